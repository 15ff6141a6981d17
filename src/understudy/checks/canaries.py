"""Canaries: tests of ours that run within a suite. Some must pass and some must fail; otherwise the suite's output
is not trusted.

A patch that makes failing tests look as if they passed would have to know which tests must fail. The canaries are
in a file of their own beside the suite's, under names that could not be known when the patch was written.
"""

from __future__ import annotations

import ast
import posixpath
import re
import secrets
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from msgspec import Struct

from understudy.checks.log_parsers import (
    ERROR,
    FAILED,
    PARSERS,
    PASSED,
    Parser,
    django,
    sympy,
)
from understudy.types import SuiteChecks
from understudy.util.python_syntax import parse_module

FAILED_CODE = 1
"""The exit code of a test runner when tests failed and nothing else went wrong."""

CANARIES_NOT_RUN = "the canaries did not run"
"""The result of `canary_problem` if no canary is in the output."""


class Canaries(Struct, frozen=True):
    """A file to write at `path`, the `command` that runs it too, and its tests by name.

    `token` is a part of each test's id.
    """

    token: str
    path: str
    text: str
    command: str
    passing: tuple[str, ...]
    failing: tuple[str, ...]


# The canaries for pytest, in parts. They import only what the files beside them import, so that they do not change
# the suite.
_ASSERTS = """\
def {passing[0]}():
    assert [1, 2] == [1, 2]


def {failing[0]}():
    assert [1, 2] == [2, 1]
"""
_WITH_PYTEST = """

import pytest


def {failing[1]}():
    with pytest.raises(ValueError):
        pass
"""
_WITHOUT_PYTEST = """

def {failing[1]}():
    raise AssertionError
"""
_WITH_UNITTEST = """

import unittest


class Test{token}(unittest.TestCase):
    def {passing[1]}(self):
        self.assertEqual(2, 1 + 1)

    def {failing[2]}(self):
        self.assertEqual(1, 2)

    def {failing[3]}(self):
        with self.assertRaises(ValueError):
            pass
"""
_WITHOUT_UNITTEST = """

def {passing[1]}():
    assert 2 == 1 + 1


def {failing[2]}():
    assert not 1


def {failing[3]}():
    assert "a" in "b"
"""
_UNITTEST = """\
import unittest


class Test{token}(unittest.TestCase):
    def {passing[0]}(self):
        with self.assertRaises(ZeroDivisionError):
            1 / 0

    def {passing[1]}(self):
        self.assertEqual(2, 1 + 1)

    def {failing[0]}(self):
        assert [1, 2] == [2, 1]

    def {failing[1]}(self):
        with self.assertRaises(ValueError):
            pass

    def {failing[2]}(self):
        self.assertEqual(1, 2)

    def {failing[3]}(self):
        self.assertTrue(False)
"""
_SYMPY = """\
try:
    from sympy.testing.pytest import raises
except ImportError:
    from sympy.utilities.pytest import raises


def {passing[0]}():
    raises(ZeroDivisionError, lambda: 1 / 0)


def {passing[1]}():
    assert [1, 2] == [1, 2]


def {failing[0]}():
    assert [1, 2] == [2, 1]


def {failing[1]}():
    raises(ValueError, lambda: 1)


def {failing[2]}():
    assert not 1


def {failing[3]}():
    raise AssertionError
"""

_TEMPLATES: dict[Parser, str] = {django: _UNITTEST, sympy: _SYMPY}
"""The tests of ours, by what reads their runner's output; all other parsers read pytest's (`_pytest_template`)."""

_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)  # what imports stand in
_SHELL = re.compile(r"[|;&<>\n]")


def plant_canaries(checks: SuiteChecks, neighbours: Iterable[bytes]) -> Canaries | None:
    """Return canaries for a suite; None if there is no form of test that its runner would run and its parser read.

    `neighbours` are the contents of the test files beside which they will be placed.
    """
    parser = PARSERS.get(checks.parser)
    siblings = suite_files(checks)
    if parser is None or not siblings:
        return None
    token = secrets.token_hex(8)
    name, command = _canary_target(checks.command, siblings, token)
    return _canaries(token, name, command, _TEMPLATES.get(parser) or _pytest_template(neighbours))


def suite_files(checks: SuiteChecks) -> list[str]:
    """Return the Python files that a suite tests: those that it names, otherwise those in its test ids."""
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    files_of_ids = {file for id in ids if (file := id.partition("::")[0]).endswith(".py") and " " not in file}
    return [file for file in checks.files if file.endswith(".py")] or sorted(files_of_ids)


def pytest_canaries(file: str, neighbours: Iterable[bytes]) -> Canaries:
    """Return canaries for pytest beside the test file `file`; `neighbours` are the contents of the files that are
    run.
    """
    token = secrets.token_hex(8)
    return _canaries(token, _canary_path(file, token), "", _pytest_template(neighbours))


def _canaries(token: str, path: str, command: str, template: str) -> Canaries:
    passing = tuple(f"test_{token}{secrets.token_hex(2)}_{n}" for n in range(2))
    failing = tuple(f"test_{token}{secrets.token_hex(2)}_{n}" for n in range(2, 6))
    text = template.format(token=token, passing=passing, failing=failing)
    return Canaries(token, path, text, command, passing, failing)


def _pytest_template(neighbours: Iterable[bytes]) -> str:
    imported = frozenset[str]().union(*map(_imported_runners, neighbours))
    template = _ASSERTS + (_WITH_PYTEST if "pytest" in imported else _WITHOUT_PYTEST)
    return template + (_WITH_UNITTEST if "unittest" in imported else _WITHOUT_UNITTEST)


@lru_cache(maxsize=64)  # all rollouts of a task are tested by the same files
def _imported_runners(text: bytes) -> frozenset[str]:
    """Return which of `pytest` and `unittest` a file imports; none if this Python cannot parse the file."""
    if b"pytest" not in text and b"unittest" not in text:
        return frozenset()
    try:
        pending: list[ast.AST] = [parse_module(text)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return frozenset()
    names: set[str] = set()
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
        pending += (child for child in ast.iter_child_nodes(node) if isinstance(child, _STATEMENTS))
    return frozenset(names & {"pytest", "unittest"})


def canary_problem(canaries: Canaries, results: Mapping[str, Collection[str]]) -> str:
    """Return what is wrong with the canaries' results; "" if all ended as they must.

    `results` maps all test ids to statuses, in the words of `log_parsers`.
    """
    if not any(canaries.token in id for id in results):
        return CANARIES_NOT_RUN
    problems: list[str] = []
    for names, expected in ((canaries.passing, {PASSED}), (canaries.failing, {FAILED, ERROR})):
        for name in names:
            observed = {status for id, statuses in results.items() if name in id for status in statuses}
            if not observed or not observed <= expected:
                problems.append(f"{min(expected)} expected, {' and '.join(sorted(observed)) or 'nothing'} seen")
    return (
        f"{len(problems)} of {len(canaries.passing + canaries.failing)} canaries: {problems[0]}"
        if problems
        else ""
    )


def _canary_target(command: str, siblings: list[str], token: str) -> tuple[str, str]:
    """Return the path of the canaries' file, and the command that tests it too.

    If the command names a sibling file, in whatever form, the canaries' file is added in the same form after the
    last name; otherwise the runner finds it as it finds the siblings.
    """
    last_match: tuple[int, str, str] | None = (
        None  # the position after the name, the sibling, and the canaries' name
    )
    for word in re.finditer(r"\S+", command):
        for sibling in siblings:
            if name := _same_form(word[0].strip("'\""), sibling, _canary_path(sibling, token)):
                last_match = (word.end(), sibling, name)
    if last_match is None:
        return _canary_path(siblings[-1], token), command
    end, sibling, name = last_match
    command = command.rstrip()
    end = end if _SHELL.search(command[end:]) else len(command)
    return _canary_path(sibling, token), f"{command[:end]} {name}{command[end:]}"


def _same_form(word: str, sibling: str, canary: str) -> str:
    """Return the canaries' file name in the form in which `word` names the sibling; "" if it does not name it."""
    for form in (_as_path, _as_module):
        target = form(word)
        name = form(sibling)
        if target and (name == target or name.endswith(("/" + target, "." + target))):
            return form(canary)[len(name) - len(target) :]
        if name and target.endswith("/" + name):
            return target.removesuffix(name) + form(canary)
    return ""


def _as_path(name: str) -> str:
    path = posixpath.normpath(name.partition("::")[0])
    return path if path.endswith(".py") else ""


def _as_module(name: str) -> str:
    """Return `tests/app/test_x.py` or `app.test_x` as a dotted name."""
    name = name.removesuffix(".py").replace("/", ".") if "/" in name or name.endswith(".py") else name
    return name if re.fullmatch(r"\w+(\.\w+)*", name) else ""


def _canary_path(sibling: str, token: str) -> str:
    """Return a new path in the sibling's directory, of the same form as the sibling's name."""
    stem = posixpath.basename(sibling).removesuffix(".py")
    name = f"{token}_test.py" if stem.endswith("_test") and not stem.startswith("test") else f"test_{token}.py"
    return posixpath.join(posixpath.dirname(sibling), name)
