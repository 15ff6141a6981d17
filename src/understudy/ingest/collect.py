"""Reads all logs below some paths, and writes their states into one file or into a store.

A file is either complete or absent: everything is first written to a temporary directory beside it. Unchanged logs
are not read again: their part of the existing file is copied, or their states are in the store already. Which logs
were read is recorded in a manifest, a hidden file beside the output, or in the store.
"""

from __future__ import annotations

import glob
import hashlib
import os
import shutil
import signal
import stat
import tempfile
from array import array
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.errors import ConfigError
from understudy.ingest.batch_reader import (
    ID_BYTES,
    BatchResult,
    IngestJob,
    IngestSummary,
    Kind,
    ProgressCallback,
    StateSelection,
    read_batches,
    signals_blocked,
)
from understudy.ingest.formats.registry import LogBatch
from understudy.ingest.found_logs import FoundLogs
from understudy.ingest.log_files import INSIDE
from understudy.ingest.state_files import (
    ParquetWriter,
    PrivateFile,
    load_spool,
    not_a_file,
    part_path,
    writing,
)
from understudy.ingest.trace_store import storable
from understudy.redact.betterleaks import is_installed
from understudy.redact.report import RedactionReport, write_report_beside
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.sessions import LogSource, TextOrBytes
from understudy.util.files import locked, write_remedy

_READER = "19"
"""The version of the readers.

Raise it when reading the same log gives another result: states, signals or redactions.

Logs that were read with another version are read again.
"""

_FORMAT = 2


class LogIdentity(Struct, frozen=True, array_like=True):
    """A log's path, size and modification time, taken before it was read.

    It tells whether the log changed since.
    """

    path: bytes
    size: int
    modified_ns: int


class IngestedBatch(Struct, array_like=True):
    """A batch that was read.

    `read` has its states and their place in the file, `dropped` the ids of its duplicates.
    """

    format: str
    files: list[LogIdentity]
    read: BatchResult
    dropped: bytes = b""


class OutputManifest(Struct, array_like=True):
    """What was written to an output file, with the file's size and modification time afterwards."""

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
    """Return a string that identifies the reader's version and options.

    Logs read with another one are read again.
    """
    key = None
    if job.key is not None:
        # The redaction rules depend on whether Betterleaks is installed.
        key = (hashlib.blake2b(job.key, digest_size=8).hexdigest(), is_installed())
    options = hashlib.blake2b(msgspec.json.encode((job.selection, job.form, key)), digest_size=8).hexdigest()
    return f"{__version__}/{_READER}/{options}"


def _identities(batch: LogBatch) -> list[LogIdentity] | None:
    """Return the current identities of a batch's logs, or None if one of them no longer exists."""
    identities: list[LogIdentity] = []
    for file in batch.files:
        archive, inside, _ = file.path.partition(INSIDE)
        try:
            status = os.stat(archive)  # noqa: PTH116 (of very many paths)
        except OSError:
            return None
        # A member of an archive has the archive's modification time.
        size = file.size if inside else status.st_size
        identities.append(LogIdentity(path_bytes(file.path), size, status.st_mtime_ns))
    return identities


def path_bytes(path: str) -> bytes:
    """Encode a path, even if it holds unpaired surrogates."""
    return path.encode(errors="surrogatepass")


# --- beside a file -------------------------------------------------------------------------------------


def manifest_path(output: Path) -> Path:
    """Return the path of the manifest that belongs to an output file."""
    return output.with_name(f".{output.name[:200]}.understudy")


def load_manifest(output: Path, job: IngestJob) -> OutputManifest | None:
    """Load the manifest of a file.

    Returns None if there is none, if the file was changed since, or if it was written with another reader or
    options.
    """
    try:
        manifest = _decode(manifest_path(output).read_bytes())
        status = output.stat()
    except (OSError, msgspec.MsgspecError):
        return None
    written = (manifest.version, manifest.reader, manifest.size, manifest.modified_ns)
    return manifest if written == (_FORMAT, reader_of(job), status.st_size, status.st_mtime_ns) else None


def save_manifest(to: Path, whole: Path, job: IngestJob, batches: list[IngestedBatch]) -> None:
    """Write the manifest for the finished file `whole` to `to`. Raises OSError."""
    status = whole.stat()
    to.touch(0o600)
    to.write_bytes(_encode(OutputManifest(_FORMAT, reader_of(job), status.st_size, status.st_mtime_ns, batches)))


def reusable(
    batches: Sequence[LogBatch], now: Sequence[list[LogIdentity] | None], manifest: OutputManifest | None
) -> list[IngestedBatch | None]:
    """Return for each batch what was written of it earlier, or None if it must be read again.

    A batch can be reused if its logs are unchanged. If some of its states were left out as duplicates, the batches
    that contain them must be reused too, and come before it.
    """
    earlier = {(one.format, tuple(one.files)): one for one in manifest.batches} if manifest else {}
    sure: set[bytes] = set()
    result: list[IngestedBatch | None] = []
    for batch, files in zip(batches, now, strict=True):
        before = earlier.get((batch.format.name, tuple(files))) if files is not None else None
        if before is not None and not sure.issuperset(_split(before.dropped)):
            before = None
        if before is not None:
            sure.update(identity for identity, _ in before.read.states())
        result.append(before)
    return result


def without_states(read: BatchResult, dropped: Set[int], at: int, size: int) -> tuple[BatchResult, bytes]:
    """Return a batch's result without its dropped states and at its new place, and the ids that were dropped."""
    ids: list[bytes] = []
    of = array("I")
    kinds: dict[Kind, int] = {}
    removed: list[bytes] = []
    for number, (identity, kind) in enumerate(read.states()):
        if number in dropped:
            removed.append(identity)
        else:
            ids.append(identity)
            of.append(kinds.setdefault(kind, len(kinds)))
    remaining = msgspec.structs.replace(
        read, ids=b"".join(ids), of=of.tobytes(), kinds=list(kinds), at=at, size=size
    )
    return remaining, b"".join(removed)


def _split(ids: bytes) -> Iterable[bytes]:
    return (ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))


# --- in a store ----------------------------------------------------------------------------------------


def sources_of(batch: LogBatch, files: Sequence[LogIdentity], job: IngestJob) -> list[LogSource]:
    """Return what the store should record about the logs of a batch."""
    reader = f"{reader_of(job)}/{batch.format.name}"
    return [
        LogSource(
            storable(str(Path(file.path.decode(errors="surrogatepass")).absolute())),
            storable(batch.key),
            file.size,
            file.modified_ns,
            reader,
        )
        for file in files
    ]


def all_read(sources: Sequence[LogSource], stored: Mapping[TextOrBytes, LogSource]) -> bool:
    """Return whether all logs were read before and are unchanged.

    It does not matter which other logs were read with them.
    """
    return all(
        (before := stored.get(source.path)) is not None
        and (before.size, before.modified_ns, before.reader) == (source.size, source.modified_ns, source.reader)
        for source in sources
    )


_WHOLE = "whole"
_MANIFEST = "manifest"
_SUFFIX = ".understudy-part"
_LOCK = "lock"


# --- into a file ---------------------------------------------------------------------------------------


def collect_to_file(
    logs: FoundLogs,
    selection: StateSelection,
    output: Path,
    jobs: int,
    report: ProgressCallback,
    key: bytes | None = None,
) -> IngestSummary:
    """Write the selected states to `output`, each once, in the order of the logs.

    Only the owner may read the file. It is Parquet if its name ends in `.parquet`, else JSON lines. With `key`,
    states are redacted with pseudonyms derived from it, and `OUTPUT.redaction.json` lists the replacements. `jobs`
    is the number of processes. An existing file is replaced only once the new one is complete, and is left alone
    if no log changed. Raises ConfigError when the file cannot be written.
    """
    output = output.resolve()
    if output.exists() and not output.is_file():
        raise not_a_file(output)
    job = IngestJob(selection, "parquet" if output.suffix == ".parquet" else "lines", key)
    now = [_identities(batch) for batch in logs.batches]
    before = load_manifest(output, job)
    old = reusable(logs.batches, now, before)
    total = IngestSummary(skipped=logs.skipped.copy(), errors=[*logs.errors])
    replaced = None if key is None else RedactionReport()
    if before is not None and [*old] == before.batches:
        seen: set[bytes] = set()
        for earlier in before.batches:
            _add(total, earlier, seen)
            if replaced:
                replaced.merge(earlier.read.places, earlier.read.unplaced)
        write_report_beside(output, replaced)
        return total
    if job.form == "parquet":
        # Rows of a Parquet file cannot be copied without being decoded, so all logs are read again.
        old = [None for _ in old]
    plan = list(zip(logs.batches, now, old, strict=True))
    remedy = "choose an --output in an existing directory in which you may write"
    with _workplace(output.parent, f".{output.name[:100]}.", remedy) as directory:
        whole = directory / _WHOLE
        with closing(ParquetWriter(whole) if job.form == "parquet" else PrivateFile(whole)) as file:
            progress = logs.progress()
            fresh = [batch for batch, _, earlier in plan if earlier is None]
            progress.read = progress.total - sum(len(batch.files) for batch in fresh)
            with closing(read_batches(fresh, job, jobs, directory, progress, report)) as reading:
                written: list[IngestedBatch] = []
                for ingested in _copy_states(plan, reading, file, output, total, replaced):
                    written += [ingested] if ingested else []
                    progress.written = file.tell() if isinstance(file, PrivateFile) else 0
                    report(progress)
        with writing(output):
            save_manifest(directory / _MANIFEST, whole, job, written)
            whole.replace(output)
            (directory / _MANIFEST).replace(manifest_path(output))
    write_report_beside(output, replaced)
    return total


def _copy_states(
    plan: Sequence[tuple[LogBatch, list[LogIdentity] | None, IngestedBatch | None]],
    reading: Iterator[tuple[BatchResult, Path | None]],
    file: PrivateFile | ParquetWriter,
    old: Path,
    total: IngestSummary,
    replaced: RedactionReport | None,
) -> Iterator[IngestedBatch | None]:
    """Copy the states of each batch into the new file, from its part file or, if it is unchanged, from the `old`
    file.

    Yields for each batch its manifest entry, or None if it must be read again next time.
    """
    seen: set[bytes] = set()
    for batch, files, earlier in plan:
        if earlier is not None:
            dropped, removed = _add(total, earlier, seen), earlier.dropped
            read, source = earlier.read, None
        else:
            read, source = next(reading)
            dropped, removed = total.add(read, seen), b""
        if replaced:
            replaced.merge(read.places, read.unplaced)
        at = size = 0  # offsets have no meaning in Parquet
        if isinstance(file, PrivateFile):
            at = file.tell()
            size = file.copy(source or old, read.at, read.size, dropped)
        elif read.size and source is not None:
            file.copy(part_path(source, read.at), dropped)
        read, more = without_states(read, dropped, at, size)
        if files is None or read.skipped:
            yield None  # an unreadable file may become readable, so this batch is not recorded
        else:
            yield IngestedBatch(batch.format.name, files, read, removed + more)


def _add(total: IngestSummary, earlier: IngestedBatch, seen: set[bytes]) -> set[int]:
    """Add the counts of an unchanged batch. Returns the positions of states that were seen before."""
    total.unchanged += len(earlier.files)
    total.duplicates += len(earlier.dropped) // ID_BYTES
    return total.add(earlier.read, seen)


# --- into a store --------------------------------------------------------------------------------------


def collect_to_store(
    logs: FoundLogs, selection: StateSelection, location: StoreLocation, jobs: int, report: ProgressCallback
) -> IngestSummary:
    """Write the selected states into the store of a directory or a database, which is created if needed.

    Logs that did not change since they were read are skipped. The store holds only complete traces at any moment,
    so after an interruption the same call continues. On the way to a database, states are kept in the system's
    directory for temporary files, readable by the owner only. Raises ConfigError and StoreError.
    """
    job = IngestJob(selection, "rows")
    if isinstance(location, Path):
        _make(location)
        parent, prefix, remedy = location, ".reading.", "choose a --dir in which you may write"
    else:
        parent, prefix = Path(tempfile.gettempdir()), ".understudy-reading."
        remedy = "set TMPDIR to an existing directory in which you may write"
    with Store.open(location) as store:
        stored = store.sessions.sources()
        total = IngestSummary(skipped=logs.skipped.copy(), errors=[*logs.errors])
        fresh: list[LogBatch] = []
        sources: list[list[LogSource]] = []
        progress = logs.progress()
        for batch in logs.batches:
            files = _identities(batch)
            of_batch = [] if files is None else sources_of(batch, files, job)
            if of_batch and all_read(of_batch, stored):
                total.files += len(batch.files)
                total.unchanged += len(batch.files)
                progress.read += len(batch.files)
            else:
                fresh.append(batch)
                sources.append(of_batch)
        if not fresh:
            return total
        seen: set[bytes] = set()
        with _workplace(parent, prefix, remedy) as workspace:
            reading = read_batches(fresh, job, jobs, workspace, progress, report)
            for of_batch, (read, source) in zip(sources, reading, strict=True):
                dropped = total.add(read, seen)
                # An unreadable file may become readable, so its batch is not recorded as read.
                complete = () if read.skipped else of_batch
                spool = load_spool(store.sessions, source, read.at, read.size, dropped, complete) if source else ()
                for changes in spool:
                    total.new += changes.new
                    total.changed += changes.changed
                    total.same += changes.same
                report(progress)
        return total


def _make(directory: Path) -> None:
    """Create a directory for private text: only the owner may read it, and git ignores it."""
    try:
        directory.mkdir(mode=0o700, parents=True)
        (directory / ".gitignore").write_text("*\n")
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(
            f"--dir: cannot create {directory}: {error.strerror}; "
            f"{write_remedy(error, 'choose a directory that you may create')}"
        ) from error


# --- both ----------------------------------------------------------------------------------------------


@contextmanager
def _workplace(parent: Path, prefix: str, remedy: str) -> Generator[Path]:
    """Make a temporary directory for part files, removed afterwards.

    Raises ConfigError with `remedy` if it cannot be created.
    """
    _sweep(parent, prefix)
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot write in {parent}: {error.strerror}; {write_remedy(error, remedy)}") from error
    try:
        with locked(directory / _LOCK):
            # another run's sweep may have removed the directory, and `locked` created it again with other
            # permissions
            directory.chmod(0o700)
            yield directory
    finally:
        with signals_blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            shutil.rmtree(directory)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove temporary directories that killed processes left behind, since they hold private text."""
    for left in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        try:
            status = left.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with locked(left / _LOCK, busy="another process is writing there"):
                shutil.rmtree(left)
        except (ConfigError, OSError):
            continue  # in use, or not ours to remove; either way this run uses a directory of its own
