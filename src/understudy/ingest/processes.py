"""Reads batches in several processes. Each writes parts of its own; they come back in the order of the logs."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest.batch_reader import BatchResult, StateSelection, StateSink, read_batch
from understudy.ingest.formats.registry import LogBatch
from understudy.ingest.jsonl import JsonlSink
from understudy.ingest.parquet import ParquetSink
from understudy.ingest.spool import SpoolSink

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
    parts = [directory / f"part-{at}" if directory else None for at in range(len(units))]
    read = _in_processes if min(jobs, len(units)) > 1 else _here
    done = read(units, job, jobs, parts, progress, report)
    for part, reads in zip(parts, done, strict=True):
        for one in reads:
            yield one, part
        if part is not None:
            _remove(part)


def _here(
    units: Sequence[Sequence[LogBatch]],
    job: IngestJob,
    jobs: int,
    parts: Sequence[Path | None],
    progress: IngestProgress,
    report: ProgressCallback,
) -> Generator[list[BatchResult]]:
    following = 0.0
    written = 0
    for unit, part in zip(units, parts, strict=True):

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
    units: Sequence[Sequence[LogBatch]],
    job: IngestJob,
    jobs: int,
    parts: Sequence[Path | None],
    progress: IngestProgress,
    report: ProgressCallback,
) -> Generator[list[BatchResult]]:
    others = set(multiprocessing.active_children())
    # A fork of a process that has threads may deadlock.
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(min(jobs, len(units)), mp_context=context, initializer=_begin)
    try:
        waiting: dict[Future[list[BatchResult]], int] = {}
        # Only this process handles Ctrl-C. The others inherit the blocked signal and are terminated below.
        with signals_blocked(signal.SIGINT):
            for at in sorted(range(len(units)), key=lambda at: -_size(units[at])):
                waiting[executor.submit(_work, units[at], job, parts[at])] = at
        done: dict[int, list[BatchResult]] = {}
        following = written = 0
        while following < len(units):
            if following in done:
                yield done.pop(following)
                following += 1
                continue
            ended, _ = wait(waiting, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                at = waiting.pop(future)
                done[at] = future.result()
                written += _grown(parts[at])
                progress.read += sum(len(batch.files) for batch in units[at])
            progress.written = written + sum(_grown(parts[at]) for at in waiting.values())
            report(progress)
    except BaseException as error:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()
        if isinstance(error, BrokenProcessPool):
            raise ConfigError(
                "a process that read logs was killed, perhaps because memory ran out; retry with --jobs 1"
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


def _nothing() -> None: ...


def _work(
    unit: Sequence[LogBatch],
    job: IngestJob,
    part: Path | None,
    tick: Callable[[], None] = _nothing,
    done: Callable[[LogBatch], None] | None = None,
) -> list[BatchResult]:
    sink = _SINKS[job.form](part) if part and job.form else None
    reads: list[BatchResult] = []
    try:
        for batch in unit:
            reads.append(read_batch(batch, job.selection, sink, job.key, tick))
            if done:
                done(batch)
    finally:
        if sink:
            sink.close()
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
