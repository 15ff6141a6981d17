"""Reads directories of runs, loops and trainers into the figures of a report."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from understudy.errors import ConfigError, StoreError
from understudy.report.figures import MAX_HEADLINE, Point, ReportFigures, SolveCounts, TrainingStep, rate
from understudy.report.runs import (
    RunFigures,
    agent_rows,
    boundary_rows,
    headline,
    read_run_figures,
    task_rows,
    unsolved_reasons,
    version_rows,
)
from understudy.store.address import StoreLocation, StoreUrl, location_name
from understudy.train.loop.state import Evaluation, LoopConfig, LoopDirectory, LoopState, StepState, WaveLocation
from understudy.train.loop.state import read_json as read_state
from understudy.train.metrics import FILE
from understudy.train.weights import TRAINING
from understudy.util.statistics import wilson

_TINY, _HUGE = 1e-90, 1e90
"""Numbers out of these are no measurements, and no axis can be drawn for them."""

_COUNTS = frozenset({"tokens", "groups", "rollouts", "sequences", "collected", "solved", "reward", "reward_mean"})
"""Numbers that are meaningful even if a step changed nothing; its other numbers are not measurements."""


class _MetricsLine(Struct):
    step: Annotated[int, Meta(ge=0, lt=1 << 53)]
    version: str | None = None
    updated: bool = True
    skipped: dict[str, Any] = field(default_factory=dict[str, Any])


def metrics_file(directory: Path) -> Path | None:
    """Return the metrics file in a directory that a trainer wrote; None if there is none."""
    return next((file for file in (directory / FILE, directory / TRAINING / FILE) if file.is_file()), None)


def read_steps(file: Path) -> tuple[tuple[TrainingStep, ...], tuple[str, ...]]:
    """Return the steps in order, and notes about them.

    If a step occurs twice, as after a crash, the later line counts. A last line without its end is still being
    written and is ignored. Numbers that are not finite, or could not be drawn, are left out. Raises ConfigError
    when the file cannot be read.
    """
    try:
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return (), ()
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}; check its permissions, or give another directory"
        ) from error
    steps: dict[int, TrainingStep] = {}
    idle: set[int] = set()
    lost = 0
    for line in filter(None, lines[:-1]):
        try:
            row: Any = json.loads(line)  # json accepts NaN, unlike msgspec
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
        steps_text = ", ".join(map(str, sorted(idle)[:10])) + (", …" if len(idle) > 10 else "")
        notes.append(f"nothing was learned in {len(idle)} of {len(steps)} steps: {steps_text}")
    return tuple(steps[step] for step in sorted(steps)), tuple(notes)


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _TINY < abs(value) < _HUGE


_CURVES = (
    "model", "backend", "steps", "groups", "samples", "eval_samples", "eval_every", "asynchronous",
    "max_staleness", "min_groups", "seed", "sandbox", "keep",
)  # fmt: skip
"""Fields of a loop's configuration that are shown, besides all plain values of its two settings."""


def is_loop(directory: StoreLocation) -> bool:
    """Return whether a directory belongs to a loop, which may not have begun. A database never does.

    Every loop has a loop.json. Other programs call their files state.json too, such as data sets in a directory
    of a run.
    """
    return isinstance(directory, Path) and (directory / "loop.json").is_file()


def _of_loop(root: Path) -> ReportFigures:
    """Return the figures of a loop. Raises StoreError if its state cannot be read.

    For steps and evaluations whose store was removed, the counts are those in the loop's state.
    """
    directory = LoopDirectory(root)
    config = read_state(root / "loop.json", LoopConfig)
    state = directory.load() or LoopState(version="", weights="")
    notes: list[str] = []
    evaluated = [_evaluation(directory, state, evaluation, notes) for evaluation in state.evaluations]
    collected = [figures for step in state.steps if (figures := _step(directory, state, step, notes)) is not None]
    steps = [figures for figures in collected if isinstance(figures, RunFigures)]
    points = tuple(figures.point if isinstance(figures, RunFigures) else figures for figures in collected)
    training, training_notes = read_steps(root / FILE)
    notes += training_notes
    for path in sorted((root / "evaluations").glob("step-*")):
        if path not in {directory.evaluation(evaluation.step) for evaluation in state.evaluations}:
            notes += _unfinished(directory.wave(state, directory.relative(path)), f"the evaluation {path.name}")
    if not evaluated:
        notes.append("no evaluation has ended yet: nothing can be said of held-out tasks")
    elif config is not None and state.done < config.steps:
        notes.append(f"{state.done} of {config.steps} steps are over: the loop goes on, or was stopped")
    if state.refused:
        notes.append(f"{len(state.refused)} tasks were refused: {', '.join(list(state.refused)[:5])}")
    return ReportFigures(
        title=root.resolve().name,
        kind="loop",
        directory=str(root),
        made_at=time.time(),
        about=_about(config) if config else {},
        points=tuple(evaluation.point for evaluation in evaluated),
        collected=points,
        headline=headline(evaluated[0], evaluated[-1]) if len(evaluated) > 1 else None,
        training=training,
        tasks=task_rows(evaluated) if evaluated else (),
        boundaries=boundary_rows([*evaluated, *steps]),
        unsolved=unsolved_reasons(evaluated[-1:]),
        versions=version_rows([*evaluated, *steps]),
        notes=(*notes, *_single_notes([*(evaluation.point for evaluation in evaluated), *points])),
    )


def _evaluation(
    directory: LoopDirectory, state: LoopState, evaluation: Evaluation, notes: list[str]
) -> RunFigures:
    """Return the figures of an evaluation: from its store, or from the loop's state if the store was removed. If
    the two differ, a note is added.
    """
    label, name = f"step {evaluation.step}", f"the evaluation of step {evaluation.step}"
    path = directory.wave(state, evaluation.run)
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


def _step(
    directory: LoopDirectory, loop: LoopState, state: StepState, notes: list[str]
) -> RunFigures | Point | None:
    """Return the figures of a step's rollouts: from their store, or from the loop's state if the store was
    removed.

    None while the rollouts are being collected.
    """
    label, name = f"step {state.step}", f"step {state.step}"
    path = directory.wave(loop, state.run)
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


def _read(
    path: WaveLocation, label: str, step: int, version: str, name: str, notes: list[str]
) -> RunFigures | None:
    try:
        figures = read_run_figures(path.store, label, wave=path.wave, step=step, version=version)
    except StoreError as error:
        notes.append(f"{name}: shown is what the loop's state says, for its store cannot be read: {error}")
        return None
    notes += figures.notes
    return figures


def _unfinished(path: WaveLocation, name: str) -> list[str]:
    """Return a note on a step or evaluation that has begun and is not in the figures; nothing if its store does
    not exist.
    """
    if isinstance(path.store, Path) and not (path.store / "store.db").is_file():
        return []
    try:
        point = read_run_figures(path.store, name, wave=path.wave).point
    except StoreError as error:
        return [f"{name}: {error}"]
    return [
        f"{name} is not shown: {point.graded} rollouts are graded, {point.solved} solved, {point.pending} pending"
    ]


def _about(config: LoopConfig) -> dict[str, str]:
    plain: dict[str, Any] = msgspec.to_builtins(config)
    about = {name.replace("_", " "): plain[name] for name in _CURVES}
    about |= {"training tasks": len(config.tasks), "held-out tasks": len(config.eval_tasks)}
    for settings_part in (config.rollout_settings, config.trainer):
        about |= {name.replace("_", " "): value for name, value in _flat(settings_part).items()}
    return {name: str(value) for name, value in about.items() if value not in (None, "")}


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Return the plain values of an object and of the objects in it. If a key occurs more than once, the last
    value counts.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= _flat(value)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(value, str | int | float):
            result[name] = value
    return result


def run_locations(locations: Sequence[StoreLocation]) -> list[StoreLocation]:
    """Return the locations; a directory that only contains runs, such as those of several agents, is replaced by
    these runs.
    """
    expanded: list[StoreLocation] = []
    for directory in locations:
        if isinstance(directory, StoreUrl):
            expanded.append(directory)
            continue
        runs = sorted(path.parent for path in directory.glob("*/store.db"))
        is_report_source = (
            is_loop(directory) or (directory / "store.db").is_file() or metrics_file(directory) is not None
        )
        expanded += [directory] if is_report_source or not runs else runs
    return expanded


def read_figures(directories: Sequence[StoreLocation], labels: Sequence[str] = ()) -> ReportFigures:
    """Return the figures of a run, of a loop, or of several runs in the given order.

    A run may also be in a database. A directory with nothing but a trainer's metrics gives the figures of these.
    `labels` are names of the runs; by default, they are named after their directories. Raises ConfigError for
    directories that are none of these, and StoreError for a store that cannot be read.
    """
    if labels and len(labels) != len(directories):
        raise ConfigError(f"--label: {len(labels)} labels for {len(directories)} runs; give one for each, or none")
    first = directories[0]
    if len(directories) > 1:
        for directory in directories:
            if is_loop(directory):
                raise ConfigError(
                    f"{directory} is a loop, and a loop cannot be compared with other runs; give it alone, or the "
                    f"directories of its evaluations, which are in {directory}/evaluations"
                )
        return _of_runs(directories, labels or _names(directories))
    if isinstance(first, StoreUrl) or (not is_loop(first) and (first / "store.db").is_file()):
        return _of_runs(directories, labels or _names(directories))
    if labels:
        raise ConfigError(f"--label: {first} is not a run, and only runs have labels; remove it")
    if is_loop(first):
        return _of_loop(first)
    if (metrics := metrics_file(first)) is not None:
        return _of_trainer(first, metrics)
    if not first.exists():
        raise ConfigError(
            f"there is no directory {first}; give one that `understudy run` or `understudy train` wrote, or the "
            "URL of a database"
        )
    raise ConfigError(
        f"{first} has no run (store.db), no loop (loop.json) and no metrics (metrics.jsonl); give a "
        "directory that `understudy run` or `understudy train` wrote"
    )


def _of_runs(directories: Sequence[StoreLocation], names: Sequence[str]) -> ReportFigures:
    runs = [read_run_figures(directory, name) for directory, name in zip(directories, names, strict=True)]
    several = len(runs) > 1
    notes = tuple(note for run in runs for note in run.notes)
    agents = agent_rows(runs)
    many = len(agents) > MAX_HEADLINE
    return ReportFigures(
        title=", ".join(names) if many else f"{names[0]} → {names[-1]}" if several else names[0],
        kind="runs" if several else "run",
        directory=str(directories[-1]),
        made_at=time.time(),
        about=_common_settings(runs) if many else runs[-1].about,
        points=tuple(run.point for run in runs),
        headline=headline(runs[0], runs[-1]) if several and not many else None,
        tasks=task_rows(runs),
        boundaries=boundary_rows(runs),
        unsolved=unsolved_reasons(runs if many else runs[-1:]),
        versions=version_rows(runs),
        agents=agents,
        notes=notes + _single_notes([run.point for run in runs]),
    )


def _common_settings(runs: Sequence[RunFigures]) -> dict[str, str]:
    """Return the settings that all runs have."""
    first_settings, *other_settings = (run.about for run in runs)
    return {
        name: value
        for name, value in first_settings.items()
        if all(about.get(name) == value for about in other_settings)
    }


def _of_trainer(directory: Path, metrics: Path) -> ReportFigures:
    training, notes = read_steps(metrics)
    return ReportFigures(
        title=directory.resolve().name,
        kind="training",
        directory=str(directory),
        made_at=time.time(),
        about={},
        training=training,
        notes=notes,
    )


def _single_notes(points: Sequence[Point]) -> tuple[str, ...]:
    """Return a note on points with only one graded rollout, whose means have no interval."""
    single = [point.label for point in points if point.graded == 1 and point.turns is not None]
    if not single:
        return ()
    labels = ", ".join(single[:5]) + (", …" if len(single) > 5 else "")
    return (f"only one rollout is graded in {labels}: its turns, tokens and time have no confidence interval",)


def _names(locations: Sequence[StoreLocation]) -> list[str]:
    """Return the names of directories and databases, with their parent's name if two have the same."""
    names = [location_name(location) for location in locations]
    if len(set(names)) == len(names):
        return names
    return [
        str(location)
        if isinstance(location, StoreUrl)
        else f"{location.resolve().parent.name}/{location.resolve().name}"
        for location in locations
    ]
