"""Live progress of a run on stderr: a line that says where it stands."""

from __future__ import annotations

import threading
import time

from understudy.cli.display.formatting import short, time_left
from understudy.cli.display.live import LiveStatus
from understudy.run.runner import RunMonitor
from understudy.run.scheduler import Scheduler
from understudy.store import RunCounts, Store

_COUNTING_SHARE = 20
"""The store's counts are asked for again after this many times as long as asking took: it grows with the run."""


class RunDisplay(RunMonitor, LiveStatus):
    """What a run tells, as one line of text; thread-safe to read."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self._stage = "starting"
        self._reading = threading.Lock()
        self._store: Store | None = None
        self._began = time.monotonic()
        self._done_before = 0
        self._counts: RunCounts | None = None
        self._count_again = 0.0

    def stage(self, text: str) -> None:
        """Show a stage; one that only counts on is not worth a line of its own elsewhere than on a terminal."""
        # While rollouts run their counters are shown, and no stage is news.
        if self.scheduler is None and text.partition(":")[0] != self._stage.partition(":")[0]:
            self.changed.set()
        self._stage = text

    def running(self, scheduler: Scheduler, store: Store) -> None:
        """Show the rollouts' counters from now on."""
        self._store = store
        self._began = time.monotonic()
        self._done_before = scheduler.progress.done
        self.scheduler = scheduler
        self.changed.set()

    def stopped(self) -> None:
        """Read the store no more."""
        with self._reading:
            self._store = None
            self._stage = "finishing"

    def line(self) -> str:
        """Where the run stands: rollouts done, solved, calls, tokens, time left."""
        with self._reading:
            return self._line()

    def _line(self) -> str:
        if self.scheduler is None or self._store is None:
            return self._stage
        progress = self.scheduler.progress
        counts = self._fresh_counts(self._store, self.scheduler.run_id)
        parts = [
            f"{progress.done}/{progress.total} rollouts",
            f"{progress.solved} solved",
            f"{progress.running} running",
            f"{counts.calls} calls",
            f"{short(counts.prompt_tokens)}+{short(counts.completion_tokens)} tokens",
            self._time_left(progress.done, progress.total),
        ]
        if progress.failed or progress.retried:
            parts.append(f"{progress.failed} failed, {progress.retried} retried")
        if progress.last_error is not None:
            parts.append(f"last fault at the {progress.last_error.boundary}")
        if self.scheduler.draining:
            parts.append("finishing what runs; Ctrl-C again stops at once")
        return " · ".join(parts)

    def _fresh_counts(self, store: Store, run_id: str) -> RunCounts:
        began = time.monotonic()
        if self._counts is None or began >= self._count_again:
            self._counts = store.outcomes.counts(run_id)
            self._count_again = began + _COUNTING_SHARE * (time.monotonic() - began)
        return self._counts

    def _time_left(self, done: int, total: int) -> str:
        fresh = done - self._done_before
        if done == total:
            return "done"
        if fresh == 0:
            return "time left unknown"
        return time_left((time.monotonic() - self._began) / fresh * (total - done))
