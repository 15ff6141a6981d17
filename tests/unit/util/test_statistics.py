"""Solve rates and their intervals, against published numbers and laws."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.util.statistics import Z_95, mean_estimate, newcombe, newcombe_paired, wilson


def counts() -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total)))


@pytest.mark.parametrize(
    ("solved", "total", "low", "high"),
    # Newcombe 1998, Statistics in Medicine 17:857-872, table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_as_published(solved: int, total: int, low: float, high: float):
    interval = wilson(solved, total)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


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
    interval = newcombe(first, second)
    assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)
    assert interval.estimate == pytest.approx(second[0] / second[1] - first[0] / first[1])


@given(counts())
def test_the_bounds_are_where_the_score_test_turns(counted: tuple[int, int]):
    solved, total = counted
    interval = wilson(solved, total)
    assert 0 <= interval.low <= interval.estimate <= interval.high <= 1
    for bound in (interval.low, interval.high):
        if 0 < bound < 1:
            score = abs(solved / total - bound) / math.sqrt(bound * (1 - bound) / total)
            assert score == pytest.approx(Z_95)


@given(counts(), counts())
def test_a_difference_is_the_other_way_round_of_its_opposite(one: tuple[int, int], other: tuple[int, int]):
    there, back = newcombe(one, other), newcombe(other, one)
    assert there.low <= there.estimate <= there.high
    assert (there.low, there.high) == (pytest.approx(-back.high), pytest.approx(-back.low))


def test_nothing_tried_says_nothing():
    assert (wilson(0, 0).low, wilson(0, 0).high) == (0.0, 1.0)
    assert (newcombe((0, 0), (3, 4)).low, newcombe((0, 0), (3, 4)).high) == (-1.0, 1.0)
    with pytest.raises(ValueError, match="5 of 4"):
        wilson(5, 4)


@pytest.mark.parametrize(
    ("number", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (11, 2.2281), (31, 2.0423)]
)
def test_a_mean_of_other_values_has_students_interval(number: int, quantile: float):
    values = [0.5 + (0.25 if n % 2 else -0.25) for n in range(number)]
    middle = sum(values) / number
    deviation = (sum((value - middle) ** 2 for value in values) / (number - 1)) ** 0.5
    interval = mean_estimate(values)
    assert interval is not None and interval.estimate == pytest.approx(middle)
    assert interval.low is not None and interval.high is not None
    half = quantile * deviation / number**0.5
    assert (interval.high - middle, middle - interval.low) == pytest.approx((half, half), rel=0.01)


def test_a_mean_of_one_value_has_no_interval():
    interval = mean_estimate([0.3])
    assert interval is not None and (interval.estimate, interval.low, interval.high) == (0.3, None, None)


def test_a_mean_of_no_values_is_none():
    assert mean_estimate([]) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=40
    )
)
def test_a_difference_of_pairs_is_within_its_interval_and_turns_with_them(pairs: list[tuple[float, float]]):
    interval, opposite = newcombe_paired(pairs), newcombe_paired([(after, before) for before, after in pairs])
    assert -1.0 <= interval.low <= interval.estimate + 1e-12 and interval.estimate - 1e-12 <= interval.high <= 1.0
    assert (interval.low, interval.high) == (pytest.approx(-opposite.high), pytest.approx(-opposite.low))
    assert interval.high > interval.low, "nothing tried a few times is certain"


def test_pairs_that_go_together_tell_more_than_two_samples():
    together = [(1.0, 1.0)] * 20 + [(0.0, 0.0)] * 15 + [(0.0, 1.0)] * 5
    apart = [(1.0, 1.0)] * 12 + [(1.0, 0.0)] * 8 + [(0.0, 1.0)] * 13 + [(0.0, 0.0)] * 7
    loose = newcombe((20, 40), (25, 40))
    tight, unrelated = newcombe_paired(together), newcombe_paired(apart)
    assert tight.estimate == unrelated.estimate == loose.estimate
    assert tight.low > 0 > loose.low
    assert abs(unrelated.low - loose.low) < 0.02
    assert newcombe_paired([]).low == -1.0
