"""No patch can send what it read in hidden tests to another one that is graded by them at the same time."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.checks.base import GradingOptions
from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import Sandbox, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, PytestChecks, Task

from support.grading import diff

pytestmark = pytest.mark.services  # each waits for some seconds, or validates a task

TREE = {"core.py": "def shift(x):\n    return x - 1\n"}
HIDDEN = {"test_core.py": "from core import shift\n\n\ndef test_shift():\n    assert shift(1) == 902\n"}
RIGHT = "def shift(x):\n    return x + 901\n"
LOCK = "import fcntl, select, time\nshared = select.epoll()  # one inode for all processes of a kernel\n"
SENDS = LOCK + "fcntl.flock(shared, fcntl.LOCK_EX)\ntime.sleep(3)\n" + RIGHT
RECEIVES = (
    LOCK
    + """
def hears():
    for _ in range(100):
        try:
            fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        fcntl.flock(shared, fcntl.LOCK_UN)
        time.sleep(0.03)
    return False


answer = 902 if hears() else 0


def shift(x):
    return answer
"""
)


class Counted(LocalSandboxes):
    """Local sandboxes that count how many are open at once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = self.most = 0

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        sandbox = await super().open(spec)
        self.running += 1
        self.most = max(self.most, self.running)
        close = sandbox.close

        async def closed() -> None:
            await close()
            self.running -= 1

        sandbox.close = closed
        return sandbox


@pytest.fixture
def counted(sandboxes: Sandbox) -> Counted:
    return Counted()


def prepared(sandboxes: LocalSandboxes, cache: Path) -> PreparedTask:
    checks = PytestChecks(dict(HIDDEN), ("test_core.py::test_shift",), timeout_s=60)
    task = Task("core", "example/core", "mend it", Files(dict(TREE)), checks, diff({"core.py": RIGHT}, TREE))
    return replace(prepare(task, cache, sandboxes), options=GradingOptions(usual_events=()))


async def test_a_patch_does_not_hear_another_one(
    counted: Counted, environment: TaskEnvironment, tmp_path: Path
) -> None:
    task = prepared(counted, tmp_path)
    patches = [diff({"core.py": text}, TREE).encode() for text in (SENDS, RECEIVES)]
    grading = (grade(task, patch, sandboxes=counted, environment=environment) for patch in patches)
    sender, receiver = await asyncio.gather(*grading)
    assert (sender.reward, receiver.reward) == (1.0, 0.0), receiver
    assert counted.most == 1


async def test_the_runs_of_one_grading_never_overlap(
    counted: Counted, environment: TaskEnvironment, tmp_path: Path
) -> None:
    task = await validate(prepared(counted, tmp_path), sandboxes=counted, environment=environment, cache=tmp_path)
    assert task.options.twins
    counted.most = 0  # validation runs the gold patch beside the empty one
    forged = "class Any(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
    for text in (RIGHT, forged + "def shift(x):\n    return Any()\n"):
        patch = diff({"core.py": text}, TREE).encode()
        await grade(task, patch, sandboxes=counted, environment=environment)
    assert (counted.most, counted.running) == (1, 0)
