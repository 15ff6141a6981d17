"""What is remembered of the logs that were read: in a hidden file beside the output, or in the store."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.ingest.batch_reader import ID_BYTES, BatchResult, Kind
from understudy.ingest.formats.registry import LogBatch
from understudy.ingest.log_files import INSIDE, LogFile
from understudy.ingest.processes import IngestJob
from understudy.redact.betterleaks import is_installed
from understudy.store.sessions import LogSource, TextOrBytes

_READER = "2"
"""Raise it when what is read of a log changes within a release."""

_FORMAT = 1


class LogIdentity(Struct, frozen=True, array_like=True):
    """A log as it was before it was read."""

    path: bytes
    size: int
    modified_ns: int


class IngestedBatch(Struct, array_like=True):
    """A batch that was read. `read` tells its states and where they are, `dropped` those that others gave."""

    format: str
    files: list[LogIdentity]
    read: BatchResult
    dropped: bytes = b""


class OutputManifest(Struct, array_like=True):
    """What was written to a file, which was `size` bytes then, and last changed at `modified_ns`."""

    version: int
    reader: str
    size: int
    modified_ns: int
    batches: list[IngestedBatch]


_encode = msgspec.msgpack.Encoder().encode


def _counter(kind: Any, value: Any) -> Any:
    return Counter[str](value)


_decode = msgspec.msgpack.Decoder(OutputManifest, dec_hook=_counter).decode


def reader_of(job: IngestJob) -> str:
    """Who reads, and how: what was read by another is read again."""
    key = None
    if job.key is not None:
        # What the rules find depends on what is installed.
        key = (hashlib.blake2b(job.key, digest_size=8).hexdigest(), is_installed())
    options = hashlib.blake2b(msgspec.json.encode((job.selection, job.form, key)), digest_size=8).hexdigest()
    return f"{__version__}/{_READER}/{options}"


def identities(batch: LogBatch) -> list[LogIdentity]:
    """The logs of a batch as they are now. Raises OSError when one is gone."""
    return [_identity(file) for file in batch.files]


def _identity(file: LogFile) -> LogIdentity:
    archive, inside, _ = file.path.partition(INSIDE)
    status = Path(archive).stat()
    # What lies in an archive is as old as that.
    return LogIdentity(path_bytes(file.path), file.size if inside else status.st_size, status.st_mtime_ns)


def path_bytes(path: str) -> bytes:
    """A path as bytes, whatever is in it."""
    return path.encode(errors="surrogatepass")


# --- beside a file -------------------------------------------------------------------------------------


def beside(output: Path) -> Path:
    """Where the manifest of a file lies."""
    return output.with_name(f".{output.name[:200]}.understudy")


def load(output: Path, job: IngestJob) -> OutputManifest | None:
    """What is remembered of a file; None where that is nothing, the file was changed, or another wrote it."""
    try:
        manifest = _decode(beside(output).read_bytes())
        status = output.stat()
    except (OSError, msgspec.MsgspecError):
        return None
    same = (manifest.version, manifest.reader) == (_FORMAT, reader_of(job))
    return (
        manifest
        if same and (manifest.size, manifest.modified_ns) == (status.st_size, status.st_mtime_ns)
        else None
    )


def save(to: Path, whole: Path, job: IngestJob, batches: list[IngestedBatch]) -> None:
    """Write the manifest of the file `whole`. Raises OSError."""
    status = whole.stat()
    to.touch(0o600)
    to.write_bytes(_encode(OutputManifest(_FORMAT, reader_of(job), status.st_size, status.st_mtime_ns, batches)))


def reusable(
    batches: Sequence[LogBatch], now: Sequence[list[LogIdentity] | None], manifest: OutputManifest | None
) -> list[IngestedBatch | None]:
    """For each batch what was written of it, where its logs are as they were.

    A batch of which states were left out for being those of others is reusable only where those are sure to be
    there again, before it.
    """
    earlier = (
        {(batch_before.format, tuple(batch_before.files)): batch_before for batch_before in manifest.batches}
        if manifest
        else {}
    )
    sure: set[bytes] = set()
    result: list[IngestedBatch | None] = []
    for batch, files in zip(batches, now, strict=True):
        batch_before = None if files is None else earlier.get((batch.format.name, tuple(files)))
        if batch_before is not None:
            if all(identity in sure for identity in _split(batch_before.dropped)):
                sure.update(identity for identity, _ in batch_before.read.states())
            else:
                batch_before = None
        result.append(batch_before)
    return result


def without(read: BatchResult, dropped: Set[int], at: int, size: int) -> tuple[BatchResult, bytes]:
    """What is remembered of a batch that states were left out of, now at another place; and the ids left out."""
    ids: list[bytes] = []
    of = array("I")
    kinds: dict[Kind, int] = {}
    gone: list[bytes] = []
    for number, (identity, kind) in enumerate(read.states()):
        if number in dropped:
            gone.append(identity)
        else:
            ids.append(identity)
            of.append(kinds.setdefault(kind, len(kinds)))
    remaining = msgspec.structs.replace(
        read, ids=b"".join(ids), of=of.tobytes(), kinds=list(kinds), at=at, size=size
    )
    return remaining, b"".join(gone)


def _split(ids: bytes) -> Iterable[bytes]:
    return (ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))


# --- in a store ----------------------------------------------------------------------------------------


def sources_of(batch: LogBatch, files: Sequence[LogIdentity], job: IngestJob) -> list[LogSource]:
    """What a store remembers of the logs of a batch."""
    reader = f"{reader_of(job)}/{batch.format.name}"
    return [
        LogSource(
            _storable(_absolute(file.path)), _storable(path_bytes(batch.key)), file.size, file.modified_ns, reader
        )
        for file in files
    ]


def all_read(sources: Sequence[LogSource], stored: Mapping[TextOrBytes, LogSource]) -> bool:
    """Whether all of the logs were read as they are; with which others does not matter."""
    return all(
        (before := stored.get(source.path)) is not None
        and (before.size, before.modified_ns, before.reader) == (source.size, source.modified_ns, source.reader)
        for source in sources
    )


def _absolute(path: bytes) -> bytes:
    return path_bytes(str(Path(path.decode(errors="surrogatepass")).absolute()))


def _storable(data: bytes) -> TextOrBytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
