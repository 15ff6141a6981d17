"""Grading in containers: nothing of this machine is used, and what an image lacks is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.errors import GraderError
from understudy.grade.verdict import as_validated, grade, validate
from understudy.plugins import load
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import ImageTree, SuiteChecks, Task

from support import docker_engine
from support.grading import CALC, CALC_MENDED, CALC_TASK, diff

CORE = CALC["calc/core.py"]
FILES = {path: text for path, text in CALC.items() if text}
NOTHING = TaskEnvironment()
pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def task(engine: docker_engine.Engine) -> Task:
    image = docker_engine.instance_image(engine, CALC_TASK.instance_id, FILES)
    assert isinstance(CALC_TASK.checks, SuiteChecks)
    activate = "set -o pipefail\nsource /opt/miniconda3/bin/activate\nconda activate testbed"
    return replace(
        CALC_TASK,
        image=image.name,
        source=ImageTree(base_commit=image.base_commit),
        checks=replace(CALC_TASK.checks, activate=activate, command="python -m pytest -rA tests/test_calc.py"),
        gold_patch=diff(CALC_MENDED, FILES),
    )


@pytest.fixture
async def sandboxes(engine: docker_engine.Engine) -> AsyncIterator[Sandboxes]:
    kind: Sandboxes = load("sandboxes", "docker")()
    yield kind
    await kind.aclose()


@pytest.fixture
async def prepared(task: Task, sandboxes: Sandboxes, tmp_path: Path) -> PreparedTask:
    return await asyncio.to_thread(prepare, task, tmp_path, sandboxes)


async def test_gold_and_empty_as_an_ordinary_user(
    prepared: PreparedTask, sandboxes: Sandboxes, tmp_path: Path
) -> None:
    way = await validate(prepared, sandboxes=sandboxes, environment=NOTHING, cache=tmp_path)
    assert (way.options.as_root, way.options.canaries, way.options.conflicts) == (False, True, {})
    assert as_validated(prepared, sandboxes=sandboxes, environment=NOTHING, cache=tmp_path) == way


async def test_what_only_root_can_do_is_tried_as_root_and_remembered(
    task: Task, sandboxes: Sandboxes, tmp_path: Path
) -> None:
    assert isinstance(task.checks, SuiteChecks)
    checks = replace(task.checks, command='test "$(id -u)" = 0 && ' + task.checks.command)
    prepared = await asyncio.to_thread(prepare, replace(task, checks=checks), tmp_path, sandboxes)
    way = await validate(prepared, sandboxes=sandboxes, environment=NOTHING, cache=tmp_path)
    assert (way.options.as_root, way.options.canaries) == (True, True)
    assert as_validated(prepared, sandboxes=sandboxes, environment=NOTHING, cache=tmp_path) == way


REWRITES = """\
import pytest


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    outcome.get_result().outcome = "passed"
"""
RAISES = """

import contextlib

import pytest

pytest.raises = lambda *a, **k: contextlib.suppress(BaseException)
"""
PATCHES: dict[str, tuple[dict[str, str | None], float, str]] = {
    "gold": (dict(CALC_MENDED), 1.0, "clean"),
    "wrong": ({"calc/core.py": CORE.replace("x - 1", "x - 2")}, 0.0, "clean"),
    "broken syntax": ({"calc/core.py": CORE + "def (:\n"}, 0.0, "clean"),
    "a new file and a deleted one": (
        {**CALC_MENDED, "calc/new.txt": "a\r\nb\n", "tests/test_other.py": None},
        1.0,
        "clean",
    ),
    "a conftest rewrites reports": (
        {"conftest.py": REWRITES, "calc/core.py": CORE + "X = 1\n"},
        0.0,
        "suspicious",
    ),
    "pytest.raises is patched": ({"calc/core.py": CORE.replace("x - 1", "x + 1") + RAISES}, 0.0, "suspicious"),
}


@pytest.mark.parametrize("name", PATCHES)
async def test_verdicts_in_containers(prepared: PreparedTask, sandboxes: Sandboxes, name: str) -> None:
    files, reward, status = PATCHES[name]
    verdict = await grade(prepared, diff(files, FILES).encode(), sandboxes=sandboxes, environment=NOTHING)
    assert (verdict.reward, verdict.integrity.status) == (reward, status), verdict


async def test_a_patch_with_other_context_goes_by_the_image_s_own_programs(
    prepared: PreparedTask, sandboxes: Sandboxes
) -> None:
    drifted = diff(CALC_MENDED, FILES).replace(' """What it does."""', ' """What it did."""')
    verdict = await grade(prepared, drifted.encode(), sandboxes=sandboxes, environment=NOTHING)
    assert (verdict.reward, verdict.applied) == (1.0, True), verdict


async def test_an_image_without_git_is_said_to_have_none(prepared: PreparedTask, sandboxes: Sandboxes) -> None:
    patch = diff(CALC_MENDED, FILES).encode()
    with pytest.raises(GraderError, match="has no git"):
        await grade(prepared, patch, sandboxes=_WithoutGit(sandboxes), environment=NOTHING)


class _WithoutGit:
    """Sandboxes of the same kind, whose git is gone."""

    name = "docker"
    host_programs = False

    def __init__(self, kind: Sandboxes) -> None:
        self._kind = kind

    async def open(self, spec):
        sandbox = await self._kind.open(replace(spec, as_root=True, env={}))
        done = await sandbox.run(["sh", "-c", "rm -f $(command -v git); command -v git"], timeout_s=30)
        assert done.exit_code != 0
        return sandbox
