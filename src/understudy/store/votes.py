"""Votes: labels that people gave to rollouts and to preference pairs. Exports and pairs honour them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Literal

from msgspec import Struct
from sqlalchemy import and_, delete, insert, select

from understudy.errors import NotInStore
from understudy.store.database import Repository, WriteContext, queued, row_reader
from understudy.store.schema import rollouts, votes

VoteSubject = Literal["rollout", "pair"]

EXCLUDE = "exclude"
"""The label of a rollout that should not be learned from."""
CHOSEN = "chosen"
"""The label of a pair whose chosen answer is the better one. A pair with any other label is doubted."""


class Vote(Struct, frozen=True, kw_only=True):
    """One person's label on a rollout or a pair, given by id. `voted_at` is in Unix seconds."""

    subject: VoteSubject
    subject_id: str
    voter: str
    label: str
    note: str
    voted_at: float


_vote = row_reader(Vote)


class VoteRepository(Repository):
    """`Store.votes`: labels that people gave to rollouts and pairs, one label per person and subject."""

    @queued
    def put(
        self, context: WriteContext, subject: VoteSubject, subject_id: str, voter: str, label: str, note: str = ""
    ) -> None:
        """Store a vote, replacing the person's earlier one. Raises StoreError if there is no such rollout."""
        if subject == "rollout":
            query = select(rollouts.c.id).where(rollouts.c.id == subject_id)
            if context.connection.execute(query).first() is None:
                raise NotInStore(
                    f"the store has no rollout {subject_id} to vote on; give one that `understudy show` lists"
                )
        _remove(context, subject, subject_id, voter)
        values = {
            "subject": subject,
            "subject_id": subject_id,
            "voter": voter,
            "label": label,
            "note": note,
            "voted_at": time.time(),
        }
        context.connection.execute(insert(votes).values(values))

    @queued
    def remove(self, context: WriteContext, subject: VoteSubject, subject_id: str, voter: str) -> bool:
        """Remove a vote. Returns False if there was none."""
        return _remove(context, subject, subject_id, voter)

    def all(self, subject: VoteSubject | None = None) -> list[Vote]:
        """Return all votes, or those on one kind of subject, oldest first."""
        query = select(votes).order_by(votes.c.voted_at, votes.c.subject_id, votes.c.voter)
        if subject is not None:
            query = query.where(votes.c.subject == subject)
        return self._read_all(query, _vote)

    def excluded_rollouts(self) -> frozenset[str]:
        """Return the rollouts that more than half of their votes exclude from learning."""
        return frozenset(key for key, labels in self._labels("rollout").items() if _is_majority(labels, EXCLUDE))

    def doubted_pairs(self) -> frozenset[str]:
        """Return the pairs of which at least half of the votes do not confirm that the chosen answer is the
        better one.
        """
        return frozenset(
            key
            for key, labels in self._labels("pair").items()
            if 2 * (labels.total() - labels[CHOSEN]) >= labels.total()
        )

    def _labels(self, subject: VoteSubject) -> dict[str, Counter[str]]:
        labels: dict[str, Counter[str]] = {}
        for vote in self.all(subject):
            labels.setdefault(vote.subject_id, Counter())[vote.label] += 1
        return labels


def _is_majority(labels: Counter[str], label: str) -> bool:
    return 2 * labels[label] > labels.total()


def _remove(context: WriteContext, subject: VoteSubject, subject_id: str, voter: str) -> bool:
    is_vote = and_(votes.c.subject == subject, votes.c.subject_id == subject_id, votes.c.voter == voter)
    return context.connection.execute(delete(votes).where(is_vote)).rowcount == 1
