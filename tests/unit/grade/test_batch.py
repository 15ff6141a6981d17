"""Many predictions at once: faults are tried again and counted apart, doubtful verdicts say so."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest

from understudy.checks.protection import NOT_VALIDATED
from understudy.config import cache_dir
from understudy.errors import ConfigError, SandboxError
from understudy.grade.batch import GradingProgress, GradingSetup, PatchGrader, grade_all
from understudy.grade.predictions import open_predictions
from understudy.grade.reports import UNSURE
from understudy.grade.verdict import validate
from understudy.sandbox.base import Sandbox, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import environment_for
from understudy.tasks.prepare import prepare
from understudy.types import Files, PytestChecks, ScriptChecks, SuiteChecks, Task

from support import calc_task

pytestmark = pytest.mark.usefixtures("isolation")

WRONG = '--- a/calc.py\n+++ b/calc.py\n@@ -1,3 +1,3 @@\n-"""Arithmetic."""\n+"""Sums."""\n \n \n'


class Flaky(LocalSandboxes):
    """Local sandboxes of which the first `faults` do not open; counts what is opened at one time."""

    def __init__(self, faults: int = 0) -> None:
        super().__init__()
        self.faults = faults
        self.asked = 0

    async def open(self, spec: SandboxSpec) -> Sandbox:
        self.asked += 1
        if self.asked <= self.faults:
            raise SandboxError("no room for a sandbox")
        return await super().open(spec)


async def graded(
    tasks: list[Task],
    patches: dict[str, str],
    out: Path,
    *,
    sandboxes: LocalSandboxes | None = None,
    stop: asyncio.Event | None = None,
    validate_failures: bool = True,
    cache: Path | None = None,
) -> GradingProgress:
    file = out / "p.jsonl"
    rows = [{"instance_id": id, "model_name_or_path": "m", "model_patch": patch} for id, patch in patches.items()]
    file.write_text("\n".join(map(json.dumps, rows)))
    kind = sandboxes or LocalSandboxes()
    bench = GradingSetup(
        tasks={task.instance_id: task for task in tasks},
        output=out,
        run_id="r",
        grader=PatchGrader(
            sandboxes=kind,
            environment=environment_for(kind, cache_dir()),
            cache=cache or cache_dir(),
            validate_failures=validate_failures,
        ),
    )
    return await grade_all(bench, open_predictions(str(file), tasks), concurrency=1, stop=stop or asyncio.Event())


def report(out: Path, id: str) -> Path:
    return out / "logs" / "run_evaluation" / "r" / "m" / id / "report.json"


async def test_grading_is_retried_after_a_sandbox_error(tmp_path: Path):
    task = calc_task()
    standing = await graded([task], {"calc-0": task.gold_patch}, tmp_path, sandboxes=Flaky(1))
    assert standing.outcomes["calc-0"].status == "resolved"


async def test_a_lasting_sandbox_error_writes_no_report_and_is_graded_on_restart(tmp_path: Path):
    tasks = [calc_task(0), calc_task(1)]
    patches = {task.instance_id: task.gold_patch for task in tasks}
    flaky = Flaky(2)
    standing = await graded(tasks, patches, tmp_path, sandboxes=flaky)
    # Which of the two has its turn first is open.
    failed, fine = sorted(standing.outcomes, key=lambda id: standing.outcomes[id].status)
    first, second = standing.outcomes[failed], standing.outcomes[fine]
    assert (first.status, first.cause, first.reason) == (
        "error",
        "container_unavailable",
        "sandbox: no room for a sandbox",
    )
    assert second.status == "resolved"
    assert not report(tmp_path, failed).exists()
    again = await graded(tasks, patches, tmp_path, sandboxes=flaky)
    assert (again.outcomes[failed].status, again.reused) == ("resolved", 1)


async def test_waiting_patches_are_not_graded_after_a_stop(tmp_path: Path):
    tasks = [calc_task(number) for number in range(4)]
    stop = asyncio.Event()
    stop.set()
    standing = await graded(tasks, {task.instance_id: task.gold_patch for task in tasks}, tmp_path, stop=stop)
    assert (standing.outcomes, standing.total) == ({}, 4)


async def test_grading_ends_with_an_error_if_reports_cannot_be_written(tmp_path: Path):
    (tmp_path / "logs").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        await graded([calc_task()], {"calc-0": WRONG}, tmp_path)


def suite(task: Task, *, gold_passes: bool) -> Task:
    assert isinstance(task.checks, PytestChecks)
    (name, content), *_ = task.checks.files.items()
    lines = content.splitlines()
    diff = f"diff --git a/{name} b/{name}\n--- a/{name}\n+++ b/{name}\n@@ -1,5 +1,{len(lines)} @@\n"
    old = ["from calc import same", "", "", "def test_same():", "    assert same(3) == 3"]
    diff += "".join(f"-{line}\n" for line in old) + "".join(f"+{line}\n" for line in lines)
    checks = SuiteChecks(
        parser="parse_log_pytest",
        command=f"python -m pytest -rA {name}",
        fail_to_pass=task.checks.fail_to_pass if gold_passes else ("test_calc.py::test_nowhere",),
        pass_to_pass=task.checks.pass_to_pass,
        files=(name,),
        test_patch=diff,
    )
    return msgspec.structs.replace(task, checks=checks)


@pytest.mark.parametrize(("gold_passes", "validate_failures"), [(True, True), (False, True), (False, False)])
async def test_an_unresolved_outcome_says_whether_the_gold_patch_fails_too(
    gold_passes: bool, validate_failures: bool, tmp_path: Path
):
    task = suite(calc_task(), gold_passes=gold_passes)
    standing = await graded([task], {"calc-0": WRONG}, tmp_path, validate_failures=validate_failures)
    outcome = standing.outcomes["calc-0"]
    assert outcome.status == "unresolved"
    assert (UNSURE in outcome.reason) is (validate_failures and not gold_passes)
    assert outcome.cause == ("gold_patch_fails" if validate_failures and not gold_passes else "")
    assert "\n" not in outcome.reason
    assert report(tmp_path, "calc-0").exists()


async def test_a_verdict_without_twins_is_graded_again_once_its_task_is_validated(tmp_path: Path):
    task, cache, kind = calc_task(), tmp_path / "cache", LocalSandboxes()
    patches = {task.instance_id: task.gold_patch}
    reused = [(await graded([task], patches, tmp_path, cache=cache)).reused for _ in range(2)]
    stored = json.loads(report(tmp_path, task.instance_id).with_name("verdict.json").read_text())
    verdict = stored["verdict"]
    assert (verdict["protection"], verdict["unprotected"].partition(" (")[0]) == ("none", NOT_VALIDATED)
    environment = environment_for(kind, cache_dir())
    await validate(prepare(task, cache, kind), sandboxes=kind, environment=environment, cache=cache)
    reused += [(await graded([task], patches, tmp_path, cache=cache)).reused for _ in range(2)]
    assert reused == [0, 1, 0, 1]


async def test_a_script_whose_python_writes_the_reward_is_graded_without_validation_too(tmp_path: Path):
    script = "PYTHONPATH=$PYTHONPATH:$PWD python /tests/score.py\n"
    score = (
        "from calc import shift\n"
        "with open('/logs/verifier/reward.txt', 'w') as file:\n    file.write(str(int(shift(1) == 2)))\n"
    )
    checks = ScriptChecks(Files({"test.sh": script, "score.py": score}), timeout_s=60)
    task = msgspec.structs.replace(calc_task(), checks=checks)
    standing = await graded(
        [task], {"calc-0": task.gold_patch}, tmp_path, validate_failures=False, cache=tmp_path / "cache"
    )
    assert standing.outcomes["calc-0"].status == "resolved", standing.outcomes
    verdict = json.loads(report(tmp_path, "calc-0").with_name("verdict.json").read_text())["verdict"]
    assert verdict["unprotected"].startswith(NOT_VALIDATED)
    assert verdict["unprotected"].endswith("the tested code runs where it can write the reward")
