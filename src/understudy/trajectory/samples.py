"""Token-exact samples: the longest sequences in which every sampled token has the context it was sampled in.

Call n is merged into call n+1 of its branch when `prompt_{n+1}` begins with `prompt_n + completion_n`; else a
new segment begins, and why is counted. No token is ever encoded anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from msgspec import Struct

from understudy.store.tokens import begins_with
from understudy.trajectory.roles import ROLES, Role, continues_parent
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Call

Reason = Literal[
    "first call",
    "retry",
    "compaction",
    "tools or system changed",
    "history rewritten",
    "sibling",
    "auxiliary",
    "call before not usable",
    "prompt rendered anew",
    "answer rewritten",
    "retokenized",
]
"""Why a segment begins.

The reasons of calls without a parent are explained in `tree.Origin`; "compaction" is also the request for the
summary. "auxiliary": forked off for a purpose of its own (see `roles.Role`). "sibling": also a call that follows
the same answer as the one from which the conversation continued. "call before not usable": it has no token ids or
was not answered. "prompt rendered anew": the earlier prompt was sent again, and rendered as other tokens. "answer
rewritten": the agent sent the answer back changed. "retokenized": it sent the answer back unchanged, and it was
rendered as other tokens.
"""

_FORK_REASONS: dict[Role, Reason] = {"compaction": "compaction", "auxiliary": "auxiliary"}
NO_TOKENS = "no token ids"
"""Counted like a reason: an answered call without a segment, because the backend returned no token ids."""


class Segment(Struct, frozen=True, kw_only=True):
    """A token sequence of one or more calls of one branch.

    `loss_mask` is 1 exactly on the sampled tokens. `logprobs` are those of the sampling policy: 0.0 where the mask
    is 0, None if the backend gave none. `policy_versions` belong to `call_ids`, and are None where one is unknown
    or the weights changed during the call. `completions` are the ranges of tokens that the calls sampled.
    `superseded` marks a call that was repeated and not continued.
    """

    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    call_ids: tuple[str, ...]
    completions: tuple[tuple[int, int], ...]
    policy_versions: tuple[str | None, ...]
    branch: str
    role: Role
    reason: Reason
    superseded: bool = False
    malformed: tuple[tuple[int, int], ...] = ()
    """The ranges of tokens of completions with a malformed tool call."""

    @property
    def target_mask(self) -> tuple[int, ...]:
        """Return `loss_mask` without the completions that have a malformed tool call.

        A malformed call is not a good action, so it is never a target of imitation (nor the chosen answer of a
        pair, see `preference.normalise`). Learning from rewards uses `loss_mask`, so that such a call also gets
        its share of the reward.
        """
        mask = list(self.loss_mask)
        for start, end in self.malformed:
            mask[start:end] = [0] * (end - start)
        return tuple(mask)


class SegmentOutline(Struct, frozen=True, kw_only=True):
    """A segment without its tokens: `tokens` is their number, the other fields are those of `Segment`."""

    tokens: int
    call_ids: tuple[str, ...]
    completions: tuple[tuple[int, int], ...]
    policy_versions: tuple[str | None, ...]
    branch: str
    role: Role
    reason: Reason
    superseded: bool = False
    malformed: tuple[tuple[int, int], ...] = ()

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(end - start for start, end in self.completions)

    def with_tokens(self, calls: Sequence[Call]) -> Segment:
        """Return the segment with its tokens, which are read from its calls, given in their order."""
        last_call = calls[-1]
        token_ids = (*(last_call.prompt_token_ids or ()), *(last_call.completion_token_ids or ()))
        mask = [0] * len(token_ids)
        logprobs: list[float | None] = [0.0] * len(token_ids)
        for call, (start, end) in zip(calls, self.completions, strict=True):
            count = end - start
            sampled = call.logprobs if call.logprobs is not None and len(call.logprobs) == count else None
            mask[start:end] = [1] * count
            logprobs[start:end] = [None] * count if sampled is None else sampled
        return Segment(
            token_ids=token_ids,
            loss_mask=tuple(mask),
            logprobs=tuple(logprobs),
            call_ids=self.call_ids,
            completions=self.completions,
            policy_versions=self.policy_versions,
            branch=self.branch,
            role=self.role,
            reason=self.reason,
            superseded=self.superseded,
            malformed=self.malformed,
        )


class Merged(Struct, frozen=True):
    """The segments of a trajectory, and how often each reason began one (`NO_TOKENS` is counted too)."""

    segments: tuple[Segment, ...]
    reasons: dict[str, int]


class Outlined(Struct, frozen=True):
    """The outlines of segments, and how often each reason began one (`NO_TOKENS` is counted too)."""

    segments: tuple[SegmentOutline, ...]
    reasons: dict[str, int]


class Sample(Struct, frozen=True, kw_only=True):
    """A segment with its reward. `policy_version` is the one that all its calls share, otherwise None."""

    segment: Segment
    reward: float | None
    rollout_id: str
    attempt_id: str
    branch: str
    role: Role
    policy_version: str | None


def merge(trajectory: Trajectory, roles: Collection[Role] = ROLES) -> Merged:
    """Merge the calls of `trajectory` that have one of `roles` into segments, in the order of their first calls.

    Every sampled token of every answered call that has token ids and such a role is in exactly one segment, with
    mask 1.
    """
    outlined = outline(trajectory, roles)
    calls = {node.call.id: node.call for node in trajectory.nodes}
    segments = (
        segment.with_tokens([calls[call_id] for call_id in segment.call_ids]) for segment in outlined.segments
    )
    return Merged(tuple(segments), outlined.reasons)


def outline(trajectory: Trajectory, roles: Collection[Role] = ROLES) -> Outlined:
    """Return the segments that `merge` makes of `trajectory`, without their tokens."""
    chains: dict[str, list[Node]] = {}
    reasons: dict[str, Reason] = {}
    left_out = 0
    for node in trajectory.nodes:
        if node.role not in roles:
            continue
        if not usable(node):
            left_out += node.call.status == "ok"
            continue
        reason = _break_reason(node)
        if reason is None and node.parent is not None:
            chains[node.call.id] = chain = chains.pop(node.parent.call.id)
            chain.append(node)
        elif reason is not None:
            chains[node.call.id] = [node]
            reasons[node.call.id] = reason
    position = {node.call.id: number for number, node in enumerate(trajectory.nodes)}
    ordered = sorted(chains.values(), key=lambda chain: position[chain[0].call.id])
    segments = tuple(_outline(chain, reasons[chain[0].call.id]) for chain in ordered)
    counts = Counter[str](segment.reason for segment in segments)
    if left_out:
        counts[NO_TOKENS] = left_out
    return Outlined(segments, dict(counts))


def samples(
    trajectory: Trajectory, *, rollout_id: str, reward: float | None, roles: Collection[Role] = ROLES
) -> list[Sample]:
    """Return the samples of the calls of `trajectory` that have one of `roles`, each with the full reward of the
    attempt.
    """
    attempts = {node.call.id: node.call.attempt_id for node in trajectory.nodes}
    result: list[Sample] = []
    for segment in merge(trajectory, roles).segments:
        versions = set(segment.policy_versions)
        result.append(
            Sample(
                segment=segment,
                reward=reward,
                rollout_id=rollout_id,
                attempt_id=attempts[segment.call_ids[0]],
                branch=segment.branch,
                role=segment.role,
                policy_version=versions.pop() if len(versions) == 1 else None,
            )
        )
    return result


def usable(node: Node) -> bool:
    """Return whether the call was answered and the tokens of its prompt and completion are known."""
    call = node.call
    return call.status == "ok" and call.prompt_token_ids is not None and call.completion_token_ids is not None


def _break_reason(node: Node) -> Reason | None:
    """Return why `node` cannot be merged into its parent; None if it can."""
    parent = node.parent
    if parent is None:
        return node.origin
    if parent.heir is not node:
        return "sibling" if continues_parent(node) else _FORK_REASONS.get(node.role, "sibling")
    if not usable(parent):
        return "call before not usable"
    earlier_prompt, sampled, prompt = (
        ids or ()
        for ids in (parent.call.prompt_token_ids, parent.call.completion_token_ids, node.call.prompt_token_ids)
    )
    if not begins_with(prompt, earlier_prompt):
        same_instructions = parent.conversation.prompt_digest == node.conversation.prompt_digest
        return "prompt rendered anew" if same_instructions else "tools or system changed"
    if not begins_with(prompt, earlier_prompt, sampled):
        return "retokenized" if node.verbatim else "answer rewritten"
    return None


def _outline(chain: list[Node], reason: Reason) -> SegmentOutline:
    completions: list[tuple[int, int]] = []
    malformed: list[tuple[int, int]] = []
    for node in chain:
        start = len(node.call.prompt_token_ids or ())
        completions.append((start, start + len(node.call.completion_token_ids or ())))
        if any(block.is_malformed for block in node.answer or ()):
            malformed.append(completions[-1])
    return SegmentOutline(
        tokens=completions[-1][1],
        call_ids=tuple(node.call.id for node in chain),
        completions=tuple(completions),
        policy_versions=tuple(_version(node.call) for node in chain),
        branch=chain[-1].branch,
        role=chain[-1].role,
        reason=reason,
        superseded=chain[-1].superseded,
        malformed=tuple(malformed),
    )


def _version(call: Call) -> str | None:
    return None if len({span.version for span in call.policy_spans}) > 1 else call.policy_version
