"""Chooses the tasks of a step's wave (the rollouts that a step starts), and the groups that its update learns
from.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from statistics import fmean

from msgspec import Struct
from msgspec.structs import replace

from understudy.errors import TaskError
from understudy.store import Store
from understudy.store.outcomes import TaskCounts
from understudy.train.algorithms.batch import NO_SIGNAL, group_rewards, has_signal
from understudy.train.groups import NO_VERDICT, RolloutGroup, groups_from_store
from understudy.train.loop.state import (
    GroupRef,
    LoopConfig,
    LoopDirectory,
    LoopState,
    StepState,
    TaskSolveRate,
    step_number,
)
from understudy.train.options import read_options

STALE = "groups that are too old"
EMPTY = "groups of which nothing can be learned"


class GroupSelection(Struct, frozen=True, kw_only=True):
    """Which finished groups an update learns from.

    `used` go into the update; `dropped` are too old or unusable; `held` wait for the next step. `skipped` counts
    what was not used by reason. `newly_finished` are the used or held groups that no earlier step has held, and
    `reward` is their mean reward. `groups` has the data of the used ones, one group for each agent that worked on
    the task; `staleness` is how many versions the oldest of them is behind.
    """

    used: tuple[GroupRef, ...]
    dropped: tuple[GroupRef, ...]
    held: tuple[GroupRef, ...] = ()
    groups: dict[GroupRef, list[RolloutGroup]]
    newly_finished: tuple[GroupRef, ...]
    reward: float
    staleness: int
    skipped: dict[str, int]


def start_step(
    config: LoopConfig, directory: LoopDirectory, state: LoopState, number: int, tasks: Iterable[str]
) -> StepState:
    """Return a new step with the tasks of its wave: the step's number of groups, minus those carried over.

    Without subtracting them, unused groups would pile up over the steps and become too old. Raises TaskError when
    validation refused all tasks.
    """
    available = usable_tasks(tasks, state.refused)
    carried = state.pending()
    carried_tasks = {ref.task for ref in carried}
    count = max(1, config.groups - len(carried))
    # Tasks with a carried-over group are not started a second time while there are enough others.
    fresh_tasks = [task for task in available if task not in carried_tasks]
    drawn = draw_tasks(
        fresh_tasks if len(fresh_tasks) >= count else available, state.rates, count, seed=config.seed, step=number
    )
    return StepState(
        step=number,
        phase="collecting",
        run=directory.relative(directory.run(number)),
        sampled_by=state.version,
        tasks=tuple(drawn),
    )


def usable_tasks(tasks: Iterable[str], refused: Mapping[str, str]) -> list[str]:
    """Return the tasks that validation did not refuse. Raises TaskError, with reasons, when it refused all."""
    usable = [task for task in tasks if task not in refused]
    if not usable:
        reasons = format_refused(refused)
        raise TaskError(
            "none of the --tasks passed validation, so there is nothing to learn from; correct them (`understudy "
            f"tasks check` validates them again) or give others, with another --output-dir:\n{reasons}"
        )
    return usable


def format_refused(refused: Mapping[str, str]) -> str:
    """Return the first five refused tasks with their reasons, one per line."""
    return "\n".join(f"  {task}: {reason}" for task, reason in list(refused.items())[:5])


def select_fresh_groups(
    directory: LoopDirectory,
    state: LoopState,
    ready: Mapping[GroupRef, TaskCounts],
    runs: Mapping[int, str],
    *,
    max_staleness: int,
) -> GroupSelection:
    """Return which of the finished groups in `ready` an update can learn from. `runs` are the run ids of the
    waves.

    Groups that are more than `max_staleness` versions old, or have no usable sequence, are dropped. Raises
    StoreError.
    """
    skipped = Counter[str]()
    groups: dict[GroupRef, list[RolloutGroup]] = {}
    for number in sorted({ref.wave for ref in ready}):
        tasks = {ref.task for ref in ready if ref.wave == number}
        step = state.step(number)
        assert step is not None
        with Store.open(directory.wave(state, step.run).store, create=False, waits=True) as store:
            for group in groups_from_store(store, run=runs[number], left_out=skipped, tasks=tasks):
                groups.setdefault(GroupRef(number, group.task_id), []).append(group)
    # The store also counts rollouts of groups that are not finished; only those of `ready` belong to this step.
    skipped[NO_VERDICT] = sum(figures.failed for figures in ready.values())
    used: list[GroupRef] = []
    staleness = 0
    for ref in sorted(ready):
        if ref not in groups:
            skipped[EMPTY] += 1
        elif (age := max(group_age(group, ref, state) for group in groups[ref])) > max_staleness:
            skipped[STALE] += 1
        else:
            used.append(ref)
            staleness = max(staleness, age)
    counted_before = {ref for step in state.steps for ref in step.held}
    newly_finished = tuple(ref for ref in used if ref not in counted_before)
    rewards = [rollout.reward for ref in newly_finished for group in groups[ref] for rollout in group.rollouts]
    return GroupSelection(
        used=tuple(used),
        dropped=tuple(ref for ref in sorted(ready) if ref not in used),
        groups={ref: groups[ref] for ref in used},
        newly_finished=newly_finished,
        reward=fmean(rewards) if rewards else 0.0,
        staleness=staleness,
        skipped={why: count for why, count in sorted(skipped.items()) if count},
    )


def select_for_update(
    config: LoopConfig,
    directory: LoopDirectory,
    state: LoopState,
    ready: Mapping[GroupRef, TaskCounts],
    runs: Mapping[int, str],
    *,
    last: bool,
) -> GroupSelection:
    """Return the selection of `select_fresh_groups`, with dynamic sampling (DAPO, arXiv 2503.14476).

    If fewer than `min_groups` groups have rewards that differ, and the step is not the `last`, these groups are
    held for the next step and nothing is learned yet.
    """
    selection = select_fresh_groups(directory, state, ready, runs, max_staleness=config.max_staleness)
    options = read_options(config.trainer)
    held = tuple(
        ref
        for ref, groups in selection.groups.items()
        if any(has_signal(group_rewards(group, options)) for group in groups)
    )
    if last or len(held) >= config.min_groups:
        return selection
    without_signal = {ref: figures for ref, figures in ready.items() if ref not in held}
    usable = select_fresh_groups(directory, state, without_signal, runs, max_staleness=config.max_staleness)
    equal = {NO_SIGNAL: len(usable.used)} if usable.used else {}
    return replace(
        selection,
        used=usable.used,
        held=held,
        groups={},
        staleness=0,
        skipped=dict(sorted((usable.skipped | equal).items())),
    )


def derive_seed(seed: int, *what: object) -> int:
    """Return a seed below 2**31 for the part of a loop that `what` names; the same arguments give the
    same seed.
    """
    text = " ".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def group_age(group: RolloutGroup, ref: GroupRef, state: LoopState) -> int:
    """Return how many published versions the oldest token of a group is behind.

    A call with an unknown version, or with more than one, counts as old as its wave.
    """
    step = state.step(ref.wave)
    assert step is not None
    versions = {
        version
        for rollout in group.rollouts
        for sequence in rollout.sequences
        for version in sequence.policy_versions or (None,)
    }
    numbers = [number for number in map(step_number, versions) if number is not None]
    if len(numbers) < len(versions):
        numbers.append(step_number(step.sampled_by) or 0)
    return state.behind(min(numbers, default=0))


MIN_WEIGHT = 0.1
"""The least weight of a task, where one that is solved half of the time has 1."""


def draw_tasks(
    tasks: Iterable[str], rates: Mapping[str, TaskSolveRate], count: int, *, seed: int, step: int
) -> list[str]:
    """Return `count` of the tasks (all if there are fewer) for one step; deterministic in its arguments.

    Drawn without replacement with weights 4 p (1 - p), at least MIN_WEIGHT, where p is the expected solve rate:
    tasks that are solved half the time teach the most. Weighted sampling by Efraimidis and Spirakis: the greatest
    u^(1/w) are taken.
    """
    draw = random.Random(f"curriculum {seed} {step}")
    keys: list[tuple[float, str]] = []
    for task in sorted(set(tasks)):
        rate = rates.get(task, TaskSolveRate()).expected
        weight = max(MIN_WEIGHT, 4.0 * rate * (1.0 - rate))
        keys.append((draw.random() ** (1.0 / weight), task))
    keys.sort(reverse=True)
    return [task for _, task in keys[:count]]
