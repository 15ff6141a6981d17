"""A run grades equal patches once where nothing speaks against it, and each verdict says whose it is."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

from understudy.checks.base import TwinTest
from understudy.run.verdicts import RunVerdicts
from understudy.sandbox.base import Sandbox, Sandboxes, SandboxSpec
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, SuiteChecks, Task, Verdict

from support.grading import diff

TREE = {"calc.txt": "wrong\n"}
TASK = Task(
    instance_id="calc-1",
    repo="calc",
    instruction="Mend calc.txt.",
    source=Files(TREE),
    checks=SuiteChecks(
        parser="parse_log_django",
        command="grep -q slow calc.txt && sleep 60; grep -q lost calc.txt && exit 1\n"
        "grep -q right calc.txt && echo 'shift ... ok' || echo 'shift ... FAIL'",
        fail_to_pass=("shift",),
        timeout_s=2,
    ),
    gold_patch=diff({"calc.txt": "right\n"}, TREE),
)


class Counted:
    """Sandboxes of another kind, counted as they are opened."""

    name: ClassVar[str] = "counted"

    def __init__(self, kind: Sandboxes) -> None:
        self._kind = kind
        self.host_programs = kind.host_programs
        self.prepare_tree = kind.prepare_tree
        self.opened = 0

    async def open(self, spec: SandboxSpec) -> Sandbox:
        self.opened += 1
        return await self._kind.open(spec)


@pytest.fixture
def prepared(sandboxes: Sandboxes, tmp_path: Path) -> PreparedTask:
    return prepare(TASK, tmp_path, sandboxes)


async def grade_three(
    prepared: PreparedTask, text: str, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[list[Verdict], int]:
    """The verdicts on three attempts with one patch, the last later than the others, and how many were made."""
    counted, verdicts = Counted(sandboxes), RunVerdicts()

    def grade(attempt_id: str) -> asyncio.Task[Verdict]:
        patch = diff({"calc.txt": text}, TREE).encode()
        graded = verdicts.grade(prepared, patch, attempt_id, sandboxes=counted, environment=environment)
        return asyncio.create_task(graded)

    both = await asyncio.gather(grade("a"), grade("b"))
    return [*both, await grade("c")], counted.opened


@pytest.mark.parametrize(("text", "reward"), [("right\n", 1.0), ("still wrong\n", 0.0)])
async def test_equal_patches_are_graded_once(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, text: str, reward: float
) -> None:
    verdicts, sandbox_count = await grade_three(prepared, text, sandboxes, environment)
    assert sandbox_count == 1
    assert [verdict.reward for verdict in verdicts] == [reward] * 3
    assert [verdict.reused_from for verdict in verdicts] == ["", "a", "a"]
    assert verdicts[0].checks_s > 0.0 == verdicts[1].checks_s == verdicts[2].checks_s


@pytest.mark.parametrize("text", ["slow\n", "lost\n"])
async def test_what_may_come_out_otherwise_is_graded_each_time(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, text: str
) -> None:
    verdicts, sandbox_count = await grade_three(prepared, text, sandboxes, environment)
    assert sandbox_count == 3
    assert [(verdict.reward, verdict.reused_from) for verdict in verdicts] == [(0.0, "")] * 3


async def test_a_patch_that_is_graded_in_another_way_is_graded_itself(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> None:
    verdicts, patch = RunVerdicts(), TASK.gold_patch.encode()
    twins = {"another": TwinTest("test_0001", {7: "[]"})}
    validated = replace(prepared, options=replace(prepared.options, twins=twins))
    for task in (prepared, replace(prepared, options=replace(prepared.options, canaries=False)), validated):
        verdict = await verdicts.grade(task, patch, "a", sandboxes=sandboxes, environment=environment)
        assert (verdict.reused_from, verdict.applied) == ("", True)
