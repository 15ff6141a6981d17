"""What a step collects, and what comes of it: the tasks of its wave, and the groups of those that have ended."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from understudy.run.collector import TaskFigures
from understudy.store import Store
from understudy.train.curriculum import choose
from understudy.train.data import NO_VERDICT, of_store
from understudy.train.sequences import Group
from understudy.train.state import GroupRef, LoopConfig, LoopDirectory, LoopState, StepState, number_of


def begun(
    config: LoopConfig, directory: LoopDirectory, state: LoopState, number: int, tasks: Iterable[str]
) -> StepState:
    """A new step with the tasks of its wave."""
    usable = [task for task in tasks if task not in state.refused]
    busy = {ref.task for ref in state.pending()}
    # A task whose group is carried over is not begun a second time, where there are others.
    free = [task for task in usable if task not in busy]
    chosen = choose(
        free if len(free) >= config.groups else usable,
        state.rates,
        config.groups,
        seed=config.seed,
        step=number,
    )
    return StepState(
        step=number,
        phase="collecting",
        run=directory.relative(directory.run(number)),
        sampled_by=state.version,
        tasks=tuple(chosen),
    )


def groups_of(
    directory: LoopDirectory, state: LoopState, ready: Mapping[GroupRef, TaskFigures], runs: Mapping[int, str]
) -> tuple[dict[GroupRef, Group], Counter[str], dict[GroupRef, int]]:
    """The groups that have ended, what of them was left out by why, and the oldest version in each.

    `runs` are the ids of the waves' runs. Raises StoreError.
    """
    found: dict[GroupRef, Group] = {}
    left_out = Counter[str]()
    ages: dict[GroupRef, int] = {}
    for number in sorted({ref.wave for ref in ready}):
        step = state.step(number)
        assert step is not None
        wanted = {ref.task for ref in ready if ref.wave == number}
        with Store.open(directory.run(number), create=False) as store:
            for group in of_store(store, run=runs[number], left_out=left_out, tasks=wanted):
                ref = GroupRef(number, group.task_id)
                found[ref] = group
                ages[ref] = _oldest(group, number_of(step.sampled_by) or 0)
    del left_out[NO_VERDICT]  # those of groups that go on are among them; ours are counted by their group
    return found, left_out, ages


def seed_of(seed: int, *what: object) -> int:
    """A seed for one part of a loop, below 2**31."""
    words = " ".join(map(str, (seed, *what)))
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:4]) >> 1


def _oldest(group: Group, otherwise: int) -> int:
    """The oldest version that a token of the group was sampled from; `otherwise` where none is told."""
    told = (
        number_of(version)
        for rollout in group.rollouts
        for sequence in rollout.sequences
        for version in sequence.policy_versions
    )
    return min((number for number in told if number is not None), default=otherwise)
