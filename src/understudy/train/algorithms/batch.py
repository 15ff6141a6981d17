"""Builds the batch of a policy update from groups of rollouts: computes advantages and filters out unusable
sequences.
"""

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

REWARD_TOLERANCE = 1e-9
"""Rewards no further apart than this are the same reward."""


def advantages(rewards: Sequence[float], kind: Advantage) -> list[float]:
    """Return the advantage of each rollout of one group; all zeros when the rewards are equal or there is only
    one.

    - "group": A_i = (R_i - mean R) / std R, with the population's standard deviation. GRPO, arXiv 2402.03300.
    - "mean": A_i = R_i - mean R. Dr. GRPO, arXiv 2503.20783: dividing by std R favours tasks that nearly always
      or hardly ever are solved.
    - "leave-one-out", or "rloo": A_i = R_i - mean of the others = G / (G - 1) · (R_i - mean R). arXiv 2402.14740.

    Raises ValueError when a reward is not a finite number.
    """
    if not all(map(math.isfinite, rewards)):
        raise ValueError(
            f"invalid rewards {list(rewards)}; expected finite numbers: correct what the check writes"
        )
    if not has_signal(rewards):
        return [0.0] * len(rewards)
    return _ADVANTAGES[kind](rewards)


def has_signal(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ. If not, all advantages are 0 and nothing is learned."""
    return all(map(math.isfinite, rewards)) and len(rewards) > 1 and max(rewards) - min(rewards) > REWARD_TOLERANCE


def with_signal(groups: Iterable[RolloutGroup]) -> list[RolloutGroup]:
    """Return the groups whose rewards differ, in their order (dynamic sampling, DAPO, arXiv 2503.14476)."""
    return [group for group in groups if has_signal([rollout.reward for rollout in group.rollouts])]


def overlong_penalty(tokens: int, limit: int, buffer: int) -> float:
    """Return the penalty, between -1 and 0, that is added to the reward of a rollout with `tokens` sampled tokens.

    It is 0 up to `limit - buffer`, falls linearly, and is -1 from `limit` on: the soft overlong punishment of
    DAPO, arXiv 2503.14476.
    """
    return -min(1.0, max(0.0, (tokens - (limit - buffer)) / buffer))


def _group_normalised(rewards: Sequence[float]) -> list[float]:
    centred = _centred(rewards)
    deviation = math.sqrt(fmean(value * value for value in centred))
    return [value / deviation for value in centred]


def _leave_one_out(rewards: Sequence[float]) -> list[float]:
    count = len(rewards)
    return [count / (count - 1) * value for value in _centred(rewards)]


def _centred(rewards: Sequence[float]) -> list[float]:
    mean = fmean(rewards)
    return [reward - mean for reward in rewards]


_ADVANTAGES: dict[Advantage, Callable[[Sequence[float]], list[float]]] = {
    "group": _group_normalised,
    "mean": _centred,
    "leave-one-out": _leave_one_out,
    "rloo": _leave_one_out,
}


NO_SIGNAL = "groups whose rewards are all equal"
BAD_REWARD = "groups with a reward that is not a number"
TOO_LONG_SEQUENCES = "sequences that are too long"
UNKNOWN_TOKENS = "sequences with tokens that the model does not have"


class TrainingBatch(Struct):
    """The sequences that one update learns from.

    `rollouts[i]` is the index of the rollout that `sequences[i]` belongs to, and `advantages` has one value for
    each rollout. `groups` is the number of groups that contributed a sequence.
    """

    sequences: list[TokenSequence] = field(default_factory=list[TokenSequence])
    rollouts: list[int] = field(default_factory=list[int])
    advantages: list[float] = field(default_factory=list[float])
    groups: int = 0

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the loss is computed on."""
        return sum(sum(sequence.loss_mask[1:]) for sequence in self.sequences)

    @property
    def stale(self) -> int:
        """Return the number of sequences that were at least partly sampled with older weights than the newest in
        the batch.

        Versions are ordered by the numbers in their names, such as step-0001.
        """
        versions = {
            version for sequence in self.sequences for version in sequence.policy_versions if version is not None
        }
        latest = max(versions, key=_version_sort_key, default=None)
        return sum(any(version != latest for version in sequence.policy_versions) for sequence in self.sequences)


def build_batch(
    groups: Sequence[RolloutGroup], options: GRPOOptions, *, vocabulary: int, longest: int, skipped: Counter[str]
) -> TrainingBatch:
    """Return the batch of all usable sequences in `groups`; what is unusable is counted in `skipped` by reason.

    `vocabulary` is the model's vocabulary size, `longest` its maximum sequence length in tokens. Groups with equal
    rewards are kept when training with a teacher, whose logprobs give a signal of their own.
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
        # A rollout that is too long to train on still counts in the mean reward of its group.
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


def optimizer_step_indices(batch: TrainingBatch, options: GRPOOptions, random: Random) -> Iterator[list[int]]:
    """Yield, for each optimizer step, the indices of its sequences.

    All sequences of a rollout go to the same step. With several mini-batches the rollouts are shuffled anew for
    each epoch.
    """
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


def _version_sort_key(version: str) -> list[tuple[int, str]]:
    """Return a sort key that compares numbers in version names by value: step-10000 comes after step-9999."""
    parts = [part.lstrip("0") if index % 2 else part for index, part in enumerate(re.split("([0-9]+)", version))]
    return [(len(part) if index % 2 else 0, part) for index, part in enumerate(parts)]


def group_rewards(group: RolloutGroup, options: GRPOOptions) -> list[float]:
    """Return the rewards of a group's rollouts, with the overlong penalty added where one is configured."""
    rewards = [rollout.reward for rollout in group.rollouts]
    limit = options.overlong_tokens
    if limit is None:
        return rewards
    sampled = [sum(sequence.sampled for sequence in rollout.sequences) for rollout in group.rollouts]
    return [
        reward + overlong_penalty(tokens, limit, options.overlong_buffer)
        for reward, tokens in zip(rewards, sampled, strict=True)
    ]


def sequence_defect(sequence: TokenSequence, vocabulary: int, longest: int) -> str | None:
    """Return why a sequence cannot be trained on, or None if it can.

    `vocabulary` is the model's vocabulary size, `longest` its maximum sequence length in tokens.
    """
    if not any(sequence.loss_mask[1:]):
        return NOTHING_SAMPLED
    if len(sequence.token_ids) > longest:
        return TOO_LONG_SEQUENCES
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
