"""Who executes a run: this process alone, or workers, for whom it may wait; what a display is told meanwhile."""

from __future__ import annotations

import asyncio
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Literal, Protocol

from understudy import __version__
from understudy.errors import StoreError
from understudy.run.rollout_files import RolloutFiles
from understudy.run.scheduler import HEARTBEAT_S, RunProgress
from understudy.store import Store
from understudy.store.runs import Lease

LEASE_S = 30.0
"""For how long an attempt is its worker's, unless that renews it."""

WORKERS_POLL_S = 1.0

RunEngine = Literal["local", "workers", "detached"]
"""Who executes a run: this process; workers, while this process waits; workers, while nobody waits."""


class WorkerFleet(Protocol):
    """Workers of one run that this process has others start, as a cluster's scheduler."""

    def start(self, run_id: str) -> None:
        """Have them started."""
        ...

    def drain(self) -> None:
        """Have them claim nothing more. May be called again, for those that were started meanwhile."""
        ...

    def waits(self) -> str:
        """Why none of them works. Raises ConfigError when all have failed. Called in a thread."""
        ...


WatchServer = Callable[[], Awaitable[None]]
"""Waits until the model server that a run depends on ends, and then raises."""


def worker_name() -> str:
    """A name that no other worker has, and that says where it is."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class RunInProgress(Protocol):
    """A run whose rollouts are executed, here or by workers."""

    run_id: str
    progress: RunProgress

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        ...

    def drain(self) -> None:
        """Start nothing new here."""
        ...


class RunMonitor:
    """Receives the events of a run. This base class ignores them; a display overrides what it shows."""

    def stage(self, text: str) -> None:
        """A stage before the rollouts start, as text."""

    def running(self, scheduler: RunInProgress, store: Store) -> None:
        """The rollouts start; the scheduler's progress and the store's counts may be read from now on."""

    def waits(self, reason: str) -> None:
        """Nobody works on the run, for this reason; empty: somebody does, or may soon."""

    def stopped(self) -> None:
        """The store is about to be closed, and must not be read any more."""


@asynccontextmanager
async def executing_alone(store: Store, run_id: str, lease: Lease) -> AsyncGenerator[WatchServer]:
    """Execute a run alone, and let others know as long as it lasts. Raises StoreError where others execute it.

    With it comes what raises when that cannot be said any more.
    """
    await asyncio.wrap_future(store.leases.execute_alone(run_id, lease, __version__))

    async def keep() -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await asyncio.wrap_future(store.leases.execute_alone(run_id, lease, __version__))

    keeping = asyncio.create_task(keep())
    try:
        yield lambda: asyncio.shield(keeping)
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        with suppress(StoreError):  # it ends by itself, and the first error is the one that says what happened
            await asyncio.wrap_future(store.leases.give_back(lease))


async def wait_for_leases(store: Store, run_id: str, engine: RunEngine | WorkerFleet, monitor: RunMonitor) -> None:
    """Wait until others may execute a run that a process which was killed has executed: till its leases end.

    Who else executes it does not end: after some time whoever asks next is told.
    """
    end = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < end:
        who = await asyncio.to_thread(store.leases.executors, run_id, alone=engine == "local")
        if not who:
            return
        monitor.stage(f"waiting until the leases of {', '.join(who)} end")
        await asyncio.sleep(WORKERS_POLL_S)


def run_progress(store: Store, run_id: str) -> RunProgress:
    """How far a run is, as its store has it."""
    counts = store.outcomes.counts(run_id)
    failed = counts.rollouts.get("failed", 0)
    return RunProgress(
        total=sum(counts.rollouts.values()),
        done=counts.solved + counts.unsolved + failed,
        solved=counts.solved,
        failed=failed,
        running=counts.rollouts.get("preparing", 0) + counts.rollouts.get("running", 0),
    )


def waiting_for(store: Store, run_id: str, fleet: WorkerFleet | None = None) -> str:
    """Why no worker takes a run: there is none, or all leave it to others. Empty where one may."""
    alive = [each for each in store.leases.workers() if each.alive and each.run_id is None]
    if not alive:
        if fleet is not None:
            return fleet.waits()
        return f"no worker is there; start some with: understudy worker --store '{store.location}'"
    reasons = {each.id: each.leaves[run_id] for each in alive if run_id in each.leaves}
    if len(reasons) < len(alive):
        return ""
    return "no worker takes it: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


class WorkersAtWork:
    """A run that workers execute, as its displays see it. `drain` lets this process end; workers go on."""

    def __init__(self, run_id: str, progress: RunProgress) -> None:
        self.run_id = run_id
        self.progress = progress
        self.draining = False

    def drain(self) -> None:
        """Wait for the workers no longer."""
        self.draining = True


async def finish_by_workers(
    store: Store, run_id: str, outputs: RolloutFiles | None, monitor: RunMonitor, engine: RunEngine | WorkerFleet
) -> tuple[str, ...]:
    """Wait until all rollouts of a run that is open to workers have ended, and write their files, if it has any.

    If `detached`, it is not waited for. A fleet is started; what that has at work when the run is drained is
    waited for. Returns what there is to know of the files.
    """
    if engine == "detached":
        return ("its rollouts are queued for workers: understudy worker --store",)
    fleet = None if isinstance(engine, str) else engine
    at_work = WorkersAtWork(run_id, run_progress(store, run_id))
    if fleet is not None:
        fleet.start(run_id)
    monitor.running(at_work, store)
    try:
        while at_work.progress.done < at_work.progress.total:
            if at_work.draining:
                if fleet is None or at_work.progress.running == 0:
                    break
                fleet.drain()
            await asyncio.to_thread(store.wait_for_change, WORKERS_POLL_S)
            await asyncio.wrap_future(store.leases.requeue_expired(LEASE_S))
            at_work.progress = await asyncio.to_thread(run_progress, store, run_id)
            idle = at_work.progress.running == 0 and at_work.progress.done < at_work.progress.total
            monitor.waits(await asyncio.to_thread(waiting_for, store, run_id, fleet) if idle else "")
            if outputs is not None:
                await outputs.catch_up()
        if outputs is not None:
            await outputs.finish()
    finally:
        monitor.stopped()
    return () if outputs is None else outputs.notes()
