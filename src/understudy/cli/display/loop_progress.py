"""Live progress of a loop on stderr: a line for each step and evaluation, and below them where it stands."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from understudy.cli.display.live import LiveStatus
from understudy.train.loop.loop import Loop, Watcher

if TYPE_CHECKING:
    from understudy.train.loop.state import Evaluation, StepState


class LoopDisplay(Watcher, LiveStatus):
    """What a loop tells, as lines of text; thread-safe to read."""

    plain_s = 15.0

    def __init__(self) -> None:
        super().__init__()
        self._loop: Loop | None = None
        self._stage = "starting"
        self._new_lines: list[str] = []
        self._lock = threading.Lock()

    def stage(self, text: str) -> None:
        """Show a stage before the loop begins."""
        self._stage = text
        self.changed.set()

    def began(self, loop: Loop) -> None:
        """See Watcher."""
        self._loop = loop
        if loop.state.steps:
            self._add_line(f"going on after step {loop.state.done} with {loop.state.version}")

    def stepped(self, step: StepState) -> None:
        """See Watcher."""
        report, parts = step.report, [f"step {step.step}: {step.solved}/{step.collected} solved"]
        if step.weights is not None:
            parts.append(f"{step.version}, loss {report.get('loss', 0):.4f}")
            parts.append(f"mismatch {report.get('mismatch_mean', 0):.1e}")
        elif step.held:
            parts.append(f"no update: it waits for more groups, {len(step.held)} so far")
        else:
            parts.append("no update: nothing to learn from")
        if step.staleness:
            parts.append(f"up to {step.staleness} versions old")
        if step.cut:
            parts.append(f"{step.cut} calls went on through the change of weights")
        parts += [f"{count} {why}" for why, count in step.skipped.items()]
        parts.append(" + ".join(f"{name} {took:.0f} s" for name, took in step.seconds.items()))
        self._add_line(" · ".join(parts))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Watcher."""
        rate = evaluation.rate
        self._add_line(
            f"held out after step {evaluation.step}: {evaluation.solved}/{evaluation.total} solved, "
            f"{rate.estimate:.3f} ({rate.low:.3f} to {rate.high:.3f})"
            + (f" · {evaluation.failed} failed" if evaluation.failed else "")
        )

    def line(self) -> str:
        """See Drawn."""
        return self._stage if self._loop is None else self._loop.line()

    def lines(self) -> list[str]:
        """See Drawn."""
        with self._lock:
            lines, self._new_lines = self._new_lines, []
        return lines

    def _add_line(self, text: str) -> None:
        with self._lock:
            self._new_lines.append(text)
        self.changed.set()
