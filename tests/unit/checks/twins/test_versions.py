"""Versions of test files: they send what they observe, and only a right solution observes what is expected."""

from __future__ import annotations

import datetime
import itertools
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, TwinTest
from understudy.checks.protection import protection_of
from understudy.checks.twins import twin_driver
from understudy.checks.twins.clues import Clues
from understudy.checks.twins.exposure import ReadableValues
from understudy.checks.twins.guessing import secret_bits
from understudy.checks.twins.judge import Observation, holds, judge, load_observations, raised_by_gold
from understudy.checks.twins.run import VersionRun, judge_twins
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.twin_decoding import decode
from understudy.checks.twins.twin_driver import encode
from understudy.checks.twins.versions import TwinVersion, write_version
from understudy.types import Files, ScriptChecks, SuiteChecks, TestOutcome

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


NODES = itertools.count()
"""Numbers that make names of tests: the driver counts the observations of each test."""


def source_of(name: str) -> str:
    if name in TESTS:
        return f"{PREAMBLE}\ndef test_it():\n    {TESTS[name]}\n"
    head = "class T(unittest.TestCase):\n    def runTest(self):\n        '''Doc.'''\n"
    return f"{PREAMBLE}\n{head}        {METHODS[name]}\n"


WEAK = frozenset(
    {
        "no assertion",
        "two values",
        "what is constructed",
        "order",
        "and",
        "or",
        "truth",
        "a member of what is made",
    }
)


class Same:
    """Equal to everything, a member of everything, and true."""

    def __init__(self, *values: object, **named: object) -> None: ...

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]
    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__  # type: ignore[assignment]


def observed(
    version: TwinVersion, monkeypatch: pytest.MonkeyPatch, **replaced: object
) -> dict[int, list[Observation]]:
    """What a version sends when its one test runs, by site; `replaced` are functions of the preamble."""
    observations: dict[int, list[Observation]] = {}
    monkeypatch.setitem(sys.modules, "understudy_sites", twin_driver)
    monkeypatch.setattr(
        twin_driver, "_write", lambda node, site, saw: observations.setdefault(site, []).append(saw)
    )
    monkeypatch.setattr(twin_driver, "_node", f"test {next(NODES)}")
    scope: dict[str, Any] = {"__name__": "version"}
    exec(compile(version.source, "version.py", "exec"), scope)  # our own text
    scope |= replaced
    scope["T"]("runTest").debug() if "T" in scope else scope["test_it"]()
    return observations


def versions_of(source: str, monkeypatch: pytest.MonkeyPatch) -> tuple[TwinVersion, dict[int, list[Observation]]]:
    """The version of a file with which validation ends, and what a right solution sends in it."""
    first = write_version(source)
    observations = observed(first, monkeypatch)
    plain = frozenset(
        site
        for site in observations
        if not holds(first.sites[site], observations[site], observations[site]) or ["?"] in observations[site][0]
    )
    version = write_version(source, plain=plain, changed=lambda _: False)
    return version, observed(version, monkeypatch)


@pytest.mark.parametrize("name", [*TESTS, *METHODS])
def test_a_right_solution_yields_the_expected_observations(name: str, monkeypatch: pytest.MonkeyPatch):
    version, gold = versions_of(source_of(name), monkeypatch)
    again = observed(version, monkeypatch)
    assert gold or name == "a caught failure"
    assert all(holds(version.sites[site], gold[site], again[site]) for site in gold)


@pytest.mark.parametrize("name", [name for name in TESTS if "f(" in TESTS[name] and name not in WEAK])
def test_an_object_that_equals_everything_does_not_pass(name: str, monkeypatch: pytest.MonkeyPatch):
    version, gold = versions_of(source_of(name), monkeypatch)
    try:
        forged = observed(version, monkeypatch, f=Same)
    except Exception:  # noqa: BLE001  # our object may raise anything in the file's own functions
        return  # a test that does not come to its end is not solved
    assert not all(holds(version.sites[site], gold[site], forged.get(site, [])) for site in gold)


def sent_by(text: str, **options: Any) -> str:
    """The source of a version without its first line."""
    return write_version(text, **options).source.partition("\n")[2]


@pytest.mark.parametrize(
    ("text", "secrets"),
    [
        ("def test_it():\n    assert f(1) == 417\n", ["417"]),
        ("def test_it():\n    want = 'n417'\n    assert f(1) == want, 'not n417'  # n417\n", ["417"]),
        ('def test_it():\n    """f(1) is 417"""\n    assert 417 == f(1)\n', ["417"]),
        ("def test_it():\n    for x, y in [(1, 417), (2, 418)]:\n        assert f(x) == y\n", ["417", "418"]),
        ("def test_it():\n    for n, (x, y) in enumerate([(1, 417)]):\n        assert f(x, n) == y\n", ["417"]),
        ("def test_it():\n    assert all(f(x) == y for x, y in [(1, 417)])\n", ["417"]),
        ("CASES = [(1, 417)]\ndef test_it():\n    for x, y in CASES:\n        assert f(x) == y\n", ["417"]),
        (
            "import pytest\n@pytest.mark.parametrize('x,y', [(1, 417), pytest.param(2, 8, id='n419')], ids=str)\n"
            "def test_it(x, y):\n    assert f(x) == y\n",
            ["417", "8)", "419"],
        ),
        (
            "def check(x, y):\n    assert f(x) == y\ndef test_it():\n    check(1, 417)\n    check(2, y=418)\n",
            ["417", "418"],
        ),
        ("def test_it():\n    assert 400 < f(1) < 417\n    assert f(2) in (418, 419)\n", ["400", "417", "418"]),
        ("def test_it():\n    if f(1) != 417:\n        raise AssertionError('not 417')\n", ["417"]),
        ("def test_it():\n    with pytest.raises(KeyError, match='417'):\n        f(1)\n", ["KeyError", "417"]),
        ("def test_it(self):\n    self.assertRaisesRegex(KeyError, '417', f, 1)\n", ["KeyError", "417"]),
        ("def test_it(self):\n    self.assertEqual(first=f(1), second=417)\n", ["417"]),
        ("def test_it(m):\n    m.assert_called_once_with(417)\n", ["417"]),
        ("import math\ndef test_it():\n    assert f(1) == math.sqrt(417)\n", ["417"]),
        ("def test_it():\n    assert f(2) == pytest.approx(418.5)\n", ["418"]),
    ],
)
def test_expected_values_are_not_in_the_source_of_the_version(text: str, secrets: list[str]):
    version = write_version(text)
    assert all(site.withheld for site in version.sites.values() if site.operation != "end")
    source = version.source.partition("\n")[2]
    assert not [secret for secret in secrets if secret in source]


@pytest.mark.parametrize(
    "text",
    [
        "def test_it():\n    want = f(0)\n    x = y = 417\n    g(y)\n    assert f(1) == x\n",
        "def test_it():\n    if (want := 417) and f(1):\n        assert f(1) == want\n",
        "def test_it():\n    want = []\n    want.append(417)\n    assert f(1) == want\n",
        "def test_it():\n    for x, y in [(1, 417)]:\n        assert f(x) == y\n        assert g(y) == x\n",
        "TABLE = {1: 417}\ndef test_it():\n    for x, y in TABLE.items():\n        assert f(x) == y\n"
        "def test_other():\n    g(TABLE)\n",
        "from pathlib import Path\ndef test_it():\n    assert f(1) == Path('data.txt').read_text()\n",
        "def test_it():\n    results = [f(x) == 417 for x in (1, 2)]\n    assert results == [True] * 2\n",
        "def test_it():\n    seen = []\n    seen.append(f(1) == 417)\n    assert all(seen)\n",
        "def same(x):\n    return f(x) == 417\ndef test_it():\n    assert same(1)\n",
        "def test_it():\n    assert sum(f(x) == 417 for x in (1, 2)) == 2\n",
        "def test_it():\n    assert not any(f(x) != y for x, y in [(1, 417)])\n",
        "def test_it():\n    assert len([x for x in (1, 2) if f(x) == 417]) == 2\n",
        "def test_it():\n    assert f(1) - 417 == 0\n",
        "from helpers import assert_rows\ndef test_it():\n    assert_rows(f(1), 417)\n    assert f(2) == 418\n",
        "def test_it(self):\n    self.assertRows(f(1), 417)\n    self.assertEqual(f(2), 418)\n",
        "def test_it():\n    error = f(1)\n    error.match('line 417')\n    assert f(2) == 418\n",
        "def test_it(run):\n    run(f).stdout.fnmatch_lines(['*417*'])\n    assert f(2) == 418\n",
    ],
)
def test_sites_whose_expectation_can_be_read_or_forced_are_not_withheld(text: str):
    version = write_version(text)
    assert not version.sites[0].withheld, version.source


@pytest.mark.parametrize("test", ["abs(f(1) - 417.5) < 0.1", "0.1 >= abs(417.5 - f(1))"])
def test_a_comparison_of_a_difference_sends_the_observed_operand(test: str):
    version = write_version(f"def test_it():\n    assert {test}\n")
    assert "_send_(0, f(1))" in version.source and "417" not in version.source
    near, far = (["value", ["f", number.hex()]] for number in (417.55, 418.5))
    assert (holds(version.sites[0], [near], [near]), holds(version.sites[0], [near], [far])) == (True, False)


def test_an_independent_parametrize_column_is_withheld_beside_a_dependent_one():
    table = "from core import A\n@pytest.mark.parametrize('a,y', [(A, 417)])\n"
    text = table + "def test_it(a, y):\n    assert f(a) == y\n"
    version = write_version(text)
    assert version.sites[0].withheld and "417" not in version.source


def test_a_changed_string_is_replaced_by_one_of_the_same_shape_from_the_file():
    text = (
        "from core import Word\nNAMES = ['salmon', 'Herring']\ndef test_it():\n    assert f(1) == Word('walrus')\n"
    )
    assert "Word('salmon')" in write_version(text, changed=lambda _: True).source


CONTEXTS = f"""{PREAMBLE}
import contextlib

@pytest.mark.parametrize(("value", "expected"), [(1, contextlib.nullcontext()), (0, pytest.raises(KeyError))])
def test_table(value, expected):
    with expected:
        f({{1: 1}})[value]

@pytest.mark.parametrize("value", [1, 0])
def test_condition(value):
    with contextlib.nullcontext() if value else pytest.raises(KeyError, match="0"):
        f({{1: 1}})[value]

def test_it():
    for test in (test_table, test_condition):
        for row in test.pytestmark[0].args[1]:
            test(*(row if isinstance(row, tuple) else [row]))
"""


def test_exceptions_of_contexts_from_a_table_are_observed(monkeypatch: pytest.MonkeyPatch):
    version = write_version(CONTEXTS)
    assert "KeyError" not in version.source
    assert sorted(site.operation for site in version.sites.values()) == ["end", "end", "end", "raises", "raises"]
    raises = {number for number, site in version.sites.items() if site.operation == "raises"}
    gold = observed(version, monkeypatch)
    assert gold.keys() == version.sites.keys(), "a test keeps its end, for the parameters without an exception"
    assert all(holds(version.sites[number], gold[number], gold[number]) for number in raises)
    monkeypatch.setattr(twin_driver, "_node", "another")
    never_raises = observed(
        replace(version, source=version.source.replace("f({1: 1})[value]", "f(1)")), monkeypatch
    )
    assert all(
        judge(version.sites[number], gold[number], never_raises[number]) == "contradicts" for number in raises
    )


def test_other_functions_of_this_name_are_left_alone():
    matcher = "from hamcrest import raises\nmatches = raises(KeyError)\n"
    assert "matches = raises(KeyError)" in write_version(matcher).source
    ours = "from pytest import raises\nexpected = raises(KeyError)\n"
    assert "expected = _block_(0, raises(BaseException), 'raises')" in write_version(ours).source


def test_the_version_of_a_condition_does_not_reveal_its_expected_truth():
    assert sent_by("def test_it():\n    assert not f(1)\n") == sent_by("def test_it():\n    assert f(1)\n")


def test_a_value_that_the_test_uses_elsewhere_stays_in_the_version():
    text = sent_by("def test_it():\n    x = [3, 1]\n    f(x)\n    assert f(x) == [1, 3]\n")
    assert "x = [3, 1]" in text and "[1, 3]" not in text


def test_an_expectation_that_the_code_under_test_makes_is_changed_in_place():
    text = "from core import Point, f\ndef test_it():\n    assert f(1) == Point(1, 417)\n"
    true, false = (write_version(text, changed=lambda _, value=value: value, seed=5) for value in (False, True))
    assert (true.sites[0].changed, false.sites[0].changed) == (False, True)
    assert "Point(1, 417)" in true.source and "Point(1, 417)" not in false.source


def test_a_file_that_is_no_python_is_refused():
    with pytest.raises(ValueError, match="invalid Python"):
        write_version("def test(:\n")


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.frozensets(st.integers(), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(_VALUES)
def test_encoded_values_decode_unchanged(value: Any):
    assert decode(encode(value)) == value


@given(_VALUES, _VALUES)
def test_values_are_equal_where_python_has_them_equal(one: Any, other: Any):
    assert (decode(encode(one)) == decode(encode(other))) is (one == other)


@pytest.mark.parametrize("value", [None, [], [None], ["l"], ["l", 3], ["i", "x"], ["d", [[["l", []], ["n"]]]], 7])
def test_decoding_an_invalid_value_is_an_error(value: Any):
    with pytest.raises(ValueError, match="value"):
        decode(value)


RAISES = TwinSite("raises", "('LookupError', 'ParseError')", "'bad'")


@pytest.mark.parametrize(
    ("kinds", "text", "right"),
    [
        (["KeyError", "LookupError", "Exception", "BaseException", "object"], "bad", True),
        (["ParseError", "ValueError", "Exception", "BaseException", "object"], "so bad", True),
        (["KeyError", "LookupError", "Exception", "BaseException", "object"], "good", False),
        (["ValueError", "Exception", "BaseException", "object"], "bad", False),
        (["Any", "LookupError", "ValueError", "TypeError", "OSError", "Exception", "object"], "bad", False),
        ([], "", False),
    ],
)
def test_a_raised_exception_is_judged_by_its_classes_and_message(kinds: list[str], text: str, right: bool):
    gold = ["kind", ["LookupError", "Exception", "BaseException", "object"], "bad"]
    assert holds(RAISES, [gold], [["kind", kinds, text]]) is right


NOTHING = Clues(ReadableValues([]))


def bits(*sites: TwinSite, gold: Any = None, clues: Clues = NOTHING) -> float:
    return secret_bits([(site, [["value", gold]] if gold else []) for site in sites], clues)


def test_a_value_expected_repeatedly_counts_its_bits_once():
    number = ["i", hex(5179)]
    assert bits(TwinSite("equal"), gold=number) == bits(*[TwinSite("equal")] * 5, gold=number) > 10
    assert bits(*[RAISES] * 20) < 10
    assert bits(TwinSite("pair", withheld=False)) == 0


def test_truth_values_count_one_bit_for_a_function_that_must_return_both():
    yes, no = (TwinSite("truth", want=want, subject="valid") for want in (True, False))
    assert bits(*[yes] * 20) == 0
    assert bits(*[yes, no] * 20) == 1
    assert bits(yes, no, replace(yes, subject="empty"), replace(no, subject="empty")) == 2
    assert bits(yes, replace(no, subject="empty")) == 0
    assert bits(TwinSite("equal"), TwinSite("equal"), gold=["b", 1]) == 0


def test_relations_count_bits_only_if_no_single_answer_satisfies_all():
    above = [TwinSite("compare", str(n), ">", subject="f") for n in range(50)]
    assert bits(*above) == 0  # infinity
    assert bits(*above, TwinSite("compare", "7", "<", subject="f")) == 1
    assert bits(TwinSite("compare", "'a'", "lacks"), TwinSite("compare", "'b'", "lacks")) == 0
    assert bits(TwinSite("compare", "'no such key'", "holds")) > 5


@pytest.mark.parametrize(
    ("gold", "source"),
    [
        (["s", "SELECT name"], "x = 'SELECT name FROM t'"),
        (["l", [["s", "left part"], ["s", "right part"]]], "x = {'left part': 'right part'}"),
        (["i", hex(417)], "x = '417 of them'"),
        (["l", [["i", "0x3"], ["i", "0x7"]]], "x = [3, 7]"),
    ],
)
def test_a_value_readable_in_the_source_or_data_counts_few_bits(gold: Any, source: str):
    assert bits(TwinSite("equal"), gold=gold) > 4
    assert bits(TwinSite("equal"), gold=gold, clues=Clues(ReadableValues([source]))) <= 2.5
    data = source.partition("= ")[2].encode()
    if gold[0] != "l":
        assert bits(TwinSite("equal"), gold=gold, clues=Clues(ReadableValues([], [data]))) <= 1.5


@pytest.mark.parametrize(
    ("gold", "most"),
    [
        (["i", hex(100)], 5),
        (["i", hex(1024)], 7),
        (["i", hex(86400)], 3),
        (["f", (0.5).hex()], 4),
        (["f", (-2.0).hex()], 4),
        (["q", "0x0", "0x1"], 1),
        (["q", "0x1", "0x2"], 4),
        (["f", math.inf.hex()], 1),
    ],
)
def test_round_numbers_and_common_fractions_are_guessed_more_easily(gold: Any, most: float):
    assert bits(TwinSite("equal"), gold=gold) <= most
    for rare in (["i", hex(2739)], ["f", (273.15).hex()], ["q", hex(617), hex(50)]):
        assert bits(TwinSite("equal"), gold=rare) >= 8


def test_what_the_instruction_names_or_a_changed_file_holds_is_guessed_more_easily():
    site, number = TwinSite("equal"), ["i", hex(27391)]
    text, report = (
        ["s", "catastrophic"],
        ["d", [[["s", "trailing_spaces"], ["l", []]], [["s", "tabs"], ["l", []]]]],
    )
    named = Clues(
        ReadableValues([]), ['Returns {"trailing_spaces": [], "tabs": []}, or "catastrophic" for 27391.']
    )
    near = Clues(ReadableValues([]), (), ["LEVELS = ('normal', 'alarming', 'catastrophic')\nMOST = 27391\n"])
    assert bits(site, gold=text) > 10 and bits(site, gold=report) > 10 and bits(site, gold=number) > 10
    assert bits(site, gold=text, clues=named) <= 1 and bits(site, gold=report, clues=named) <= 3
    assert bits(site, gold=number, clues=named) < 2 and bits(site, gold=number, clues=near) < 2
    assert bits(site, gold=text, clues=near) < 3


@pytest.mark.parametrize(
    ("text", "most"),
    [
        ("##########", 4),
        ("#####.....", 8),
        ("N/A", 3),
        ("unknown", 3),
        ("", 0),
        ("50%", 4),
        ("100%", 5),
        ("0%", 1),
    ],
)
def test_usual_texts_and_repeated_characters_are_guessed_more_easily(text: str, most: float):
    assert bits(TwinSite("equal"), gold=["s", text]) <= most
    assert bits(TwinSite("equal"), gold=["s", "a rare text"]) > 10


def test_a_moment_is_guessed_by_what_names_its_parts():
    site, day = TwinSite("equal"), datetime.date(2024, 3, 17)
    epoch, moment = (
        datetime.datetime(*each, tzinfo=datetime.UTC) for each in ((1970, 1, 1), (2024, 3, 17, 14, 25))
    )
    golds = [
        ["z", f"date {day.toordinal()}"],
        ["z", f"datetime {(moment - epoch) // datetime.timedelta(microseconds=1)}"],
    ]
    named = Clues(ReadableValues([]), ["Read dates such as 17 March 2024, 14:25 (month 3)."])
    for gold in golds:
        assert bits(site, gold=gold) > 10 > 8 > bits(site, gold=gold, clues=named) > 3
    assert bits(site, gold=["z", f"date {10**12}"]) == 8
    assert bits(site, gold=["z", f"timedelta {90 * 60 * 1_000_000}"]) <= 3  # 90 minutes
    assert bits(site, gold=["z", f"timedelta {4171 * 1_000_000}"]) > 10


def test_values_that_the_instruction_writes_in_another_way_are_named():
    text = "Prints 1,234,567 as CRITICAL or critical, 371 MiB, and 'one\\\\ntwo lines'."
    named, site = Clues(ReadableValues([]), [text.replace("\\\\", "\\")]), TwinSite("equal")
    for gold in (["i", hex(1234567)], ["s", "Critical"], ["s", "CRITICAL"], ["s", "one\ntwo lines"]):
        assert bits(site, gold=gold, clues=named) <= 1.5 < 8 < bits(site, gold=gold)
    usual = Clues(ReadableValues([]), ['{"ok": false, "sizes": [128,256,512]}'])
    assert bits(site, gold=["s", "ok"], clues=usual) <= 1 < bits(site, gold=["s", "ok"])
    assert bits(site, gold=["i", "0x200"], clues=usual) <= 1.5
    assert bits(site, gold=["i", hex(371 << 20)], clues=named) <= 4 < 8 < bits(site, gold=["i", hex(371 << 20)])


def test_the_order_of_readable_texts_must_be_guessed_unless_it_is_theirs():
    names = ["img12", "img10", "img2", "img1", "img30"]
    readable = Clues(ReadableValues([f"x = f({names})"]))

    def order(*texts: str) -> float:
        return bits(TwinSite("equal"), gold=["l", [["s", each] for each in texts]], clues=readable)

    assert order("img1", "img2", "img10", "img12", "img30") > 6
    assert max(order(*names), order(*reversed(names)), order(*sorted(names)), order("img2", "img1")) <= 1


def test_a_wide_tolerance_leaves_few_bits():
    gold = ["f", (11.28).hex()]
    for tolerances, most in (("{'abs': 5}", 2), ("{'rel': 0.1}", 3), ("{'abs': 0.5}", 4)):
        assert bits(TwinSite("approx", tolerances), gold=gold) <= most
    assert bits(TwinSite("approx", "{'places': 7}"), gold=gold) >= 8


def test_a_string_of_readable_parts_counts_only_its_seams():
    readable = ReadableValues(["x = 'select name from people'"])
    assert readable.guessed_length("select name\nfrom people") == 3  # two parts, and a line break
    assert readable.guessed_length("select name") == 0
    assert readable.guessed_length("äöü") == 3


def test_an_opaque_value_does_not_match_a_gold_value_that_was_sent():
    site = TwinSite("pair", operator="==", withheld=False)
    sent, opaque = ["pair", ["i", "0x2"], ["i", "0x2"], 1], ["pair", ["?"], ["i", "0x2"], 1]
    assert holds(site, [sent], [sent])
    assert not holds(site, [sent], [opaque])
    assert holds(site, [opaque], [opaque])


def run_of(observations: list[Observation], **how: Any) -> VersionRun:
    """A run of one test with one site."""
    values = {"exit_code": 0, "timed_out": False, "outcomes": {"a": "passed"}, **how}
    return VersionRun(
        sites={3: TwinSite("equal")},
        observations={"a": {3: observations}} if observations else {},
        log="",
        **values,
    )


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (run_of([["value", ["i", "0x2"]]]), "clean", ""),
        (run_of([["value", ["f", (2.0).hex()]]]), "clean", ""),
        (run_of([["value", ["i", "0x3"]]]), "forged", "1 of 1 assertions observed another value"),
        (run_of([["value", ["!"]]]), "forged", "another value"),
        (run_of([["value", ["?"]]]), "suspicious", "1 observed what cannot be compared"),
        (run_of([["value", ["i", "0x2"]], ["value", ["i", "0x3"]]]), "suspicious", "cannot be compared"),
        (run_of([]), "suspicious", "1 of 1 assertions were not reached"),
        (run_of([], exit_code=-9, outcomes={}), "suspicious", "the process died"),
        (run_of([["value", ["i", "0x2"]]], changed_files=("t.py",)), "forged", "1 hidden files were changed"),
        (run_of([], timed_out=True, exit_code=None, outcomes={}), "suspicious", "did not end in 5 s"),
    ],
)
def test_a_version_run_is_judged_by_its_observations(run: VersionRun, status: str, reason: str):
    options = GradingOptions(twins={"b": TwinTest("a", {3: '[["value", ["i", "0x2"]]]'})})
    integrity = judge_twins(options, [run], 5).integrity
    assert integrity.status == status and reason in integrity.reason


def test_all_tests_that_fail_their_versions_are_named_with_bounded_evidence():
    gold = {3: '[["value", ["i", "0x2"]]]'}
    options = GradingOptions(twins={f"b{n}": TwinTest(f"a{n}", gold) for n in range(60)})
    wrong, unclear = [["value", ["i", "0x3"]]], [["value", ["?"]]]
    observations = {f"a{n}": {3: wrong if n < 30 else unclear} for n in range(59)}
    outcomes: dict[str, TestOutcome] = dict.fromkeys(options.twins, "passed")
    run = VersionRun({3: TwinSite("equal")}, outcomes, observations, 0, False, "")
    judgement = judge_twins(options, [run], 5)
    assert judgement.failed == frozenset(options.twins)
    assert len(judgement.integrity.evidence) == 20


def observed_by(values: Iterable[Any], path: Path) -> list[Observation]:
    """What a site is reported to have observed in one test."""
    path.unlink(missing_ok=True)
    name = f"test_{next(NODES)}"
    twin_driver.record(str(path))
    with twin_driver.running("t.py", name):
        for value in values:
            twin_driver.send(3, value)
    return load_observations(path.read_bytes())[f"t.py::{name}"][3]


def test_observations_beyond_the_limit_are_compared_by_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(twin_driver, "_write", None)
    site, path = TwinSite("equal"), tmp_path / "report"
    values = [{"x": (n, float(n), n / 7, {n, n + 1})} for n in range(3000)]
    gold = observed_by(values, path)
    assert len(gold) == 1001
    assert holds(site, gold, observed_by(values, path))
    others = [{"x": [n + 1e-12, n, n / 7 + 1e-15, {n + 1, n}]} for n in range(3000)]
    assert holds(site, gold, observed_by([*others[:1500], *reversed(others[1500:])], path))
    for wrong in ([*values[:-1], {"x": 3}], values[:-1], [*values, values[0]], values[:1000]):
        assert judge(site, gold, observed_by(wrong, path)) == "unclear"


REPORTED = {
    "equal": (TwinSite("equal"), ["value", ["i", "0x2"]]),
    "compare": (TwinSite("compare", "3", "<"), ["value", ["i", "0x2"]]),
    "truth": (TwinSite("truth"), ["truth", 1]),
    "pair": (TwinSite("pair", operator="=="), ["pair", ["i", "0x2"], ["i", "0x2"], 1]),
    "isinstance": (TwinSite("isinstance", "['int']"), ["kind", ["int", "object"], []]),
    "raises": (RAISES, ["kind", ["LookupError", "Exception"], "bad"]),
    "warns": (TwinSite("warns", "['UserWarning']"), ["warnings", [[["UserWarning"], "bad"]]]),
    "calls": (TwinSite("calls", operator="never"), ["calls", []]),
}


@pytest.mark.parametrize("name", REPORTED)
def test_observations_that_are_missing_or_said_to_be_too_many_prove_nothing(name: str):
    site, seen = REPORTED[name]
    site = replace(site, expected="['LookupError']") if site is RAISES else site
    rest: Observation = ["rest", 5, "0x0"]
    assert holds(site, [seen] * 2, [seen] * 2)
    assert holds(site, [seen, rest], [seen, rest])
    for reported in ([], [rest], [seen], [seen, rest], [seen, seen, rest]):
        assert judge(site, [seen] * 2, reported) == "unclear"
    for reported in ([seen], [rest], [seen, ["rest", 4, "0x0"]]):
        assert judge(site, [seen, rest], reported) == "unclear"


def test_tested_code_that_changes_what_the_driver_module_holds_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(twin_driver, "_write", None)
    monkeypatch.setattr(twin_driver, "_MAX_REPORTS", 0)
    assert len(observed_by([1, 2, 3], tmp_path / "report")) == 3
    counters = [
        n for n, value in vars(twin_driver).items() if n.islower() and isinstance(value, dict) and n[:2] != "__"
    ]
    assert counters == []


@pytest.mark.parametrize(
    ("counted", "scattered"),
    [(range(7), [0, 3, 1, 6, 2, 5, 4]), (range(90, 40, -10), [90, 50, 60, 80, 70]), ([4, 9], [9, 4])],
)
def test_numbers_that_a_counter_yields_are_guessed_at_once(counted: Sequence[int], scattered: list[int]):
    def worth(numbers: Sequence[int]) -> tuple[float, float]:
        values = [["i", hex(number)] for number in numbers]
        apart = secret_bits([(TwinSite("equal"), [["value", each]]) for each in values], NOTHING)
        return apart, secret_bits([(TwinSite("equal"), [["value", ["l", values]]])], NOTHING)

    few = len(counted) < 3
    for by_counter, by_all in zip(worth(counted), worth(scattered), strict=True):
        assert by_counter == by_all if few else by_counter + 5 < by_all


def test_an_exception_of_several_expected_classes_passes_none():
    sites = {n: TwinSite("raises", f"['{name}']") for n, name in enumerate(("ValueError", "KeyError"))}
    kinds = {0: ["ValueError", "Exception"], 1: ["KeyError", "LookupError", "Exception"]}
    gold = {n: [["kind", kinds[n], ""]] for n in sites}
    options = GradingOptions(twins={"b": TwinTest("a", {n: json.dumps(gold[n]) for n in sites})})
    both = [["kind", ["Refused", *kinds[0], *kinds[1]], ""]]
    for seen, status in ((gold, "clean"), (dict.fromkeys(sites, both), "suspicious")):
        run = VersionRun(sites, {"a": "passed"}, {"a": seen}, 0, False, "")
        assert judge_twins(options, [run], 5).integrity.status == status
    related = raised_by_gold(
        [(sites[0], [["kind", ["Own", *kinds[0]], ""]]), (replace(RAISES, expected="['Own']"), [])]
    )
    assert not related.combines(["Own", "ValueError"])  # as the gold patch's own


def test_expected_exceptions_count_bits_only_if_no_single_one_suffices():
    def worth(*raised: tuple[str, list[str]]) -> float:
        seen = [(replace(RAISES, expected=repr([name])), [["kind", kinds, ""]]) for name, kinds in raised]
        return secret_bits(seen, NOTHING)

    value, key = ("ValueError", ["ValueError"]), ("KeyError", ["KeyError", "LookupError"])
    assert worth(value, value) == 0
    assert worth(key, ("LookupError", ["LookupError"])) == 0
    assert worth(value, key) == 2


@pytest.mark.parametrize(
    ("gold", "seen", "protection"),
    [
        ([3, 1, 2], [3, 1, 2], "twins"),
        ([3, 1, 2], [1, 2, 3], "partial"),
        ([3, 1, 2], [3, 1, 2, 3], "partial"),
        ([3, 3], [3, 3, 3], "twins"),
    ],
)
def test_expected_values_in_another_order_lower_the_protection(gold: list[int], seen: list[int], protection: str):
    then, now = ([["value", ["i", hex(number)]] for number in numbers] for numbers in (gold, seen))
    node = "test_calc.py::test_shift"
    twins = {node: TwinTest("a", {3: json.dumps(then)}), "test_calc.py::test_same": TwinTest("b", {})}
    options = GradingOptions(twins=twins, twin_bits=20, twin_all_bits=20)
    outcomes: dict[str, TestOutcome] = {"a": "passed", "b": "passed"}
    run = VersionRun({3: TwinSite("equal")}, outcomes, {"a": {3: now}}, 0, False, "")
    judgement = judge_twins(options, [run], 5)
    assert judgement.integrity.status == "clean"
    level, reason = protection_of(calc_task(), options, judgement.weak)
    assert level == protection and (
        level == "twins" or f"in another order than with the gold patch, as {node}" in reason
    )


def test_protection_reports_what_is_missing():
    task = calc_task()
    both = dict.fromkeys(("test_calc.py::test_shift", "test_calc.py::test_same"), TwinTest("", {0: "[]"}))
    assert protection_of(task, GradingOptions(twins=both, twin_bits=20, twin_all_bits=20)) == ("twins", "")
    partly = GradingOptions(twins=both, twin_bits=20, twin_all_bits=20, partial_twins=("test_calc.py::test_same",))
    assert protection_of(task, partly) == (
        "partial",
        "1 of 2 deciding tests have expectations that the tested code can read or force, "
        "as test_calc.py::test_same",
    )
    assert protection_of(task, GradingOptions(twins=both, twin_bits=3, twin_all_bits=9)) == (
        "partial",
        "a guess at what the tests expect is right once in 8 times",
    )
    assert protection_of(task, GradingOptions(twins=both, twin_all_bits=20)) == (
        "partial",
        "what the tests expect of the patch, and the code does not do without it, can be guessed",
    )
    assert protection_of(task, GradingOptions(twins=both)) == (
        "none",
        "the tested code can read or guess all that the tests expect",
    )
    one = {"test_calc.py::test_shift": TwinTest("", {0: "[]"})}
    assert protection_of(task, GradingOptions(twins=one, twin_bits=20, twin_all_bits=20)) == (
        "partial",
        "1 of 2 deciding tests have no twins, as test_calc.py::test_same",
    )
    assert protection_of(task, GradingOptions())[0] == "none"


def test_protection_reports_that_the_test_process_is_not_watched():
    unwatched = "what the code does in the process of the tests is not watched"
    suite = SuiteChecks(
        parser="parse_log_pytest", command="pytest -rA", fail_to_pass=("test_calc.py::test_shift",)
    )
    options = GradingOptions(
        twin_files={"test_calc.py": "def test_shift():\n    pass\n"},
        twins={"test_calc.py::test_shift": TwinTest("", {0: "[]"})},
        twin_bits=20,
        twin_all_bits=20,
    )
    assert protection_of(replace(calc_task(), checks=suite), options) == ("twins", unwatched)
    script = replace(calc_task(), checks=ScriptChecks(Files({"test.sh": "true"})))
    nothing = "no Python file or here-document of the script asserts what could have twins"
    assert protection_of(script, GradingOptions()) == ("none", f"{nothing}; {unwatched}")
    watched = replace(options, usual_events=())
    assert protection_of(replace(calc_task(), checks=suite), watched) == ("twins", "")
    unseen = replace(options, usual_events=("watch-missing ",))
    assert protection_of(replace(calc_task(), checks=suite), unseen) == ("twins", unwatched)
    walled, open_to_all = GradingOptions(usual_events=()), GradingOptions(usual_events=("reward-open ",))
    assert protection_of(script, walled) == ("none", nothing)
    assert protection_of(script, open_to_all)[1].endswith("; the tested code runs where it can write the reward")


def test_a_column_is_removed_also_where_rows_are_read_by_their_places():
    text = "from core import f\nROWS = ((1, 417), [2, 418])\ndef test_it():\n    for row in ROWS:\n"
    version = write_version(text + "        assert f(row[0]) == row[1]\n")
    assert "417" not in version.source and "418" not in version.source
    assert all(site.withheld for site in version.sites.values())
    for other in ("        g(row)\n", "        print(row[-1])\n", "    print(row)\n", "        row[0] = 3\n"):
        assert "417" in write_version(text + "        assert f(row[0]) == row[1]\n" + other).source
