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

_READER_VERSION = "19"
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


def reader_id(job: IngestJob) -> str:
    """Return a string that identifies the reader's version and options.

    Logs read with another one are read again.
    """
    key = None
    if job.key is not None:
        # The redaction rules depend on whether Betterleaks is installed.
        key = (hashlib.blake2b(job.key, digest_size=8).hexdigest(), is_installed())
    options = hashlib.blake2b(msgspec.json.encode((job.selection, job.form, key)), digest_size=8).hexdigest()
    return f"{__version__}/{_READER_VERSION}/{options}"


def _identities(batch: LogBatch) -> list[LogIdentity] | None:
    """Return the current identities of a batch's logs, or None if one of them no longer exists."""
    identities: list[LogIdentity] = []
    for file in batch.files:
        archive, separator, _ = file.path.partition(INSIDE)
        try:
            status = os.stat(archive)  # noqa: PTH116 (of very many paths)
        except OSError:
            return None
        # A member of an archive has the archive's modification time.
        size = file.size if separator else status.st_size
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
    recorded = (manifest.version, manifest.reader, manifest.size, manifest.modified_ns)
    return manifest if recorded == (_FORMAT, reader_id(job), status.st_size, status.st_mtime_ns) else None


def save_manifest(path: Path, states_file: Path, job: IngestJob, batches: list[IngestedBatch]) -> None:
    """Write the manifest for the finished file `states_file` to `path`. Raises OSError."""
    status = states_file.stat()
    path.touch(0o600)
    path.write_bytes(_encode(OutputManifest(_FORMAT, reader_id(job), status.st_size, status.st_mtime_ns, batches)))


def reusable(
    batches: Sequence[LogBatch], identities: Sequence[list[LogIdentity] | None], manifest: OutputManifest | None
) -> list[IngestedBatch | None]:
    """Return for each batch what was written of it earlier, or None if it must be read again.

    A batch can be reused if its logs are unchanged. If some of its states were left out as duplicates, the batches
    that contain them must be reused too, and come before it.
    """
    ingested_batches = (
        {(batch.format, tuple(batch.files)): batch for batch in manifest.batches} if manifest else {}
    )
    reused_ids: set[bytes] = set()
    results: list[IngestedBatch | None] = []
    for batch, logs in zip(batches, identities, strict=True):
        reusable_batch = ingested_batches.get((batch.format.name, tuple(logs))) if logs is not None else None
        if reusable_batch is not None and not reused_ids.issuperset(_split_ids(reusable_batch.dropped)):
            reusable_batch = None
        if reusable_batch is not None:
            reused_ids.update(identity for identity, _ in reusable_batch.read.states())
        results.append(reusable_batch)
    return results


def without_states(result: BatchResult, dropped: Set[int], offset: int, size: int) -> tuple[BatchResult, bytes]:
    """Return a batch's result without its dropped states and at its new place, and the ids that were dropped."""
    ids: list[bytes] = []
    kind_numbers = array("I")
    kinds: dict[Kind, int] = {}
    removed_ids: list[bytes] = []
    for number, (identity, kind) in enumerate(result.states()):
        if number in dropped:
            removed_ids.append(identity)
        else:
            ids.append(identity)
            kind_numbers.append(kinds.setdefault(kind, len(kinds)))
    remaining = msgspec.structs.replace(
        result, ids=b"".join(ids), of=kind_numbers.tobytes(), kinds=list(kinds), at=offset, size=size
    )
    return remaining, b"".join(removed_ids)


def _split_ids(ids: bytes) -> Iterable[bytes]:
    return (ids[start : start + ID_BYTES] for start in range(0, len(ids), ID_BYTES))


# --- in a store ----------------------------------------------------------------------------------------


def sources_of(batch: LogBatch, files: Sequence[LogIdentity], job: IngestJob) -> list[LogSource]:
    """Return what the store should record about the logs of a batch."""
    reader = f"{reader_id(job)}/{batch.format.name}"
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
        (stored_source := stored.get(source.path)) is not None
        and (stored_source.size, stored_source.modified_ns, stored_source.reader)
        == (source.size, source.modified_ns, source.reader)
        for source in sources
    )


_STATES_FILE = "whole"
_MANIFEST_FILE = "manifest"
_SUFFIX = ".understudy-part"
_LOCK_FILE = "lock"


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
    identities = [_identities(batch) for batch in logs.batches]
    manifest = load_manifest(output, job)
    reused = reusable(logs.batches, identities, manifest)
    summary = IngestSummary(skipped=logs.skipped.copy(), errors=[*logs.errors])
    redaction_report = None if key is None else RedactionReport()
    if manifest is not None and [*reused] == manifest.batches:
        known_ids: set[bytes] = set()
        for ingested in manifest.batches:
            _add_unchanged(summary, ingested, known_ids)
            if redaction_report:
                redaction_report.merge(ingested.read.places, ingested.read.unplaced)
        write_report_beside(output, redaction_report)
        return summary
    if job.form == "parquet":
        # Rows of a Parquet file cannot be copied without being decoded, so all logs are read again.
        reused = [None for _ in reused]
    plan = list(zip(logs.batches, identities, reused, strict=True))
    remedy = "choose an --output in an existing directory in which you may write"
    with _temporary_directory(output.parent, f".{output.name[:100]}.", remedy) as directory:
        new_file = directory / _STATES_FILE
        with closing(ParquetWriter(new_file) if job.form == "parquet" else PrivateFile(new_file)) as file:
            progress = logs.progress()
            unread = [batch for batch, _, ingested in plan if ingested is None]
            progress.read = progress.total - sum(len(batch.files) for batch in unread)
            with closing(read_batches(unread, job, jobs, directory, progress, report)) as results:
                entries: list[IngestedBatch] = []
                for entry in _copy_states(plan, results, file, output, summary, redaction_report):
                    entries += [entry] if entry else []
                    progress.written = file.tell() if isinstance(file, PrivateFile) else 0
                    report(progress)
        with writing(output):
            save_manifest(directory / _MANIFEST_FILE, new_file, job, entries)
            new_file.replace(output)
            (directory / _MANIFEST_FILE).replace(manifest_path(output))
    write_report_beside(output, redaction_report)
    return summary


def _copy_states(
    plan: Sequence[tuple[LogBatch, list[LogIdentity] | None, IngestedBatch | None]],
    results: Iterator[tuple[BatchResult, Path | None]],
    file: PrivateFile | ParquetWriter,
    earlier_output: Path,
    summary: IngestSummary,
    redaction_report: RedactionReport | None,
) -> Iterator[IngestedBatch | None]:
    """Copy the states of each batch into the new file, from its part file or, if it is unchanged, from the earlier
    output.

    Yields for each batch its manifest entry, or None if it must be read again next time.
    """
    known_ids: set[bytes] = set()
    for batch, files, ingested in plan:
        if ingested is not None:
            dropped, removed_ids = _add_unchanged(summary, ingested, known_ids), ingested.dropped
            result, source = ingested.read, None
        else:
            result, source = next(results)
            dropped, removed_ids = summary.add(result, known_ids), b""
        if redaction_report:
            redaction_report.merge(result.places, result.unplaced)
        offset = size = 0  # offsets have no meaning in Parquet
        if isinstance(file, PrivateFile):
            offset = file.tell()
            size = file.copy(source or earlier_output, result.at, result.size, dropped)
        elif result.size and source is not None:
            file.copy(part_path(source, result.at), dropped)
        result, newly_removed = without_states(result, dropped, offset, size)
        if files is None or result.skipped:
            yield None  # an unreadable file may become readable, so this batch is not recorded
        else:
            yield IngestedBatch(batch.format.name, files, result, removed_ids + newly_removed)


def _add_unchanged(summary: IngestSummary, ingested: IngestedBatch, known_ids: set[bytes]) -> set[int]:
    """Add the counts of an unchanged batch. Returns the positions of states whose ids were known."""
    summary.unchanged += len(ingested.files)
    summary.duplicates += len(ingested.dropped) // ID_BYTES
    return summary.add(ingested.read, known_ids)


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
        _make_private(location)
        parent, prefix, remedy = location, ".reading.", "choose a --dir in which you may write"
    else:
        parent, prefix = Path(tempfile.gettempdir()), ".understudy-reading."
        remedy = "set TMPDIR to an existing directory in which you may write"
    with Store.open(location) as store:
        stored = store.sessions.sources()
        summary = IngestSummary(skipped=logs.skipped.copy(), errors=[*logs.errors])
        unread: list[LogBatch] = []
        sources: list[list[LogSource]] = []
        progress = logs.progress()
        for batch in logs.batches:
            files = _identities(batch)
            batch_sources = [] if files is None else sources_of(batch, files, job)
            if batch_sources and all_read(batch_sources, stored):
                summary.files += len(batch.files)
                summary.unchanged += len(batch.files)
                progress.read += len(batch.files)
            else:
                unread.append(batch)
                sources.append(batch_sources)
        if not unread:
            return summary
        known_ids: set[bytes] = set()
        with _temporary_directory(parent, prefix, remedy) as workspace:
            results = read_batches(unread, job, jobs, workspace, progress, report)
            for batch_sources, (result, part_file) in zip(sources, results, strict=True):
                dropped = summary.add(result, known_ids)
                # An unreadable file may become readable, so its batch is not recorded as read.
                sources_read = () if result.skipped else batch_sources
                stored_parts = (
                    load_spool(store.sessions, part_file, result.at, result.size, dropped, sources_read)
                    if part_file
                    else ()
                )
                for changes in stored_parts:
                    summary.new += changes.new
                    summary.changed += changes.changed
                    summary.same += changes.same
                report(progress)
        return summary


def _make_private(directory: Path) -> None:
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
def _temporary_directory(parent: Path, prefix: str, remedy: str) -> Generator[Path]:
    """Make a temporary directory for part files, removed afterwards.

    Raises ConfigError with `remedy` if it cannot be created.
    """
    _remove_leftovers(parent, prefix)
    try:
        directory = Path(tempfile.mkdtemp(prefix=prefix, suffix=_SUFFIX, dir=parent))
    except OSError as error:
        raise ConfigError(f"cannot write in {parent}: {error.strerror}; {write_remedy(error, remedy)}") from error
    try:
        with locked(directory / _LOCK_FILE):
            # Another run may have removed the directory as a leftover, and `locked` created it again with other
            # permissions.
            directory.chmod(0o700)
            yield directory
    finally:
        with signals_blocked(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            shutil.rmtree(directory)


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove temporary directories that killed processes left behind, since they hold private text."""
    for leftover in parent.glob(f"{glob.escape(prefix)}*{_SUFFIX}"):
        try:
            status = leftover.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
                continue
            with locked(leftover / _LOCK_FILE, busy="another process is writing there"):
                shutil.rmtree(leftover)
        except (ConfigError, OSError):
            continue  # in use, or not ours to remove; either way this run uses a directory of its own
