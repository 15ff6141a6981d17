"""Versions of test files: a right solution holds at every site exactly where its expectation is true."""

from __future__ import annotations

import random
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.checks import twin_driver
from understudy.checks.base import GradingOptions
from understudy.checks.twin_driver import another, change, decides, key_for
from understudy.checks.twin_run import SiteReport, TwinRun, protection_of, stable_sites, versions_needed
from understudy.checks.twins import write_version
from understudy.types import PytestChecks

from support import calc_task

PREAMBLE = '''"""A file with a docstring."""

from __future__ import annotations
import collections
import contextlib
import decimal
import unittest
import warnings
import pytest

Point = collections.namedtuple("Point", "x y")

def f(x): return x
def fail(kind): raise kind("because of 17")
'''

TESTS = {
    "an equality with a number": "assert f(3) == 3",
    "a negative number": "assert f(-3.5) == -3.5",
    "a literal on the left": "assert 'abc' == f('abc')",
    "with a message": "assert f(3) == 3, fail(ValueError)",
    "two values": "assert f(3) == f(3)",
    "an approximation": "assert f(3.0) == pytest.approx(3.0000001)",
    "an approximation of a name": "near = 3.0\n    assert f(near) == pytest.approx(near + 0)",
    "an empty list": "assert f([]) == []",
    "an empty dict": "assert f({}) == {}",
    "an empty text": "assert f('') == ''",
    "nested containers": "assert f([{'a': (1, 2)}, {3}]) == [{'a': (1, 2)}, {3}]",
    "what is constructed": "assert f(Point(1, 2)) == Point(1, 2)",
    "a decimal": "value = decimal.Decimal('1.5')\n    assert f(value) == value",
    "a text over lines": 'assert f("""a\n  b""") == """a\n  b"""',
    "bytes": "assert f(b'ab') == b'ab'",
    "parentheses over lines": "assert (\n        f(1)\n        == 1  # one\n    )",
    "identity": "assert f(None) is None",
    "no identity": "assert f(1) is not None",
    "truth": "assert f([1])",
    "no truth": "assert not f([])",
    "order": "assert f(1) < 2",
    "a member": "assert 'b' in f('abc')",
    "no member": "assert 'd' not in f('abc')",
    "a member of what is made": "assert f(1) in [f(0), f(1)]",
    "an inequality": "assert f(1) != 2",
    "a kind": "assert isinstance(f(1), int)",
    "and": "assert f(1) == 1 and f(2) == 2",
    "or": "assert f(1) == 2 or f(2) == 2",
    "all": "assert all(f(x) == x for x in (1, 2))",
    "an exception": "with pytest.raises(ValueError):\n        fail(ValueError)",
    "one of several exceptions": "with pytest.raises((KeyError, ValueError), match='17'):\n"
    "        fail(ValueError)",
    "an exception that is looked at": "with pytest.raises(ValueError) as caught:\n        fail(ValueError)\n"
    "    assert caught.value.args == ('because of 17',)",
    "an exception of a call": "pytest.raises(ValueError, fail, ValueError)",
    "the end of a process": "with pytest.raises(SystemExit):\n        fail(SystemExit)",
    "a warning": "with pytest.warns(UserWarning):\n        warnings.warn('x')",
    "an expected name": "expected = {'a': 1}\n    assert f({'a': 1}) == expected\n"
    "    assert expected == f({'a': 1})",
    "a name with another use": "expected = [1, 2]\n    assert f(expected) == expected",
    "a loop": "for value, expected in [(1, 1), (2, 2)]:\n        assert f(value) == expected",
    "a nested function": "def check(value, expected):\n        assert f(value) == expected\n    check(1, 1)",
    "no assertion": "f(1)",
    "a caught failure": "with pytest.raises(AssertionError):\n        assert f(1) == 2",
}
METHODS = {
    "assertEqual": "self.assertEqual(f(1), 1)",
    "assertEqual, expected first": "self.assertEqual('x', f('x'))",
    "assertTrue": "self.assertTrue(f(1))",
    "assertTrue of an equality": "self.assertTrue(f(1) == 1)",
    "assertFalse": "self.assertFalse(f(0), 'message')",
    "assertIsNone": "self.assertIsNone(f(None))",
    "assertIsInstance": "self.assertIsInstance(f(1), int)",
    "assertIn": "self.assertIn('b', f(['ab', 'b']))",
    "assertNotIn": "self.assertNotIn(3, f([1, 2]))",
    "assertGreater": "self.assertGreater(f(2), 1)",
    "assertRegex": "self.assertRegex(f('abc'), r'^a\\w')",
    "assertAlmostEqual": "self.assertAlmostEqual(f(1.0), 1.00000001)",
    "assertCountEqual": "self.assertCountEqual(f([1, 2]), [2, 1])",
    "assertRaises": "self.assertRaises(ValueError, fail, ValueError)",
    "assertRaises, a context": "with self.assertRaises(ValueError):\n            fail(ValueError)",
    "assertRaises, looked at": "with self.assertRaises(ValueError) as caught:\n            fail(ValueError)\n"
    "        self.assertEqual(str(caught.exception), 'because of 17')",
    "assertRaisesRegex": "self.assertRaisesRegex(ValueError, '17', fail, ValueError)",
    "subTest": "for value in (1, 2):\n            with self.subTest(value=value):\n"
    "                self.assertEqual(f(value), value)",
}


def source_of(name: str) -> str:
    if name in TESTS:
        return f"{PREAMBLE}\ndef test_it():\n    {TESTS[name]}\n"
    head = "class T(unittest.TestCase):\n    def runTest(self):\n        '''Doc.'''\n"
    return f"{PREAMBLE}\n{head}        {METHODS[name]}\n"


def reports_of(
    source: str, changed: frozenset[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[int, set[int]], Any]:
    """What a version reports when its one test runs, by site, and the version."""
    version = write_version(source, lambda site: site in changed, seed=7)
    reports: dict[int, set[int]] = {}
    monkeypatch.setitem(sys.modules, "understudy_twin_driver", twin_driver)
    monkeypatch.setattr(twin_driver, "report", lambda site, held: reports.setdefault(site, set()).add(held))
    scope: dict[str, Any] = {"__name__": "version"}
    exec(compile(version.source, "version.py", "exec"), scope)  # our own text
    scope["T"]("runTest").debug() if "T" in scope else scope["test_it"]()
    return reports, version


@pytest.mark.parametrize("name", [*TESTS, *METHODS])
def test_a_right_solution_fails_a_changed_site_and_no_other(name: str, monkeypatch: pytest.MonkeyPatch):
    source = source_of(name)
    unchanged, version = reports_of(source, frozenset(), monkeypatch)
    assert all(held == {1} for held in unchanged.values())
    if name != "a caught failure":
        assert unchanged
    for deciding in range(len(version.changed)):
        reports, changed = reports_of(source, frozenset({deciding}), monkeypatch)
        assert reports == {site: {int(not changed.changed[site])} for site in unchanged}


def test_both_candidates_of_a_literal_are_written_alike():
    source = source_of("a text over lines")
    true, false = (write_version(source, lambda site, value=value: value, 3).source for value in (False, True))
    [(before, after)] = [(a, b) for a, b in zip(true.splitlines(), false.splitlines(), strict=True) if a != b]
    assert "'a\\n  b'" in before and len(before) == len(after)


def test_a_name_that_only_expects_is_changed_where_it_gets_its_value():
    source = textwrap.dedent("""
        def test_it(value, expected):
            assert f(value) == expected
    """)
    text = write_version(source, lambda site: True, 3).source
    assert "    expected = _change_(expected, " in text
    assert "assert f(value) == expected\n" in text


def test_a_file_that_is_no_python_is_refused():
    with pytest.raises(ValueError, match="invalid Python"):
        write_version("def test(:\n", lambda site: False, 0)


@given(st.booleans(), st.integers(0, 2**63))
def test_a_key_says_what_it_was_made_for(changed: bool, seed: int):
    assert decides(key_for(changed, seed)) is changed


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_VALUES, st.integers(0, 2**32))
def test_another_value_differs(value: Any, seed: int):
    assert another(value, random.Random(seed)) != value
    assert change(value, key_for(False, seed)) is value


@given(st.lists(st.integers(-50, 50) | st.text("abc", max_size=4), min_size=1, max_size=4), st.integers(0, 2**32))
def test_another_container_has_another_first_element(value: list[Any], seed: int):
    assert value[0] not in another(value[:1], random.Random(seed))


def test_a_test_to_fix_with_few_sites_runs_more_often():
    checks = PytestChecks(files={}, fail_to_pass=("a", "b"), pass_to_pass=("c",))
    counts = versions_needed(checks, {"a": (0,), "b": (0, 1, 2, 3, 4, 5), "c": (0,)})
    assert counts == {"a": 8, "b": 4, "c": 4}


def test_protection_says_what_is_missing():
    task = calc_task()
    both = {"test_calc.py::test_shift": (0,), "test_calc.py::test_same": (1,)}
    assert protection_of(task, GradingOptions(twins=both)) == ("twins", "")
    assert protection_of(task, GradingOptions(twins=both, partial_twins=("test_calc.py::test_same",))) == (
        "partial",
        "1 of 2 deciding tests have values that twins cannot change, as test_calc.py::test_same",
    )
    assert protection_of(task, GradingOptions(twins={"test_calc.py::test_shift": (0,)})) == (
        "partial",
        "1 of 2 deciding tests have no twins, as test_calc.py::test_same",
    )
    assert protection_of(task, GradingOptions())[0] == "none"


def test_a_test_that_is_only_negated_is_protected_in_part():
    reports = [
        SiteReport("passed", {0: True, 1: False}, {0: frozenset({1}), 1: frozenset({0})}, frozenset({0, 1})),
        SiteReport("passed", {0: False, 1: True}, {0: frozenset({0}), 1: frozenset({1})}, frozenset({0, 1})),
    ]
    stable = stable_sites([TwinRun({"a": reports})])
    assert (stable.sites, stable.partial) == ({"a": (0, 1)}, ("a",))


def test_a_site_that_gold_does_not_tell_apart_is_left_out():
    reports = [
        SiteReport("passed", {0: True, 1: False}, {0: frozenset({1}), 1: frozenset({1})}, frozenset()),
        SiteReport("passed", {0: False, 1: True}, {0: frozenset({0}), 1: frozenset({1})}, frozenset()),
    ]
    stable = stable_sites([TwinRun({"a": reports})])
    assert (stable.sites, stable.partial) == ({"a": (0,)}, ("a",))
