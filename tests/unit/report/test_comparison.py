"""What is called beyond chance: intervals, the test by task, and the judgement of both."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.report.comparison import Tried, difference, mean, rate, swapped
from understudy.train.loop.evaluation import wilson

counts = st.integers(1, 5).flatmap(lambda graded: st.builds(Tried, st.integers(0, graded), st.just(graded)))


def tasks(solved: int, total: int, samples: int = 1) -> dict[str, Tried]:
    return {f"t{n}": Tried(samples if n < solved else 0, samples) for n in range(total)}


def test_a_rate_is_wilsons_over_all_rollouts_and_nothing_where_none_was_graded():
    assert rate([Tried(3, 10), Tried(9, 30)]) == wilson(12, 40)
    assert rate([Tried(0, 0)]) is None and rate([]) is None


def test_a_mean_of_zeros_and_ones_is_a_rate():
    assert mean([1.0, 0.0, 1.0, 1.0]) == wilson(3, 4)
    assert mean([]) is None


@pytest.mark.parametrize(
    ("number", "quantile"), [(2, 12.7062), (3, 4.3027), (4, 3.1824), (6, 2.5706), (11, 2.2281), (31, 2.0423)]
)
def test_a_mean_of_other_values_has_students_interval(number: int, quantile: float):
    values = [0.5 + (0.25 if n % 2 else -0.25) for n in range(number)]
    middle = sum(values) / number
    deviation = (sum((value - middle) ** 2 for value in values) / (number - 1)) ** 0.5
    found = mean(values)
    assert found is not None and found.estimate == pytest.approx(middle)
    half = quantile * deviation / number**0.5
    assert (found.high - middle, middle - found.low) == pytest.approx((half, half), rel=0.01)


def test_a_mean_of_one_value_pretends_nothing():
    found = mean([0.3])
    assert found is not None and (found.low, found.high) == (0.3, 0.3)


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=7))
def test_the_test_by_task_counts_all_swaps(pairs: list[tuple[Tried, Tried]]):
    changes = [last.solved / last.graded - first.solved / first.graded for first, last in pairs]
    seen = abs(sum(changes))
    sums = [
        abs(sum(sign * change for sign, change in zip(signs, changes, strict=True)))
        for signs in product((1, -1), repeat=len(changes))
    ]
    assert swapped(pairs) == pytest.approx(sum(total >= seen - 1e-9 for total in sums) / len(sums))


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=20))
def test_which_comes_first_does_not_matter(pairs: list[tuple[Tried, Tried]]):
    assert swapped(pairs) == pytest.approx(swapped([(last, first) for first, last in pairs]))


def test_many_tasks_are_tested_by_a_normal_distribution_that_agrees():
    few = [(Tried(0, 1), Tried(n % 3 > 0, 1)) for n in range(40)] + [(Tried(1, 1), Tried(0, 1))] * 15
    many = few * 60  # 3300 tasks
    assert swapped(many) < 1e-9
    even = [(Tried(0, 1), Tried(1, 1))] * 1500 + [(Tried(1, 1), Tried(0, 1))] * 1500
    assert swapped(even) == pytest.approx(1.0)


def test_better_needs_both_the_interval_and_the_tasks():
    found = difference(tasks(4, 40), tasks(24, 40))
    assert found is not None
    assert (found.judgement, found.apart, found.common_tasks) == ("better", True, 40)
    assert found.low > 0.2 and found.p_by_task is not None and found.p_by_task < 0.001
    back = difference(tasks(24, 40), tasks(4, 40))
    assert back is not None and back.judgement == "worse" and back.value == -found.value


def test_many_samples_of_few_tasks_are_not_taken_for_many_tasks():
    found = difference(tasks(0, 4, samples=50), tasks(4, 4, samples=50))
    assert found is not None and found.low > 0.9 and found.apart
    assert found.p_by_task == pytest.approx(0.125)
    assert found.judgement == "open"


def test_a_small_gain_is_open():
    found = difference(tasks(10, 40), tasks(13, 40))
    assert found is not None and found.judgement == "open" and not found.apart
    assert found.low < 0 < found.high


def test_without_tasks_in_common_the_interval_alone_counts():
    found = difference(tasks(1, 30), {f"other{n}": Tried(1, 1) for n in range(30)})
    assert found is not None and found.p_by_task is None and found.judgement == "better"


def test_nothing_graded_is_no_difference():
    assert difference({}, tasks(1, 2)) is None
    assert difference(tasks(1, 2), {"a": Tried(0, 0)}) is None


def test_few_tasks_with_odd_numbers_of_rollouts_are_enumerated():
    pairs = [(Tried(0, graded), Tried(graded, graded)) for graded in (97, 89, 83, 79, 73, 71)]
    assert swapped(pairs) == pytest.approx(2 / 2**6)
    pairs = [(Tried(0, graded), Tried(1, graded)) for graded in (97, 89, 83, 79, 73, 71)]
    assert swapped(pairs) == pytest.approx(2 / 2**6)
