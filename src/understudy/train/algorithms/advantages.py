"""How much better than its group a rollout did. Pure functions over rewards, no torch.

Every rollout of a group of G has one reward R_i, and one advantage A_i, which all its sampled tokens share however
many sequences they are in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from understudy.train.data.groups import RolloutGroup
from understudy.train.options import Advantage

EQUAL = 1e-9
"""Rewards no further apart than this are the same reward."""


def advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """The advantage of each rollout of one group; zeros when all rewards are equal, as those of one rollout are.

    - "group": A_i = (R_i - mean R) / std R, with the population's standard deviation. GRPO, arXiv 2402.03300.
    - "mean": A_i = R_i - mean R. Dr. GRPO, arXiv 2503.20783: dividing by std R favours tasks that are almost
      always or almost never solved.
    - "leave-one-out", or "rloo": A_i = R_i - mean of the others = G / (G - 1) · (R_i - mean R). RLOO,
      arXiv 2402.14740.

    Raises ValueError when a reward is not a finite number.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards must be finite numbers, got {list(rewards)}")
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    return _KINDS[kind](rewards)


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards of a group differ, so that something can be learned from them."""
    return all(map(math.isfinite, rewards)) and len(rewards) > 1 and max(rewards) - min(rewards) > EQUAL


def with_signal(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """The groups whose rewards differ (dynamic sampling, DAPO, arXiv 2503.14476), in their order."""
    return [group for group in groups if has_signal([rollout.reward for rollout in group.rollouts])]


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """What is added to the reward of a rollout of `tokens` sampled tokens: from 0 down to -1.

    0 up to limit - buffer, -1 from `limit` on, a straight line between them: the soft over-long punishment of
    DAPO, arXiv 2503.14476.
    """
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))


def _group(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    deviation = math.sqrt(fmean(one * one for one in centred))
    return [one / deviation for one in centred]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    count = len(rewards)
    return [count / (count - 1) * one for one in _centred(rewards)]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


_KINDS: dict[Advantage, Callable[[Sequence[float]], list[float]]] = {
    "group": _group,
    "mean": _centred,
    "leave-one-out": _leave_one_out,
    "rloo": _leave_one_out,
}
