"""What teachers were asked: replays with their configurations, and their asks.

An ask is stored before it is sent.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct
from sqlalchemy import Table, Text, func, insert, select, update

from understudy.store.database import (
    Repository,
    WriteContext,
    decode_object,
    encode,
    error_column,
    json_column,
    queued,
    read_error,
    row_reader,
)
from understudy.store.schema import asks, calls, replays
from understudy.store.statements import json_values
from understudy.types import ErrorInfo

AskKind = Literal["teacher", "judge"]
AskStatus = Literal["asked", "answered", "failed"]


class StoredReplay(Struct, frozen=True, kw_only=True):
    """A named replay. `config` holds its configuration and counts, as of the last time it was run."""

    id: str
    config: dict[str, Any]
    created_at: float


class StoredAsk(Struct, frozen=True, kw_only=True):
    """One question to one teacher about one state. `number` distinguishes repeated questions.

    `cost_usd` is what it has cost so far; for tries that were interrupted, the most that they can have cost.
    `reserved_usd` is the most that the current try can cost. The ask never costs more than the sum of both. Both
    are None if the teacher has no price. `call_id` names the call that answered it, `error` says why it failed.
    Status `asked` also covers an ask whose process died.
    """

    id: str
    replay_id: str
    state_id: str
    kind: AskKind
    teacher: str
    model: str
    family: str | None
    number: int
    status: AskStatus
    asked_at: float
    reserved_usd: float | None = None
    cost_usd: float | None = None
    call_id: str | None = None
    error: ErrorInfo | None = None
    ended_at: float | None = None


class ReplayCost(Struct, frozen=True, kw_only=True):
    """What a replay has cost, and what is reserved for tries in progress (see StoredAsk)."""

    cost_usd: float
    reserved_usd: float


_replay = row_reader(StoredReplay, config=decode_object)
_ask = row_reader(StoredAsk, error=read_error)


class AskRepository(Repository):
    """`Store.asks`: replays, and what teachers and judges were asked in them."""

    @queued
    def put_replay(self, context: WriteContext, replay_id: str, config: Mapping[str, Any]) -> None:
        """Store a replay, or replace its configuration."""
        column = json_column(encode, dict(config), f"the configuration of replay {replay_id}")
        _upsert(context, replays, replay_id, {"config": column}, {"created_at": time.time()})

    def replay(self, replay_id: str) -> StoredReplay | None:
        """Return the replay with this name, or None."""
        return next((replay for replay in self.replays() if replay.id == replay_id), None)

    def replays(self) -> list[StoredReplay]:
        """Return all replays, oldest first."""
        query = select(replays).order_by(replays.c.created_at, replays.c.id)
        return self._read_all(query, _replay)

    @queued
    def add(self, context: WriteContext, ask: StoredAsk) -> None:
        """Store the current state of an ask, replacing an earlier one.

        Raises StoreError if its state id is unknown.
        """
        values = msgspec.structs.asdict(ask) | {"error": error_column(ask.error)}
        del values["id"]
        _upsert(context, asks, ask.id, values, {})

    def find(self, ask_ids: Iterable[str]) -> dict[str, StoredAsk]:
        """Return those of these asks that exist, by id."""
        query = select(asks).where(asks.c.id.in_(json_values(list(ask_ids), Text)))
        return {ask.id: ask for ask in self._read_all(query, _ask)}

    def of_state(self, state_id: str, kind: AskKind | None = None) -> list[StoredAsk]:
        """Return the asks about a state, ordered by replay, teacher and number."""
        query = select(asks).where(asks.c.state_id == state_id)
        if kind is not None:
            query = query.where(asks.c.kind == kind)
        query = query.order_by(asks.c.replay_id, asks.c.teacher, asks.c.number, asks.c.id)
        return self._read_all(query, _ask)

    def of_replay(self, replay_id: str, status: AskStatus | None = None) -> list[StoredAsk]:
        """Return the asks of a replay, oldest first."""
        query = select(asks).where(asks.c.replay_id == replay_id).order_by(asks.c.asked_at, asks.c.id)
        if status is not None:
            query = query.where(asks.c.status == status)
        return self._read_all(query, _ask)

    def states_of_replay(self, replay_id: str) -> set[str]:
        """Return the ids of the states that a replay has asked a teacher about."""
        query = select(asks.c.state_id).where(asks.c.replay_id == replay_id, asks.c.kind == "teacher")
        with self._reading() as connection:
            return set(connection.execute(query.distinct()).scalars())

    def answered_states(self) -> list[str]:
        """Return, in order, the ids of the states that a teacher has answered about."""
        answered = select(asks.c.state_id).where(asks.c.status == "answered", asks.c.kind == "teacher")
        with self._reading() as connection:
            return list(connection.execute(answered.distinct().order_by(asks.c.state_id)).scalars())

    def cost(self, replay_id: str) -> ReplayCost:
        """Return what a replay has cost so far, at most."""
        total = select(
            func.coalesce(func.sum(asks.c.cost_usd), 0.0), func.coalesce(func.sum(asks.c.reserved_usd), 0.0)
        )
        with self._reading() as connection:
            cost, reserved = connection.execute(total.where(asks.c.replay_id == replay_id)).one()
        return ReplayCost(cost_usd=cost, reserved_usd=reserved)

    def answered_calls(self, attempt_id: str) -> dict[str, str]:
        """Return the answered calls of an attempt: session id (the ask's) → call id."""
        query = (
            select(calls.c.session_id, calls.c.id)
            .where(calls.c.attempt_id == attempt_id, calls.c.status == "ok", calls.c.session_id.is_not(None))
            .order_by(calls.c.sequence)
        )
        with self._reading() as connection:
            return {row.session_id: row.id for row in connection.execute(query)}


def _upsert(
    context: WriteContext, table: Table, key: str, values: Mapping[str, Any], inserted_values: Mapping[str, Any]
) -> None:
    """Update the row with this id, or insert it; only an insert also sets `inserted_values`."""
    if context.connection.execute(update(table).where(table.c.id == key).values(values)).rowcount == 0:
        context.connection.execute(insert(table).values({"id": key, **values, **inserted_values}))
