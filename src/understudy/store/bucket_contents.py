"""The contents of a store that are in its bucket: sets the bucket, compares it with the database, and removes
objects that no content refers to.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Final

from msgspec import Struct
from sqlalchemy import delete, func, insert, select

from understudy.errors import ConfigError
from understudy.store.bucket import MIN_BYTES, Bucket, BucketSetting, StoredObject, parse_bucket, setting_row
from understudy.store.contents import content_hash
from understudy.store.database import Repository, WriteContext, queued
from understudy.store.schema import blobs, settings

GRACE_S: Final = 3600.0
"""The least age, in seconds, of an unreferenced object that is removed. Removing needs exclusive access to the
store; this also protects an object that another process has just written in spite of that.
"""

_PROBE: Final = b"understudy's check whether this bucket can be written\n"


class BucketUse(Struct, frozen=True, kw_only=True):
    """How many contents of a store are in its bucket, and how many bytes they take there.

    `missing` of them are not, and `unneeded` objects, of `unneeded_bytes`, are those that nothing refers to.
    """

    contents: int = 0
    bytes: int = 0
    missing: int = 0
    unneeded: int = 0
    unneeded_bytes: int = 0


class UnneededObjects(Struct, frozen=True):
    """Objects that nothing refers to, and their bytes. `too_new` others stay for now."""

    count: int = 0
    bytes: int = 0
    too_new: int = 0


class BucketRepository(Repository):
    """`Store.bucket`: the bucket for large contents, if the store has one."""

    @property
    def setting(self) -> BucketSetting | None:
        """Where large contents are; None if they are in the database."""
        return None if self._database.bucket is None else self._database.bucket.setting

    def check(self) -> None:
        """Check that the bucket, if there is one, can be reached with this machine's credentials. Raises
        StoreError.
        """
        if self._database.bucket is not None:
            with self._database.driver.errors():
                self._database.bucket.check()

    def set(
        self, url: str | None, *, endpoint_url: str | None = None, min_bytes: int | None = None
    ) -> BucketSetting:
        """Set where contents of at least `min_bytes` are written from now on. What is not given stays as it is.

        Needs a store that was opened with `exclusive`, and takes effect when it is opened again. Contents that are
        in the database stay there; those in a bucket before must have been copied to another. Raises ConfigError
        for an invalid bucket, and StoreError for one that cannot be used.
        """
        current = self.setting
        if url is None and current is None:
            raise ConfigError(
                "the store has no bucket yet; expected one, as s3://BUCKET/PREFIX: name it after the store, as in "
                "understudy store bucket STORE s3://BUCKET/PREFIX"
            )
        changed = parse_bucket(
            url or f"s3://{current.bucket}/{current.prefix}",  # pyright: ignore[reportOptionalMemberAccess]
            endpoint_url
            if endpoint_url is not None or url is not None or current is None
            else current.endpoint_url,
            min_bytes if min_bytes is not None else MIN_BYTES if current is None else current.min_bytes,
            uuid.uuid4().hex if current is None else current.store_id,
        )
        bucket = Bucket(changed, outage_s=0.0)
        with self._database.driver.errors():
            probe = content_hash(_PROBE)
            bucket.write({probe: _PROBE})
            bucket.read([probe])
            bucket.delete([probe])
            if current is not None and (missing := self._compare(bucket).missing):
                raise ConfigError(
                    f"{missing} contents of the store are in {current} and not in {changed}; copy these objects "
                    "there first, for example with rclone, or within one server with aws s3 sync"
                )
        self._write_setting(changed).result()
        return changed

    @queued
    def _write_setting(self, context: WriteContext, setting: BucketSetting) -> None:
        row = setting_row(setting)
        context.connection.execute(delete(settings).where(settings.c.name == row["name"]))
        context.connection.execute(insert(settings).values(row))

    def use(self) -> BucketUse:
        """Return how much is in the bucket, as the database has it, without asking the bucket."""
        query = select(func.count(), func.coalesce(func.sum(blobs.c.bucket_bytes), 0))
        with self._reading() as connection:
            count, size = connection.execute(query.where(blobs.c.bucket_bytes.is_not(None))).one()
        return BucketUse(contents=count, bytes=size)

    def compare(self) -> BucketUse:
        """Compare the bucket with the database. Raises StoreError."""
        if self._database.bucket is None:
            return BucketUse()
        with self._database.driver.errors():
            return self._compare(self._database.bucket)

    def _compare(self, bucket: Bucket) -> BucketUse:
        missing = unneeded = unneeded_bytes = 0
        for absent, extra in self._differences(bucket):
            missing += absent
            unneeded += len(extra)
            unneeded_bytes += sum(content.bytes for content in extra)
        use = self.use()
        return BucketUse(
            contents=use.contents,
            bytes=use.bytes,
            missing=missing,
            unneeded=unneeded,
            unneeded_bytes=unneeded_bytes,
        )

    def _differences(self, bucket: Bucket) -> Iterator[tuple[int, list[StoredObject]]]:
        """Yield how many contents lack an object, and the objects that no content refers to, page by page."""
        last_digest = b""
        in_bucket = blobs.c.bucket_bytes.is_not(None)
        for page in bucket.objects():
            if not page:
                continue
            query = select(blobs.c.hash).where(
                in_bucket, blobs.c.hash > last_digest, blobs.c.hash <= page[-1].digest
            )
            with self._reading() as connection:
                needed = set(connection.execute(query).scalars())
            stored = {content.digest for content in page}
            yield len(needed - stored), [content for content in page if content.digest not in needed]
            last_digest = page[-1].digest
        remainder = select(func.count()).select_from(blobs).where(in_bucket, blobs.c.hash > last_digest)
        with self._reading() as connection:
            yield connection.execute(remainder).scalar_one(), []

    def unneeded(self, *, remove: bool = False) -> UnneededObjects:
        """Return the objects that nothing refers to, except new ones, and `remove` them.

        Removing needs exclusive access to the store. Raises StoreError.
        """
        if (bucket := self._database.bucket) is None:
            return UnneededObjects()
        count = size = too_new = 0
        with self._database.driver.errors():
            for _, extra in self._differences(bucket):
                removable = [content for content in extra if content.age_s >= GRACE_S]
                if remove:
                    bucket.delete(content.digest for content in removable)
                count += len(removable)
                size += sum(content.bytes for content in removable)
                too_new += len(extra) - len(removable)
        return UnneededObjects(count, size, too_new)
