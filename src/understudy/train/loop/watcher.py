"""Who is told how a loop goes on: a display, and whatever tracker is at hand."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from understudy.train.loop.state import Evaluation, LoopState, StepState, metrics_of
from understudy.train.metrics import Trackers

_log = logging.getLogger(__name__)


class LoopStatus(Protocol):
    """A loop that can be asked how it goes on; see `loop.Loop`."""

    state: LoopState

    def line(self) -> str:
        """Where it stands, in a line. Any thread may ask."""
        ...


class Watcher:
    """What a loop tells while it goes on. The base class listens to nothing."""

    def began(self, loop: LoopStatus) -> None:
        """The loop begins; its `line` may be asked from now on."""

    def stepped(self, step: StepState) -> None:
        """A step is over: its weights answer."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """The held-out tasks were tried."""


class TrackingWatcher(Watcher):
    """Passes on what a loop tells, and its numbers to trackers by name. To be used as a context.

    A thread of its own waits for the trackers, which may be far away; one that fails is said once, and the loop
    goes on.
    """

    def __init__(self, inner: Watcher, directory: Path, names: Sequence[str]) -> None:
        self._inner = inner
        self._trackers = Trackers(directory, names, "understudy-loop")
        self._thread = ThreadPoolExecutor(1, "trackers")
        self._open = bool(names)

    def __enter__(self) -> Self:
        self._do(self._trackers.__enter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._do(lambda: self._trackers.__exit__(None, None, None))
        self._thread.shutdown()

    def began(self, loop: LoopStatus) -> None:
        """See Watcher."""
        self._inner.began(loop)

    def stepped(self, step: StepState) -> None:
        """See Watcher."""
        self._inner.stepped(step)
        self._log(step.step, metrics_of(step))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Watcher."""
        self._inner.evaluated(evaluation)
        rate = evaluation.rate
        metrics = {"solve_rate": rate.estimate, "low": rate.low, "high": rate.high, "rollouts": evaluation.total}
        self._log(evaluation.step, {"held_out": metrics})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._do(lambda: self._trackers.log(step, values))

    def _do(self, work: Callable[[], Any]) -> None:
        if self._open:
            self._thread.submit(work).add_done_callback(self._note)

    def _note(self, done: Future[Any]) -> None:
        if (error := done.exception()) is not None and self._open:
            self._open = False
            _log.warning("the trackers are told no more, for one failed: %s", error)
