"""Reads batches of logs, in this process or in several: the selected states, where they go, and what is counted.

Each process writes parts of its own; they come back in the order of the logs.
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
from understudy.ingest.log_files import LogFile, readable_files
from understudy.ingest.log_reader import garbage_collection_paused
from understudy.ingest.model_families import model_family
from understudy.ingest.redaction import redact_trace
from understudy.ingest.signals.annotate import annotate
from understudy.ingest.state_files import JsonlSink, ParquetSink, SpoolSink
from understudy.ingest.trace import Message, Trace, TraceRenderer, TurnAction, state_id_bytes, text_of
from understudy.redact.report import ReportPlace
from understudy.types import WORK_ROLES

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor

ID_BYTES = 16

Kind = tuple[int, str, str, str, str]
"""What states are counted by: the number of the trace in its batch, format, role, model family, fidelity."""


class StateSelection(Struct, frozen=True):
    """Which states are wanted.

    `since` is a moment in seconds, `project` a part of the directory that the agent worked in (or, where the log
    names none, of the log's path), `min_turns` how many turns the conversation has at least. Without `all_roles`
    only those of agents that did what the user wanted.
    """

    since: float | None = None
    project: str | None = None
    min_turns: int = 0
    all_roles: bool = False


class BatchResult(Struct):
    """The result of a batch. `ids` are those of the states, 16 bytes each, `kinds[of[i]]` is what state `i` is.

    `duplicates` counts the states that the batch has twice, `redactions` what was replaced, by rule: at `places`,
    and at others of which `unplaced` has only the counts. Where states were written, they are `size` bytes of a
    file from `at` on.
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
    at: int = 0
    size: int = 0

    def states(self) -> Iterator[tuple[bytes, Kind]]:
        """The states: id, and what they are."""
        for number, kind in enumerate(array("I", self.of)):
            yield self.ids[number * ID_BYTES : (number + 1) * ID_BYTES], self.kinds[kind]


class IngestSummary(Struct):
    """What was read. All but `files`, `unchanged`, `traces`, `losses` and `skipped` count states.

    Of the `files`, `unchanged` were not read again. `duplicates` were written once, though several files have
    them. `left_out` is by the reason; `losses` is what readers could not make sense of; `skipped` counts the files
    that were not read, by the reason; `redactions` what was replaced, by the rule. In a store some states are
    `new`, and some were there, as they are (`same`) or otherwise (`changed`).
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

    def add(self, read: BatchResult, seen: set[bytes]) -> set[int]:
        """Count the states of a batch that are not `seen`, and add them. Returns the numbers of the others."""
        self.files += read.files
        for name in ("left_out", "losses", "skipped", "redactions"):
            mine: Counter[str] = getattr(self, name)
            mine.update(getattr(read, name))
        dropped: set[int] = set()
        counted: Counter[Kind] = Counter()
        for number, (identity, kind) in enumerate(read.states()):
            if identity in seen:
                dropped.add(number)
            else:
                seen.add(identity)
                counted[kind] += 1
        for (_, *names), number in counted.items():
            for name, counter in zip(
                names, (self.formats, self.roles, self.families, self.fidelities), strict=True
            ):
                counter[name] += number
        self.traces += len({kind[0] for kind in counted})
        self.states += counted.total()
        self.duplicates += len(dropped) + read.duplicates
        return dropped


StateSink = JsonlSink | ParquetSink | SpoolSink
"""Where states go."""

_UNIT = 8 << 20  # bytes of small logs that are read in one go
_LOOK_S = 0.2

Form = Literal["lines", "parquet", "rows"]
_SINKS: dict[Form, Callable[[Path], StateSink]] = {"lines": JsonlSink, "parquet": ParquetSink, "rows": SpoolSink}


class IngestProgress(Struct):
    """How far the reading is: files discovered, logs among them (`total`), logs read, bytes written."""

    files: int = 0
    read: int = 0
    total: int = 0
    written: int = 0


ProgressCallback = Callable[[IngestProgress], None]


class IngestJob(Struct, frozen=True):
    """What to do with each batch. Without a `form` states are only counted; with a `key` they are redacted."""

    selection: StateSelection
    form: Form | None = None
    key: bytes | None = None


def read_batch(batch: LogBatch, job: IngestJob, sink: StateSink | None, tick: Callable[[], None]) -> BatchResult:
    """Write the wanted states of a batch, each once; without a sink they are only counted.

    A file that cannot be read is counted, and what it gives before it breaks off is read. `tick` is called now and
    then.
    """
    start = sink.tell() if sink else 0
    files: Sequence[LogFile] = batch.files
    skipped: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    for _ in range(2):
        read = BatchResult(files=len(files), at=start)
        redactor = None if job.key is None else _redactor(job.key)
        try:
            with garbage_collection_paused():
                _read_traces(batch.format.read(files), job.selection, sink, redactor, read, tick)
        except OSError:
            # Rare enough to begin again: only reading each file to its end tells which of them cannot be read.
            if sink:
                sink.roll_back(start)
            files = readable_files(files, skipped, broken)
            continue
        read.skipped.update(skipped)
        read.losses.update(broken)
        if redactor:
            report = redactor.report
            read.redactions, read.places, read.unplaced = report.counts, [*report.places()], report.more
        read.size = sink.tell() - start if sink else 0
        return read
    return BatchResult(skipped=Counter(unreadable_file=len(batch.files)), at=start)


def _redactor(key: bytes) -> Redactor:
    # Its rules take a tenth of a second to compile, which readers that do not redact need not wait for.
    from understudy.redact.redactor import Redactor

    return Redactor(key)


def _read_traces(
    traces: Iterable[Trace],
    selection: StateSelection,
    sink: StateSink | None,
    redactor: Redactor | None,
    read: BatchResult,
    tick: Callable[[], None],
) -> None:
    seen: set[bytes] = set()
    kinds: dict[Kind, int] = {}
    of = array("I")
    ids = bytearray()
    for number, trace in enumerate(traces):
        tick()
        if trace.losses:
            read.losses.update(trace.losses)
        trace_id, turns = trace.trace_id, trace.turns
        turns_wanted: list[int] = []
        kind_numbers: dict[tuple[str | None, str], int] = {}  # most turns of a trace are of one kind
        for index in _selected_turns(trace, selection, read.left_out):
            turn = turns[index]
            identity = state_id_bytes(trace_id, turn.message_id)
            if identity in seen:
                read.duplicates += 1
                continue
            seen.add(identity)
            turns_wanted.append(index)
            ids += identity
            kind_number = kind_numbers.get((turn.model, turn.fidelity))
            if kind_number is None:
                kind = (number, trace.format, trace.role, model_family(turn.model) or "unknown", turn.fidelity)
                kind_number = kind_numbers[turn.model, turn.fidelity] = kinds.setdefault(kind, len(kinds))
            of.append(kind_number)
        if sink and turns_wanted:
            trace.renderer = RenderCache(trace.renderer)
            annotate(trace)
            sink.write_turns(redact_trace(trace, redactor) if redactor else trace, turns_wanted, tick)
    read.ids, read.kinds, read.of = bytes(ids), list(kinds), of.tobytes()


def _selected_turns(trace: Trace, selection: StateSelection, left_out: Counter[str]) -> Iterable[int]:
    """The indexes of the turns of a trace that are wanted; the others are counted by the reason."""
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
    moments = [timestamp_seconds(turn.timestamp) for turn in turns]
    wanted = [index for index, moment in enumerate(moments) if moment is not None and moment >= since]
    undated = moments.count(None)
    left_out += Counter(undated=undated, earlier=len(moments) - len(wanted) - undated)
    return wanted


_ROOM = 32 << 20


class RenderCache:
    """Renders as another does, and remembers the messages of the bodies of one trace, whose nodes keep them alive.

    Only the first `_ROOM` characters are remembered, so that a long trace takes no more memory.
    """

    def __init__(self, renderer: TraceRenderer) -> None:
        self._renderer = renderer
        self._messages: dict[int, list[Message]] = {}
        self._room = _ROOM

    def history(self, body: Any) -> list[Message]:
        """The messages of a node; not to be changed."""
        messages = self._messages.get(id(body))
        if messages is None:
            messages = self._renderer.history(body)
            if self._room > 0:
                self._messages[id(body)] = messages
                self._room -= 1000 + sum(len(text_of(message.get("content"))) for message in messages)
        return messages

    def action(self, bodies: Sequence[Any]) -> TurnAction:
        """What the model did."""
        return self._renderer.action(bodies)


def read_batches(
    batches: Iterable[LogBatch],
    job: IngestJob,
    jobs: int,
    directory: Path | None,
    progress: IngestProgress,
    report: ProgressCallback,
) -> Generator[tuple[BatchResult, Path | None]]:
    """The result of each batch, in order, with the file of its states, which is removed before the next one.

    The files are written in `directory`. Raises ConfigError when one cannot be written or a process is killed.
    """
    units = list(_units(batches))
    work = [(unit, job, directory / f"part-{at}" if directory else None) for at, unit in enumerate(units)]
    jobs = min(jobs, len(units))
    done = _in_processes(work, jobs, progress, report) if jobs > 1 else _here(work, progress, report)
    for (_, _, part), reads in zip(work, done, strict=True):
        for one in reads:
            yield one, part
        if part is not None:
            _remove(part)


_Work = tuple[Sequence[LogBatch], IngestJob, Path | None]
"""What one call of `_work` reads, how, and the file or directory that it writes the states to."""


def _here(
    work: Sequence[_Work], progress: IngestProgress, report: ProgressCallback
) -> Generator[list[BatchResult]]:
    following = 0.0
    written = 0
    for unit, job, part in work:

        def tick(part: Path | None = part, written: int = written) -> None:
            nonlocal following
            if time.monotonic() > following:
                following = time.monotonic() + _LOOK_S
                progress.written = written + _grown(part)
                report(progress)

        def done(batch: LogBatch) -> None:
            progress.read += len(batch.files)

        reads = _work(unit, job, part, tick, done)
        written += _grown(part)
        yield reads


def _in_processes(
    work: Sequence[_Work], jobs: int, progress: IngestProgress, report: ProgressCallback
) -> Generator[list[BatchResult]]:
    others = set(multiprocessing.active_children())
    # A fork of a process that has threads may deadlock.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin)
    try:
        waiting: dict[Future[list[BatchResult]], int] = {}
        # Only this process handles Ctrl-C. The others inherit the blocked signal and are terminated below.
        with signals_blocked(signal.SIGINT):
            for at in sorted(range(len(work)), key=lambda at: -_size(work[at][0])):
                waiting[executor.submit(_work, *work[at])] = at
        done: dict[int, list[BatchResult]] = {}
        following = written = 0
        while following < len(work):
            if following in done:
                yield done.pop(following)
                following += 1
                continue
            ended, _ = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                at = waiting.pop(future)
                unit, _, part = work[at]
                done[at] = future.result()
                written += _grown(part)
                progress.read += sum(len(batch.files) for batch in unit)
            progress.written = written + sum(_grown(work[at][2]) for at in waiting.values())
            report(progress)
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                "a process that read logs was killed, perhaps for lack of memory; retry with --jobs 1"
            ) from error
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _begin() -> None:
    """Runs first in a worker process: ends the process when its parent is killed."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def _work(
    unit: Sequence[LogBatch],
    job: IngestJob,
    part: Path | None,
    tick: Callable[[], None] = lambda: None,
    done: Callable[[LogBatch], None] = lambda _: None,
) -> list[BatchResult]:
    reads: list[BatchResult] = []
    with closing(_SINKS[job.form](part)) if part and job.form else nullcontext() as sink:
        for batch in unit:
            reads.append(read_batch(batch, job, sink, tick))
            done(batch)
    return reads


def _units(batches: Iterable[LogBatch]) -> Iterator[list[LogBatch]]:
    """The batches in units of work: small neighbours are read in one call."""
    unit: list[LogBatch] = []
    size = 0
    for batch in batches:
        more = _size([batch])
        if unit and size + more > _UNIT:
            yield unit
            unit, size = [], 0
        unit.append(batch)
        size += more
    if unit:
        yield unit


def _size(unit: Iterable[LogBatch]) -> int:
    return sum(file.size for batch in unit for file in batch.files)


def _grown(part: Path | None) -> int:
    try:
        return part.stat().st_size if part else 0
    except FileNotFoundError:
        return 0


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part)
    else:
        part.unlink(missing_ok=True)


@contextmanager
def signals_blocked(*signals: signal.Signals) -> Generator[None]:
    """Block signals; they are delivered afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
