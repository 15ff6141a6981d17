"""A training loop's directory in figures: its state, its metrics, and the stores of what it collected."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import StoreError
from understudy.report.comparison import SolveCounts, rate
from understudy.report.figures import Point, TrainingStep
from understudy.report.metrics import read_steps
from understudy.report.runs import RunFigures, read_run_figures
from understudy.train.loop.state import Evaluation, LoopConfig, LoopDirectory, LoopState, StepState, read
from understudy.train.metrics import FILE
from understudy.util.statistics import wilson

_SHOWN = (
    "model", "backend", "steps", "groups", "samples", "eval_samples", "eval_every", "asynchronous",
    "max_staleness", "min_groups", "seed", "sandbox", "keep",
)  # fmt: skip
"""What of a loop's configuration is shown as it is; of its manner and its trainer, all plain values."""


class LoopFigures(Struct, frozen=True, kw_only=True):
    """What a loop's directory holds: the evaluations and the steps that have ended, and what there is to know.

    `points` of steps whose store is gone are in the state's own words; `steps` has what was read of the others.
    """

    about: dict[str, str]
    evaluations: tuple[RunFigures, ...]
    points: tuple[Point, ...]
    steps: tuple[RunFigures, ...]
    training: tuple[TrainingStep, ...]
    notes: tuple[str, ...]


def is_loop(directory: Path) -> bool:
    """Whether a directory is that of a loop, which may not have begun."""
    return (directory / "loop.json").exists() or (directory / "state.json").exists()


def read_loop(root: Path) -> LoopFigures:
    """What a loop did so far. Raises StoreError for a state that cannot be read."""
    directory = LoopDirectory(root)
    config = read(root / "loop.json", LoopConfig)
    state = directory.load() or LoopState(version="", weights="")
    notes: list[str] = []
    evaluations = [_evaluation(directory, each, notes) for each in state.evaluations]
    points: list[Point] = []
    steps: list[RunFigures] = []
    for step in state.steps:
        step_figures = _step(directory, step, notes)
        if isinstance(step_figures, RunFigures):
            steps.append(step_figures)
            points.append(step_figures.point)
        elif step_figures is not None:
            points.append(step_figures)
    training, training_notes = read_steps(root / FILE)
    notes += training_notes
    for path in sorted((root / "evaluations").glob("step-*")):
        if path not in {directory.evaluation(each.step) for each in state.evaluations}:
            notes += _unfinished(path, f"the evaluation {path.name}")
    if not evaluations:
        notes.append("no evaluation has ended yet: nothing can be said of held-out tasks")
    elif config is not None and state.done < config.steps:
        notes.append(f"{state.done} of {config.steps} steps are over: the loop goes on, or was stopped")
    if state.refused:
        notes.append(f"{len(state.refused)} tasks were refused: {', '.join(list(state.refused)[:5])}")
    return LoopFigures(
        about=_about(config) if config else {},
        evaluations=tuple(evaluations),
        points=tuple(points),
        steps=tuple(steps),
        training=training,
        notes=tuple(notes),
    )


def _evaluation(directory: LoopDirectory, evaluation: Evaluation, notes: list[str]) -> RunFigures:
    """What the store of an evaluation says, or where that is gone the state; notes tell where they differ."""
    label, name = f"step {evaluation.step}", f"the evaluation of step {evaluation.step}"
    path = directory.absolute(evaluation.run)
    figures = _read(path, label, evaluation.step, evaluation.version, name, notes)
    if figures is not None:
        if (evaluation.solved, evaluation.total) != (figures.point.solved, figures.point.graded):
            notes.append(
                f"{name}: the state says {evaluation.solved} of {evaluation.total} solved, the store "
                f"{figures.point.solved} of {figures.point.graded}; the store is what is shown"
            )
        return figures
    tasks = {task: SolveCounts(*counted) for task, counted in evaluation.tasks.items()}
    point = Point(
        label=label,
        step=evaluation.step,
        version=evaluation.version,
        directory=str(path),
        solved=evaluation.solved,
        unsolved=evaluation.total - evaluation.solved,
        failed=evaluation.failed,
        solve_rate=rate(list(tasks.values())) or (evaluation.rate if evaluation.total else None),
        from_store=False,
    )
    return RunFigures(
        point=point, about={}, tasks=tasks, strict=tasks, turns={}, faults=[], unsolved=Counter(), versions=[]
    )


def _step(directory: LoopDirectory, state: StepState, notes: list[str]) -> RunFigures | Point | None:
    """What the store of a step's wave says, or where that is gone the state; None while it is collected."""
    label, name = f"step {state.step}", f"step {state.step}"
    path = directory.absolute(state.run)
    if state.phase == "collecting":
        notes += _unfinished(path, f"{name}, which is being collected")
        return None
    figures = _read(path, label, state.step, state.sampled_by, name, notes)
    if figures is not None:
        return figures
    return Point(
        label=label,
        step=state.step,
        version=state.sampled_by,
        directory=str(path),
        solved=state.solved,
        unsolved=state.collected - state.solved,
        solve_rate=wilson(state.solved, state.collected) if state.collected else None,
        from_store=False,
    )


def _read(path: Path, label: str, step: int, version: str, name: str, notes: list[str]) -> RunFigures | None:
    try:
        figures = read_run_figures(path, label, step=step, version=version)
    except StoreError as error:
        notes.append(f"{name}: shown is what the loop's state says, for its store cannot be read: {error}")
        return None
    notes += figures.notes
    return figures


def _unfinished(path: Path, name: str) -> list[str]:
    """A line for what has begun and is not in the figures."""
    if not (path / "store.db").is_file():
        return []
    try:
        point = read_run_figures(path, name).point
    except StoreError as error:
        return [f"{name}: {error}"]
    return [
        f"{name} is not shown: {point.graded} rollouts are graded, {point.solved} solved, {point.pending} pending"
    ]


def _about(config: LoopConfig) -> dict[str, str]:
    plain: dict[str, Any] = msgspec.to_builtins(config)
    about = {name.replace("_", " "): plain[name] for name in _SHOWN}
    about |= {"training tasks": len(config.tasks), "held-out tasks": len(config.eval_tasks)}
    for part in (config.manner, config.trainer):
        about |= {name.replace("_", " "): value for name, value in _flat(part).items()}
    return {name: str(value) for name, value in about.items() if value not in (None, "")}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """The plain values of an object, and those of the objects in it, by their last name."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= _flat(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str | int | float):
            result[name] = value
    return result
