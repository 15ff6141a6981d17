"""How rewards become advantages."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from understudy.train.algorithms.batch import advantages, has_signal, overlong_penalty, with_signal
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout
from understudy.train.options import Advantage

KINDS: list[Advantage] = ["group", "mean", "leave-one-out", "rloo"]
rewards_of_a_group = st.lists(st.integers(-8, 8).map(lambda n: n / 4), min_size=1, max_size=12)


def test_advantages_of_solved_and_unsolved_rollouts_for_each_kind() -> None:
    assert advantages([1.0, 0.0], "group") == [1.0, -1.0]
    assert advantages([1.0, 0.0], "mean") == [0.5, -0.5]
    assert advantages([1.0, 0.0], "leave-one-out") == [1.0, -1.0]
    assert advantages([1.0, 0.0, 0.0, 0.0], "rloo") == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@given(rewards_of_a_group)
def test_each_kind_of_advantage_matches_its_formula(rewards: list[float]) -> None:
    assume(has_signal(rewards))
    mean, deviation = fmean(rewards), pstdev(rewards)
    assert advantages(rewards, "group") == pytest.approx([(one - mean) / deviation for one in rewards])
    assert advantages(rewards, "mean") == pytest.approx([one - mean for one in rewards])
    others = [fmean(rewards[:at] + rewards[at + 1 :]) for at in range(len(rewards))]
    expected = [one - other for one, other in zip(rewards, others, strict=True)]
    assert advantages(rewards, "leave-one-out") == pytest.approx(expected)
    assert advantages(rewards, "rloo") == advantages(rewards, "leave-one-out")


@given(rewards_of_a_group, st.sampled_from(KINDS), st.integers(-3, 3), st.randoms())
def test_advantages_sum_to_zero_and_ignore_shifts_and_order_of_rewards(
    rewards: list[float], kind: Advantage, shift: int, random: object
) -> None:
    result = advantages(rewards, kind)
    assert sum(result) == pytest.approx(0, abs=1e-9)
    assert advantages([one + shift for one in rewards], kind) == pytest.approx(result, abs=1e-9)
    assert advantages(rewards[::-1], kind) == pytest.approx(result[::-1], abs=1e-9)
    if kind == "group":
        assert advantages([3 * one for one in rewards], kind) == pytest.approx(result, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rewards", [[], [1.0], [0.0, 0.0], [0.3, 0.1 + 0.2, 0.3]])
def test_equal_rewards_give_zero_advantages(kind: Advantage, rewards: list[float]) -> None:
    assert advantages(rewards, kind) == [0.0] * len(rewards)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_reward_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        advantages([0.0, bad], "group")
    assert not has_signal([0.0, bad])


def test_groups_without_signal_are_left_out() -> None:
    def group(task: str, rewards: list[float]) -> RolloutGroup:
        one = TokenSequence(token_ids=(1, 2), loss_mask=(0, 1), logprobs=(0.0, -0.5))
        return RolloutGroup(
            task_id=task,
            rollouts=tuple(
                TrainingRollout(rollout_id=f"{task}-{at}", task_id=task, reward=reward, sequences=(one,))
                for at, reward in enumerate(rewards)
            ),
        )

    groups = [group("a", [0, 1]), group("b", [1, 1]), group("c", [0.0]), group("d", [0.2, 0.4, 0.2])]
    assert [one.task_id for one in with_signal(groups)] == ["a", "d"]


def test_the_overlong_penalty_grows_linearly_within_the_buffer() -> None:
    penalties = [overlong_penalty(tokens, 1000, 200) for tokens in (0, 800, 850, 900, 1000, 5000)]
    assert penalties == [0.0, 0.0, -0.25, -0.5, -1.0, -1.0]
