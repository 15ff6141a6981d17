"""Changing the literals of a test file: what changes alike, and what stays."""

from __future__ import annotations

import ast
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.checks.input_changes import InputChanges, change_inputs, draw_tokens, tokens_of, words_of_code

CODE = 'UNITS = {"MiB": 1 << 20}\n\ndef size(text):\n    """Parse gigabytes."""\n    return text\n'
TESTS = '''\
import pytest
from core import size

@pytest.mark.parametrize("text, other", [("12 MiB", "Kim"), ("2024-02-16", "kim KIM")])
def test_size(text, other, monkeypatch):
    """About 77 apples."""
    monkeypatch.setenv("HOME", "elsewhere")
    assert size(text, limit=4096, rel=0.25)[3] == {"Kim": 0.375, "flag": True, "one": 1}["Kim"]
    assert f"{size} 55 pears" == "pears"
'''


def changed(text: str, changes: dict[str, str], seed: int = 0, *, longer: bool = False) -> str:
    tree = ast.parse(text)
    change_inputs(tree, InputChanges(changes, seed, longer))
    return ast.unparse(ast.fix_missing_locations(tree))


def test_numbers_and_words_of_literals_can_be_changed() -> None:
    assert tokens_of(TESTS) == {
        "12",
        "2024",
        "02",
        "16",
        "4096",
        "0",
        "375",
        "1",
        "mib",
        "kim",
        "flag",
        "one",
        "pears",
    }
    assert {"units", "mib", "size", "text"} <= words_of_code([CODE])
    assert "gigabytes" not in words_of_code([CODE])
    assert {"not", "python"} <= words_of_code(["not python ("])


def test_equal_tokens_change_alike_and_what_names_something_stays() -> None:
    source = changed(
        TESTS, {"12": "34", "kim": "bob", "02": "11", "25": "99", "55": "44", "77": "66", "home": "none"}
    )
    assert "('34 MiB', 'Bob'), ('2024-11-16', 'bob BOB')" in source
    assert "{'Bob': 0.375, 'flag': True, 'one': 1}['Bob']" in source
    assert all(kept in source for kept in ("rel=0.25", "'HOME'", "[3]", "55 pears", "77 apples", "'text, other'"))


def test_without_changes_a_file_stays_as_it_is() -> None:
    assert changed(TESTS, {}) == ast.unparse(ast.parse(TESTS))


def test_words_that_the_code_knows_stay() -> None:
    changes = draw_tokens(tokens_of(TESTS), words_of_code([CODE]), random.Random(1))
    assert "mib" not in changes
    assert changes["kim"] != "kim"
    assert {"0", "1"}.isdisjoint(changes)


def test_a_file_that_is_not_python_is_refused() -> None:
    with pytest.raises(ValueError, match="invalid Python"):
        tokens_of("def (")


@given(st.sets(st.integers(0, 10**19)), st.integers())
def test_numbers_stay_in_their_range_and_order(numbers: set[int], seed: int) -> None:
    tokens = {str(number) for number in numbers}
    changes = draw_tokens(tokens, frozenset(), random.Random(seed))
    assert all(len(other) == len(token) for token, other in changes.items())
    for begin, end in (
        (0, 2),
        (2, 9),
        (9, 10),
        (10, 13),
        (13, 24),
        (24, 29),
        (29, 32),
        (32, 60),
        (60, 100),
        (1900, 2100),
    ):
        old = sorted(number for number in numbers if begin <= number < end)
        new = [int(changes.get(str(number), str(number))) for number in old]
        assert new == sorted(set(new))
        assert all(begin <= number < end for number in new)


@pytest.mark.parametrize("seed", range(20))
def test_all_numbers_change_where_that_is_possible(seed: int) -> None:
    changes = draw_tokens({"2", "3", "4", "6"}, frozenset(), random.Random(seed))
    assert changes.keys() == {"2", "3", "4", "6"}


def test_leading_zeros_stay() -> None:
    changes = draw_tokens({"007", "7", "00"}, frozenset(), random.Random(3))
    assert changes.keys() <= {"007", "7"}
    assert all(other.zfill(3) == changes.get("007") for token, other in changes.items() if token == "7")


def test_lists_get_shorter_but_rows_and_parameters_do_not() -> None:
    text = '@parametrize("x", [[1, 2, 3], 4, 5])\ndef test_it(x):\n    '
    text += "assert f([6, 7, 8], [x, 9, 0], ([1, 2, 3], 4), [1, 2])"
    lines = {changed(text, {}, seed) for seed in range(1, 20)}
    begin, end = text.split("[6, 7, 8]")
    assert lines == {f"{begin.replace(chr(34), chr(39))}{short}{end}" for short in ("[6, 7]", "[6, 8]", "[7, 8]")}


@given(st.integers())
def test_words_keep_their_ending_and_their_letters_if_these_are_few(seed: int) -> None:
    changes = draw_tokens({"butterfly", "acgtacgt", "kim"}, frozenset(), random.Random(seed))
    assert changes["butterfly"].endswith("ly")
    assert set(changes.get("acgtacgt", "acgt")) <= set("acgt")
    assert all(len(other) != len(token) and other.isalpha() for token, other in changes.items())


@given(st.integers())
def test_digits_above_seven_come_only_where_there_are_some(seed: int) -> None:
    changes = draw_tokens({"644", "1011", "75321", "1234567"}, frozenset(), random.Random(seed))
    assert all(max(other) <= max(token) and len(other) == len(token) for token, other in changes.items())
    assert changes.keys() >= {"644", "75321", "1234567"}


@given(st.sets(st.integers(0, 3000)), st.integers())
def test_longer_numbers_have_one_digit_more_and_years_and_long_ones_stay(numbers: set[int], seed: int) -> None:
    tokens = {str(number) for number in numbers}
    changes = draw_tokens(tokens, frozenset(), random.Random(seed), longer=True)
    for number in numbers:
        other = changes.get(str(number), str(number))
        assert len(other) == len(str(number)) + (2 <= number < 1000)


@given(st.integers())
def test_longer_words_have_letters_more_and_their_ending(seed: int) -> None:
    changes = draw_tokens({"butterfly", "kim"}, frozenset({"kim"}), random.Random(seed), longer=True)
    assert changes.keys() == {"butterfly"}
    assert len(changes["butterfly"]) >= len("butterfly") + 5
    assert changes["butterfly"].endswith("ly")


def test_lists_and_tuples_of_loops_get_longer_but_rows_pairs_and_parameters_do_not() -> None:
    text = '@parametrize("x", [[1, 2, 3], 4, 5])\ndef test_it(x):\n    for each in ("ab", "cd", "ef"):\n        '
    text += "assert f([6, 7, 8], [(1, 2), (3, 4)], [x, 9, 0], ([1, 2, 3], 4), [1, 2])"
    tree = ast.parse(changed(text, {}, 7, longer=True))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert ast.unparse(function.decorator_list[0]) == "parametrize('x', [[1, 2, 3], 4, 5])"
    loop = function.body[0]
    assert isinstance(loop, ast.For)
    words = ast.literal_eval(loop.iter)
    assert len(words) == 6
    assert {"ab", "cd", "ef"} < set(words)
    (check,) = loop.body
    assert isinstance(check, ast.Assert)
    assert isinstance(check.test, ast.Call)
    numbers, pairs, *others = check.test.args
    assert len(ast.literal_eval(numbers)) == 6
    assert len(rows := ast.literal_eval(pairs)) == 5
    assert all(high == low + 1 for low, high in rows), "what is in a row changes together"
    assert list(map(ast.unparse, others)) == ["[x, 9, 0]", "([1, 2, 3], 4)", "[1, 2]"]
