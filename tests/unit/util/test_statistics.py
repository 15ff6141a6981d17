"""Solve rates and their intervals, against published numbers and laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.train.loop.evaluation import Z_95, Evaluation, difference, wilson


def counts() -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@pytest.mark.parametrize(
    ("solved", "total", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(solved: int, total: int, low: float, high: float):
    found = wilson(solved, total)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)


@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:873-890, table II, method 10.
    [
        ((48, 80), (56, 70), 0.0524, 0.3339),
        ((3, 10), (9, 10), 0.1705, 0.8090),
        ((2, 7), (6, 7), 0.0582, 0.8062),
        ((0, 29), (5, 56), -0.0381, 0.1926),
        ((0, 20), (0, 10), -0.1611, 0.2775),
        ((0, 10), (10, 10), 0.6075, 1.0),
    ],
)
def test_a_difference_as_published(first: tuple[int, int], second: tuple[int, int], low: float, high: float):
    found = difference(first, second)
    assert (round(found.low, 4), round(found.high, 4)) == (low, high)
    assert found.estimate == pytest.approx(second[0] / second[1] - first[0] / first[1])


@given(counts())
def test_the_bounds_are_where_the_score_test_turns(given: tuple[int, int]):
    solved, total = given
    found = wilson(solved, total)
    assert 0 <= found.low <= found.estimate <= found.high <= 1
    for bound in (found.low, found.high):
        if 0 < bound < 1:
            score = abs(solved / total - bound) / math.sqrt(bound * (1 - bound) / total)
            assert score == pytest.approx(Z_95)


@given(counts(), counts())
def test_a_difference_is_the_other_way_round_of_its_opposite(one: tuple[int, int], other: tuple[int, int]):
    there, back = difference(one, other), difference(other, one)
    assert there.low <= there.estimate <= there.high
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


def test_nothing_tried_says_nothing():
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)
    assert (difference((0, 0), (3, 4)).low, difference((0, 0), (3, 4)).high) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="5 of 4"):
        wilson(5, 4)


def test_an_evaluation_has_its_rate():
    tried = Evaluation(step=0, version="step-0000", run="evaluations/step-0000", solved=8, total=10)
    assert (round(tried.rate.low, 3), round(tried.rate.high, 3)) == (0.49, 0.943)
