"""Grading a run anew: gradings of one task take turns, and those of different tasks run meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.grade.grading_lock import grading_lock
from understudy.run import regrade
from understudy.store import Store
from understudy.types import Task, Verdict

from support.export import put_rollouts


async def regraded(
    directory: Path, grade: regrade.GradePatch, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> Any:
    """What `regrade_run` says of a stored run, with a grader of ours."""

    async def finish() -> None: ...

    monkeypatch.setattr(regrade, "RunConfig", dict)  # the stored run has no whole one, and no files are asked for
    monkeypatch.setattr(regrade, "RolloutFiles", lambda *_, **__: SimpleNamespace(finish=finish))
    with Store.open(directory) as store:
        return await regrade.regrade_run(store, directory / "files", grade, concurrency=concurrency)


async def test_gradings_of_one_task_take_turns_while_those_of_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_rollouts(tmp_path, tasks=2, samples=3)
    both, running, graded = asyncio.Barrier(2), Counter[str](), Counter[str]()

    async def grade(task: Task, patch: bytes) -> Verdict:
        # Hidden tests of their own, so that the two tasks need not wait for each other.
        async with grading_lock(replace(task, checks=_checks(task)), tmp_path / "cache"):
            running[task.instance_id] += 1
            assert running[task.instance_id] == 1
            async with asyncio.timeout(30):
                await both.wait()  # until the other task is graded too: no slot may wait for its turn meanwhile
            graded[task.instance_id] += 1
            running[task.instance_id] -= 1
        return Verdict(reward=1.0, reason=patch.decode())

    summary = await regraded(tmp_path, grade, monkeypatch, 2)
    assert (summary.rollouts, summary.solved, summary.errors) == (6, 6, {})
    assert sorted(graded.values()) == [3, 3]
    assert sorted(summary.changed.values()) == [(0.0, 1.0)] * 4


def _checks(task: Task) -> Any:
    checks: Any = task.checks
    files = {name: f"{text}# {task.instance_id}\n" for name, text in checks.files.items()}
    return replace(checks, files=files)


async def test_patches_of_one_task_are_never_graded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_rollouts(tmp_path, tasks=1, samples=4)
    running = most = entered = 0
    all_entered = asyncio.Event()

    async def grade(task: Task, patch: bytes) -> Verdict:
        nonlocal running, most, entered
        entered += 1
        if entered == 4:
            all_entered.set()
        async with grading_lock(task, tmp_path / "cache"):
            running += 1
            most = max(most, running)
            async with asyncio.timeout(30):
                await all_entered.wait()  # the others are waiting for their turn now
            running -= 1
        return Verdict(reward=0.0, reason="x")

    summary = await regraded(tmp_path, grade, monkeypatch, 4)
    assert (summary.rollouts, summary.solved, most) == (4, 0, 1)
