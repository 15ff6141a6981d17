"""Gradings with the same hidden tests take turns on a machine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.grade.grading_lock import grading_lock
from understudy.types import Checks, Files, PytestChecks, ScriptChecks, SuiteChecks, Task

SHARED = PytestChecks({"test_a.py": "def test(): ..."}, ("test_a.py::test",))
SUITE = SuiteChecks("pytest", "pytest", ("tests/test_a.py::test",), files=("tests/test_a.py",))


def task(id: str, checks: Checks, repo: str = "example/turns") -> Task:
    return Task(id, repo, "mend it", Files({"core.py": ""}), checks, "")


async def is_held_up(waiting: Task, cache: Path) -> bool:
    """Whether no turn of a task comes in a while in which one that is not held up comes."""
    try:
        async with asyncio.timeout(0.3), grading_lock(waiting, cache):
            return False
    except TimeoutError:
        return True


@pytest.mark.parametrize(
    ("first", "second", "waits"),
    [
        (task("a", SHARED), task("a", SHARED), True),
        (task("a", SHARED), task("b", SHARED), True),
        (
            task("a", SHARED),
            task("b", PytestChecks({"test_a.py": "def test(): pass"}, SHARED.fail_to_pass)),
            False,
        ),
        (task("a", SUITE), task("b", SUITE), True),
        (task("a", SUITE), task("b", SUITE, "example/other"), False),
        (task("a", ScriptChecks(Files({}))), task("a", ScriptChecks(Files({}))), True),
        (task("a", ScriptChecks(Files({}))), task("b", ScriptChecks(Files({}))), False),
    ],
    ids=["a task", "a file", "another file", "a suite's", "another repository's", "a script", "another script"],
)
async def test_what_shares_hidden_tests_waits(first: Task, second: Task, waits: bool, tmp_path: Path) -> None:
    async with grading_lock(first, tmp_path):
        assert await is_held_up(second, tmp_path) is waits
    async with grading_lock(second, tmp_path):
        pass


def test_another_process_waits_too(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom understudy.grade.grading_lock import grading_lock\n"
        "from understudy.types import *\n"
        "async def hold():\n"
        "    checks = PytestChecks({'test_a.py': 'def test(): ...'}, ('test_a.py::test',))\n"
        "    async with grading_lock(Task('b', 'r', 'i', Files({}), checks, ''), Path(sys.argv[1])):\n"
        "        print('held', flush=True)\n        sys.stdin.read()\n"
        "asyncio.run(hold())\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        assert asyncio.run(is_held_up(task("a", SHARED), tmp_path))
        other.kill()  # its locks go with it
    assert not asyncio.run(is_held_up(task("a", SHARED), tmp_path))


async def test_who_stops_waiting_holds_nothing_up(tmp_path: Path) -> None:
    first, both = task("a", SHARED), task("b", SHARED)
    async with grading_lock(first, tmp_path):
        assert await is_held_up(both, tmp_path)
        async with asyncio.timeout(30), grading_lock(task("b", ScriptChecks(Files({}))), tmp_path):
            pass
