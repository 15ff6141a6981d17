"""A bucket of an S3 server, which holds a store's large contents.

The key of an object is the store's id and the content's hash, so stores never share objects. An object is the
codec (one byte) and the packed content: what it holds does not depend on who wrote it, so writing it again is
harmless. It is written before the transaction that refers to it begins.

This uses boto3 (the extra `s3`), because the store works in threads, and boto3 finds credentials in all places
that other programs use: variables, profiles, the roles of machines and pods.
"""

from __future__ import annotations

import re
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import partial
from hashlib import md5
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, select

from understudy.errors import BucketUnavailable, ConfigError, StoreError
from understudy.store.decoding import damaged
from understudy.store.outage_retry import repeat_for
from understudy.store.schema import settings

T = TypeVar("T")

MIN_BYTES: Final = 128 << 10
"""Contents that take so many bytes go to the bucket, by default."""

_SETTING: Final = "bucket"
_PARALLEL_REQUESTS: Final = 8
"""How many requests run at a time for contents that are read or written together."""

_URL = re.compile(r"s3://([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([A-Za-z0-9!_.*'()/-]*))?")
_HASH = re.compile(r"[0-9a-f]{40}")
_CLIENT_OPTIONS = {
    "connect_timeout": 5,
    "read_timeout": 20,
    "retries": {"mode": "standard", "total_max_attempts": 2},
    "max_pool_connections": _PARALLEL_REQUESTS,
    # Servers other than Amazon's refuse the newer checksums. Objects are written with their MD5, which all verify.
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",
}

_CREDENTIALS: Final = (
    "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine that uses the store, for a "
    "user who may list the bucket and get, put and delete its objects"
)
_HINTS: Final = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the name with: understudy store bucket",
    **dict.fromkeys(
        (
            "AccessDenied",
            "AllAccessDisabled",
            "AuthorizationHeaderMalformed",
            "ExpiredToken",
            "Forbidden",
            "InvalidAccessKeyId",
            "InvalidToken",
            "SignatureDoesNotMatch",
        ),
        f"the server refused the credentials; {_CREDENTIALS}",
    ),
    "RequestTimeTooSkewed": "this machine's clock differs too much from the server's; set it, or the server's",
}
"""Maps an error code of the server to an explanation with a remedy."""

_TEMPORARY_CODES: Final = frozenset(
    {"SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling"}
)


class BucketSetting(Struct, frozen=True, kw_only=True):
    """Where a store keeps its large contents: those that take at least `min_bytes`, packed.

    `endpoint_url` is None for Amazon's own servers. `store_id` begins all keys, after the `prefix`.
    """

    bucket: str
    prefix: str = ""
    endpoint_url: str | None = None
    min_bytes: int = MIN_BYTES
    store_id: str

    def __str__(self) -> str:
        server = f" at {self.endpoint_url}" if self.endpoint_url else ""
        return f"s3://{self.bucket}/{self.keys_prefix}{server}"

    @property
    def keys_prefix(self) -> str:
        """What the keys of all objects of the store begin with."""
        return f"{self.prefix}{self.store_id}/"


class StoredObject(Struct, frozen=True):
    """An object of a bucket: the hash of its content, its size, and seconds since it was written."""

    digest: bytes
    bytes: int
    age_s: float


def parse_bucket(url: str, endpoint_url: str | None, min_bytes: int, store_id: str) -> BucketSetting:
    """Parse a bucket given by a user, as s3://BUCKET/PREFIX. Raises ConfigError."""
    if not (match := _URL.fullmatch(url)):
        raise ConfigError(
            f"invalid bucket {url!r}; expected s3://BUCKET or s3://BUCKET/PREFIX, with a name of 3 to 63 "
            "lower-case letters, digits, dots and hyphens, and a prefix of letters, digits and !_.*'()/-: correct "
            "it"
        )
    if endpoint_url is not None and not _is_server_address(endpoint_url):
        # The address is not shown, because it may have a key in it.
        raise ConfigError(
            "--endpoint-url: not the address of a server alone (http:// or the host is missing or invalid, or "
            "there is a user, a key or a query in it); give one such as https://HOST:PORT, and the credentials in "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    if min_bytes < 1:
        raise ConfigError(
            f"--min-bytes: got {min_bytes}, expected a number of at least 1; give such a number, or leave it out "
            f"for {MIN_BYTES}"
        )
    prefix = (match[2] or "").strip("/")
    return BucketSetting(
        bucket=match[1],
        prefix=f"{prefix}/" if prefix else "",
        endpoint_url=endpoint_url,
        min_bytes=min_bytes,
        store_id=store_id,
    )


def _is_server_address(url: str) -> bool:
    """Return whether a URL has a scheme and a host, and neither a user nor a query."""
    try:
        address = urlsplit(url)
    except ValueError:
        return False
    has_host = address.scheme in ("http", "https") and bool(address.hostname)
    return has_host and not address.query and "@" not in address.netloc


class Bucket:
    """The objects of a store. Safe to use from many threads.

    Reads and deletions wait up to `outage_s` seconds for an unavailable server; writes do not wait.
    """

    def __init__(self, setting: BucketSetting, outage_s: float) -> None:
        self.setting = setting
        self._outage_s = outage_s
        self._lock = threading.Lock()
        self._boto_client: Any = None

    def write(self, contents: Mapping[bytes, bytes]) -> None:
        """Write objects by the hashes of their contents; they are durable afterwards.

        Raises BucketUnavailable if the server is unavailable, so that the caller can retry, and StoreError.
        """
        self._for_each(self._write_object, list(contents.items()))

    def read(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return objects by the hashes of their contents. Raises StoreError, also if one is missing."""
        return self._for_each(self._read_object, digests)

    def objects(self) -> Iterator[list[StoredObject]]:
        """Yield the objects of the store, ordered by hash. Raises StoreError."""
        start, last_digest = len(self.setting.keys_prefix), b""
        request = {"Bucket": self.setting.bucket, "Prefix": self.setting.keys_prefix}
        while True:
            # Not boto3's paginator, which ends without an error when it is asked again after one.
            page = self._repeated(lambda: self._client().list_objects_v2(**request), "")
            # Ages by the server's clock: this machine's may be wrong.
            server_date = page["ResponseMetadata"]["HTTPHeaders"].get("date")
            server_time = parsedate_to_datetime(server_date).timestamp() if server_date else time.time()
            listed = [
                StoredObject(bytes.fromhex(name), item["Size"], server_time - item["LastModified"].timestamp())
                for item in page.get("Contents", ())
                if _HASH.fullmatch(name := item["Key"][start:])
            ]
            for content in listed:
                if content.digest <= last_digest:
                    raise StoreError(
                        f"{self.setting}: the server does not list objects in the order of their keys (directory "
                        "buckets do not); use a general purpose bucket"
                    )
                last_digest = content.digest
            yield listed
            if not page["IsTruncated"]:
                return
            request["ContinuationToken"] = page["NextContinuationToken"]

    def delete(self, digests: Iterable[bytes]) -> None:
        """Delete objects. Raises StoreError."""
        self._for_each(self._delete_object, list(digests))

    def check(self) -> None:
        """Check that the bucket is there and that its server accepts the credentials. Raises StoreError."""
        self._repeated(lambda: self._client().head_bucket(Bucket=self.setting.bucket), "")

    def name(self, digest: bytes) -> str:
        """Return the name of an object for error messages."""
        return f"{self.setting.keys_prefix}{digest.hex()} of the bucket {self.setting.bucket}"

    def _write_object(self, content: tuple[bytes, bytes]) -> None:
        digest, data = content
        checksum = b64encode(md5(data, usedforsecurity=False).digest()).decode()
        location = self._location(digest)
        self._with_store_errors(
            lambda: self._client().put_object(**location, Body=data, ContentMD5=checksum), digest
        )

    def _read_object(self, digest: bytes) -> bytes:
        return self._repeated(lambda: self._client().get_object(**self._location(digest))["Body"].read(), digest)

    def _delete_object(self, digest: bytes) -> None:
        self._repeated(lambda: self._client().delete_object(**self._location(digest)), digest)

    def _location(self, digest: bytes) -> dict[str, str]:
        return {"Bucket": self.setting.bucket, "Key": f"{self.setting.keys_prefix}{digest.hex()}"}

    def _for_each(self, request: Callable[[Any], T], arguments: Sequence[Any]) -> list[T]:
        if len(arguments) < 2:
            return [request(argument) for argument in arguments]
        with ThreadPoolExecutor(_PARALLEL_REQUESTS, thread_name_prefix="bucket") as threads:
            return list(threads.map(request, arguments))

    def _repeated(self, request: Callable[[], T], digest: bytes | str) -> T:
        """Run a request, and repeat it while the server is unavailable."""
        return repeat_for(
            partial(self._with_store_errors, request, digest),
            lambda error: self._outage_s if isinstance(error, BucketUnavailable) else 0.0,
        )

    def _with_store_errors(self, request: Callable[[], T], digest: bytes | str) -> T:
        """Run a request. Raises a StoreError that says what happened to which object, and what to do next."""
        import botocore.exceptions as errors

        target = self.name(digest) if isinstance(digest, bytes) else f"the bucket {self.setting.bucket}"
        target += f" at {self.setting.endpoint_url}" if self.setting.endpoint_url else ""
        try:
            return request()
        except errors.ClientError as error:
            response: Any = error.response
            code = str(response.get("Error", {}).get("Code", ""))
            status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            text = f"{code} {response.get('Error', {}).get('Message', '')}".strip()
            # Answers to HEAD have no body, so only their status tells.
            code = {"403": "AccessDenied", "404": "NoSuchBucket"}.get(code, code)
            if code == "NoSuchKey":
                raise StoreError(
                    f"{target} is missing, so a content of the store is lost; restore the object from a version "
                    "or a copy of the bucket, or the store from a copy"
                ) from error
            if code in _TEMPORARY_CODES or status >= 500 or status == 429:
                raise BucketUnavailable(
                    f"{target}: the server is not available now; check it, then run the same command again "
                    f"({text})"
                ) from error
            hint = _HINTS.get(code, "the server refused the request; check the bucket and its settings")
            raise StoreError(f"{target}: {hint} ({text})") from error
        except (
            errors.NoCredentialsError,
            errors.CredentialRetrievalError,
            errors.PartialCredentialsError,
            errors.ProfileNotFound,
        ) as error:
            raise StoreError(f"{target}: there are no usable credentials; {_CREDENTIALS} ({error})") from error
        except (errors.HTTPClientError, errors.ConnectionError, errors.IncompleteReadError) as error:
            raise BucketUnavailable(
                f"{target}: the server cannot be reached; check its address, and that it runs ({error})"
            ) from error
        except (errors.BotoCoreError, ValueError) as error:
            raise StoreError(f"{target}: {error}; check the bucket with: understudy store bucket") from error

    def _client(self) -> Any:
        with self._lock:
            if self._boto_client is None:
                self._boto_client = (
                    _boto3()
                    .session.Session()
                    .client("s3", endpoint_url=self.setting.endpoint_url, config=_config())
                )
            return self._boto_client


def _boto3() -> Any:
    try:
        import boto3
    except ImportError as error:
        raise ConfigError(
            f"this store keeps large contents in an S3 bucket, for which boto3 cannot be imported ({error}); "
            "install it with: pip install 'understudy[s3]'"
        ) from error
    return boto3


def _config() -> Any:
    from botocore.config import Config

    return Config(**_CLIENT_OPTIONS)


def read_setting(connection: Connection) -> BucketSetting | None:
    """Return the setting of a store's bucket, or None. Raises StoreError if it is damaged."""
    value: bytes | None = connection.execute(select(settings.c.value).where(settings.c.name == _SETTING)).scalar()
    try:
        return None if value is None else msgspec.json.decode(value, type=BucketSetting)
    except msgspec.MsgspecError as error:
        raise damaged(f"the setting of its bucket cannot be decoded ({error})") from error


def setting_row(setting: BucketSetting) -> dict[str, Any]:
    """Return the row of the settings that stores the setting of a bucket."""
    return {"name": _SETTING, "value": msgspec.json.encode(setting)}


def bucket_of(connection: Connection) -> Bucket | None:
    """Return the bucket of the store to which a connection belongs, or None if the store has none."""
    return connection.get_execution_options().get("store_bucket")
