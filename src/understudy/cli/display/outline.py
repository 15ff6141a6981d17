"""A trajectory in figures, and as one line a branch: what `show` begins with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct, field

from understudy.trajectory.roles import Role
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import Node, Trajectory
from understudy.types import Call


class BranchLine(Struct, frozen=True, kw_only=True):
    """A branch at a glance. `above` is the branch that it hangs under, `depth` how far down that is.

    `origin` says how it began; nothing for the first call of all. `answered` counts the calls that were.
    """

    name: str
    role: Role
    above: str | None
    depth: int
    origin: str
    calls: int
    answered: int
    superseded: bool
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None


class ExactFigures(Struct, frozen=True, kw_only=True):
    """How token-in-token-out went: calls by how their prompt was made, and why where it was not extended.

    `mismatches` are the classes in which a rendering anew would have given other tokens.
    """

    prompts: dict[str, int]
    reasons: dict[str, int]
    mismatches: dict[str, int]


class TrajectoryFigures(Struct, frozen=True, kw_only=True):
    """A trajectory in figures. `priced` counts the calls whose cost is known, `cost_usd` is their sum.

    `policy_versions` counts calls; one during which the weights changed counts for each version. `segments` are
    the token sequences that the calls merge into, by why each began.
    """

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    cost_usd: float
    priced: int
    policy_versions: dict[str, int] = field(default_factory=dict[str, int])
    segments: dict[str, int] = field(default_factory=dict[str, int])
    exact: ExactFigures | None = None


def outline(trajectory: Trajectory) -> list[BranchLine]:
    """A line for each branch, in the order of their first calls."""
    branches = trajectory.branches
    heads = {name: nodes[0] for name, nodes in branches.items()}
    above = {name: _above(first, heads) for name, first in heads.items()}
    return [_line(name, nodes, above) for name, nodes in branches.items()]


def figures(trajectory: Trajectory) -> TrajectoryFigures:
    """The figures of all calls of a trajectory."""
    calls = [node.call for node in trajectory.nodes]
    costs = [call.cost_usd for call in calls if call.cost_usd is not None]
    return TrajectoryFigures(
        calls=len(calls),
        prompt_tokens=sum(call.usage.prompt_tokens for call in calls),
        completion_tokens=sum(call.usage.completion_tokens for call in calls),
        cached_tokens=sum(call.usage.cached_tokens for call in calls),
        cost_usd=sum(costs),
        priced=len(costs),
        policy_versions=dict(Counter(version for call in calls for version in _versions(call))),
        segments=merge(trajectory).reasons,
        exact=_exact(calls),
    )


def origin(first: Node) -> str:
    """How a branch began, by its first call; nothing for the first call of all."""
    if first.spawned_by is not None:
        return f"started by call {first.spawned_by.call.sequence}"
    if first.continues is not None:
        return f"goes on from the summary of call {first.continues.call.sequence}"
    if first.parent is not None:
        return f"from call {first.parent.call.sequence}"
    return "" if first.origin in (None, "first call") else str(first.origin)


def _above(first: Node, heads: Mapping[str, Node]) -> str | None:
    """The branch that a branch hangs under. What goes on after a compaction stands beside what was summed up."""
    while first.continues is not None and first.continues.parent is not None:
        first = heads[first.continues.parent.branch]
    node = first.spawned_by or first.parent
    return None if node is None else node.branch


def _line(name: str, nodes: Sequence[Node], above: dict[str, str | None]) -> BranchLine:
    calls = [node.call for node in nodes]
    costs = [call.cost_usd for call in calls if call.cost_usd is not None]
    depth, at = 0, above[name]
    while at is not None:
        depth, at = depth + 1, above[at]
    return BranchLine(
        name=name,
        role=nodes[0].role,
        above=above[name],
        depth=depth,
        origin=origin(nodes[0]),
        calls=len(calls),
        answered=sum(call.status == "ok" for call in calls),
        superseded=all(node.superseded for node in nodes),
        prompt_tokens=sum(call.usage.prompt_tokens for call in calls),
        completion_tokens=sum(call.usage.completion_tokens for call in calls),
        cost_usd=sum(costs) if costs else None,
    )


def _versions(call: Call) -> Iterator[str]:
    if call.policy_spans:
        yield from dict.fromkeys(span.version for span in call.policy_spans)
    elif call.policy_version is not None:
        yield call.policy_version


def _exact(calls: Sequence[Call]) -> ExactFigures | None:
    notes = [call.audit for call in calls if call.audit.get("mode") == "exact"]
    if not notes:
        return None

    def counted(name: str) -> dict[str, int]:
        return dict(Counter(str(note[name]) for note in notes if note.get(name)))

    return ExactFigures(prompts=counted("prompt"), reasons=counted("reason"), mismatches=counted("mismatch"))
