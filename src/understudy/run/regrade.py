"""Grades a run's stored patches again with the current grader. Earlier verdicts are kept inside the new ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError, GraderError, SandboxError, TaskError
from understudy.run.config import RunConfig
from understudy.run.rollout_files import RolloutFiles
from understudy.run.store_reads import read_stored
from understudy.store import Store
from understudy.store.outcomes import GradedRollout
from understudy.types import Task, Verdict, is_solved

GradePatch = Callable[[Task, bytes], Awaitable[Verdict]]
"""Validates a task, and grades a patch of it. Raises TaskError, SandboxError and GraderError."""


class RegradeSummary(Struct, frozen=True):
    """The result of grading again.

    `changed` maps rollout ids to (reward before, reward now) where these differ. `errors` maps the ids of rollouts
    that could not be graded to the reason; their verdicts are unchanged.
    """

    rollouts: int
    solved: int = 0
    changed: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    errors: dict[str, str] = field(default_factory=dict[str, str])


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be created: {error.strerror}; choose another --output-dir"
        ) from error


def _alternating(decided: Sequence[GradedRollout]) -> list[GradedRollout]:
    """Return the rollouts with those of one task far apart, because their gradings wait for each other."""
    before: Counter[str] = Counter()
    turns: list[int] = []
    for graded in decided:
        turns.append(before[graded.rollout.task_id])
        before[graded.rollout.task_id] += 1
    return [decided[n] for n in sorted(range(len(decided)), key=turns.__getitem__)]


async def regrade_run(
    store: Store,
    directory: Path,
    grade: GradePatch,
    *,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RegradeSummary:
    """Grade the patch of each decided rollout in a store again, `concurrency` at a time, and rewrite its files.

    `grade` validates a task first, as in a run. `progress` gets how many are done, and the total. Raises
    StoreError, and ConfigError if files cannot be written.
    """
    await asyncio.to_thread(_make_directory, directory)
    decided = await read_stored(store.outcomes.decisions)
    summary = RegradeSummary(len(decided))
    slots = asyncio.Semaphore(concurrency)
    solved = done = 0

    async def regrade(graded: GradedRollout) -> None:
        nonlocal solved, done
        rollout, attempt = graded.rollout, graded.attempt
        reward = graded.verdict.reward
        async with slots:
            try:
                task = await read_stored(store.runs.task, rollout.run_id, rollout.task_id)
                patch = await read_stored(store.runs.patch, attempt.id)
                verdict = await grade(task, patch or b"")
            except (TaskError, SandboxError, GraderError) as error:
                summary.errors[rollout.id] = str(error).splitlines()[0]
            else:
                await asyncio.wrap_future(store.runs.replace_verdict(attempt.id, verdict))
                if verdict.reward != reward:
                    summary.changed[rollout.id] = (reward, verdict.reward)
                reward = verdict.reward
        solved += is_solved(reward)
        done += 1
        progress(done, len(decided))

    async with asyncio.TaskGroup() as group:
        for graded in _alternating(decided):
            group.create_task(regrade(graded))
    for run in await read_stored(store.runs.all):
        files = RolloutFiles(store, msgspec.convert(run.config, RunConfig), directory, rewrite=True)
        await files.finish()
    return msgspec.structs.replace(summary, solved=solved)
