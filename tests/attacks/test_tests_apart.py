"""What one test expects often stands in another as an input: they run in versions of their own then."""

from __future__ import annotations

from pathlib import Path

import pytest

from understudy.checks.base import GradingOptions
from understudy.checks.twins.templates import draw_versions, make_templates
from understudy.checks.twins.test_ids import deciding_tests
from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Files, PytestChecks, SuiteChecks, Task

from support.grading import by_twins_alone, diff

WRITE = "def write(n):\n    return ' '.join(WORDS[int(digit)] for digit in str(n))\n"
WORDS = "WORDS = 'zero one two three four five six seven eight nine'.split()\n\n\n"
READ = "\n\ndef read(text):\n    return int(''.join(str(WORDS.index(word)) for word in text.split()))\n"
GOLD = {"core.py": WORDS + WRITE + READ}
TREE = {"core.py": WORDS + "def write(n):\n    return ''\n" + READ}
HIDDEN = {
    "test_core.py": """\
import pytest

from core import read, write

TABLE = ((417, "four one seven"), (32, "three two"), (905, "nine zero five"))


@pytest.mark.parametrize(("number", "text"), [(6, "six"), (8, "eight")])
def test_read_more(number, text):
    assert read(text) == number


def test_write():
    for number, text in TABLE:
        assert write(number) == text


def test_read():
    for number, text in TABLE:
        assert read(text) == number


@pytest.mark.parametrize(("number", "text"), [(6, "six"), (8, "eight")])
def test_write_more(number, text):
    assert write(number) == text
"""
}
TO_MEND = tuple(f"test_core.py::{name}" for name in ("test_write", "test_write_more[6-six]"))
TO_MEND += ("test_core.py::test_write_more[8-eight]",)
TO_KEEP = tuple(
    f"test_core.py::{name}" for name in ("test_read_more[6-six]", "test_read_more[8-eight]", "test_read")
)
CHECKS = {
    "record": PytestChecks(HIDDEN, TO_MEND, TO_KEEP, timeout_s=60),
    "suite": SuiteChecks(
        parser="parse_log_pytest",
        command="python -m pytest -rA test_core.py",
        fail_to_pass=TO_MEND,
        pass_to_pass=TO_KEEP,
        files=tuple(HIDDEN),
        test_patch=diff(HIDDEN, TREE),
        timeout_s=60,
    ),
}
# Another program reads what stands in the version, and finds the text that stands beside the number.
FROM_OTHER_TESTS = """\
def write(n):
    import ast, subprocess
    text = subprocess.run("cat *.py", shell=True, capture_output=True, text=True).stdout
    tables = []
    for part in text.splitlines():
        start, end = part.find("("), part.rfind(")")
        if not part.startswith("def"):
            for first, last in ((start, end), (part.find("["), part.rfind("]"))):
                try:
                    tables.append(ast.literal_eval(part[first : last + 1]))
                except (ValueError, SyntaxError):
                    pass
    for table in tables:
        for row in table if isinstance(table, (tuple, list)) else ():
            if isinstance(row, tuple) and len(row) == 2 and row[0] == n:
                return row[1]
    return ""
"""


@pytest.mark.parametrize("kind", CHECKS)
async def test_inputs_of_other_tests_do_not_tell_what_one_expects(
    sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path, kind: str
) -> None:
    task = Task("core", "example/core", "mend it", Files(TREE), CHECKS[kind], diff(GOLD, TREE))
    prepared = prepare(task, tmp_path, sandboxes)
    prepared = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    assert prepared.options.twin_apart
    prepared = by_twins_alone(prepared)
    shorter = GOLD["core.py"].replace(" for digit in str(n)", " for digit in f'{n}'")
    for text, reward in ((shorter, 1.0), (WORDS + FROM_OTHER_TESTS + READ, 0.0)):
        patch = diff({"core.py": text}, TREE).encode()
        verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
        assert set(verdict.tests.values()) == {"passed"}
        assert (verdict.reward, verdict.protection) == (reward, "twins"), (verdict.reason, verdict.unprotected)


def test_each_version_is_spread_over_two_that_share_no_test() -> None:
    task = Task("core", "example/core", "mend it", Files(TREE), CHECKS["record"], diff(GOLD, TREE))
    options = GradingOptions(twin_apart=True)
    tests = deciding_tests(task, options)
    to_mend, to_keep = draw_versions(tests, options, make_templates(tests, options))
    assert "write(" in to_mend.files["test_core.py"] and "read(" not in to_mend.files["test_core.py"]
    assert "four one seven" not in to_mend.files["test_core.py"] and "eight" not in to_mend.files["test_core.py"]
    assert "read(" in to_keep.files["test_core.py"] and "write(" not in to_keep.files["test_core.py"]
    assert to_mend.sites.keys() == to_keep.sites.keys()
