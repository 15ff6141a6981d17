"""Kills from outside at random moments of grading: never a reward that the patch has not, never a lost verdict.

UNDERSTUDY_TEST_KILLS says how many; `make soak` makes a hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from attacks.test_sealed import CHECKS, GOLD, TREE
from understudy.errors import GraderError, SandboxError
from understudy.grade.verdict import grade
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Files, Task

from support.grading import diff

pytestmark = pytest.mark.services

KILLS = int(os.environ.get("UNDERSTUDY_TEST_KILLS", "8"))
PATCHES = {1.0: diff(GOLD, TREE), 0.0: diff({"core.py": "def shift(x):\n    return x\n"}, TREE)}


def descendants(others: Collection[int] = ()) -> list[int]:
    """All processes below this one, apart from others and what is below those."""
    below = [os.getpid()]
    for pid in below:
        with contextlib.suppress(OSError):
            for thread in Path(f"/proc/{pid}/task").iterdir():
                children = map(int, (thread / "children").read_text().split())
                below += [child for child in children if child not in others]
    return below[1:]


def kill_one(source: random.Random, others: Collection[int]) -> str:
    """Kill one process of a sandbox, chosen at random; its name, "" when there was none."""
    pids = descendants(others)
    while pids:
        pid = pids.pop(source.randrange(len(pids)))
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            os.kill(pid, signal.SIGKILL)
            return name
    return ""


@pytest.mark.parametrize("kind", ["record", "suite", "script"])
async def test_a_kill_changes_no_verdict(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path, kind: str
) -> None:
    source = random.Random(kind)
    task = Task("core", "example/core", "mend it", Files(TREE), CHECKS[kind], PATCHES[1.0])
    prepared = prepare(task, tmp_path, sandboxes)
    others = descendants()  # servers of other tests in this process
    graded = 0
    for number in range(-(-KILLS // 3)):
        expected = float(number % 2 == 0)
        grading = asyncio.create_task(
            grade(prepared, PATCHES[expected].encode(), sandboxes=sandboxes, environment=environment)
        )
        await asyncio.sleep(source.uniform(0.0, 2.0))
        killed = kill_one(source, others)
        try:
            verdict = await grading
        except (SandboxError, GraderError):
            continue  # an infrastructure failure, which is tried again
        graded += 1
        assert verdict.reward == expected, (number, killed, verdict.reason)
    assert graded
