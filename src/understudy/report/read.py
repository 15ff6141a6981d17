"""Directories in, figures out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from understudy.errors import ConfigError
from understudy.report.figures import Point, ReportFigures
from understudy.report.loops import is_loop, read_loop
from understudy.report.metrics import metrics_file, read_steps
from understudy.report.runs import (
    boundary_rows,
    headline,
    read_run_figures,
    task_rows,
    unsolved_reasons,
    version_rows,
)


def read(directories: Sequence[Path], labels: Sequence[str] = ()) -> ReportFigures:
    """The figures of a run, of a loop, or of several runs beside each other, in the order given.

    A directory that has nothing but a trainer's metrics gives those. `labels` are names of the runs, else they
    are called as their directories. Raises ConfigError for directories that are none of these, StoreError for a
    store that cannot be read.
    """
    if labels and len(labels) != len(directories):
        raise ConfigError(f"--label: {len(labels)} labels for {len(directories)} runs; give one for each, or none")
    first = directories[0]
    if len(directories) > 1:
        for directory in directories:
            if is_loop(directory):
                raise ConfigError(
                    f"{directory} is a loop, which is reported alone; give its evaluations' directories"
                )
        return _of_runs(directories, labels or _names(directories))
    if not is_loop(first) and (first / "store.db").is_file():
        return _of_runs(directories, labels or _names(directories))
    if labels:
        raise ConfigError(f"--label: {first} is not a run, and only runs have labels; remove it")
    if is_loop(first):
        return _of_loop(first)
    if (metrics := metrics_file(first)) is not None:
        return _of_trainer(first, metrics)
    raise ConfigError(
        f"{first} holds neither a run (store.db) nor a loop (state.json) nor metrics (metrics.jsonl); give a "
        "directory that `understudy run` or `understudy train` wrote"
    )


def _of_runs(directories: Sequence[Path], names: Sequence[str]) -> ReportFigures:
    runs = [read_run_figures(directory, name) for directory, name in zip(directories, names, strict=True)]
    several = len(runs) > 1
    notes = tuple(note for one in runs for note in one.notes)
    return ReportFigures(
        title=f"{names[0]} → {names[-1]}" if several else names[0],
        kind="runs" if several else "run",
        directory=str(directories[-1]),
        made_at=time.time(),
        about=runs[-1].about,
        points=tuple(one.point for one in runs),
        headline=headline(runs[0], runs[-1]) if several else None,
        tasks=task_rows(runs),
        boundaries=boundary_rows(runs),
        unsolved=unsolved_reasons(runs[-1:]),
        versions=version_rows(runs),
        notes=notes + _single_notes([one.point for one in runs]),
    )


def _of_loop(directory: Path) -> ReportFigures:
    loop = read_loop(directory)
    evaluated = loop.evaluations
    everything = [*evaluated, *loop.steps]
    return ReportFigures(
        title=directory.resolve().name,
        kind="loop",
        directory=str(directory),
        made_at=time.time(),
        about=loop.about,
        points=tuple(one.point for one in evaluated),
        collected=loop.points,
        headline=headline(evaluated[0], evaluated[-1]) if len(evaluated) > 1 else None,
        training=loop.training,
        tasks=task_rows(evaluated) if evaluated else (),
        boundaries=boundary_rows(everything),
        unsolved=unsolved_reasons(evaluated[-1:]),
        versions=version_rows(everything),
        notes=loop.notes + _single_notes([*(one.point for one in evaluated), *loop.points]),
    )


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
    """A note on points with one graded rollout, of which means have no interval."""
    single = [point.label for point in points if point.graded == 1 and point.turns is not None]
    if not single:
        return ()
    labels = ", ".join(single[:5]) + (", …" if len(single) > 5 else "")
    return (f"only one rollout is graded in {labels}: its turns, tokens and time have no confidence interval",)


def _names(directories: Sequence[Path]) -> list[str]:
    """The directories' own names, with those of their parents where two have the same."""
    whole = [directory.resolve() for directory in directories]
    names = [path.name for path in whole]
    return names if len(set(names)) == len(names) else [f"{path.parent.name}/{path.name}" for path in whole]
