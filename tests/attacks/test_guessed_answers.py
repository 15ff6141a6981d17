"""Tests whose expectations can be met without computing anything do not protect a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import Struct

from understudy.checks.protection import protection_of
from understudy.grade.verdict import grade, validate
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import prepare
from understudy.types import Files, PytestChecks, Task

from support.grading import diff

pytestmark = pytest.mark.services  # each validates a task and grades a patch

CODE = '''\
"""Texts and tables."""

LEVELS = ("informational", "questionable", "exceptional", "catastrophic")


def code(text):
    """A check number."""
    return sum(ord(each) ** 2 * (n + 3) for n, each in enumerate(text)) % 1000003


def balanced(text):
    """Whether all brackets are closed."""
    return None


def percent(a, b):
    """How many percent of the words of a are in b."""
    return None


def level(loads, limit):
    """The level, by how many loads are above the limit."""
    return None


def lint(text):
    """A report: {"trailing_spaces": [line numbers], "tabulators": [line numbers]}."""
    return None


def spread(values):
    """The mean distance from the mean."""
    return None


class Table:
    def __init__(self, rows):
        self.rows = rows

    def width(self):
        return sum(len(str(each)) ** 5 for row in self.rows for each in row)
'''
BALANCED = 'return text.count("(") == text.count(")")'
REPORT = '{"trailing_spaces": [], "tabulators": []}'


class Case(Struct, frozen=True):
    """A function's body, a body that guesses, a test of it, and the level of protection that the test gives."""

    before: str
    solution: str
    guess: str
    tests: str
    level: str = "partial"


def of(function: str, solution: str, guess: str, tests: str, level: str = "partial") -> Case:
    head = CODE[CODE.index(f"def {function}(") :].partition("    return None\n")[0]
    return Case(f"{head}    return None\n", f"{head}    {solution}\n", f"{head}    {guess}\n", tests, level)


OLD = 'assert code("some long text") == 419961\n    assert code("another text") == 149501'
INIT = "    def __init__(self, rows):\n        self.rows = rows\n"
STRICT = "    def __init__(self, rows, strict=False):\n        {}\n        self.rows = rows\n"
CASES = {
    "what the old code does already": of(
        "balanced", BALANCED, "return True", f'{OLD}\n    assert balanced("(a)")\n    assert balanced("")'
    ),
    "a new name": Case(
        "def percent(",
        'def closed(text):\n    return text.count("(") == text.count(")")\n\n\ndef percent(',
        "def closed(text):\n    return True\n\n\ndef percent(",
        f'{OLD}\n    assert closed("(a)")',
    ),
    "a new parameter": Case(
        INIT,
        STRICT.format('if strict and len({*map(len, rows)}) > 1:\n            raise ValueError("width")'),
        STRICT.format('if len(rows) > 1:\n            raise ValueError("width")'),
        'assert Table([["name", 4182]], strict=True).width() == 2048\n'
        "    with pytest.raises(ValueError):\n        Table([[1], [2, 3]], strict=True)",
    ),
    "a method that returns its object": Case(
        "    def width(self):",
        "    def checked(self):\n        if not self.rows:\n            raise ValueError\n        return self\n\n"
        "    def width(self):",
        "    def checked(self):\n        return self\n\n    def width(self):",
        'assert Table([["name", 4182]]).checked().width() == 2048\n'
        "    assert Table([[99991]]).checked().width() == 3125",
    ),
    "a round number": of(
        "percent",
        "return round(100 * sum(each in b.split() for each in a.split()) / len(a.split()))",
        "return 100",
        'assert percent("one two", "two one") == 100\n    assert percent("red", "green red") == 100',
    ),
    "a constant of the file": of(
        "level",
        "return LEVELS[min(3, sum(each > limit for each in loads))]",
        "return LEVELS[-1]",
        'assert level([90, 95, 99], 60) == "catastrophic"\n    assert level([9, 8, 7], 1) == "catastrophic"',
    ),
    "what a docstring names": of(
        "lint",
        'return {"trailing_spaces": [n for n, each in enumerate(text.split("\\n")) if each != each.rstrip()], '
        '"tabulators": [n for n, each in enumerate(text.split("\\n")) if "\\t" in each]}',
        f"return {REPORT}",
        f'assert lint("a") == {REPORT}\n    assert lint("") == {REPORT}',
    ),
    "a wide tolerance": of(
        "spread",
        "return sum(abs(each - sum(values) / len(values)) for each in values) / len(values)",
        "return 12.0",
        "assert abs(spread([3, 18, 41, 22, 9]) - 11.1) < 5\n    assert spread([77, 52, 91, 60]) == "
        "pytest.approx(14, abs=5)",
    ),
    "nothing that a guess meets": of(
        "percent",
        "return round(100 * sum(each in b.split() for each in a.split()) / len(a.split()))",
        "return 100",
        'assert percent("a b c d e f g", "a b") == 29\n'
        '    assert percent("a b c", "a") == 33\n    assert percent("a b c d e f g h", "a b") == 25',
        "twins",
    ),
}

SIZES = """\
def size(text):
    number, unit = text.split()
    return int(number) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
"""
SIZES_OTHERWISE = """\
def size(text):
    for power, unit in enumerate(("KiB", "MiB"), 1):
        if text.endswith(unit):
            return int(text[: -len(unit)]) * 1024 ** power
"""
SIZES_BY_HEART = """\
def size(text):
    return {"7": 7168, "2": 2097152, "3": 33554432, "1": 102400}[text[0]]
"""
SIZES_IN_PART = """\
def size(text):
    return int(text.split()[0]) << 10 if "KiB" in text else {"2 MiB": 2097152, "32 MiB": 33554432}[text]
"""
SIZE_TESTS = """\
from core import size

def test_it():
    assert size("7 KiB") == 7168
    assert size("2 MiB") == 2097152
    assert size("32 MiB") == 33554432
    assert size("100 KiB") == 102400
"""


@pytest.mark.parametrize("name", CASES)
async def test_expectations_that_a_guess_meets_are_not_called_protected(
    sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    assert CODE.count(case.before) == 1
    imports = "from core import *\n" + ("from core import closed\n" if "closed" in case.tests else "")
    tests = f"import pytest\n{imports}\n\ndef test_it():\n    {case.tests}\n"
    checks = PytestChecks({"test_core.py": tests}, ("test_core.py::test_it",), timeout_s=60)
    tree = {"core.py": CODE}
    solution, guess = (
        diff({"core.py": CODE.replace(case.before, each)}, tree) for each in (case.solution, case.guess)
    )
    ready = prepare(Task("core", "example/core", "write it", Files(tree), checks, solution), tmp_path, sandboxes)
    prepared = await validate(ready, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    verdict = await grade(prepared, guess.encode(), sandboxes=sandboxes, environment=environment)
    if case.level == "twins":
        assert protection_of(prepared.task, prepared.options) == ("twins", "")
        assert verdict.reward == 0.0, verdict.reason
    else:
        assert (verdict.reward, verdict.protection) == (1.0, case.level), verdict.unprotected


async def test_a_patch_is_protected_as_far_as_it_answers_other_inputs(
    sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    checks = PytestChecks({"test_core.py": SIZE_TESTS}, ("test_core.py::test_it",), timeout_s=60)
    tree = {"core.py": "def size(text):\n    return None\n"}
    told = "Read sizes. It is 7168 for 7 KiB, 2097152 for 2 MiB, 33554432 for 32 MiB, 102400 for 100 KiB."
    task = Task("core", "example/core", told, Files(tree), checks, diff({"core.py": SIZES}, tree))
    ready = prepare(task, tmp_path, sandboxes)
    prepared = await validate(ready, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    levels: dict[str, str] = {}
    for source in (SIZES, SIZES_OTHERWISE, SIZES_BY_HEART, SIZES_IN_PART):
        patch = diff({"core.py": source}, tree).encode()
        verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
        assert (verdict.reward, verdict.integrity.status) == (1.0, "clean"), verdict.reason
        levels[source] = verdict.protection
    assert levels == {
        SIZES: "twins",
        SIZES_OTHERWISE: "twins",
        SIZES_BY_HEART: "partial",
        SIZES_IN_PART: "partial",
    }, prepared.options
