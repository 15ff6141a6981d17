"""Leases: which worker holds which attempts, and until when.

The attempts of a rollout are numbered, and only the one with the highest number can be open, so the number serves
as a fencing token. When a lease expires, its attempt becomes unresponsive and its rollout is requeued, in one
transaction. Every write of an attempt (its calls, its start, its end with patch and verdict) checks in its own
transaction whether that happened, and is then refused with LeaseLost: a worker that was given up does no harm if
it comes back. Leases expire by the database's clock, but not right after the database server started.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from msgspec import Struct
from sqlalchemy import Select, delete, func, insert, literal, select, update

from understudy.errors import LeaseLost, StoreError
from understudy.store.database import Database, Repository, WriteContext, encode, queued, row_reader
from understudy.store.decoding import decoder
from understudy.store.runs import OPEN_ATTEMPTS, Lease, begin_attempt, read_rollout, take_attempt
from understudy.store.schema import attempts, rollouts, runs, workers
from understudy.store.statements import json_field, server_started, store_clock
from understudy.types import ENDED, Attempt, ErrorInfo, Rollout, RolloutStatus

RETRY_PAUSE_S = 1.0
"""How long a rollout whose attempt failed waits before it can be claimed again."""

MAX_LOST = 5
"""A rollout whose attempts lost this many workers is not tried again.

Workers that were told to stop do not count.
"""

FORGET_WORKER_S = 3600.0
"""How long a lost worker stays in the list of workers."""

GATEWAY = "(gateway)"
"""Stands in place of a run id for the gateway that serves a store's clients. No run can have this id."""

_SILENT_S = 30.0
"""A process that executes a run alone counts as alive for this long after it was last seen, whatever its lease."""


_OUT_OF_TOUCH_S = 3.0
"""A process that could not ask for expired leases for a third of a lease, and at least this long, was cut off."""


class ClaimedRollout(Struct, frozen=True):
    """A rollout with the attempt that a worker may now make, and the number of its earlier failed attempts."""

    rollout: Rollout
    attempt: Attempt
    failures: int


class OpenRun(Struct, frozen=True):
    """A run that workers may claim rollouts of, and the release of Understudy that enqueued it.

    For a training loop's run, `wave` is LOOP/NAME, and `served` the server that answers it, as JSON.
    """

    id: str
    release: str | None
    served: str | None = None
    wave: str | None = None


class RunQueue(Struct, frozen=True, kw_only=True):
    """A run with its numbers of rollouts by status.

    `oldest_s`: for how long its oldest queued rollout has waited.
    """

    run_id: str
    engine: str
    release: str | None
    rollouts: dict[RolloutStatus, int]
    oldest_s: float | None

    @property
    def is_open(self) -> bool:
        """Whether some of its rollouts have not ended."""
        return not self.rollouts.keys() <= set(ENDED)


class Worker(Struct, frozen=True, kw_only=True):
    """A process that claims rollouts or, if it has a `run_id`, executes that run alone.

    `held` is the number of attempts that it holds. `leaves` are the runs that it leaves to other workers, with the
    reasons. It is `alive` while its lease has not expired or, if it executes a run alone, while it was seen
    recently; it last renewed its leases `silent_s` seconds ago. Times are Unix seconds by the database's clock.
    """

    id: str
    release: str
    capacity: int
    run_id: str | None
    started_at: float
    silent_s: float
    leaves: dict[str, str]
    alive: bool
    held: int


_worker = row_reader(Worker, leaves=decoder(dict[str, str], "a worker's list of reasons"), alive=bool)


class LeaseRepository(Repository):
    """`Store.leases`: workers' claims of rollouts."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self._announced: dict[str, tuple[str, int, Mapping[str, str]]] = {}
        self._in_touch_at: float | None = None
        self._spares_until = 0.0

    @queued
    def open_to_workers(self, context: WriteContext, run_id: str, release: str) -> None:
        """Let workers of this release of Understudy claim the rollouts of a run.

        Raises StoreError while a process executes the run alone.
        """
        values = {"engine": "workers", "release": release}
        context.connection.execute(update(runs).where(runs.c.id == run_id).values(values))
        self._refuse_others(context, run_id, _executor_alone(run_id), "")
        context.session.notify()

    @queued
    def execute_alone(self, context: WriteContext, run_id: str, lease: Lease, release: str) -> None:
        """Let a process execute a run alone until its lease expires. Calling it again renews the lease.

        Workers can then claim none of its rollouts. Raises StoreError while another process executes it, or
        workers hold attempts of it.
        """
        # This comes first because it waits for claims in progress, so that their attempts are seen below.
        context.connection.execute(update(runs).where(runs.c.id == run_id).values(engine="local"))
        self._refuse_others(context, run_id, _executor_alone(run_id), lease.worker)
        self._refuse_others(context, run_id, _holders(run_id), lease.worker)
        is_earlier = (workers.c.run_id == run_id) & (workers.c.id != lease.worker)
        context.connection.execute(delete(workers).where(is_earlier))
        _write_worker(context, lease, release, capacity=0, run_id=run_id)

    @queued
    def serve_alone(self, context: WriteContext, lease: Lease, release: str) -> None:
        """Let one gateway serve the store's clients until its lease expires. Calling it again renews the lease.

        If two gateways start at the same moment, both may succeed the first time, but at least one fails on
        renewal. Raises LeaseLost while another gateway serves the store.
        """
        other_gateways = [
            worker
            for worker in context.connection.execute(_executor_alone(GATEWAY)).scalars()
            if worker != lease.worker
        ]
        if other_gateways:
            raise LeaseLost(
                f"another gateway already serves this store: {', '.join(sorted(other_gateways))}; expected none; "
                "stop it. If it was killed, run the same command again in a minute, when its lease has "
                "expired"
            )
        # Delete only expired rows: the row of a gateway that started at the same moment must make this one fail.
        is_earlier = (workers.c.run_id == GATEWAY) & (workers.c.lease_until < store_clock())
        is_earlier &= workers.c.id != lease.worker
        context.connection.execute(delete(workers).where(is_earlier))
        _write_worker(context, lease, release, capacity=0, run_id=GATEWAY)

    def _refuse_others(
        self, context: WriteContext, run_id: str, query: Select[tuple[Any]], own_worker: str
    ) -> None:
        ids = context.connection.execute(query).scalars()
        if other_workers := sorted(worker for worker in ids if worker != own_worker):
            raise StoreError(executed_elsewhere(run_id, other_workers))

    @queued
    def announce(
        self, context: WriteContext, lease: Lease, release: str, capacity: int, leaves: Mapping[str, str]
    ) -> None:
        """Publish that a worker exists, which runs it leaves to others, and why."""
        self._announced[lease.worker] = release, capacity, leaves
        _write_worker(context, lease, release, capacity=capacity, leaves=leaves)

    def workers(self) -> list[Worker]:
        """Return the current workers and those that were lost recently, oldest first."""
        columns = [column for column in workers.c if column.name not in ("seen_at", "lease_until")]
        recently_seen = workers.c.run_id.is_not(None) & (workers.c.seen_at >= store_clock() - _SILENT_S)
        alive = ((workers.c.lease_until >= store_clock()) | recently_seen).label("alive")
        silent = (store_clock() - workers.c.seen_at).label("silent_s")
        is_holder = (attempts.c.worker == workers.c.id) & attempts.c.status.in_(OPEN_ATTEMPTS)
        held_count = select(func.count()).select_from(attempts).where(is_holder).scalar_subquery().label("held")
        query = select(*columns, alive, silent, held_count).order_by(workers.c.started_at, workers.c.id)
        return self._read_all(query, _worker)

    def open_runs(self) -> list[OpenRun]:
        """Return the runs that workers may claim rollouts of and that have queued ones, oldest first."""
        is_queued = rollouts.c.status.in_(("queuing", "requeuing"))
        query = (
            select(
                runs.c.id,
                runs.c.release,
                *(json_field(runs.c.config, name).label(name) for name in ("served", "wave")),
            )
            .where(runs.c.engine == "workers")
            .where(select(rollouts.c.id).where(rollouts.c.run_id == runs.c.id, is_queued).exists())
            .order_by(runs.c.created_at, runs.c.id)
        )
        return self._read_all(query, lambda row: OpenRun(row["id"], row["release"], row["served"], row["wave"]))

    def queues(self) -> list[RunQueue]:
        """Return the runs that have rollouts, oldest first."""
        waiting_since = func.min(rollouts.c.updated_at).label("since")
        query = (
            select(
                runs.c.id,
                runs.c.engine,
                runs.c.release,
                rollouts.c.status,
                func.count().label("number"),
                waiting_since,
            )
            .join(rollouts, rollouts.c.run_id == runs.c.id)
            .group_by(runs.c.id, rollouts.c.status)
            .order_by(runs.c.created_at, runs.c.id, rollouts.c.status)
        )
        queues: dict[str, RunQueue] = {}
        for row in self._read_all(query, dict):
            waiting_s = max(0.0, time.time() - row["since"]) if row["status"] in ("queuing", "requeuing") else None
            counted = queues.get(row["id"])
            ages = [age for age in (waiting_s, counted and counted.oldest_s) if age is not None]
            queues[row["id"]] = RunQueue(
                run_id=row["id"],
                engine=row["engine"],
                release=row["release"],
                rollouts={**(counted.rollouts if counted else {}), row["status"]: row["number"]},
                oldest_s=max(ages, default=None),
            )
        return list(queues.values())

    def holders(self, run_id: str) -> list[str]:
        """Return the workers that hold attempts of a run now."""
        with self._reading() as connection:
            return sorted(connection.execute(_holders(run_id)).scalars())

    def executors(self, run_id: str, *, alone: bool) -> list[str]:
        """Return the names of those who prevent others from executing a run now: a process that executes it alone;
        with `alone`, also the workers that hold attempts of it.
        """
        with self._reading() as connection:
            names = set(connection.execute(_executor_alone(run_id)).scalars())
            return sorted(names.union(connection.execute(_holders(run_id)).scalars() if alone else ()))

    @queued
    def claim(
        self,
        context: WriteContext,
        lease: Lease,
        run_ids: Sequence[str],
        limit: int,
        max_starting: int | None = None,
    ) -> list[ClaimedRollout]:
        """Start one attempt for each of at most `limit` queued rollouts of these runs that no other worker is
        claiming.

        With `max_starting`, only so many are claimed that no more attempts than that wait for their sandbox, over
        all workers.
        """
        # These row locks are held until the commit, so that meanwhile no process begins to execute one of the runs
        # alone, or counts the attempts that are starting.
        open_now = select(runs.c.id).where(runs.c.id.in_(run_ids), runs.c.engine == "workers").order_by(runs.c.id)
        is_limited = max_starting is not None
        locking = open_now.with_for_update(read=not is_limited, key_share=is_limited)
        open_run_ids = context.connection.execute(locking).scalars().all()
        if max_starting is not None:
            starting = select(func.count()).where(
                attempts.c.status == "preparing", attempts.c.lease_until >= store_clock()
            )
            limit = min(limit, max_starting - context.connection.execute(starting).scalar_one())
            if limit <= 0:
                return []
        has_rested = (rollouts.c.status == "queuing") | (rollouts.c.updated_at < time.time() - RETRY_PAUSE_S)
        query = (
            select(rollouts)
            .join(runs, runs.c.id == rollouts.c.run_id)
            .where(rollouts.c.run_id.in_(open_run_ids))
            .where(rollouts.c.status.in_(("queuing", "requeuing")), has_rested)
            .order_by(runs.c.created_at, rollouts.c.created_at, rollouts.c.sample_index, rollouts.c.task_id)
            .limit(limit)
            .with_for_update(of=rollouts, skip_locked=True)
        )
        claimed: list[ClaimedRollout] = []
        for row in context.connection.execute(query).mappings().all():
            attempt = begin_attempt(context, row["id"], lease)
            failure_count = select(func.count()).where(
                attempts.c.rollout_id == row["id"], attempts.c.status.in_(("failed", "timeout"))
            )
            failures: int = context.connection.execute(failure_count).scalar_one()
            claimed.append(ClaimedRollout(read_rollout(row), attempt, failures))
        return claimed

    def renew(self, lease: Lease, attempt_ids: Sequence[str]) -> Future[frozenset[str]]:
        """Renew the lease of a worker and its attempts. Returns the attempts that are still open and its own.

        A worker whose row was deleted meanwhile is listed again as it was last announced here.
        """
        return self._database.lease_writer.submit(lambda context: self._renew(context, lease, attempt_ids))

    def _renew(self, context: WriteContext, lease: Lease, attempt_ids: Sequence[str]) -> frozenset[str]:
        values = {"seen_at": store_clock(), "lease_until": store_clock() + lease.seconds}
        renewed = context.connection.execute(update(workers).where(workers.c.id == lease.worker).values(values))
        if renewed.rowcount == 0 and (announced := self._announced.get(lease.worker)) is not None:
            release, capacity, leaves = announced
            _write_worker(context, lease, release, capacity=capacity, leaves=leaves)
        is_own = (
            attempts.c.id.in_(attempt_ids)
            & (attempts.c.worker == lease.worker)
            & attempts.c.status.in_(OPEN_ATTEMPTS)
        )
        lease_values = {"lease_until": store_clock() + lease.seconds, "heartbeat_at": time.time()}
        context.connection.execute(update(attempts).where(is_own).values(lease_values))
        return frozenset(context.connection.execute(select(attempts.c.id).where(is_own)).scalars())

    @queued
    def give_back(self, context: WriteContext, lease: Lease) -> int:
        """Requeue everything that a stopping worker holds, and delete the worker. Returns how many attempts."""
        query = (
            select(attempts.c.id, attempts.c.rollout_id)
            .where(attempts.c.worker == lease.worker, attempts.c.status.in_(OPEN_ATTEMPTS))
            .with_for_update()
        )
        leased = context.connection.execute(query).all()
        error = ErrorInfo("run", "WorkerStopped", f"worker {lease.worker} was stopped before this attempt ended")
        for attempt_id, rollout_id in leased:
            take_attempt(context, attempt_id, rollout_id, error)
        context.connection.execute(delete(workers).where(workers.c.id == lease.worker))
        if leased:
            context.session.notify()
        return len(leased)

    @queued
    def requeue_expired(self, context: WriteContext, grace_s: float) -> int:
        """Take away expired leases and requeue their rollouts. Returns how many.

        None is taken during the first `grace_s` seconds after the database server started, because workers could
        not renew them while it was down; nor during as many seconds after this process could not reach the server
        for a while, because what cut it off may have cut off all workers. For that, call this regularly. Attempts
        that are being written to at this moment are skipped until the next time.
        """
        settled = store_clock() - server_started() > literal(grace_s)
        query = (
            select(attempts.c.id, attempts.c.rollout_id, attempts.c.worker)
            .where(attempts.c.status.in_(OPEN_ATTEMPTS), attempts.c.rollout_id.is_not(None))
            .where(attempts.c.lease_until < store_clock())
            .where(settled)
            .with_for_update(skip_locked=True)
        )
        expired = context.connection.execute(query).all()
        if self._spares_others(grace_s):
            return 0
        expired_workers = workers.c.lease_until < store_clock() - FORGET_WORKER_S
        context.connection.execute(delete(workers).where(expired_workers, settled))
        for attempt_id, rollout_id, worker in expired:
            # A worker that was seen after its lease had ended was only cut off, which is not the rollout's fault.
            came_back = (workers.c.id == attempts.c.worker) & (workers.c.seen_at > attempts.c.lease_until)
            lost_count = select(func.count()).where(
                attempts.c.rollout_id == rollout_id,
                attempts.c.status == "unresponsive",
                json_field(attempts.c.error, "type") == "WorkerLost",
                ~select(workers.c.id).where(came_back).exists(),
            )
            is_last = context.connection.execute(lost_count).scalar_one() + 1 >= MAX_LOST
            error = ErrorInfo("run", "WorkerLost", f"worker {worker} did not answer in time")
            take_attempt(context, attempt_id, rollout_id, error, "failed" if is_last else "requeuing")
        if expired:
            context.session.notify()
        return len(expired)

    def _spares_others(self, grace_s: float) -> bool:
        """Return whether leases of others are left alone, now that the server has answered."""
        now, in_touch_before = time.monotonic(), self._in_touch_at
        self._in_touch_at = now
        if in_touch_before is not None and now - in_touch_before > max(grace_s / 3, _OUT_OF_TOUCH_S):
            self._spares_until = now + grace_s
        return now < self._spares_until


def executed_elsewhere(run_id: str, executors: Sequence[str]) -> str:
    """Return the error message for a run that cannot be executed because others execute it."""
    return (
        f"run {run_id} is being executed by {', '.join(executors)}; wait until it ends. If it was killed, run the "
        "same command again after its lease has expired, which takes seconds"
    )


def _executor_alone(run_id: str) -> Select[tuple[Any]]:
    """Select the process that executes a run alone now."""
    return select(workers.c.id).where(workers.c.run_id == run_id, workers.c.lease_until >= store_clock())


def _holders(run_id: str) -> Select[tuple[Any]]:
    """Select the workers that hold attempts of a run now."""
    return (
        select(attempts.c.worker)
        .join(rollouts, rollouts.c.id == attempts.c.rollout_id)
        .where(rollouts.c.run_id == run_id, attempts.c.status.in_(OPEN_ATTEMPTS))
        .where(attempts.c.lease_until >= store_clock())
        .distinct()
    )


def _write_worker(
    context: WriteContext,
    lease: Lease,
    release: str,
    *,
    capacity: int,
    run_id: str | None = None,
    leaves: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Insert or update the row of a worker. Its start time is kept."""
    values = {
        "release": release,
        "capacity": capacity,
        "run_id": run_id,
        "seen_at": store_clock(),
        "lease_until": store_clock() + lease.seconds,
        "leaves": encode(dict(leaves)),
    }
    if (
        context.connection.execute(update(workers).where(workers.c.id == lease.worker).values(values)).rowcount
        == 0
    ):
        context.connection.execute(insert(workers).values(id=lease.worker, started_at=store_clock(), **values))
