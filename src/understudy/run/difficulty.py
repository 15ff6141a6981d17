"""How hard tasks are for a model, by the rollouts of runs, and which of them it can learn from.

A task that is always solved, or never, gives a group without differences: nothing is learned from it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.store import Store
from understudy.types import Task

NOT_GRADED = "no graded rollout"
NEVER_SOLVED = "never solved"
ALWAYS_SOLVED = "always solved"
TOO_HARD = "solve rate below the bounds"
TOO_EASY = "solve rate above the bounds"


class TriedTask(Struct, frozen=True):
    """A task with its ended rollouts: how many were `graded`, and how many of these solved it."""

    task: Task
    solved: int
    graded: int


class SolveRates(Struct, frozen=True):
    """Bounds of the share of graded rollouts that solved a task, both included."""

    low: float
    high: float


class TaskSelection(Struct, frozen=True):
    """The kept tasks in their order, and the reason of each one that was dropped."""

    kept: list[Task]
    dropped: dict[str, str]

    @property
    def counts(self) -> dict[str, int]:
        """Return how many tasks were dropped, by reason, most frequent first."""
        return dict(Counter(self.dropped.values()).most_common())


def parse_solve_rates(option: str, text: str) -> SolveRates:
    """Parse bounds such as 0.1..0.9. Raises ConfigError."""
    match = re.fullmatch(r"(\d*\.?\d+)\.\.(\d*\.?\d+)", text)
    if match is None or not float(match[1]) <= float(match[2]) <= 1:
        raise ConfigError(
            f"{option}: invalid bounds {text!r}; give LOW..HIGH, two numbers from 0 to 1, such as 0.1..0.9"
        )
    return SolveRates(float(match[1]), float(match[2]))


def tried_tasks(directories: Iterable[Path], run_id: str | None = None) -> list[TriedTask]:
    """Return the tasks of the runs in these output directories, with counts over all runs (only `run_id`, if
    given).

    Raises StoreError for a directory without a store, and TaskError when two runs have different tasks of the
    same id.
    """
    tried: dict[str, TriedTask] = {}
    for directory in directories:
        with Store.open(directory, create=False) as store:
            for run in store.runs.all():
                if run_id in (None, run.id):
                    _add(store, run.id, tried, directory)
    return list(tried.values())


def _add(store: Store, run_id: str, tried: dict[str, TriedTask], directory: Path) -> None:
    counts = store.outcomes.by_task(run_id)
    for name in dict.fromkeys(rollout.task_id for rollout in store.runs.rollouts(run_id)):
        task = store.runs.task(run_id, name)
        before = tried.get(name) or TriedTask(task, 0, 0)
        if before.task != task:
            raise TaskError(
                f"{directory}: its task {name} differs from the task of the same id in another of these runs, so "
                "solve rates cannot be added up; give only runs of the same task file"
            )
        ended = counts.get(name)
        solved, graded = (0, 0) if ended is None else (ended.solved, ended.graded)
        tried[name] = TriedTask(task, before.solved + solved, before.graded + graded)


def select(tried: Iterable[TriedTask], bounds: SolveRates | None = None) -> TaskSelection:
    """Choose the tasks within `bounds`, by default those that are neither always nor never solved."""
    tried = list(tried)
    reasons = {difficulty.task.instance_id: _reason(difficulty, bounds) for difficulty in tried}
    kept = [difficulty.task for difficulty in tried if reasons[difficulty.task.instance_id] is None]
    return TaskSelection(kept, {name: why for name, why in reasons.items() if why is not None})


def _reason(tried: TriedTask, bounds: SolveRates | None) -> str | None:
    """Return why a task is dropped, None if it is kept."""
    if tried.graded == 0:
        return NOT_GRADED
    rate = tried.solved / tried.graded
    if bounds is None:
        return NEVER_SOLVED if rate == 0 else ALWAYS_SOLVED if rate == 1 else None
    return TOO_HARD if rate < bounds.low else TOO_EASY if rate > bounds.high else None
