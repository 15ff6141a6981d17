"""Reads batches of logs, in this process or in several: selects states, writes them, and counts them.

Each worker process writes a part file of its own. Results are returned in the order of the logs, whichever process
finishes first.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.ingest.formats.base import timestamp_seconds
from understudy.ingest.formats.registry import LogBatch
from understudy.ingest.log_files import LogFile, add_error, readable_files
from understudy.ingest.log_reader import garbage_collection_paused
from understudy.ingest.model_families import model_family
from understudy.ingest.redaction import redact_trace
from understudy.ingest.signals.annotate import annotate
from understudy.ingest.trace import Message, Trace, TraceRenderer, TurnAction, state_ids_of, text_of
from understudy.redact.report import ReportPlace
from understudy.types import WORK_ROLES

if TYPE_CHECKING:
    from understudy.ingest.state_files import JsonlSink, ParquetSink, SpoolSink
    from understudy.redact.redactor import Redactor

    StateSink = JsonlSink | ParquetSink | SpoolSink

ID_BYTES = 16

Kind = tuple[int, str, str, str, str]
"""What states are counted by: the number of the trace in its batch, format, role, model family, fidelity."""


class StateSelection(Struct, frozen=True):
    """Which states to read.

    `since`: only turns at or after this Unix time, in seconds. `project`: a substring of the agent's working
    directory (of the log's path if the log does not name the directory). `min_turns`: the fewest turns that a
    conversation must have. `all_roles`: also read conversations of agents that the program started for its own
    purposes.
    """

    since: float | None = None
    project: str | None = None
    min_turns: int = 0
    all_roles: bool = False


class BatchResult(Struct):
    """The result of one batch.

    `ids` concatenates the ids of the states, 16 bytes each. `of` is an array of unsigned ints: `kinds[of[i]]` is
    the kind of state `i`. `duplicates` counts states that occurred a second time within the batch. `redactions`
    counts the replacements by rule; `places` says where they are, and `unplaced` counts those whose place was not
    recorded. `errors` has the texts of errors about damaged files. If states were written, they are the `size`
    bytes at offset `at` of the part file.
    """

    files: int = 0
    ids: bytes = b""
    kinds: list[Kind] = field(default_factory=list[Kind])
    of: bytes = b""
    duplicates: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    losses: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    redactions: Counter[str] = field(default_factory=Counter[str])
    places: list[ReportPlace] = field(default_factory=list[ReportPlace])
    unplaced: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])
    at: int = 0
    size: int = 0

    def states(self) -> Iterator[tuple[bytes, Kind]]:
        """Yield the id and the kind of each state."""
        for number, kind in enumerate(array("I", self.of)):
            yield self.ids[number * ID_BYTES : (number + 1) * ID_BYTES], self.kinds[kind]


class IngestSummary(Struct):
    """What was read. All fields except `files`, `unchanged`, `traces`, `losses`, `skipped`, `redactions` and
    `errors` count states.

    `files` includes the `unchanged` files, which were not read again. `duplicates` are states that several files
    contain; they were written once. `left_out` counts unwanted states by reason, `losses` what a reader could not
    interpret, by kind, `skipped` the files that were not read, by reason, and `redactions` the replacements by
    rule. `errors` has the texts of the first errors about damaged files. With a store, `new`, `changed` and `same`
    compare the states with those stored before.
    """

    files: int = 0
    unchanged: int = 0
    traces: int = 0
    states: int = 0
    duplicates: int = 0
    new: int = 0
    changed: int = 0
    same: int = 0
    formats: Counter[str] = field(default_factory=Counter[str])
    families: Counter[str] = field(default_factory=Counter[str])
    fidelities: Counter[str] = field(default_factory=Counter[str])
    roles: Counter[str] = field(default_factory=Counter[str])
    left_out: Counter[str] = field(default_factory=Counter[str])
    losses: Counter[str] = field(default_factory=Counter[str])
    skipped: Counter[str] = field(default_factory=Counter[str])
    redactions: Counter[str] = field(default_factory=Counter[str])
    errors: list[str] = field(default_factory=list[str])

    def add(self, result: BatchResult, known_ids: set[bytes]) -> set[int]:
        """Add the counts of a batch, and its ids to `known_ids`.

        Returns the positions of states that were in `known_ids` already.
        """
        self.files += result.files
        for name in ("left_out", "losses", "skipped", "redactions"):
            totals: Counter[str] = getattr(self, name)
            totals.update(getattr(result, name))
        for error in result.errors:
            add_error(self.errors, error)
        dropped: set[int] = set()
        kind_counts: Counter[Kind] = Counter()
        for number, (identity, kind) in enumerate(result.states()):
            if identity in known_ids:
                dropped.add(number)
            else:
                known_ids.add(identity)
                kind_counts[kind] += 1
        for (_, *names), number in kind_counts.items():
            for name, counter in zip(
                names, (self.formats, self.roles, self.families, self.fidelities), strict=True
            ):
                counter[name] += number
        self.traces += len({kind[0] for kind in kind_counts})
        self.states += kind_counts.total()
        self.duplicates += len(dropped) + result.duplicates
        return dropped


_UNIT_BYTES = 8 << 20  # small batches are read together, up to this many bytes in one call
_REPORT_EVERY_S = 0.2

Form = Literal["lines", "parquet", "rows"]


class IngestProgress(Struct):
    """Progress of reading: files discovered, how many of them are logs (`total`), logs read, and bytes written."""

    files: int = 0
    read: int = 0
    total: int = 0
    written: int = 0


ProgressCallback = Callable[[IngestProgress], None]


class IngestJob(Struct, frozen=True):
    """What to do with each batch.

    If `form` is None, states are only counted; if `key` is set, they are redacted.
    """

    selection: StateSelection
    form: Form | None = None
    key: bytes | None = None


def read_batch(batch: LogBatch, job: IngestJob, sink: StateSink | None, tick: Callable[[], None]) -> BatchResult:
    """Write each selected state of a batch once. If `sink` is None, the states are only counted.

    An unreadable file is counted as skipped; of a file that breaks off, the readable beginning is used. `tick` is
    called after every trace and while states are written, to report progress.
    """
    start_offset = sink.tell() if sink else 0
    files: Sequence[LogFile] = batch.files
    skipped: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    errors: list[str] = []
    last_error: OSError | None = None
    for _ in range(2):
        result = BatchResult(files=len(files), at=start_offset)
        redactor = None if job.key is None else _redactor(job.key)
        try:
            with garbage_collection_paused():
                _read_traces(batch.format.read(files), job.selection, sink, redactor, result, tick)
        except OSError as error:
            last_error = error
            # Unreadable files are rare, so the batch is read again without them: only reading each file to its end
            # shows which they are.
            if sink:
                sink.roll_back(start_offset)
            files = readable_files(files, skipped, broken, errors)
            continue
        result.skipped.update(skipped)
        result.losses.update(broken)
        result.errors = errors
        if redactor:
            report = redactor.report
            result.redactions, result.places, result.unplaced = report.counts, [*report.places()], report.more
        result.size = sink.tell() - start_offset if sink else 0
        return result
    if last_error is not None and not errors:
        add_error(errors, last_error)  # each file can be read, but what it holds is damaged
    return BatchResult(skipped=Counter(unreadable_file=len(batch.files)), errors=errors, at=start_offset)


def _redactor(key: bytes) -> Redactor:
    # Imported here because compiling the redaction rules takes 0.1 s, which readers that do not redact should not
    # pay.
    from understudy.redact.redactor import Redactor

    return Redactor(key)


def _read_traces(
    traces: Iterable[Trace],
    selection: StateSelection,
    sink: StateSink | None,
    redactor: Redactor | None,
    result: BatchResult,
    tick: Callable[[], None],
) -> None:
    seen_ids: set[bytes] = set()
    kinds: dict[Kind, int] = {}
    kind_of_state = array("I")
    ids = bytearray()
    for number, trace in enumerate(traces):
        tick()
        if trace.losses:
            result.losses.update(trace.losses)
        identity_of, turns = state_ids_of(trace.trace_id), trace.turns
        selected: list[int] = []
        # a cache: most turns of a trace have the same model and fidelity
        kind_numbers: dict[tuple[str | None, str], int] = {}
        for index in _selected_turns(trace, selection, result.left_out):
            turn = turns[index]
            identity = identity_of(turn.message_id)
            if identity in seen_ids:
                result.duplicates += 1
                continue
            seen_ids.add(identity)
            selected.append(index)
            ids += identity
            kind_number = kind_numbers.get((turn.model, turn.fidelity))
            if kind_number is None:
                kind = (number, trace.format, trace.role, model_family(turn.model) or "unknown", turn.fidelity)
                kind_number = kind_numbers[turn.model, turn.fidelity] = kinds.setdefault(kind, len(kinds))
            kind_of_state.append(kind_number)
        if sink and selected:
            trace.renderer = RenderCache(trace.renderer)
            annotate(trace)
            sink.write_turns(redact_trace(trace, redactor) if redactor else trace, selected, tick)
    result.ids, result.kinds, result.of = bytes(ids), list(kinds), kind_of_state.tobytes()


def _selected_turns(trace: Trace, selection: StateSelection, left_out: Counter[str]) -> Iterable[int]:
    """Return the indexes of the selected turns of a trace, and count the other turns in `left_out` by reason."""
    turns, since = trace.turns, selection.since
    reason = None
    if not selection.all_roles and trace.role not in WORK_ROLES:
        reason = f"role:{trace.role}"
    elif selection.project is not None and selection.project not in (trace.project or trace.source):
        reason = "other_project"
    elif len(turns) < selection.min_turns:
        reason = "few_turns"
    elif since is None:
        return range(len(turns))
    if since is None or reason is not None:
        left_out += Counter({str(reason): len(turns)})
        return ()
    times = [timestamp_seconds(turn.timestamp) for turn in turns]
    selected = [index for index, time_s in enumerate(times) if time_s is not None and time_s >= since]
    undated = times.count(None)
    left_out += Counter(undated=undated, earlier=len(times) - len(selected) - undated)
    return selected


_CACHED_CHARACTERS = 32 << 20


class RenderCache:
    """Wraps a renderer and caches the messages of one trace's node bodies.

    Cache keys are the `id()` of the bodies, which is safe because the trace's nodes keep them alive. Caching stops
    after about `_CACHED_CHARACTERS`, so that a long trace does not take more memory.
    """

    def __init__(self, renderer: TraceRenderer) -> None:
        self._renderer = renderer
        self._messages: dict[int, list[Message]] = {}
        self._remaining_characters = _CACHED_CHARACTERS

    def history(self, body: Any) -> list[Message]:
        """Return the messages of a node. They are shared with the cache: do not change them."""
        messages = self._messages.get(id(body))
        if messages is None:
            messages = self._renderer.history(body)
            if self._remaining_characters > 0:
                self._messages[id(body)] = messages
                self._remaining_characters -= 1000 + sum(
                    len(text_of(message.get("content"))) for message in messages
                )
        return messages

    def action(self, bodies: Sequence[Any]) -> TurnAction:
        """Return what the model did in one turn."""
        return self._renderer.action(bodies)


def read_batches(
    batches: Iterable[LogBatch],
    job: IngestJob,
    jobs: int,
    directory: Path | None,
    progress: IngestProgress,
    report: ProgressCallback,
) -> Generator[tuple[BatchResult, Path | None]]:
    """Yield the result of each batch in order, with the part file that holds its states.

    The part files are written in `directory`, and each is removed once the results of its batches were consumed.
    Raises ConfigError when a file cannot be written or a worker process is killed.
    """
    units = list(_units(batches))
    unit_jobs = [
        (unit, job, directory / f"part-{number}" if directory else None) for number, unit in enumerate(units)
    ]
    jobs = min(jobs, len(units))
    results_of_units = (
        _in_processes(unit_jobs, jobs, progress, report)
        if jobs > 1
        else _in_this_process(unit_jobs, progress, report)
    )
    for (_, _, part_file), results in zip(unit_jobs, results_of_units, strict=True):
        for result in results:
            yield result, part_file
        if part_file is not None:
            _remove(part_file)


_UnitJob = tuple[Sequence[LogBatch], IngestJob, Path | None]
"""What one call of `_read_unit` reads, how, and the file or directory that it writes the states to."""


def _in_this_process(
    unit_jobs: Sequence[_UnitJob], progress: IngestProgress, report: ProgressCallback
) -> Generator[list[BatchResult]]:
    next_report_at = 0.0
    written_bytes = 0
    for unit, job, part_file in unit_jobs:

        def tick(part_file: Path | None = part_file, written_bytes: int = written_bytes) -> None:
            nonlocal next_report_at
            if time.monotonic() > next_report_at:
                next_report_at = time.monotonic() + _REPORT_EVERY_S
                progress.written = written_bytes + _file_bytes(part_file)
                report(progress)

        def count_batch(batch: LogBatch) -> None:
            progress.read += len(batch.files)

        results = _read_unit(unit, job, part_file, tick, count_batch)
        written_bytes += _file_bytes(part_file)
        yield results


def _in_processes(
    unit_jobs: Sequence[_UnitJob], jobs: int, progress: IngestProgress, report: ProgressCallback
) -> Generator[list[BatchResult]]:
    earlier_children = set(multiprocessing.active_children())
    # Use "spawn": forking a process that has threads may deadlock.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_end_with_parent)
    try:
        pending: dict[Future[list[BatchResult]], int] = {}
        # Only this process handles Ctrl-C: the workers inherit the blocked signal, and are terminated below.
        with signals_blocked(signal.SIGINT):
            for number in sorted(range(len(unit_jobs)), key=lambda number: -_unit_bytes(unit_jobs[number][0])):
                pending[executor.submit(_read_unit, *unit_jobs[number])] = number
        finished: dict[int, list[BatchResult]] = {}
        next_number = written_bytes = 0
        while next_number < len(unit_jobs):
            if next_number in finished:
                yield finished.pop(next_number)
                next_number += 1
                continue
            completed, _ = wait(pending, timeout=_REPORT_EVERY_S, return_when=FIRST_COMPLETED)
            for future in completed:
                number = pending.pop(future)
                unit, _, part_file = unit_jobs[number]
                finished[number] = future.result()
                written_bytes += _file_bytes(part_file)
                progress.read += sum(len(batch.files) for batch in unit)
            progress.written = written_bytes + sum(
                _file_bytes(unit_jobs[number][2]) for number in pending.values()
            )
            report(progress)
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - earlier_children:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                f"one of {jobs} processes that read logs was killed, perhaps because memory ran out; retry with "
                "--jobs 1, which needs the least memory"
            ) from error
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Initialise a worker process: start a thread that ends it when its parent process dies."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait_for_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait_for_parent, daemon=True).start()


def _read_unit(
    unit: Sequence[LogBatch],
    job: IngestJob,
    part_file: Path | None,
    tick: Callable[[], None] = lambda: None,
    count_batch: Callable[[LogBatch], None] = lambda _: None,
) -> list[BatchResult]:
    results: list[BatchResult] = []
    with closing(_sink(job.form, part_file)) if part_file and job.form else nullcontext() as sink:
        for batch in unit:
            results.append(read_batch(batch, job, sink, tick))
            count_batch(batch)
    return results


def _sink(form: Form, part_file: Path) -> StateSink:
    """Return the writer of a part file."""
    # Imported here because it imports the store, which takes longer than counting the states of many logs.
    from understudy.ingest import state_files

    sinks: dict[Form, Callable[[Path], StateSink]] = {
        "lines": state_files.JsonlSink,
        "parquet": state_files.ParquetSink,
        "rows": state_files.SpoolSink,
    }
    return sinks[form](part_file)


def _units(batches: Iterable[LogBatch]) -> Iterator[list[LogBatch]]:
    """Yield the batches grouped into units of work: neighbouring small batches are read in one call."""
    unit: list[LogBatch] = []
    unit_bytes = 0
    for batch in batches:
        batch_bytes = _unit_bytes([batch])
        if unit and unit_bytes + batch_bytes > _UNIT_BYTES:
            yield unit
            unit, unit_bytes = [], 0
        unit.append(batch)
        unit_bytes += batch_bytes
    if unit:
        yield unit


def _unit_bytes(unit: Iterable[LogBatch]) -> int:
    return sum(file.size for batch in unit for file in batch.files)


def _file_bytes(part_file: Path | None) -> int:
    try:
        return part_file.stat().st_size if part_file else 0
    except FileNotFoundError:
        return 0


def _remove(part_file: Path) -> None:
    if part_file.is_dir():
        shutil.rmtree(part_file)
    else:
        part_file.unlink(missing_ok=True)


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Generator[None]:
    """Block these signals inside the `with` block; signals that arrive meanwhile are delivered after it."""
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
