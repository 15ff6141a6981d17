"""A training loop's directory in figures: its state, its metrics, and the stores of what it collected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import StoreError
from understudy.report.comparison import TaskCounts, rate
from understudy.report.figures import Point, TrainingStep
from understudy.report.metrics import read_steps
from understudy.report.runs import Gathered, gather
from understudy.train.loop.state import Evaluation, LoopConfig, LoopDirectory, LoopState, StepState, read
from understudy.train.metrics import FILE
from understudy.util.statistics import wilson

_SHOWN = (
    "model", "backend", "steps", "groups", "samples", "eval_samples", "eval_every", "asynchronous",
    "max_staleness", "min_groups", "seed", "sandbox", "keep",
)  # fmt: skip
"""What of a loop's configuration is shown as it is; of its manner and its trainer, all plain values."""


class Loop(Struct, frozen=True, kw_only=True):
    """What a loop's directory holds: the evaluations and the steps that have ended, and what there is to know.

    `points` of steps whose store is gone are in the state's own words; `steps` has what was read of the others.
    """

    about: dict[str, str]
    evaluations: tuple[Gathered, ...]
    points: tuple[Point, ...]
    steps: tuple[Gathered, ...]
    training: tuple[TrainingStep, ...]
    notes: tuple[str, ...]


def is_loop(directory: Path) -> bool:
    """Whether a directory is that of a loop, which may not have begun."""
    return (directory / "loop.json").exists() or (directory / "state.json").exists()


def read_loop(root: Path) -> Loop:
    """What a loop did so far. Raises StoreError for a state that cannot be read."""
    directory = LoopDirectory(root)
    config = read(root / "loop.json", LoopConfig)
    state = directory.load() or LoopState(version="", weights="")
    notes: list[str] = []
    evaluations = [_evaluation(directory, each, notes) for each in state.evaluations]
    points: list[Point] = []
    steps: list[Gathered] = []
    for step in state.steps:
        found = _step(directory, step, notes)
        if isinstance(found, Gathered):
            steps.append(found)
            points.append(found.point)
        elif found is not None:
            points.append(found)
    training, told = read_steps(root / FILE)
    notes += told
    for path in sorted((root / "evaluations").glob("step-*")):
        if path not in {directory.evaluation(each.step) for each in state.evaluations}:
            notes += _unfinished(path, f"the evaluation {path.name}")
    if not evaluations:
        notes.append("no evaluation has ended yet: nothing can be said of held-out tasks")
    elif config is not None and state.done < config.steps:
        notes.append(f"{state.done} of {config.steps} steps are over: the loop goes on, or was stopped")
    if state.refused:
        notes.append(f"{len(state.refused)} tasks were refused: {', '.join(list(state.refused)[:5])}")
    return Loop(
        about=_about(config) if config else {},
        evaluations=tuple(evaluations),
        points=tuple(points),
        steps=tuple(steps),
        training=training,
        notes=tuple(notes),
    )


def _evaluation(directory: LoopDirectory, told: Evaluation, notes: list[str]) -> Gathered:
    """What the store of an evaluation says, or where that is gone the state; notes tell where they differ."""
    label, name = f"step {told.step}", f"the evaluation of step {told.step}"
    path = directory.absolute(told.run)
    found = _read(path, label, told.step, told.version, name, notes)
    if found is not None:
        if (told.solved, told.total) != (found.point.solved, found.point.graded):
            notes.append(
                f"{name}: the state says {told.solved} of {told.total} solved, the store {found.point.solved} of "
                f"{found.point.graded}; the store is what is shown"
            )
        return found
    tasks = {task: TaskCounts(*counted) for task, counted in told.tasks.items()}
    point = Point(
        label=label,
        step=told.step,
        version=told.version,
        directory=str(path),
        solved=told.solved,
        unsolved=told.total - told.solved,
        failed=told.failed,
        solve_rate=rate(list(tasks.values())) or (wilson(told.solved, told.total) if told.total else None),
        from_store=False,
    )
    return Gathered(
        point=point, about={}, tasks=tasks, strict=tasks, turns={}, faults=[], unsolved=Counter(), versions=[]
    )


def _step(directory: LoopDirectory, told: StepState, notes: list[str]) -> Gathered | Point | None:
    """What the store of a step's wave says, or where that is gone the state; None while it is collected."""
    label, name = f"step {told.step}", f"step {told.step}"
    path = directory.absolute(told.run)
    if told.phase == "collecting":
        notes += _unfinished(path, f"{name}, which is being collected")
        return None
    found = _read(path, label, told.step, told.sampled_by, name, notes)
    if found is not None:
        return found
    return Point(
        label=label,
        step=told.step,
        version=told.sampled_by,
        directory=str(path),
        solved=told.solved,
        unsolved=told.collected - told.solved,
        solve_rate=wilson(told.solved, told.collected) if told.collected else None,
        from_store=False,
    )


def _read(path: Path, label: str, step: int, version: str, name: str, notes: list[str]) -> Gathered | None:
    try:
        found = gather(path, label, step=step, version=version)
    except StoreError as error:
        notes.append(f"{name}: shown is what the loop's state says, for its store cannot be read: {error}")
        return None
    notes += found.notes
    return found


def _unfinished(path: Path, name: str) -> list[str]:
    """A line for what has begun and is not in the figures."""
    if not (path / "store.db").is_file():
        return []
    try:
        point = gather(path, name).point
    except StoreError as error:
        return [f"{name}: {error}"]
    return [
        f"{name} is not shown: {point.graded} rollouts are graded, {point.solved} solved, {point.pending} pending"
    ]


def _about(config: LoopConfig) -> dict[str, str]:
    plain: dict[str, Any] = msgspec.to_builtins(config)
    told = {name.replace("_", " "): plain[name] for name in _SHOWN}
    told |= {"training tasks": len(config.tasks), "held-out tasks": len(config.eval_tasks)}
    for part in (config.manner, config.trainer):
        told |= {name.replace("_", " "): value for name, value in _flat(part).items()}
    return {name: str(value) for name, value in told.items() if value not in (None, "")}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of an object, and those of the objects in it, by their last name."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            found |= _flat(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str | int | float):
            found[name] = value
    return found
