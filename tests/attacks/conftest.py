"""Where the attacks are graded: local sandboxes, with the Python environment of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from understudy.config import cache_dir
from understudy.grade.verdict import grade, validate
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment, python_environment
from understudy.tasks.prepare import prepare
from understudy.types import Files, Task

from support import require
from support.grading import Protections, diff


@pytest.fixture(scope="module")
def environment() -> TaskEnvironment:
    return python_environment(cache_dir())


@pytest.fixture(scope="module")
def sandboxes() -> LocalSandboxes:
    sandboxes = LocalSandboxes()
    require(sandboxes.problems())
    return sandboxes


@pytest.fixture
def protections(sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path) -> Protections:
    """A function that returns the protection of each patch, by its name, and why it is not whole.

    It takes a task, whose tree is one file that it has with it, and that file's text after each patch. Each patch
    must get reward 1 and be clean.
    """

    async def grade_patches(task: Task, patched: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        assert isinstance(task.source, Files)
        (name,) = task.source.files
        ready = prepare(task, tmp_path, sandboxes)
        prepared = await validate(ready, sandboxes=sandboxes, environment=environment, cache=tmp_path)
        levels: dict[str, tuple[str, str]] = {}
        for label, text in patched.items():
            patch = diff({name: text}, task.source.files).encode()
            verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
            assert (verdict.reward, verdict.integrity.status) == (1.0, "clean"), verdict
            levels[label] = (verdict.protection, verdict.unprotected)
        return levels

    return grade_patches
