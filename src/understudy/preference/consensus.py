"""The vote of teachers on what to do at a state.

Each teacher has one vote. Actions are grouped by their effect (`same_effect`): a group is an action with all those
that have the same effect. The group with the most votes wins when it has at least `minimum`, and more than every
other. **A tie is no agreement**: it goes to the judge, if there is one, and so does a vote that nobody wins. The
result does not depend on the order in which the proposals are given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from understudy.ingest.trace import TurnAction
from understudy.preference.equivalence import ActionEffect, effect_of, same_effect, similarity
from understudy.preference.normalise import UNKNOWN_DIRECTORY, WorkingDirectory

MINIMUM = 2
"""The number of teachers that must agree, by default."""


class Proposal(Struct, frozen=True, kw_only=True):
    """What a teacher would do at a state. `cost_usd` is None if its price is not known."""

    ask_id: str
    replay_id: str
    teacher: str
    model: str
    family: str | None
    action: TurnAction
    cost_usd: float | None = None


class Consensus(Struct, frozen=True, kw_only=True):
    """The agreement of teachers: the action of one of them that represents all `supporters`, out of `asked`.

    `by` says in what they agree: the tools with their arguments, the text, or a judge's choice. `agreement` is the
    share of the asked teachers, in [0, 1].
    """

    action: TurnAction
    teacher: str
    supporters: tuple[str, ...]
    asked: tuple[str, ...]
    by: Literal["tools", "text", "judge"]
    agreement: float


class Group(Struct, frozen=True):
    """Equivalent proposals: the one that represents them, all of them, and the teachers who voted for them."""

    proposal: Proposal
    members: tuple[Proposal, ...]
    supporters: tuple[str, ...]


Judge = Callable[[Sequence[Group]], int | None]
"""Returns the index of the best of several groups; None, or an index out of range, chooses none of them.

The groups come in an order that does not depend on their votes.
"""


class _ProposalEffect(Struct, frozen=True):
    proposal: Proposal
    effect: ActionEffect


def consensus(
    proposals: Sequence[Proposal],
    *,
    minimum: int = MINIMUM,
    judge: Judge | None = None,
    location: WorkingDirectory = UNKNOWN_DIRECTORY,
) -> Consensus | None:
    """Return the action of at least `minimum` teachers; None if they do not agree.

    A proposal without text and calls is no vote. A teacher that answered several times votes for the group with
    most of its answers, and for none if there is a tie.
    """
    teachers = tuple(sorted({proposal.teacher for proposal in proposals}))
    groups = grouped(proposals, location)
    if not groups or len(teachers) < minimum:
        return None
    best = max(len(group.supporters) for group in groups)
    winners = [group for group in groups if len(group.supporters) == best]
    if best >= minimum and len(winners) == 1:
        return _consensus_on(winners[0], teachers, "tools" if winners[0].proposal.action.tool_calls else "text")
    if judge is None or len(groups) < 2:
        return None
    chosen = judge(groups)
    if chosen is None or not 0 <= chosen < len(groups):
        return None
    return _consensus_on(groups[chosen], teachers, "judge")


def grouped(proposals: Sequence[Proposal], location: WorkingDirectory = UNKNOWN_DIRECTORY) -> list[Group]:
    """Return the proposals in groups. The largest group is formed first, then the largest of the rest.

    Among groups of equal size, the one with the most similar members comes first.
    """
    candidates = sorted(_effects_of(proposals, location), key=_sort_key)
    equivalents = [
        frozenset(j for j, other in enumerate(candidates) if i == j or same_effect(candidate.effect, other.effect))
        for i, candidate in enumerate(candidates)
    ]
    ungrouped = set(range(len(candidates)))
    clusters: list[tuple[int, list[int]]] = []
    while ungrouped:
        # The group of the most teachers; then the most similar; then the first.
        centre = max(sorted(ungrouped), key=lambda i: _group_strength(candidates, i, equivalents[i] & ungrouped))
        members = sorted(equivalents[centre] & ungrouped)
        clusters.append((centre, members))
        ungrouped.difference_update(members)
    votes = _votes([[candidates[i].proposal.teacher for i in members] for _, members in clusters])
    groups = [
        Group(candidates[centre].proposal, tuple(candidates[i].proposal for i in members), supporters)
        for (centre, members), supporters in zip(clusters, votes, strict=True)
    ]
    return sorted(groups, key=lambda group: repr(effect_of(group.proposal.action, location).key))


def _effects_of(proposals: Sequence[Proposal], location: WorkingDirectory) -> Iterator[_ProposalEffect]:
    """Yield the proposals that would do or say something, with their effects."""
    for proposal in proposals:
        effect = effect_of(proposal.action, location)
        if not effect.empty:
            yield _ProposalEffect(proposal, effect)


def _sort_key(candidate: _ProposalEffect) -> tuple[str, str, str, str]:
    proposal = candidate.proposal
    return (proposal.teacher, proposal.ask_id, proposal.model, repr((candidate.effect.key, proposal.action)))


def _group_strength(
    candidates: Sequence[_ProposalEffect], centre: int, members: frozenset[int] | set[int]
) -> tuple[int, int, float]:
    """Return the number of teachers, of members, and the members' similarity to the proposal in the centre."""
    effect = candidates[centre].effect
    close = 0.0 if effect.calls else sum(similarity(effect, candidates[i].effect) for i in sorted(members))
    return (len({candidates[i].proposal.teacher for i in members}), len(members), close)


def _votes(groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the teachers who vote for each group, given the teachers of the proposals in it."""
    groups_by_teacher: defaultdict[str, list[int]] = defaultdict(list)
    for number, teachers in enumerate(groups):
        for teacher in teachers:
            groups_by_teacher[teacher].append(number)
    votes: list[list[str]] = [[] for _ in groups]
    for teacher in sorted(groups_by_teacher):
        counts = sorted(
            ((groups_by_teacher[teacher].count(number), number) for number in set(groups_by_teacher[teacher])),
            reverse=True,
        )
        if len(counts) == 1 or counts[0][0] > counts[1][0]:
            votes[counts[0][1]].append(teacher)
    return [tuple(members) for members in votes]


def _consensus_on(group: Group, teachers: tuple[str, ...], by: Literal["tools", "text", "judge"]) -> Consensus:
    supporting = [member for member in group.members if member.teacher in group.supporters] or [group.proposal]
    representative = group.proposal if group.proposal in supporting else supporting[0]
    return Consensus(
        action=representative.action,
        teacher=representative.teacher,
        supporters=group.supporters,
        asked=teachers,
        by=by,
        agreement=len(group.supporters) / len(teachers),
    )
