"""What became of each rollout of a run, and of its calls, in figures: a few queries, however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, and_, case, func, select, text

from understudy.store.schema import attempts, calls, rewards, rollouts
from understudy.store.sql import read_error
from understudy.types import AttemptStatus, ErrorInfo, IntegrityStatus, RolloutStatus


class Outcome(Struct, frozen=True, kw_only=True):
    """A rollout as it stands now.

    `reward`, `reason`, `integrity` and `ended` are those of the attempt that decided, the last that was graded,
    and None where none was, or the rollout has not ended. `turns` (calls that were answered), tokens, `cost_usd`
    and `seconds` (from its start to its end) are that attempt's too; where none decided, the last attempt's.
    """

    task_id: str
    sample_index: int
    status: RolloutStatus
    attempts: int
    reward: float | None = None
    reason: str | None = None
    integrity: IntegrityStatus | None = None
    ended: AttemptStatus | None = None
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float | None = None
    error: ErrorInfo | None = None


class AttemptFault(Struct, frozen=True):
    """A fault that an attempt met, and whether its rollout was given up for it in the end."""

    error: ErrorInfo
    given_up: bool


class VersionUse(Struct, frozen=True, kw_only=True):
    """The answered calls that ended with one version of the weights; None: no version is known.

    `mixed` counts those that an update fell into, so that more than one version sampled them. Times in Unix
    seconds.
    """

    version: str | None
    calls: int
    mixed: int
    completion_tokens: int
    first_at: float
    last_at: float


_used = (
    select(
        calls.c.attempt_id,
        func.sum(case((calls.c.status == "ok", 1), else_=0)).label("turns"),
        func.sum(calls.c.prompt_tokens).label("prompt_tokens"),
        func.sum(calls.c.cached_tokens).label("cached_tokens"),
        func.sum(calls.c.completion_tokens).label("completion_tokens"),
        func.coalesce(func.sum(calls.c.cost_usd), 0.0).label("cost_usd"),
    )
    .join(attempts, attempts.c.id == calls.c.attempt_id)
    .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
    .group_by(calls.c.attempt_id)
)


def outcomes(connection: Connection, run_id: str) -> list[Outcome]:
    """Every rollout of a run, by task and sample index."""
    used = {row.attempt_id: row for row in connection.execute(_used.where(rollouts.c.run_id == run_id))}
    query = (
        select(
            rollouts.c.id,
            rollouts.c.task_id,
            rollouts.c.sample_index,
            rollouts.c.status,
            rollouts.c.error,
            attempts.c.id.label("attempt_id"),
            attempts.c.status.label("attempt_status"),
            attempts.c.started_at,
            attempts.c.ended_at,
            rewards.c.reward,
            rewards.c.reason,
            rewards.c.integrity,
        )
        .join(attempts, attempts.c.rollout_id == rollouts.c.id, isouter=True)
        .join(rewards, rewards.c.attempt_id == attempts.c.id, isouter=True)
        .where(rollouts.c.run_id == run_id)
        .order_by(rollouts.c.task_id, rollouts.c.sample_index, attempts.c.number)
    )
    found: list[Outcome] = []
    of_rollout: dict[str, int] = {}
    for row in connection.execute(query):
        at = of_rollout.setdefault(row.id, len(found))
        if at == len(found):
            found.append(
                Outcome(
                    task_id=row.task_id,
                    sample_index=row.sample_index,
                    status=row.status,
                    attempts=0,
                    error=read_error(row.error),
                )
            )
        if row.attempt_id is None:
            continue
        known = found[at]
        changes: dict[str, Any] = {"attempts": known.attempts + 1}
        decides = row.reward is not None and row.status in ("succeeded", "failed")
        if decides or known.reward is None:
            spent = used.get(row.attempt_id)
            changes |= {
                name: getattr(spent, name) if spent else 0
                for name in ("turns", "prompt_tokens", "cached_tokens", "completion_tokens", "cost_usd")
            }
            changes["seconds"] = None if row.ended_at is None else row.ended_at - row.started_at
        if decides:
            changes |= {"reward": row.reward, "reason": row.reason, "integrity": row.integrity}
            changes["ended"] = row.attempt_status
        found[at] = msgspec.structs.replace(known, **changes)
    return found


def faults(connection: Connection, run_id: str) -> Iterator[AttemptFault]:
    """The faults that attempts of a run met, whether they were tried again or not, in order of attempt."""
    query = (
        select(attempts.c.error, attempts.c.number, rollouts.c.status)
        .add_columns(func.max(attempts.c.number).over(partition_by=attempts.c.rollout_id).label("last"))
        .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
        .order_by(attempts.c.started_at, attempts.c.id)
    )
    for row in connection.execute(query).all():
        if (error := read_error(row.error)) is not None:
            yield AttemptFault(error, row.status == "failed" and row.number == row.last)


def versions(connection: Connection, run_id: str) -> list[VersionUse]:
    """The versions of the weights that a run's calls were answered by, in order of their first call."""
    mixed = case((text("json_array_length(CAST(policy_spans AS TEXT)) > 1"), 1), else_=0)
    query = (
        select(
            calls.c.policy_version.label("version"),
            func.count().label("calls"),
            func.sum(mixed).label("mixed"),
            func.sum(calls.c.completion_tokens).label("completion_tokens"),
            func.min(calls.c.started_at).label("first_at"),
            func.max(calls.c.ended_at).label("last_at"),
        )
        .join(attempts, attempts.c.id == calls.c.attempt_id)
        .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
        .where(calls.c.status == "ok")
        .group_by(calls.c.policy_version)
        .order_by(func.min(calls.c.started_at))
    )
    return [VersionUse(**row) for row in connection.execute(query).mappings()]
