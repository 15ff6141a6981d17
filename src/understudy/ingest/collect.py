"""Reads all logs below some paths, and writes their states into one file or into a store.

A file is complete or absent: everything is written to a temporary directory beside it first. Logs that did not
change are not read again: their part of the existing file is copied, or their states are in the store already.
What was read of which log is remembered in a manifest, a hidden file beside the output, or in the store.
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
from msgspec import Struct, field

from understudy import __version__
from understudy.errors import ConfigError
from understudy.ingest.batch_reader import (
    ID_BYTES,
    BatchResult,
    IngestJob,
    IngestProgress,
    IngestSummary,
    Kind,
    ProgressCallback,
    StateSelection,
    read_batches,
    signals_blocked,
)
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.formats.registry import LogBatch, group_batches
from understudy.ingest.log_files import INSIDE, LogFile, walk_logs
from understudy.ingest.state_files import ParquetWriter, PrivateFile, load_spool, part_path, writing
from understudy.ingest.trace_store import storable
from understudy.redact.betterleaks import is_installed
from understudy.redact.report import RedactionReport, write_report_beside
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.sessions import LogSource, TextOrBytes
from understudy.util.files import locked

_READER = "7"
"""Raise it when the results of reading a log change within a release: what is read, a signal, a rule of redaction.

Logs that were read with another one are read again.
"""

_FORMAT = 2


class LogIdentity(Struct, frozen=True, array_like=True):
    """A log as it was before it was read."""

    path: bytes
    size: int
    modified_ns: int


class IngestedBatch(Struct, array_like=True):
    """A batch that was read. `read` has its states and their place in the file, `dropped` ids of duplicates."""

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
    """The version and the options of reading: logs that were read with others are read again."""
    key = None
    if job.key is not None:
        # What the rules find depends on what is installed.
        key = (hashlib.blake2b(job.key, digest_size=8).hexdigest(), is_installed())
    options = hashlib.blake2b(msgspec.json.encode((job.selection, job.form, key)), digest_size=8).hexdigest()
    return f"{__version__}/{_READER}/{options}"


def _identities(batch: LogBatch) -> list[LogIdentity] | None:
    """The logs of a batch as they are now, None where one does not exist any more."""
    identities: list[LogIdentity] = []
    for file in batch.files:
        archive, inside, _ = file.path.partition(INSIDE)
        try:
            status = os.stat(archive)  # noqa: PTH116 (of very many paths)
        except OSError:
            return None
        # What lies in an archive is as old as the archive.
        size = file.size if inside else status.st_size
        identities.append(LogIdentity(path_bytes(file.path), size, status.st_mtime_ns))
    return identities


def path_bytes(path: str) -> bytes:
    """A path as bytes, whatever is in it."""
    return path.encode(errors="surrogatepass")


# --- beside a file -------------------------------------------------------------------------------------


def manifest_path(output: Path) -> Path:
    """Where the manifest of a file lies."""
    return output.with_name(f".{output.name[:200]}.understudy")


def load_manifest(output: Path, job: IngestJob) -> OutputManifest | None:
    """What is remembered of a file; None where that is nothing, the file was changed, or another wrote it."""
    try:
        manifest = _decode(manifest_path(output).read_bytes())
        status = output.stat()
    except (OSError, msgspec.MsgspecError):
        return None
    written = (manifest.version, manifest.reader, manifest.size, manifest.modified_ns)
    return manifest if written == (_FORMAT, reader_of(job), status.st_size, status.st_mtime_ns) else None


def save_manifest(to: Path, whole: Path, job: IngestJob, batches: list[IngestedBatch]) -> None:
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
    """What is remembered of a batch that states were left out of, now at another place; and the ids left out."""
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
    """What a store remembers of the logs of a batch."""
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
    """Whether all of the logs were read as they are; with which others does not matter."""
    return all(
        (before := stored.get(source.path)) is not None
        and (before.size, before.modified_ns, before.reader) == (source.size, source.modified_ns, source.reader)
        for source in sources
    )


_WHOLE = "whole"
_MANIFEST = "manifest"
_SUFFIX = ".understudy-part"
_LOCK = "lock"


class FoundLogs(Struct):
    """The logs below some paths; `skipped` counts the other files by the reason why they are skipped."""

    batches: list[LogBatch]
    files: int
    skipped: Counter[str] = field(default_factory=Counter[str])


def find_logs(
    paths: Sequence[Path], only: LogFormat | None, output: Path | None, report: ProgressCallback
) -> FoundLogs:
    """The logs at and below the paths.

    With `only`, those of one format; a path that is a file is taken to be of that format without detection. Raises
    ConfigError when a path cannot be read, or `output` is one of the logs.
    """
    skipped: Counter[str] = Counter()
    progress = IngestProgress()
    named_paths = {str(path.absolute()) for path in paths if path.is_file() and path.suffix.lower() != ".zip"}
    own = _inode(output) if output else None

    def seen() -> Iterator[LogFile]:
        for file in walk_logs(paths, skipped):
            if own is not None and _inode(Path(file.path.partition(INSIDE)[0])) == own:
                raise ConfigError(f"--output: {output} is one of the logs to read; choose another file")
            progress.files += 1
            report(progress)
            yield file

    if only is None:
        groups = group_batches(seen(), skipped)
        return FoundLogs(groups, progress.files, skipped)
    named: list[LogFile] = []
    others: list[LogFile] = []
    for file in seen():
        (named if str(Path(file.path).absolute()) in named_paths else others).append(file)
    groups = {batch.key: batch for batch in group_batches(named, skipped, only)}
    for batch in group_batches(others, skipped):
        if batch.format.name != only.name:
            skipped["other_format"] += len(batch.files)
        elif batch.key in groups:
            groups[batch.key].files.extend(batch.files)
        else:
            groups[batch.key] = batch
    return FoundLogs(list(groups.values()), progress.files, skipped)


def count_states(logs: FoundLogs, selection: StateSelection, jobs: int, report: ProgressCallback) -> IngestSummary:
    """Count the selected states; nothing is written."""
    total = IngestSummary(skipped=logs.skipped.copy())
    progress = _progress(logs)
    seen: set[bytes] = set()
    for read, _ in read_batches(logs.batches, IngestJob(selection), jobs, None, progress, report):
        total.add(read, seen)
    return total


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

    Only its owner may read the file. It is Parquet where its name ends in `.parquet`, else JSON lines. With a
    `key` for pseudonyms the states are redacted, and `OUTPUT.redaction.json` lists what was replaced where. `jobs`
    processes read. An existing file is replaced when the new one is complete; it stays untouched where no log
    changed since it was written. Raises ConfigError when the file cannot be written.
    """
    output = output.resolve()
    if output.exists() and not output.is_file():
        raise ConfigError(f"--output: {output} exists and is not a regular file; choose another file")
    job = IngestJob(selection, "parquet" if output.suffix == ".parquet" else "lines", key)
    now = [_identities(batch) for batch in logs.batches]
    before = load_manifest(output, job)
    old = reusable(logs.batches, now, before)
    total = IngestSummary(skipped=logs.skipped.copy())
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
        # Rows cannot be copied without being read.
        old = [None for _ in old]
    plan = list(zip(logs.batches, now, old, strict=True))
    with _workplace(output.parent, f".{output.name[:100]}.") as directory:
        whole = directory / _WHOLE
        with closing(ParquetWriter(whole) if job.form == "parquet" else PrivateFile(whole)) as file:
            progress = _progress(logs)
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
    """Copy the states of each batch into the new file, from what was read, or else from the `old` file.

    Yields what the manifest keeps of each batch, None of one that must be read again the next time.
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
            yield None  # a file that could not be read may be readable the next time
        else:
            yield IngestedBatch(batch.format.name, files, read, removed + more)


def _add(total: IngestSummary, earlier: IngestedBatch, seen: set[bytes]) -> set[int]:
    """Count a batch that is unchanged. Returns the positions of states that were seen before."""
    total.unchanged += len(earlier.files)
    total.duplicates += len(earlier.dropped) // ID_BYTES
    return total.add(earlier.read, seen)


# --- into a store --------------------------------------------------------------------------------------


def collect_to_store(
    logs: FoundLogs, selection: StateSelection, location: StoreLocation, jobs: int, report: ProgressCallback
) -> IngestSummary:
    """Put the selected states into the store of a directory or a database, made where it does not exist.

    What is read on the way to a database lies in the directory for temporary files, for the owner alone.

    Logs that did not change since they were read are skipped. The store holds complete traces at any moment; after
    an interruption the same call continues. Raises ConfigError and StoreError.
    """
    job = IngestJob(selection, "rows")
    if isinstance(location, Path):
        _make(location)
        parent, prefix = location, ".reading."
    else:
        parent, prefix = Path(tempfile.gettempdir()), ".understudy-reading."
    with Store.open(location) as store:
        stored = store.sessions.sources()
        total = IngestSummary(skipped=logs.skipped.copy())
        fresh: list[LogBatch] = []
        sources: list[list[LogSource]] = []
        progress = _progress(logs)
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
        with _workplace(parent, prefix) as workspace:
            reading = read_batches(fresh, job, jobs, workspace, progress, report)
            for of_batch, (read, source) in zip(sources, reading, strict=True):
                dropped = total.add(read, seen)
                # A file that could not be read may be readable the next time, so its batch is not noted as read.
                complete = () if read.skipped else of_batch
                spool = load_spool(store.sessions, source, read.at, read.size, dropped, complete) if source else ()
                for changes in spool:
                    total.new += changes.new
                    total.changed += changes.changed
                    total.same += changes.same
                report(progress)
        return total


def _make(directory: Path) -> None:
    """Create a directory that only the owner may read and that git ignores: it will hold private text."""
    try:
        directory.mkdir(mode=0o700, parents=True)
        (directory / ".gitignore").write_text("*\n")
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(
            f"--dir: cannot create {directory}: {error.strerror}; choose another directory"
        ) from error


# --- both ----------------------------------------------------------------------------------------------


def _progress(logs: FoundLogs) -> IngestProgress:
    return IngestProgress(files=logs.files, total=sum(len(batch.files) for batch in logs.batches))


@contextmanager
def _workplace(parent: Path, prefix: str) -> Generator[Path]:
    """A temporary directory for parts. Raises ConfigError where it cannot be created."""
    _sweep(parent, prefix)
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write in {parent}: {error.strerror}; choose an existing directory that you may write in"
        ) from error
    try:
        with locked(directory / _LOCK):
            directory.chmod(0o700)  # another run may have swept it in between, and `locked` made it anew
            yield directory
    finally:
        with signals_blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            shutil.rmtree(directory)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove the directories of processes that were killed: they hold private text."""
    for left in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        try:
            status = left.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with locked(left / _LOCK, busy="another process is writing there"):
                shutil.rmtree(left)
        except (ConfigError, OSError):
            continue  # in use, or not ours to remove: this run has a directory of its own


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
