"""What a trainer computed for the sampled tokens of calls: logprobs, ratios and advantages, by its step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, RowMapping, delete, func, insert, literal, select

from understudy.store.contents import unpack
from understudy.store.database import Repository, WriteContext, queued
from understudy.store.schema import calls, token_values
from understudy.store.tokens import pack_float32, unpack_float32

_ARRAYS = ("logprobs", "ratios", "advantages")
_SIZE: ColumnElement[int] = func.coalesce(
    func.sum(sum((func.length(token_values.c[name]) for name in _ARRAYS), literal(0))), 0
)


class TokenValues(Struct, frozen=True, kw_only=True):
    """What one update computed for the completion of one call.

    Each tuple has one float32 for each of the call's `completion_token_ids`, in their order:

    - `logprobs`: natural logarithms of the probabilities of the tokens under the weights in training, as they were
      when the update last learned from the call (at the temperature of sampling).
    - `ratios`: those probabilities divided by the probabilities under the policy that sampled the tokens; 1 where
      trainer and sampling server agree, NaN where the server gave no logprobs.
    - `advantages`: how much better the token's rollout did than others of its group, in the units of the trainer's
      `advantage` option (for GRPO standard deviations of the group's rewards).
    """

    call_id: str
    logprobs: tuple[float, ...]
    ratios: tuple[float, ...]
    advantages: tuple[float, ...]


class StepTokenValues(TokenValues, frozen=True, kw_only=True):
    """The values of a call in the update of a `step`, which made the weights of `version`."""

    step: int
    version: str


class StepSize(Struct, frozen=True):
    """How many `calls` a store has values of in a `step`, and how many bytes these take."""

    step: int
    calls: int
    bytes: int


class TrainingRepository(Repository):
    """`Store.training`: what trainers computed for the tokens of this store's calls."""

    @queued
    def record(
        self, context: WriteContext, step: int, version: str, values: Iterable[TokenValues], *, limit_bytes: int
    ) -> int:
        """Store the values of a step, in place of those that it had; returns of how many calls.

        Calls of other stores are ignored: a step learns from several waves, each with a store of its own. All
        values of a store take at most `limit_bytes`: what a step has beyond that is left out, and the oldest steps
        are removed until the rest fits.
        """
        connection, pack = context.connection, context.contents.pack
        connection.execute(delete(token_values).where(token_values.c.step == step))
        size = stored = 0
        for each in values:
            if connection.execute(select(calls.c.key).where(calls.c.id == each.call_id)).first() is None:
                continue
            arrays = {name: pack(pack_float32(getattr(each, name))) for name in _ARRAYS}
            size += sum(map(len, arrays.values()))
            if size > limit_bytes:
                break
            row = {"step": step, "version": version, "call_id": each.call_id, **arrays}
            connection.execute(insert(token_values).values(row))
            stored += 1
        _prune(context, limit_bytes)
        return stored

    @queued
    def prune(self, context: WriteContext, limit_bytes: int = 0) -> int:
        """Remove the values of the oldest steps until the rest takes at most `limit_bytes`; returns how many."""
        return _prune(context, limit_bytes)

    def steps(self) -> list[StepSize]:
        """The steps that there are values of, oldest first."""
        query = select(token_values.c.step, func.count(), _SIZE).group_by(token_values.c.step)
        return self._read_all(query.order_by(token_values.c.step), lambda row: StepSize(*row.values()))

    def of_call(self, call_id: str) -> list[StepTokenValues]:
        """The values of a call in every step that learned from it, oldest first; empty where none were kept."""
        return self._read(token_values.c.call_id == call_id)

    def of_step(self, step: int) -> list[StepTokenValues]:
        """The values of all calls in a step, by call id."""
        return self._read(token_values.c.step == step)

    def _read(self, condition: ColumnElement[bool]) -> list[StepTokenValues]:
        query = select(token_values).where(condition).order_by(token_values.c.step, token_values.c.call_id)
        return self._read_all(query, _read_values)


def _read_values(row: RowMapping) -> StepTokenValues:
    arrays: dict[str, Any] = {name: unpack_float32(unpack(row[name])) for name in _ARRAYS}
    return StepTokenValues(step=row["step"], version=row["version"], call_id=row["call_id"], **arrays)


def _prune(context: WriteContext, limit_bytes: int) -> int:
    """Remove the oldest steps until the rest fits."""
    query = select(token_values.c.step, _SIZE).group_by(token_values.c.step).order_by(token_values.c.step)
    steps = context.connection.execute(query).all()
    size, removed = sum(row[1] for row in steps), 0
    for step, step_size in steps:
        if size <= limit_bytes:
            break
        context.connection.execute(delete(token_values).where(token_values.c.step == step))
        size, removed = size - step_size, removed + 1
    return removed
