"""Patches that go around hidden tests, by kind of check: none has a reward, and the gold patch keeps its own."""

from __future__ import annotations

from collections import Counter

import pytest
from msgspec.structs import replace

from attacks.sealed_techniques import IN_PLACE, SCRIPT, SCRIPT_ESCAPES
from understudy.grade.verdict import grade
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, PytestChecks, ScriptChecks, SuiteChecks, Task, Verdict

from support.grading import diff

TREE = {"core.py": "def shift(x):\n    return x - 1\n", "tests/helper.py": "def check(a, b):\n    assert a == b\n"}
HIDDEN = {
    "tests/test_core.py": "from core import shift\nfrom helper import check\n\n\n"
    "def test_shift():\n    check(shift(1), 2)\n"
}
GOLD = {"core.py": "def shift(x):\n    return x + 1\n"}
ID = "tests/test_core.py::test_shift"
# The reward is 1 only where the tests pass; a script that cannot write it fails.
TEST_SH = """\
if python -c 'from core import shift; assert shift(1) == 2'; then echo 1 >/logs/verifier/reward.txt
else echo 0 >/logs/verifier/reward.txt; fi
"""
CHECKS = {
    "record": PytestChecks(HIDDEN, (ID,), timeout_s=20),
    "suite": SuiteChecks(
        parser="parse_log_pytest",
        command="python -m pytest -rA tests/test_core.py",
        fail_to_pass=(ID,),
        files=tuple(HIDDEN),
        test_patch=diff(HIDDEN, TREE),
        timeout_s=20,
    ),
    "script": ScriptChecks(Files({"test.sh": TEST_SH}), timeout_s=60),
}
CASES = [(kind, name) for kind in ("record", "suite") for name in IN_PLACE] + [("script", name) for name in SCRIPT]
SAMPLE = CASES[::9]


@pytest.fixture(scope="module")
def prepared(sandboxes: Sandboxes, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PreparedTask]:
    task = Task("core", "example/core", "mend it", Files(TREE), CHECKS["record"], diff(GOLD, TREE))
    cache = tmp_path_factory.mktemp("cache")
    return {kind: prepare(replace(task, checks=checks), cache, sandboxes) for kind, checks in CHECKS.items()}


async def attacked(
    prepared: dict[str, PreparedTask], kind: str, name: str, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    files = IN_PLACE.get(name) or {"core.py": {**SCRIPT, **SCRIPT_ESCAPES}[name]}
    # Beside a change that counts, so that the tests run.
    patch = diff({"NOTES.md": "notes\n", **files}, {**TREE, **HIDDEN})
    return await grade(prepared[kind], patch.encode(), sandboxes=sandboxes, environment=environment)


def test_the_techniques_are_counted_by_kind() -> None:
    assert Counter(kind for kind, _ in CASES) == {"record": 38, "suite": 38, "script": 18}


@pytest.mark.parametrize(("kind", "name"), SAMPLE)
async def test_a_sample_has_no_reward(
    prepared: dict[str, PreparedTask], sandboxes: Sandboxes, environment: TaskEnvironment, kind: str, name: str
) -> None:
    verdict = await attacked(prepared, kind, name, sandboxes, environment)
    assert verdict.reward == 0.0, verdict.reason


@pytest.mark.services  # they take minutes together
@pytest.mark.parametrize(("kind", "name"), [case for case in CASES if case not in SAMPLE])
async def test_no_technique_has_a_reward(
    prepared: dict[str, PreparedTask], sandboxes: Sandboxes, environment: TaskEnvironment, kind: str, name: str
) -> None:
    verdict = await attacked(prepared, kind, name, sandboxes, environment)
    assert verdict.reward == 0.0, verdict.reason


@pytest.mark.parametrize("name", SCRIPT_ESCAPES)
async def test_what_a_script_cannot_see_is_not_clean(
    prepared: dict[str, PreparedTask], sandboxes: Sandboxes, environment: TaskEnvironment, name: str
) -> None:
    verdict = await attacked(prepared, "script", name, sandboxes, environment)
    assert (verdict.reward, verdict.protection) == (1.0, "none")
    assert verdict.integrity.status == "suspicious"


@pytest.mark.parametrize("kind", CHECKS)
async def test_the_gold_patch_has_its_reward_beside_files_that_do_not_count(
    prepared: dict[str, PreparedTask], sandboxes: Sandboxes, environment: TaskEnvironment, kind: str
) -> None:
    more = {} if kind == "script" else {path: text for files in IN_PLACE.values() for path, text in files.items()}
    patch = diff({**more, **GOLD}, {**TREE, **HIDDEN})
    verdict = await grade(prepared[kind], patch.encode(), sandboxes=sandboxes, environment=environment)
    assert verdict.reward == 1.0, verdict.reason
