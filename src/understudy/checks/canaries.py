"""Canaries: our own tests among a suite's. Some must pass and some must fail, or the suite is not believed.

A patch that makes failing tests look like passing ones has to know which tests those are. The canaries stand in
a file of their own beside the suite's, under names that nobody could know when the patch was written.
"""

from __future__ import annotations

import posixpath
import re
import secrets

from msgspec import Struct

from understudy.checks.log_parsers import (
    ERROR,
    FAILED,
    PARSERS,
    PASSED,
    ParsedLog,
    Parser,
    django,
    sympy,
)
from understudy.types import SuiteChecks

FAILED_CODE = 1
"""What every runner that we plant canaries for exits with when tests failed and nothing else went wrong."""

NONE_SEEN = "the canaries did not run"
"""What `complaint` says when nothing is seen of them."""


class Canaries(Struct, frozen=True):
    """A file to write at `path`, the `command` that runs it too, and the tests in it by name.

    `token` is in every one of their ids.
    """

    token: str
    path: str
    text: str
    command: str
    passing: tuple[str, ...]
    failing: tuple[str, ...]


_PYTEST = """\
import unittest

import pytest


def {passing[0]}():
    with pytest.raises(ZeroDivisionError):
        1 / 0
    assert [1, 2] == [1, 2]


def {failing[0]}():
    assert [1, 2] == [2, 1]


def {failing[1]}():
    with pytest.raises(ValueError):
        pass


class Test{token}(unittest.TestCase):
    def {passing[1]}(self):
        self.assertEqual(2, 1 + 1)

    def {failing[2]}(self):
        self.assertEqual(1, 2)

    def {failing[3]}(self):
        with self.assertRaises(ValueError):
            pass
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

_FORMS: dict[Parser, str] = {django: _UNITTEST, sympy: _SYMPY}
"""The tests of ours, by what reads their runner's output; all other parsers read pytest's."""

_SHELL = re.compile(r"[|;&<>\n]")


def plant_canaries(checks: SuiteChecks) -> Canaries | None:
    """Canaries for a suite; None where we know no form of test that its runner would run and its parser read."""
    parser = PARSERS.get(checks.parser)
    ids = (*checks.fail_to_pass, *checks.pass_to_pass)
    of_ids = {file for id in ids if (file := id.partition("::")[0]).endswith(".py") and " " not in file}
    siblings = [file for file in checks.files if file.endswith(".py")] or sorted(of_ids)
    if parser is None or not siblings:
        return None
    token = secrets.token_hex(8)
    passing = tuple(f"test_{token}{secrets.token_hex(2)}_{n}" for n in range(2))
    failing = tuple(f"test_{token}{secrets.token_hex(2)}_{n}" for n in range(2, 6))
    name, command = _target(checks.command, siblings, token)
    text = _FORMS.get(parser, _PYTEST).format(token=token, passing=passing, failing=failing)
    return Canaries(token, name, text, command, passing, failing)


def canary_problem(canaries: Canaries, reading: ParsedLog) -> str:
    """What is wrong with the canaries' results in the log; empty when all ended as they must."""
    if not any(canaries.token in id for id in reading.tests):
        return NONE_SEEN
    wrong: list[str] = []
    for names, expected in ((canaries.passing, {PASSED}), (canaries.failing, {FAILED, ERROR})):
        for name in names:
            statuses = {status for id, test in reading.tests.items() if name in id for status in test.counts}
            if not statuses or not statuses <= expected:
                wrong.append(f"{min(expected)} expected, {' and '.join(sorted(statuses)) or 'nothing'} seen")
    return f"{len(wrong)} of {len(canaries.passing + canaries.failing)} canaries: {wrong[0]}" if wrong else ""


def _target(command: str, siblings: list[str], token: str) -> tuple[str, str]:
    """The path of the canaries' file, and the command that tests it too.

    Where the command names a sibling, in whatever form, they are named in the same form after all others; else
    they are found as the sibling is.
    """
    last: tuple[int, str, str] | None = None  # where the name ends, the sibling, the canaries' name
    for word in re.finditer(r"\S+", command):
        for sibling in siblings:
            if name := _same_form(word[0].strip("'\""), sibling, _beside(sibling, token)):
                last = (word.end(), sibling, name)
    if last is None:
        return _beside(siblings[-1], token), command
    end, sibling, name = last
    command = command.rstrip()
    end = end if _SHELL.search(command[end:]) else len(command)
    return _beside(sibling, token), f"{command[:end]} {name}{command[end:]}"


def _same_form(word: str, sibling: str, canary: str) -> str:
    """The name of the canaries' file, in the form in which `word` names the sibling; empty when it does not."""
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
    """`tests/app/test_x.py` and `app.test_x` as dotted names."""
    name = name.removesuffix(".py").replace("/", ".") if "/" in name or name.endswith(".py") else name
    return name if re.fullmatch(r"\w+(\.\w+)*", name) else ""


def _beside(sibling: str, token: str) -> str:
    """A new file's path in the sibling's directory, of the form that the sibling's own name has."""
    stem = posixpath.basename(sibling).removesuffix(".py")
    name = f"{token}_test.py" if stem.endswith("_test") and not stem.startswith("test") else f"test_{token}.py"
    return posixpath.join(posixpath.dirname(sibling), name)
