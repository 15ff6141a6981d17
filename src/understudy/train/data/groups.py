"""What a trainer is given: token sequences as they were sampled, by rollout and by group. Plain data, no torch."""

from __future__ import annotations

from msgspec import Struct


class TokenSequence(Struct, frozen=True, kw_only=True):
    """One segment of a rollout's trajectory.

    `loss_mask` is 1 exactly on sampled tokens. `logprobs` are the behaviour policy's, after temperature, 0.0 off
    the mask; None where the backend gave none, which only imitation can use. `policy_versions` are those of its
    calls.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    policy_versions: tuple[str | None, ...] = ()

    @property
    def sampled(self) -> int:
        """How many tokens are learned from."""
        return sum(self.loss_mask)


class TrainingRollout(Struct, frozen=True, kw_only=True):
    """A graded rollout: all its sequences (branches, segments) share its one reward."""

    rollout_id: str
    task_id: str
    reward: float
    sequences: tuple[TokenSequence, ...]


class RolloutGroup(Struct, frozen=True, kw_only=True):
    """The rollouts of one task by which each other's advantage is measured."""

    task_id: str
    rollouts: tuple[TrainingRollout, ...]
