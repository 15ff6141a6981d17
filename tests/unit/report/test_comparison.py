"""What is called beyond chance: intervals, the test by task, and the judgement of both."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from understudy.errors import ConfigError
from understudy.report.figures import (
    SolveCounts,
    compare,
    compare_by_task,
    holm,
    mean_reward,
    permutation_p_value,
    rate,
)
from understudy.report.formatting import describe_judgement, sentence
from understudy.report.read import read_figures, run_locations
from understudy.report.runs import agent_rows, read_run_figures
from understudy.util.statistics import MeanEstimate, mean_estimate, wilson

from support.report import put_run, solved

counts = st.integers(1, 5).flatmap(lambda graded: st.builds(SolveCounts, st.integers(0, graded), st.just(graded)))


def tasks(solved: int, total: int, samples: int = 1) -> dict[str, SolveCounts]:
    return {f"t{n}": SolveCounts(samples if n < solved else 0, samples) for n in range(total)}


def test_a_rate_is_wilsons_over_all_rollouts_and_nothing_where_none_was_graded():
    assert rate([SolveCounts(3, 10), SolveCounts(9, 30)]) == wilson(12, 40)
    assert rate([SolveCounts(0, 0)]) is None and rate([]) is None


def test_a_mean_of_zeros_and_ones_is_a_rate():
    share = wilson(3, 4)
    assert mean_reward([1.0, 0.0, 1.0, 1.0]) == MeanEstimate(share.estimate, share.low, share.high)
    assert mean_reward([]) is None


def test_a_mean_of_other_rewards_is_no_rate():
    rewards = [0.0, 1.0, 0.5]
    assert mean_reward(rewards) == mean_estimate(rewards)


def test_a_single_reward_has_an_interval_only_where_it_is_a_rate():
    assert mean_reward([0.3]) == MeanEstimate(0.3, None, None)
    solved = mean_reward([1.0])
    assert solved is not None and solved.low is not None and solved.low < 0.3 and solved.high == 1.0


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=7))
def test_the_test_by_task_counts_all_swaps(pairs: list[tuple[SolveCounts, SolveCounts]]):
    changes = [last.solved / last.graded - first.solved / first.graded for first, last in pairs]
    observed = abs(sum(changes))
    sums = [
        abs(sum(sign * change for sign, change in zip(signs, changes, strict=True)))
        for signs in product((1, -1), repeat=len(changes))
    ]
    assert permutation_p_value(pairs) == pytest.approx(sum(total >= observed - 1e-9 for total in sums) / len(sums))


@given(st.lists(st.tuples(counts, counts), min_size=1, max_size=20))
def test_which_comes_first_does_not_matter(pairs: list[tuple[SolveCounts, SolveCounts]]):
    assert permutation_p_value(pairs) == pytest.approx(
        permutation_p_value([(last, first) for first, last in pairs])
    )


def test_many_tasks_are_tested_by_a_normal_distribution_that_agrees():
    few = [(SolveCounts(0, 1), SolveCounts(n % 3 > 0, 1)) for n in range(40)] + [
        (SolveCounts(1, 1), SolveCounts(0, 1))
    ] * 15
    many = few * 60  # 3300 tasks
    assert permutation_p_value(many) < 1e-9
    even = [(SolveCounts(0, 1), SolveCounts(1, 1))] * 1500 + [(SolveCounts(1, 1), SolveCounts(0, 1))] * 1500
    assert permutation_p_value(even) == pytest.approx(1.0)


def test_better_needs_both_the_interval_and_the_tasks():
    comparison = compare(tasks(4, 40), tasks(24, 40))
    assert comparison is not None
    assert (comparison.judgement, comparison.apart, comparison.common_tasks) == ("better", True, 40)
    assert comparison.low > 0.2 and comparison.p_by_task is not None and comparison.p_by_task < 0.001
    back = compare(tasks(24, 40), tasks(4, 40))
    assert back is not None and back.judgement == "worse" and back.value == -comparison.value


def test_many_samples_of_few_tasks_are_not_taken_for_many_tasks():
    comparison = compare(tasks(0, 4, samples=50), tasks(4, 4, samples=50))
    assert comparison is not None and comparison.low > 0.9 and comparison.apart
    assert comparison.p_by_task == pytest.approx(0.125)
    assert comparison.judgement == "open"


def test_a_small_gain_is_open():
    comparison = compare(tasks(10, 40), tasks(13, 40))
    assert comparison is not None and comparison.judgement == "open" and not comparison.apart
    assert comparison.low < 0 < comparison.high


def test_without_tasks_in_common_the_interval_alone_counts():
    comparison = compare(tasks(1, 30), {f"other{n}": SolveCounts(1, 1) for n in range(30)})
    assert comparison is not None and comparison.p_by_task is None and comparison.judgement == "better"


def test_nothing_graded_is_no_difference():
    assert compare({}, tasks(1, 2)) is None
    assert compare(tasks(1, 2), {"a": SolveCounts(0, 0)}) is None


def test_few_tasks_with_odd_numbers_of_rollouts_are_enumerated():
    pairs = [(SolveCounts(0, graded), SolveCounts(graded, graded)) for graded in (97, 89, 83, 79, 73, 71)]
    assert permutation_p_value(pairs) == pytest.approx(2 / 2**6)
    pairs = [(SolveCounts(0, graded), SolveCounts(1, graded)) for graded in (97, 89, 83, 79, 73, 71)]
    assert permutation_p_value(pairs) == pytest.approx(2 / 2**6)


def test_tasks_of_two_runs_are_compared_one_by_one():
    common, difference, p = compare_by_task(tasks(9, 10), tasks(3, 12))
    assert (common, p) == (10, 2 / 2**6)
    assert difference is not None and difference.estimate == pytest.approx(-0.6)
    assert difference.low < -0.6 < difference.high < 0
    assert compare_by_task(tasks(1, 1), {"other": SolveCounts(1, 1)}) == (0, None, None)


def test_agents_are_compared_with_that_of_the_first_run(tmp_path: Path):
    unchanged = {f"t{n}": (2, 2) for n in range(8)}
    worse = {f"t{n}": (2 * (n < 2), 2) for n in range(8)}
    for name, counts_of in (("codex", unchanged), ("pi", worse)):
        put_run(tmp_path / "runs" / name, solved(counts_of))
    assert run_locations([tmp_path / "runs"]) == [tmp_path / "runs" / "codex", tmp_path / "runs" / "pi"]
    assert run_locations([tmp_path / "runs" / "pi"]) == [tmp_path / "runs" / "pi"]
    gathered = [
        structs.replace(read_run_figures(tmp_path / "runs" / name, name), agent=name) for name in ("codex", "pi")
    ]
    first, second = agent_rows(gathered)
    assert (first.agent, first.solve_rate, first.difference) == ("codex", 1.0, None)
    assert (second.agent, second.solve_rate, second.common_tasks) == ("pi", 0.25, 8)
    assert second.difference is not None and second.difference.high < 0 and second.p_by_task == 2 / 2**6
    same = read_figures([tmp_path / "runs" / "codex", tmp_path / "runs" / "pi"])
    assert same.agents == (), "runs of one agent are not compared by agent"
    assert "100\u00a0% before (16 of 16, codex)" in sentence(same)
    compared = sentence(structs.replace(same, agents=(first, second)))
    assert (
        "25.0\u00a0% of rollouts solved (4 of 16, pi), 100\u00a0% with the first agent (16 of 16, codex)"
        in compared
    )


def test_adjusted_p_values_are_holms() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=8))
def test_adjusted_p_values_keep_their_order_and_lie_between_the_plain_ones_and_bonferronis(plain: list[float]):
    adjusted = holm(plain)
    assert all(p <= after <= min(1.0, p * len(plain)) for p, after in zip(plain, adjusted, strict=True))
    assert [after for _, after in sorted(zip(plain, adjusted, strict=True))] == sorted(adjusted)


def test_each_of_three_agents_is_compared_with_the_first(tmp_path: Path) -> None:
    """One that differs at p = 0.03 alone does not once two comparisons are made; the last one has no say in it."""
    solves = {"codex": 8, "gemini": 2, "pi": 8, "qwen": 0}
    for name, number in solves.items():
        put_run(tmp_path / name, solved({f"t{n}": (n < number, 1) for n in range(8)}), agent=name)
    three = read_figures([tmp_path / name for name in ("codex", "gemini", "pi")])
    assert three.headline is None and three.title == "codex, gemini, pi"
    assert [(row.p_by_task, row.p_adjusted, row.judgement) for row in three.agents] == [
        (None, None, "open"),
        (2 / 2**6, 4 / 2**6, "open"),
        (1.0, 1.0, "open"),
    ]
    assert describe_judgement(three) == ("No agent differs from codex beyond chance", "open")
    assert "25.0\u00a0% with gemini" in sentence(three) and "adjusted for 2 comparisons (Holm)" in sentence(three)
    last = read_figures([tmp_path / name for name in ("codex", "qwen", "pi")])
    assert [row.judgement for row in last.agents] == ["open", "worse", "open"]
    assert describe_judgement(last)[0] == "1 of 2 agents differs from codex beyond chance"
    two = read_figures([tmp_path / "codex", tmp_path / "qwen"])
    assert two.headline is not None and [row.p_adjusted for row in two.agents] == [None, 2 / 2**8]


def test_a_directory_that_holds_nothing_is_still_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="has no run"):
        read_figures(run_locations([tmp_path]))
