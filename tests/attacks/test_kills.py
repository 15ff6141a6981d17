"""Kills from outside at random moments of grading: never a reward that the patch has not, never a lost verdict.

UNDERSTUDY_TEST_KILLS says how many, a quarter of it how many containers are ended. `make soak` makes a hundred.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Collection
from pathlib import Path

import docker
import pytest
from msgspec.structs import replace

from attacks.test_sealed import CHECKS, GOLD, TREE
from understudy.errors import GraderError, SandboxError
from understudy.grade.verdict import grade
from understudy.sandbox.base import Sandboxes
from understudy.sandbox.docker.sandboxes import DockerSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.row_formats import task_of
from understudy.types import Files, Task

from support import docker_engine
from support.grading import diff
from support.suite import FILES, ID, classic

KILLS = int(os.environ.get("UNDERSTUDY_TEST_KILLS", "8"))
pytestmark = [pytest.mark.services, pytest.mark.timeout(300 + 60 * KILLS)]  # on a busy machine
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


def program_of_script() -> int | None:
    """The Python of a check script that runs now."""
    for pid in descendants():
        with contextlib.suppress(OSError):
            if b"\0from core import shift; " in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return None


@pytest.mark.parametrize(("killed_by", "expected"), [("another process", 1.0), ("itself", 0.0)])
async def test_a_script_whose_program_was_killed_is_run_once_more(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path, killed_by: str, expected: float
) -> None:
    checks = replace(CHECKS["script"], timeout_s=60)
    task = Task("core", "example/core", "mend it", Files(TREE), checks, PATCHES[1.0])
    prepared = prepare(task, tmp_path, sandboxes)
    before = "import time\ntime.sleep(2)\n" if expected else "import os\nos.kill(os.getpid(), 9)\n"
    patch = diff({"core.py": before + GOLD["core.py"]}, TREE).encode()
    grading = asyncio.create_task(grade(prepared, patch, sandboxes=sandboxes, environment=environment))
    if expected:
        while (pid := program_of_script()) is None:
            assert not grading.done()
            await asyncio.sleep(0.02)
        os.kill(pid, signal.SIGKILL)
    verdict = await grading
    assert (verdict.reward, verdict.reason) == (expected, f"the checks gave {expected:g}")


def end_one(source: random.Random, engine: docker_engine.Engine, is_late: Callable[[], bool]) -> str:
    """End the first container of this process that there is, in a way chosen at random; how, "" if none came."""
    label = {"label": "understudy.owner"}
    with contextlib.closing(engine.client) as client:
        while not is_late():
            for each in client.api.containers(filters=label):
                if each["Labels"]["understudy.owner"].split("/")[2] == str(os.getpid()):
                    how = source.choice([*docker_engine.ENDS])
                    with contextlib.suppress(docker.errors.APIError):  # it may end by itself meanwhile
                        docker_engine.ENDS[how](client.api, each["Id"])
                        return how
            time.sleep(0.02)
    return ""


async def test_the_end_of_a_container_changes_no_verdict(engine: docker_engine.Engine, tmp_path: Path) -> None:
    source = random.Random("containers")
    image = docker_engine.instance_image(engine, ID, FILES)
    task = task_of(classic(image.base_commit), ImageChoice())
    patches = {1.0: task.gold_patch, 0.0: diff({"calc.py": FILES["calc.py"].replace("x - 1", "x")}, FILES)}
    sandboxes, ended = DockerSandboxes(), 0
    try:
        prepared = prepare(task, tmp_path, sandboxes)
        for number in range(-(-KILLS // 4)):
            expected = float(number % 2 == 0)
            patch = patches[expected].encode()
            grading = asyncio.create_task(
                grade(prepared, patch, sandboxes=sandboxes, environment=TaskEnvironment())
            )
            if number:  # the first ends whatever container comes first
                await asyncio.sleep(source.uniform(0.0, 2.0))
            how = await asyncio.to_thread(end_one, source, engine, grading.done)
            ended += bool(how)
            with contextlib.suppress(SandboxError, GraderError):  # an infrastructure failure, which is tried again
                assert (await grading).reward == expected, (number, how)
    finally:
        await sandboxes.aclose()
    assert ended
