"""What an update learns from, out of the groups that it is given."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from statistics import fmean

from msgspec import Struct, field

from understudy.train.groups import (
    BAD_LOGPROBS,
    NO_LOGPROBS,
    NO_TEACHER,
    NOTHING_SAMPLED,
    RolloutGroup,
    TokenSequence,
    leave_out,
)
from understudy.train.options import Advantage, DistillOptions, GRPOOptions

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


NO_SIGNAL = "groups whose rewards are all equal"
BAD_REWARD = "groups with a reward that is not a number"
TOO_LONG = "sequences that are too long"
UNKNOWN_TOKENS = "sequences with tokens that the model does not have"


class TrainingBatch(Struct):
    """Sequences, the number of the rollout that each is of, and an advantage for each rollout."""

    sequences: list[TokenSequence] = field(default_factory=list[TokenSequence])
    rollouts: list[int] = field(default_factory=list[int])
    advantages: list[float] = field(default_factory=list[float])
    groups: int = 0

    @property
    def tokens(self) -> int:
        """How many are learned from."""
        return sum(sum(each.loss_mask[1:]) for each in self.sequences)

    @property
    def stale(self) -> int:
        """Sequences that other weights than the latest had a part in; by names with numbers, as step-0001."""
        versions = {version for each in self.sequences for version in each.policy_versions if version is not None}
        latest = max(versions, key=_order, default=None)
        return sum(any(version != latest for version in each.policy_versions) for each in self.sequences)


def build_batch(
    groups: Sequence[RolloutGroup], options: GRPOOptions, *, vocabulary: int, longest: int, skipped: Counter[str]
) -> TrainingBatch:
    """What can be learned from in `groups`; what cannot is counted in `skipped` by why.

    `vocabulary` is how many tokens the model has, `longest` how many a sequence may have. With a teacher,
    something is learned of groups with equal rewards too.
    """
    batch = TrainingBatch()
    for group in groups:
        rewards = group_rewards(group, options)
        if not all(map(math.isfinite, rewards)):
            skipped[BAD_REWARD] += 1
            continue
        if not has_signal(rewards) and not isinstance(options, DistillOptions):
            skipped[NO_SIGNAL] += 1
            if options.dynamic_sampling:
                continue
        before = len(batch.advantages)
        # A rollout that is too long to learn from still tells how good the others are.
        for rollout, gain in zip(group.rollouts, advantages(rewards, options.advantage), strict=True):
            usable = leave_out(
                rollout.sequences, lambda sequence: _defect(sequence, options, vocabulary, longest), skipped
            )
            if usable:
                batch.sequences += usable
                batch.rollouts += [len(batch.advantages)] * len(usable)
                batch.advantages.append(gain)
        batch.groups += len(batch.advantages) > before
    return batch


def plan(batch: TrainingBatch, options: GRPOOptions, random: Random) -> Iterator[list[int]]:
    """The sequences that each optimizer step learns from, a rollout's together; every epoch in another order."""
    of_rollout: dict[int, list[int]] = {}
    for index, rollout in enumerate(batch.rollouts):
        of_rollout.setdefault(rollout, []).append(index)
    rollouts = list(of_rollout)
    parts = min(options.mini_batches, len(rollouts))
    for _ in range(options.epochs):
        if parts > 1:
            random.shuffle(rollouts)
        for part in range(parts):
            yield [index for rollout in sorted(rollouts[part::parts]) for index in of_rollout[rollout]]


def _order(version: str) -> list[tuple[int, str]]:
    """What versions are sorted by: step-10000 comes after step-9999."""
    parts = [part.lstrip("0") if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", version))]
    return [(len(part) if index % 2 else 0, part) for index, part in enumerate(parts)]


def group_rewards(group: RolloutGroup, options: GRPOOptions) -> list[float]:
    """The rewards of a group's rollouts, lower for those that sampled too much."""
    rewards = [rollout.reward for rollout in group.rollouts]
    limit = options.overlong_tokens
    if limit is None:
        return rewards
    sampled = [sum(each.sampled for each in rollout.sequences) for rollout in group.rollouts]
    return [
        reward + overlong_penalty(tokens, limit, options.overlong_buffer)
        for reward, tokens in zip(rewards, sampled, strict=True)
    ]


def sequence_defect(sequence: TokenSequence, vocabulary: int, longest: int) -> str | None:
    """Why a model of `vocabulary` tokens, which reads `longest`, learns nothing from a sequence; None: it does."""
    if not any(sequence.loss_mask[1:]):
        return NOTHING_SAMPLED
    if len(sequence.token_ids) > longest:
        return TOO_LONG
    if max(sequence.token_ids) >= vocabulary or min(sequence.token_ids) < 0:
        return UNKNOWN_TOKENS
    return None


def _defect(sequence: TokenSequence, options: GRPOOptions, vocabulary: int, longest: int) -> str | None:
    if (why := sequence_defect(sequence, vocabulary, longest)) is not None:
        return why
    if isinstance(options, DistillOptions) and sequence.teacher_logprobs is None:
        return NO_TEACHER
    if sequence.logprobs is None:
        return None if options.correction == "none" else NO_LOGPROBS
    return None if all(map(math.isfinite, sequence.logprobs)) else BAD_LOGPROBS
