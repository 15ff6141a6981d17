"""Disk usage by kind, and how much of it `understudy prune` can remove."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from msgspec import Struct

from understudy.disk.caches import CacheEntry, cache_entries, tree_bytes
from understudy.disk.stores import FoundStore
from understudy.errors import ConfigError, SandboxError, StoreError
from understudy.sandbox.docker.images import StoredImage
from understudy.store import Store
from understudy.store.sqlite import FILE


class DiskUse(Struct, frozen=True, kw_only=True):
    """Something that takes `bytes`; of these, `unused` are empty or were not used recently (None: unknown).

    `error`: it could not be read, and its size is unknown; `note` says why.
    """

    what: str
    where: str
    bytes: int
    unused: int | None = None
    note: str = ""
    error: bool = False


def store_use(stores: Sequence[FoundStore]) -> Iterable[DiskUse]:
    """Yield stores, with the files that their runs wrote beside them."""
    for found_store in stores:
        where = str(found_store.location)
        try:
            with Store.open(found_store.location, create=False, read_only=True) as store:
                size, free = store.space.file_size()
                runs = store.space.runs()
                setting, in_bucket = store.bucket.setting, store.bucket.use()
        except StoreError as error:
            yield DiskUse(what="store", where=where, bytes=0, note=str(error), error=True)
            continue
        calls, pruned = sum(run.calls for run in runs), sum(run.pruned for run in runs)
        parts = [f"{len(runs)} runs", f"{calls} calls"]
        parts += [f"{pruned} of them without bodies"] if pruned else []
        parts += [f"{not_ended} not ended"] if (not_ended := sum(not run.ended for run in runs)) else []
        yield DiskUse(what="store", where=where, bytes=size, unused=free, note=", ".join(parts))
        if setting is not None:
            note = f"{in_bucket.contents} contents"
            yield DiskUse(what="bucket of a store", where=str(setting), bytes=in_bucket.bytes, note=note)
        if isinstance(found_store.location, Path):
            store_bytes = sum(map(tree_bytes, found_store.location.glob(f"{FILE}*")))
            beside = tree_bytes(found_store.location) - store_bytes
            yield DiskUse(what="files of runs", where=where, bytes=max(0, beside), note="logs, datasets, reports")


def loop_use(loops: Sequence[Path]) -> Iterable[DiskUse]:
    """Yield the weights of loops, and the training data of their steps; their waves are listed as stores."""
    for root in loops:
        weights = [path for path in root.glob("steps/*/weights") if path.is_dir()]
        note = f"of {len(weights)} steps"
        yield DiskUse(what="weights of a loop", where=str(root), bytes=sum(map(tree_bytes, weights)), note=note)
        groups = list(root.glob("steps/*/*.msgpack"))
        yield DiskUse(what="groups of a loop", where=str(root), bytes=sum(map(tree_bytes, groups)))


def cache_use(cache: Path, older_than_s: float) -> Iterable[DiskUse]:
    """Yield the content of the cache, by kind; `unused` was not used for `older_than_s` seconds."""
    before = time.time() - older_than_s
    entries = sorted(cache_entries(cache), key=lambda entry: entry.kind)
    for kind, same in groupby(entries, key=lambda entry: entry.kind):
        entries_of_kind = list(same)
        unused = sum(entry.bytes for entry in entries_of_kind if entry.used_at < before)
        size = sum(entry.bytes for entry in entries_of_kind)
        yield DiskUse(
            what=f"cache: {kind}",
            where=str(cache),
            bytes=size,
            unused=unused,
            note=f"{len(entries_of_kind)} entries",
        )


def image_use(older_than_s: float) -> Iterable[DiskUse]:
    """Yield the prepared images of the running container engine; nothing if there is none."""
    images = prepared_images()
    if images:
        before = time.time() - older_than_s
        unused = sum(image.bytes for image in images if image.created_at < before)
        size = sum(image.bytes for image in images)
        yield DiskUse(
            what="prepared images",
            where="container engine",
            bytes=size,
            unused=unused,
            note=f"{len(images)} images",
        )


def prepared_images() -> list[StoredImage]:
    """Return the prepared images of the running container engine; an empty list if there is none."""
    from understudy.sandbox.docker.engine import find_engine
    from understudy.sandbox.docker.images import stored_images

    try:
        engine = find_engine()
    except ConfigError:
        return []
    try:
        return stored_images(engine)
    except SandboxError:
        return []
    finally:
        engine.close()


def unused_entries(cache: Path, older_than_s: float) -> list[CacheEntry]:
    """Return the cache entries that were not used for `older_than_s` seconds."""
    return [entry for entry in cache_entries(cache) if entry.used_at < time.time() - older_than_s]
