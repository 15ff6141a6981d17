"""Which tasks a step collects."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from understudy.train.loop.batches import MIN_WEIGHT, draw_tasks
from understudy.train.loop.state import TaskSolveRate

NAMES = st.lists(st.text("abcdef", min_size=1, max_size=4), unique=True, max_size=12)


@given(NAMES, st.integers(0, 14), st.integers(0, 5), st.integers(0, 100))
def test_each_task_is_chosen_at_most_once_independent_of_order(tasks: list[str], count: int, seed: int, step: int):
    chosen = draw_tasks(tasks, {}, count, seed=seed, step=step)
    assert len(chosen) == len(set(chosen)) == min(count, len(tasks))
    assert set(chosen) <= set(tasks)
    assert chosen == draw_tasks(reversed(tasks), {}, count, seed=seed, step=step), (
        "the order given decides nothing"
    )


def test_another_step_or_seed_chooses_other_tasks():
    tasks = [f"t{number}" for number in range(50)]
    one = draw_tasks(tasks, {}, 5, seed=0, step=1)
    assert one != draw_tasks(tasks, {}, 5, seed=0, step=2)
    assert one != draw_tasks(tasks, {}, 5, seed=1, step=1)


def test_half_solved_tasks_are_preferred_and_others_keep_a_minimum_probability():
    rates = {
        "always": TaskSolveRate(tried=80, solved=80),
        "never": TaskSolveRate(tried=80, solved=0),
        "half": TaskSolveRate(tried=80, solved=40),
    }
    drawn = Counter(draw_tasks(rates, rates, 1, seed=0, step=step)[0] for step in range(3000))
    share = MIN_WEIGHT / (1 + 2 * MIN_WEIGHT)
    for easy_or_hard in ("always", "never"):
        assert share / 1.5 < drawn[easy_or_hard] / 3000 < share * 1.5


def test_an_untried_task_is_as_likely_as_a_half_solved_one():
    rates = {"half": TaskSolveRate(tried=10, solved=5)}
    drawn = Counter(draw_tasks(["half", "new"], rates, 1, seed=0, step=step)[0] for step in range(2000))
    assert 900 < drawn["new"] < 1100


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_the_expected_solve_rate_stays_between_zero_and_one(counts: list[tuple[int, int]]):
    rate = TaskSolveRate()
    for step, (one, other) in enumerate(counts):
        rate = rate.after(max(one, other), min(one, other), step)
        assert 0 < rate.expected < 1
        assert rate.step == step


def test_recent_results_weigh_more_in_the_solve_rate():
    before = TaskSolveRate().after(8, 0, 1)
    assert before.after(8, 8, 2).expected > 0.5
    assert TaskSolveRate().after(8, 8, 1).after(8, 0, 2).expected < 0.5
