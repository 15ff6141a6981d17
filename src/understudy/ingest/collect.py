"""Reads all logs below some paths, and puts their states into one file or into a store.

A file is whole or not there: everything is written beside it first. What was read before and is as it was is not
read again: its part of the file that is there is copied, its states are in the store already.
"""

from __future__ import annotations

import glob
import os
import shutil
import signal
import stat
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.ingest import manifest
from understudy.ingest.batch_reader import ID_BYTES, BatchResult, IngestSummary, StateSelection
from understudy.ingest.formats.base import LogFormat
from understudy.ingest.formats.registry import LogBatch, group_batches
from understudy.ingest.jsonl import PrivateFile, unwritable_error
from understudy.ingest.log_files import INSIDE, LogFile, walk_logs
from understudy.ingest.manifest import IngestedBatch
from understudy.ingest.parquet import ParquetWriter, part_path
from understudy.ingest.processes import IngestJob, IngestProgress, ProgressCallback, read_batches, signals_blocked
from understudy.ingest.spool import SpoolLoader
from understudy.redact.report import RedactionReport as Replaced
from understudy.redact.report import write_report_beside
from understudy.store import Store
from understudy.util.locks import locked

_WHOLE = "whole"
_MANIFEST = "manifest"
_SUFFIX = ".understudy-part"
_LOCK = "lock"


class FoundLogs(Struct):
    """The logs below some paths; `skipped` counts by reason the files that are none."""

    batches: list[LogBatch]
    files: int
    skipped: Counter[str] = field(default_factory=Counter[str])


def find_logs(
    paths: Sequence[Path], only: LogFormat | None, output: Path | None, report: ProgressCallback
) -> FoundLogs:
    """The logs at and below the paths. With `only` those of one format; a file given itself is taken for one.

    Raises ConfigError when a path cannot be read, or `output` is one of the logs.
    """
    skipped: Counter[str] = Counter()
    progress = IngestProgress()
    named_paths = {str(path.absolute()) for path in paths if path.is_file() and path.suffix.lower() != ".zip"}
    own = _identity(output) if output else None

    def seen() -> Iterator[LogFile]:
        for file in walk_logs(paths, skipped):
            if own is not None and _identity(Path(file.path.partition(INSIDE)[0])) == own:
                raise ConfigError(f"--output: {output} is one of the files to be read; give another one.")
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
    """What the states are that are wanted; nothing is written."""
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
    """Write the states that are wanted to `output`, each once, in the order of the logs, readable by its owner.

    One that ends in `.parquet` is Parquet, else each state is a line of JSON. With the `key` of pseudonyms they
    are redacted, and what was replaced where is told in `OUTPUT.redaction.json`. `jobs` processes read. A file
    that is there stays as it is until the new one is whole, and where all logs are as they were when it was
    written. Raises ConfigError when it cannot be written.
    """
    output = output.resolve()
    if output.exists() and not output.is_file():
        raise ConfigError(f"--output: {output} is there and is no regular file; give the name of a file.")
    job = IngestJob(selection, "parquet" if output.suffix == ".parquet" else "lines", key)
    now = [_identities(batch) for batch in logs.batches]
    before = manifest.load(output, job)
    old = manifest.reusable(logs.batches, now, before)
    total = IngestSummary(skipped=logs.skipped.copy())
    replaced = None if key is None else Replaced()
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
    with _workplace(output.parent, f".{output.name[:100]}.") as directory:
        writing = _ParquetOutput(directory) if job.form == "parquet" else _JsonlOutput(directory, output)
        try:
            written = _write(logs, job, jobs, report, now, old, directory, writing, total, replaced)
        finally:
            writing.file.close()
        whole = directory / _WHOLE
        try:
            manifest.save(directory / _MANIFEST, whole, job, written)
            whole.replace(output)
            (directory / _MANIFEST).replace(manifest.beside(output))
        except OSError as error:
            raise unwritable_error(output, error) from error
    write_report_beside(output, replaced)
    return total


class _JsonlOutput:
    """The new file of lines, of the old one and of parts."""

    def __init__(self, directory: Path, old: Path) -> None:
        self.file = PrivateFile(directory / _WHOLE)
        self._old = old

    def take(self, read: BatchResult, source: Path | None, dropped: set[int]) -> tuple[int, int]:
        """Write a batch, from a part or else the old file, but for the states `dropped`; where it is, how long."""
        at = self.file.tell()
        return at, self.file.copy(source or self._old, read.at, read.size, dropped)


class _ParquetOutput:
    """The new file of Parquet, of parts."""

    def __init__(self, directory: Path) -> None:
        self.file = ParquetWriter(directory / _WHOLE)

    def take(self, read: BatchResult, source: Path | None, dropped: set[int]) -> tuple[int, int]:
        """Write a batch but for the states `dropped`."""
        if read.size and source is not None:
            self.file.copy(part_path(source, read.at), dropped)
        return 0, 0


def _write(
    logs: FoundLogs,
    job: IngestJob,
    jobs: int,
    report: ProgressCallback,
    now: Sequence[list[manifest.LogIdentity] | None],
    old: Sequence[IngestedBatch | None],
    directory: Path,
    writing: _JsonlOutput | _ParquetOutput,
    total: IngestSummary,
    replaced: Replaced | None,
) -> list[IngestedBatch]:
    """Write all batches, those that are in the `old` file from there; what is to be remembered of them."""
    progress = _progress(logs)
    progress.read = sum(len(earlier.files) for earlier in old if earlier is not None)
    fresh = [batch for batch, earlier in zip(logs.batches, old, strict=True) if earlier is None]
    reading = read_batches(fresh, job, jobs, directory, progress, report)
    seen: set[bytes] = set()
    written: list[IngestedBatch] = []
    for batch, files, earlier in zip(logs.batches, now, old, strict=True):
        if earlier is not None:
            dropped, gone = _add(total, earlier, seen), earlier.dropped
            read, source = earlier.read, None
        else:
            read, source = next(reading)
            dropped, gone = total.add(read, seen), b""
        if replaced:
            replaced.merge(read.places, read.unplaced)
        at, size = writing.take(read, source, dropped)
        read, more = manifest.without(read, dropped, at, size)
        if files is not None and not _unread(read):
            written.append(IngestedBatch(batch.format.name, files, read, gone + more))
        progress.written = writing.file.tell() if isinstance(writing, _JsonlOutput) else 0
        report(progress)
    reading.close()
    return written


def _add(total: IngestSummary, earlier: IngestedBatch, seen: set[bytes]) -> set[int]:
    """Count what was written before."""
    total.unchanged += len(earlier.files)
    total.duplicates += len(earlier.dropped) // ID_BYTES
    return total.add(earlier.read, seen)


# --- into a store --------------------------------------------------------------------------------------


def collect_to_store(
    logs: FoundLogs, selection: StateSelection, directory: Path, jobs: int, report: ProgressCallback
) -> IngestSummary:
    """Put the states that are wanted into the store of a directory, which is made where there is none.

    Logs that were read before and are as they were are left alone. Stopped at any moment, whole traces are in the
    store, and the same again goes on. Raises ConfigError and StoreError.
    """
    job = IngestJob(selection, "rows")
    _make(directory)
    with Store.open(directory) as store:
        stored = store.sessions.sources()
        total = IngestSummary(skipped=logs.skipped.copy())
        fresh: list[LogBatch] = []
        sources: list[list[manifest.Source]] = []
        progress = _progress(logs)
        for batch in logs.batches:
            files = _identities(batch)
            of_batch = [] if files is None else manifest.sources_of(batch, files, job)
            if of_batch and manifest.all_read(of_batch, stored):
                total.files += len(batch.files)
                total.unchanged += len(batch.files)
                progress.read += len(batch.files)
            else:
                fresh.append(batch)
                sources.append(of_batch)
        if not fresh:
            return total
        seen: set[bytes] = set()
        shelf = SpoolLoader(store.sessions)
        with _workplace(directory, ".reading.") as workspace:
            reading = read_batches(fresh, job, jobs, workspace, progress, report)
            for of_batch, (read, source) in zip(sources, reading, strict=True):
                dropped = total.add(read, seen)
                if source is not None:
                    shelf.load(source, read.at, read.size, dropped, () if _unread(read) else of_batch)
                report(progress)
        total.new, total.changed, total.same = shelf.summary.new, shelf.summary.changed, shelf.summary.same
        return total


def _make(directory: Path) -> None:
    """A directory that nobody else may read, and that git leaves alone: it will hold private text."""
    try:
        directory.mkdir(mode=0o700, parents=True)
        (directory / ".gitignore").write_text("*\n")
    except FileExistsError:
        return
    except OSError as error:
        raise ConfigError(f"--dir: {directory} cannot be made: {error.strerror}; give another.") from error


# --- both ----------------------------------------------------------------------------------------------


def _progress(logs: FoundLogs) -> IngestProgress:
    return IngestProgress(files=logs.files, total=sum(len(batch.files) for batch in logs.batches))


def _unread(read: BatchResult) -> bool:
    """Whether a file could not be read, which may be other next time though the file is not."""
    return bool(read.skipped)


def _identities(batch: LogBatch) -> list[manifest.LogIdentity] | None:
    try:
        return manifest.identities(batch)
    except OSError:
        return None


@contextmanager
def _workplace(parent: Path, prefix: str) -> Generator[Path]:
    """A directory for parts, gone afterwards. Raises ConfigError where it cannot be made."""
    _sweep(parent, prefix)
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
    except OSError as error:
        raise ConfigError(
            f"nothing can be written in {parent} ({error.strerror}); give a place in a directory that is there "
            "and is yours."
        ) from error
    try:
        with locked(directory / _LOCK):
            yield directory
    finally:
        with signals_blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            shutil.rmtree(directory)


def _sweep(parent: Path, prefix: str) -> None:
    """Remove what was left by a process that was killed: it holds private text."""
    for left in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        status = left.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            continue
        try:
            with locked(left / _LOCK, busy="another process is writing there"):
                shutil.rmtree(left)
        except (ConfigError, OSError):
            continue  # in use, or not ours to remove: this run has a directory of its own


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None
