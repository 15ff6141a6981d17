"""What a trainer told of its steps, out of its `metrics.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from understudy.errors import ConfigError
from understudy.report.figures import TrainingStep
from understudy.train.metrics import FILE
from understudy.train.weights import TRAINING

_TINY, _HUGE = 1e-90, 1e90
"""Numbers out of these are no measurements, and no axis can be drawn for them."""

_COUNTS = frozenset({"tokens", "groups", "rollouts", "sequences", "collected", "solved", "reward", "reward_mean"})
"""What is meant also where a step changed nothing; of such a step the other numbers are no measurements."""


class _MetricsLine(Struct):
    step: Annotated[int, Meta(ge=0, lt=1 << 53)]
    version: str | None = None
    updated: bool = True
    skipped: dict[str, Any] = field(default_factory=dict[str, Any])


def metrics_file(directory: Path) -> Path | None:
    """The metrics in a directory that a trainer wrote; None where there are none."""
    return next((file for file in (directory / FILE, directory / TRAINING / FILE) if file.is_file()), None)


def read_steps(file: Path) -> tuple[tuple[TrainingStep, ...], tuple[str, ...]]:
    """The steps in order, and what there is to know of them.

    Where a step is told twice, as after a crash, the later line counts. A last line that is not ended is still
    being written and counts for nothing. Numbers that are not finite, or could not be drawn, are left out.
    Raises ConfigError when the file cannot be read.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; make it readable, or give another directory"
        ) from error
    steps: dict[int, TrainingStep] = {}
    idle: set[int] = set()
    lost = 0
    for line in filter(None, lines[:-1]):
        try:
            row: Any = json.loads(line)  # which takes NaN, unlike msgspec
            metrics = msgspec.convert(row, _MetricsLine)
        except (ValueError, RecursionError):
            lost += 1
            continue
        (idle.discard if metrics.updated else idle.add)(metrics.step)
        steps[metrics.step] = TrainingStep(
            step=metrics.step,
            version=metrics.version,
            values={
                name: float(value)
                for name, value in row.items()
                if name != "step" and _is_number(value) and (metrics.updated or name in _COUNTS)
            },
            skipped={name: float(value) for name, value in metrics.skipped.items() if _is_number(value)},
        )
    notes: list[str] = []
    if lost:
        notes.append(f"{file.name}: {lost} lines are no metrics of a step and were left out")
    if idle:
        shown = ", ".join(map(str, sorted(idle)[:10])) + (", …" if len(idle) > 10 else "")
        notes.append(f"nothing was learned in {len(idle)} of {len(steps)} steps: {shown}")
    return tuple(steps[step] for step in sorted(steps)), tuple(notes)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _TINY < abs(value) < _HUGE
