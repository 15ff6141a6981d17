"""Runs, their tasks, rollouts and attempts: what is stored about them, and every change of their status.

The tables in `types.py` say which status changes are legal; the store refuses all others.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Connection, Select, Table, and_, func, insert, select, update

from understudy.errors import ConfigError, LeaseLost, NotInStore, StoreError
from understudy.store.contents import read_blobs
from understudy.store.database import (
    Repository,
    Row,
    WriteContext,
    canonical,
    decode_object,
    encode,
    error_column,
    findings_column,
    json_column,
    queued,
    read_error,
    read_findings,
    row_reader,
)
from understudy.store.decoding import decoder
from understudy.store.schema import attempts, rewards, rollouts, runs, tasks
from understudy.store.schema import logs as log_table
from understudy.store.statements import json_field, store_clock
from understudy.types import (
    ATTEMPT_TRANSITIONS,
    ROLLOUT_TRANSITIONS,
    AgentIdentity,
    Attempt,
    AttemptStatus,
    ErrorInfo,
    Finding,
    IntegrityStatus,
    Rollout,
    RolloutStatus,
    Run,
    Task,
    Verdict,
)

_NOTHING: Mapping[str, Any] = {}
_CLAUDE_CODE = AgentIdentity("claude-code")
_TABLES: dict[str, tuple[Table, Mapping[Any, frozenset[Any]]]] = {
    "rollout": (rollouts, ROLLOUT_TRANSITIONS),
    "attempt": (attempts, ATTEMPT_TRANSITIONS),
}
_run = row_reader(Run, config=decode_object)
_task = decoder(Task, "a task")
_verdict = decoder(Verdict, "a verdict")
OPEN_ATTEMPTS: tuple[AttemptStatus, ...] = ("preparing", "running")
read_timings = decoder(dict[str, float], "an attempt's list of durations")


class Lease(Struct, frozen=True):
    """What a worker requests: its unique name, and for how many seconds an attempt belongs to it."""

    worker: str
    seconds: float


class RunRepository(Repository):
    """`Store.runs`: runs with their tasks, rollouts and attempts."""

    # --- runs and tasks --------------------------------------------------------------------------------

    @queued
    def create(self, context: WriteContext, run_id: str, config: Mapping[str, Any]) -> None:
        """Store a run. Storing the same run again only updates what it is `served` by.

        Raises StoreError if the run is stored with another configuration.
        """
        column = json_column(canonical, dict(config), f"the configuration of run {run_id}")
        existing = context.connection.execute(select(runs.c.config).where(runs.c.id == run_id)).scalar()
        if existing is None:
            values = {"id": run_id, "config": column, "created_at": time.time()}
            context.connection.execute(insert(runs).values(values))
        elif existing != column:
            differing_keys = _differing_keys(msgspec.json.decode(existing), msgspec.json.decode(column))
            if differing_keys == "served":
                context.connection.execute(update(runs).where(runs.c.id == run_id).values(config=column))
                return
            raise StoreError(
                f"run {run_id} is stored with another configuration (different: {differing_keys}); continue with "
                "the same one, or choose another --output-dir"
            )

    def all(self) -> list[Run]:
        """Return all runs, oldest first."""
        query = select(runs.c.id, runs.c.config, runs.c.created_at).order_by(runs.c.created_at, runs.c.id)
        return self._read_all(query, _run)

    def of_wave(self, wave: str) -> Run | None:
        """Return the run that is this wave of a training loop, or None."""
        query = select(runs.c.id, runs.c.config, runs.c.created_at).where(
            json_field(runs.c.config, "wave") == wave
        )
        return next(iter(self._read_all(query, _run)), None)

    @queued
    def add_tasks(self, context: WriteContext, run_id: str, new_tasks: Sequence[Task]) -> None:
        """Store the tasks of a run.

        Storing the same again changes nothing; raises StoreError if a task's content differs.
        """
        query = select(tasks.c.id, tasks.c.blob_id).where(tasks.c.run_id == run_id)
        existing: dict[str, int] = {row.id: row.blob_id for row in context.connection.execute(query)}
        for task in new_tasks:
            blob = context.contents.blob(json_column(canonical, task, f"task {task.instance_id}"))
            if task.instance_id not in existing:
                values = {"run_id": run_id, "id": task.instance_id, "blob_id": blob}
                context.connection.execute(insert(tasks).values(values))
                existing[task.instance_id] = blob
            elif existing[task.instance_id] != blob:
                raise StoreError(
                    f"task {task.instance_id} is stored in run {run_id} with different content; continue with "
                    "the same tasks, or choose another --output-dir"
                )

    def task(self, run_id: str, task_id: str) -> Task:
        """Return a task of a run. Raises StoreError if there is none."""
        query = select(tasks.c.blob_id).where(tasks.c.run_id == run_id, tasks.c.id == task_id)
        if (content := self._database.read_content(query)) is None:
            raise NotInStore(
                f"{self._name}: run {run_id} has no task {task_id}; give the id of a task that `understudy "
                "show` lists"
            )
        with self._database.driver.errors():
            return _task(content)

    # --- rollouts --------------------------------------------------------------------------------------

    @queued
    def create_rollouts(
        self,
        context: WriteContext,
        run_id: str,
        new_rollouts: Sequence[tuple[str, str, int]],
        agent: AgentIdentity = _CLAUDE_CODE,
    ) -> None:
        """Store rollouts (id, task id, sample index) of an agent as queuing.

        Existing rollouts stay as they are, except that queued ones take the agent's version that will now work on
        them. Raises StoreError if an id, or a sample of a task by this agent, belongs to another rollout.
        """
        table = rollouts.c
        query = select(table.id, table.run_id, table.task_id, table.agent, table.sample_index, table.status)
        now = time.time()
        for rollout_id, task_id, index in new_rollouts:
            same_sample = and_(
                table.run_id == run_id,
                table.task_id == task_id,
                table.agent == agent.name,
                table.agent_version.is_not_distinct_from(agent.version),
                table.sample_index == index,
            )
            rows = context.connection.execute(query.where((table.id == rollout_id) | same_sample)).all()
            if not rows:
                values = {
                    "id": rollout_id,
                    "run_id": run_id,
                    "task_id": task_id,
                    "sample_index": index,
                    "status": "queuing",
                    "created_at": now,
                    "updated_at": now,
                    "agent": agent.name,
                    "agent_version": agent.version,
                }
                context.connection.execute(insert(rollouts).values(values))
            elif tuple(rows[0])[:5] != (rollout_id, run_id, task_id, agent.name, index):
                raise StoreError(
                    f"internal error: rollout {rollout_id} for sample {index} of task {task_id} in run "
                    f"{run_id} collides with rollout {rows[0].id} for sample {rows[0].sample_index} of task "
                    f"{rows[0].task_id} in run {rows[0].run_id}; please report it"
                )
            elif rows[0].status in ("queuing", "requeuing"):
                change = update(rollouts).where(table.id == rollout_id).values(agent_version=agent.version)
                context.connection.execute(change)

    def rollouts(self, run_id: str | None = None) -> list[Rollout]:
        """Return the rollouts of a run (or all), oldest first, then by task and sample index."""
        query = select(rollouts).order_by(
            rollouts.c.created_at, rollouts.c.run_id, rollouts.c.task_id, rollouts.c.sample_index
        )
        if run_id is not None:
            query = query.where(rollouts.c.run_id == run_id)
        return self._read_all(query, read_rollout)

    def rollout(self, rollout_id: str) -> Rollout:
        """Return a rollout by its id. Raises StoreError if there is none."""
        for rollout in self._read_all(select(rollouts).where(rollouts.c.id == rollout_id), read_rollout):
            return rollout
        raise NotInStore(f"{self._name}: there is no rollout {rollout_id}; give one that `understudy show` lists")

    def find_rollout(self, prefix: str) -> Rollout:
        """Return the one rollout whose id is or begins with `prefix`.

        Raises StoreError if there is none, or several.
        """
        starts = func.substr(rollouts.c.id, 1, len(prefix)) == prefix
        matches = self._read_all(select(rollouts).where(starts), read_rollout)
        if exact := [rollout for rollout in matches if rollout.id == prefix]:
            return exact[0]
        if not matches:
            raise NotInStore(
                f"{self._name}: no rollout's id begins with {prefix!r}; give one that `understudy show --dir` "
                "lists for this store"
            )
        if len(matches) > 1:
            examples = ", ".join(rollout.id for rollout in matches[:5]) + (", …" if len(matches) > 5 else "")
            raise StoreError(
                f"{self._name}: the ids of {len(matches)} rollouts begin with {prefix!r}: {examples}; type more "
                "characters of the id"
            )
        return matches[0]

    @queued
    def set_rollout_status(
        self, context: WriteContext, rollout_id: str, status: RolloutStatus, *, error: ErrorInfo | None = None
    ) -> None:
        """Cancel or requeue a rollout while no attempt works on it. Raises StoreError if that is illegal."""
        _set_rollout_status(context, rollout_id, status, error)

    @queued
    def recover(self, context: WriteContext, run_id: str) -> int:
        """Clean up after a kill: mark open attempts as unresponsive and requeue their rollouts. Returns how many.

        Attempts whose worker holds a lease are left alone.
        """
        query = (
            select(attempts.c.id, attempts.c.rollout_id)
            .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
            .where(rollouts.c.run_id == run_id, attempts.c.status.in_(OPEN_ATTEMPTS))
            .where(attempts.c.lease_until.is_(None) | (attempts.c.lease_until < store_clock()))
            .with_for_update(of=attempts)
        )
        lost_attempts = context.connection.execute(query).all()
        error = ErrorInfo("run", "Interrupted", "the run ended before this attempt did")
        for attempt_id, rollout_id in lost_attempts:
            take_attempt(context, attempt_id, rollout_id, error)
        return len(lost_attempts)

    @queued
    def requeue_failed(self, context: WriteContext, run_id: str) -> int:
        """Requeue rollouts that failed because of the infrastructure or were cancelled. Returns how many."""
        has_ended = and_(rollouts.c.run_id == run_id, rollouts.c.status.in_(("failed", "cancelled")))
        ids = context.connection.execute(select(rollouts.c.id).where(has_ended)).scalars().all()
        for rollout_id in ids:
            _set_rollout_status(context, rollout_id, "requeuing", None)
        return len(ids)

    # --- attempts --------------------------------------------------------------------------------------

    @queued
    def start_attempt(self, context: WriteContext, rollout_id: str, lease: Lease | None = None) -> Attempt:
        """Start the next attempt of a queuing or requeuing rollout; both become preparing."""
        return begin_attempt(context, rollout_id, lease)

    @queued
    def mark_running(self, context: WriteContext, attempt_id: str) -> None:
        """Move an attempt and its rollout from preparing to running."""
        _set_status(context, "attempt", attempt_id, "running", heartbeat_at=time.time())
        _set_rollout_status(context, _rollout_of(context, attempt_id), "running", None)

    @queued
    def heartbeat(self, context: WriteContext, attempt_ids: Sequence[str]) -> None:
        """Record that attempts are alive now. Ended attempts are left alone."""
        alive = and_(attempts.c.id.in_(attempt_ids), attempts.c.status.in_(OPEN_ATTEMPTS))
        context.connection.execute(update(attempts).where(alive).values(heartbeat_at=time.time()))

    @queued
    def finish_attempt(
        self,
        context: WriteContext,
        attempt_id: str,
        status: AttemptStatus,
        rollout_status: RolloutStatus,
        *,
        patch: bytes | None = None,
        verdict: Verdict | None = None,
        logs: Mapping[str, bytes] = _NOTHING,
        error: ErrorInfo | None = None,
        timings: Mapping[str, float] = _NOTHING,
        findings: Sequence[Finding] = (),
    ) -> None:
        """End an attempt, storing its rollout's new status and all its results in one transaction.

        Timings are in seconds.
        """
        store = context.contents.blob
        _set_status(
            context,
            "attempt",
            attempt_id,
            status,
            ended_at=time.time(),
            error=error_column(error),
            timings=json_column(encode, dict(timings), f"the timings of attempt {attempt_id}"),
            patch_id=None if patch is None else store(patch),
            findings=findings_column(findings) if findings else None,
        )
        _set_rollout_status(context, _rollout_of(context, attempt_id), rollout_status, error)
        if verdict is not None:
            values = {"attempt_id": attempt_id, **_reward_columns(context, attempt_id, verdict)}
            context.connection.execute(insert(rewards).values(values))
        for name, content in logs.items():
            values = {"attempt_id": attempt_id, "name": name, "blob_id": store(content)}
            context.connection.execute(insert(log_table).values(values))

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """Return the attempts of a rollout in order."""
        query = select(attempts).where(attempts.c.rollout_id == rollout_id).order_by(attempts.c.number)
        return self._read_all(query, read_attempt)

    def attempt(self, attempt_id: str) -> Attempt:
        """Return an attempt by its id. Raises StoreError if there is none."""
        for attempt in self._read_all(select(attempts).where(attempts.c.id == attempt_id), read_attempt):
            return attempt
        raise NotInStore(
            f"{self._name}: there is no attempt {attempt_id}; give one that `understudy show ROLLOUT` lists"
        )

    def patch(self, attempt_id: str) -> bytes | None:
        """Return the patch of an attempt, or None if it did not get that far."""
        return self._database.read_content(select(attempts.c.patch_id).where(attempts.c.id == attempt_id))

    def logs(self, attempt_id: str) -> dict[str, bytes]:
        """Return the log files of an attempt by name."""
        query = (
            select(log_table.c.name, log_table.c.blob_id)
            .where(log_table.c.attempt_id == attempt_id)
            .order_by(log_table.c.name)
        )
        with self._reading() as connection:
            blobs: dict[str, int] = {row.name: row.blob_id for row in connection.execute(query)}
            contents = read_blobs(connection, blobs.values())
        return {name: contents[blob] for name, blob in blobs.items()}

    def verdict(self, attempt_id: str) -> Verdict | None:
        """Return the grader's verdict on an attempt, or None; its integrity reflects the last review."""
        with self._reading() as connection:
            return read_verdicts(connection, [attempt_id]).get(attempt_id)

    @queued
    def replace_verdict(self, context: WriteContext, attempt_id: str, verdict: Verdict) -> None:
        """Replace an attempt's verdict. The new verdict keeps the old one as the last of its `earlier` verdicts.

        A person's decision on the patch's integrity is kept. Raises StoreError if the attempt has no verdict.
        """
        row = context.connection.execute(
            select(rewards.c.verdict_id, rewards.c.review).where(rewards.c.attempt_id == attempt_id)
        ).one_or_none()
        if row is None:
            raise StoreError(
                f"attempt {attempt_id} has no verdict to replace; give an attempt that has been graded"
            )
        replaced = _verdict(read_blobs(context.connection, [row.verdict_id])[row.verdict_id])
        earlier = (*replaced.earlier, msgspec.structs.replace(replaced, earlier=()))
        values = _reward_columns(context, attempt_id, msgspec.structs.replace(verdict, earlier=earlier))
        if row.review is not None:
            del values["integrity"]
        context.connection.execute(update(rewards).where(rewards.c.attempt_id == attempt_id).values(values))

    @queued
    def review(self, context: WriteContext, attempt_id: str, status: IntegrityStatus, note: str) -> None:
        """Store a person's decision on whether a patch is suspicious, and why.

        Raises StoreError if there is no verdict.
        """
        change = update(rewards).where(rewards.c.attempt_id == attempt_id).values(integrity=status, review=note)
        if context.connection.execute(change).rowcount != 1:
            raise StoreError(
                f"attempt {attempt_id} has no verdict to review; wait until it is graded, or give a graded attempt"
            )


def check_run_id(run_id: str | None, run_ids: Sequence[str]) -> None:
    """Raise ConfigError if `run_id` is given and not one of `run_ids`, the runs of the store."""
    if run_id is not None and run_id not in run_ids:
        raise ConfigError(
            f"the store has no run {run_id!r}; give one of: {', '.join(run_ids) or 'none, it has no runs'}"
        )


def _reward_columns(context: WriteContext, attempt_id: str, verdict: Verdict) -> dict[str, Any]:
    """Store a verdict as a content, and return the values of its row in the rewards table."""
    if not math.isfinite(verdict.reward):
        raise StoreError(
            f"attempt {attempt_id}: expected a finite number as reward, got {verdict.reward}; correct what "
            "the check writes"
        )
    content = json_column(encode, verdict, f"the verdict of attempt {attempt_id}")
    return {
        "reward": verdict.reward,
        "reason": verdict.reason,
        "verdict_id": context.contents.blob(content),
        "integrity": verdict.integrity.status,
    }


def begin_attempt(context: WriteContext, rollout_id: str, lease: Lease | None) -> Attempt:
    """Start the next attempt of a rollout. Raises StoreError if the rollout is not queued."""
    _set_rollout_status(context, rollout_id, "preparing", None)
    query = select(func.max(attempts.c.number)).where(attempts.c.rollout_id == rollout_id)
    number = (context.connection.execute(query).scalar() or 0) + 1
    attempt = insert_attempt(context, f"{rollout_id}.{number}", rollout_id, number, "preparing")
    if lease is not None:
        values = {"worker": lease.worker, "lease_until": store_clock() + lease.seconds}
        context.connection.execute(update(attempts).where(attempts.c.id == attempt.id).values(values))
    return attempt


def take_attempt(
    context: WriteContext, attempt_id: str, rollout_id: str, error: ErrorInfo, status: RolloutStatus = "requeuing"
) -> None:
    """Take an open attempt away from its worker, so that none of the worker's later writes to it are stored."""
    end_columns = {"ended_at": time.time(), "error": error_column(error)}
    _set_status(context, "attempt", attempt_id, "unresponsive", **end_columns)
    _set_rollout_status(context, rollout_id, status, error if status == "failed" else None)


def insert_attempt(
    context: WriteContext, attempt_id: str, rollout_id: str | None, number: int, status: AttemptStatus
) -> Attempt:
    """Store a new attempt that starts now."""
    now = time.time()
    attempt = Attempt(
        id=attempt_id, rollout_id=rollout_id, number=number, status=status, started_at=now, heartbeat_at=now
    )
    values = msgspec.structs.asdict(attempt) | {"timings": encode(attempt.timings), "findings": None}
    context.connection.execute(insert(attempts).values(values))
    return attempt


def read_rollout(row: Row) -> Rollout:
    """Read a rollout from a row of its table."""
    agent = AgentIdentity(row["agent"], row["agent_version"])
    fields: dict[str, Any] = {**row, "error": read_error(row["error"]), "agent": agent}
    del fields["agent_version"]
    return Rollout(**fields)


def read_attempt(row: Row) -> Attempt:
    """Read an attempt from a row of its table."""
    fields: dict[str, Any] = {
        **row,
        "error": read_error(row["error"]),
        "timings": read_timings(row["timings"]),
        "findings": read_findings(row["findings"]),
    }
    for name in ("patch_id", "worker", "lease_until"):
        del fields[name]
    return Attempt(**fields)


def read_verdicts(connection: Connection, attempt_ids: Sequence[str] | Select[tuple[str]]) -> dict[str, Verdict]:
    """Return the verdicts on those of these attempts that were graded, by attempt id.

    If a person reviewed a patch, that decision replaces the grader's integrity.
    """
    columns = (rewards.c.attempt_id, rewards.c.verdict_id, rewards.c.integrity, rewards.c.review)
    rows = connection.execute(select(*columns).where(rewards.c.attempt_id.in_(attempt_ids))).all()
    contents = read_blobs(connection, (row.verdict_id for row in rows))
    verdicts: dict[str, Verdict] = {}
    for row in rows:
        verdict = _verdict(contents[row.verdict_id])
        if row.review is not None:
            earlier_reason = verdict.integrity.reason
            reason = f"reviewed: {row.review}" + (f" (before: {earlier_reason})" if earlier_reason else "")
            integrity = msgspec.structs.replace(verdict.integrity, status=row.integrity, reason=reason)
            verdict = msgspec.structs.replace(verdict, integrity=integrity)
        verdicts[row.attempt_id] = verdict
    return verdicts


def _set_rollout_status(
    context: WriteContext, rollout_id: str, status: RolloutStatus, error: ErrorInfo | None
) -> None:
    _set_status(context, "rollout", rollout_id, status, updated_at=time.time(), error=error_column(error))


def _set_status(context: WriteContext, noun: str, key: str, status: Any, **values: Any) -> None:
    """Change the status and other columns of a row. Raises StoreError if the change is illegal."""
    table, transitions = _TABLES[noun]
    # An illegal change updates no row, so checking and changing are a single statement.
    sources = [source for source, targets in transitions.items() if status in targets]
    change = (
        update(table).where(table.c.id == key, table.c.status.in_(sources)).values({"status": status, **values})
    )
    if context.connection.execute(change).rowcount == 1:
        return
    current = context.connection.execute(select(table.c.status).where(table.c.id == key)).scalar()
    if current is None:
        raise NotInStore(f"the store has no {noun} {key}; give one that `understudy show` lists")
    legal = " or ".join(sorted(transitions[current]))
    kind = LeaseLost if current == "unresponsive" else StoreError
    raise kind(
        f"{noun} {key} cannot become {status}: it is {current}, "
        f"{f'which can only become {legal}' if legal else 'which is final'}; another process may have changed it: "
        "run the same command again"
    )


def _rollout_of(context: WriteContext, attempt_id: str) -> str:
    query = select(attempts.c.rollout_id).where(attempts.c.id == attempt_id)
    return context.connection.execute(query).scalar_one()


def _differing_keys(old_config: dict[str, Any], new_config: dict[str, Any]) -> str:
    names = [
        name
        for name in sorted(old_config.keys() | new_config.keys())
        if old_config.get(name) != new_config.get(name)
    ]
    return ", ".join(names) or "spelling"
