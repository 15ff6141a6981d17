"""What the name of a test says does not help to pass it: the code under test can read which one runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Files, PytestChecks, SuiteChecks, Task

from support.grading import diff

TREE = {"core.py": "def is_empty(x):\n    return None\n"}
GOLD = "def is_empty(x):\n    return not x\n"
HIDDEN = {
    "test_core.py": "from core import is_empty\n\n\n"
    "class TestEmpty:\n    def test_nothing_is_empty_true(self):\n        assert is_empty([]) is True\n\n\n"
    "def test_something_is_empty_false():\n    assert is_empty([1]) is False\n",
    "test_own.py": "from core import is_empty\n\n\n"
    "def test_own(request):\n    assert is_empty([]) is True\n    assert {'own': 1}[request.node.name[5:]] == 1\n",
}
IDS = (
    "test_core.py::TestEmpty::test_nothing_is_empty_true",
    "test_core.py::test_something_is_empty_false",
    "test_own.py::test_own",
)
CHECKS = {
    "record": PytestChecks(HIDDEN, IDS, timeout_s=60),
    "suite": SuiteChecks(
        parser="parse_log_pytest",
        command="python -m pytest -rA test_core.py test_own.py",
        fail_to_pass=IDS,
        files=tuple(HIDDEN),
        test_patch=diff(HIDDEN, TREE),
        timeout_s=60,
    ),
}
BY_NAME = "import os\n\n\ndef is_empty(x):\n    return 'false' not in os.environ['PYTEST_CURRENT_TEST']\n"


@pytest.mark.parametrize("kind", CHECKS)
async def test_answers_by_the_name_of_the_test_have_no_reward(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path, kind: str
) -> None:
    task = Task("core", "example/core", "mend it", Files(TREE), CHECKS[kind], diff({"core.py": GOLD}, TREE))
    prepared = prepare(task, tmp_path, sandboxes)
    prepared = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    assert prepared.options.twins.keys() == set(IDS)
    assert prepared.options.twin_named == ("test_own.py",)
    for text, reward in ((GOLD.replace("not x", "len(x) == 0"), 1.0), (BY_NAME, 0.0)):
        patch = diff({"core.py": text}, TREE).encode()
        verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
        assert set(verdict.tests.values()) == {"passed"}
        assert verdict.reward == reward, verdict.reason
