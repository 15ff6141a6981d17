"""What a trainer computed for the sampled tokens of calls, by its step: logprobs, ratios and advantages."""

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
    """The values of a call in the update of a `step`, which produced the weights of `version`."""

    step: int
    version: str


class StepSize(Struct, frozen=True):
    """How many `calls` have values in a `step`, and their size in bytes."""

    step: int
    calls: int
    bytes: int


class TrainingRepository(Repository):
    """`Store.training`: what trainers computed for the tokens of this store's calls."""

    @queued
    def record(
        self, context: WriteContext, step: int, version: str, values: Iterable[TokenValues], *, limit_bytes: int
    ) -> int:
        """Store the values of a step, replacing earlier ones of that step. Returns the number of calls stored.

        Calls of other stores are ignored, because a step may learn from several waves with a store each. All
        values in a store take at most `limit_bytes`: values of this step beyond that are left out, and the oldest
        steps are removed until the rest fits.
        """
        connection, pack = context.connection, context.contents.pack
        connection.execute(delete(token_values).where(token_values.c.step == step))
        size = stored = 0
        for value in values:
            if connection.execute(select(calls.c.key).where(calls.c.id == value.call_id)).first() is None:
                continue
            arrays = {name: pack(pack_float32(getattr(value, name))) for name in _ARRAYS}
            size += sum(map(len, arrays.values()))
            if size > limit_bytes:
                break
            row = {"step": step, "version": version, "call_id": value.call_id, **arrays}
            connection.execute(insert(token_values).values(row))
            stored += 1
        _prune(context, limit_bytes)
        return stored

    @queued
    def prune(self, context: WriteContext, limit_bytes: int = 0) -> int:
        """Remove the values of the oldest steps until the rest fits in `limit_bytes`.

        Returns how many were removed.
        """
        return _prune(context, limit_bytes)

    def steps(self) -> list[StepSize]:
        """Return the steps that have values, oldest first."""
        query = select(token_values.c.step, func.count(), _SIZE).group_by(token_values.c.step)
        return self._read_all(query.order_by(token_values.c.step), lambda row: StepSize(*row.values()))

    def of_call(self, call_id: str) -> list[StepTokenValues]:
        """Return the values of a call in every step that learned from it, oldest first; empty if none were
        kept.
        """
        return self._read(token_values.c.call_id == call_id)

    def of_step(self, step: int) -> list[StepTokenValues]:
        """Return the values of all calls in a step, by call id."""
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
