"""What executes a run: this process alone, or workers, which it may wait for; and the events that a display
receives.
"""

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
from understudy.run.store_reads import read_stored, through_outages
from understudy.store import Store
from understudy.store.runs import Lease

LEASE_S = 30.0
"""How many seconds an attempt belongs to its worker, unless the worker renews the lease."""

WORKERS_POLL_S = 1.0

RunEngine = Literal["local", "workers", "detached"]
"""What executes a run: this process; workers that this process waits for; or workers without waiting."""


class WorkerFleet(Protocol):
    """Workers of one run that this process has an external scheduler start, such as a cluster's."""

    def start(self, run_id: str) -> None:
        """Have the workers started."""
        ...

    def drain(self) -> None:
        """Have the workers claim nothing more. May be called again, for workers that were started meanwhile."""
        ...

    def idle_reason(self) -> str:
        """Return why none of them works. Raises ConfigError if all have failed. Called in a thread."""
        ...


WatchServer = Callable[[], Awaitable[None]]
"""Waits until the model server that a run depends on ends, and then raises."""


def worker_name() -> str:
    """Return a unique name for a worker that says where it runs."""
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


class RunInProgress(Protocol):
    """A run whose rollouts are being executed, here or by workers."""

    run_id: str
    progress: RunProgress

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        ...

    def drain(self) -> None:
        """Start nothing new in this process."""
        ...


class RunMonitor:
    """Receives the events of a run. This base class ignores them; displays override the events that they show."""

    def stage(self, text: str) -> None:
        """A stage before the rollouts start, as text."""

    def running(self, scheduler: RunInProgress, store: Store) -> None:
        """The rollouts start. The scheduler's progress and the store's counts can be read from now on."""

    def waiting(self, reason: str) -> None:
        """No worker works on the run, for this reason; "" if one does, or may soon."""

    def stopped(self) -> None:
        """The store is about to be closed and must not be read any more."""


@asynccontextmanager
async def executing_alone(store: Store, run_id: str, lease: Lease) -> AsyncGenerator[WatchServer]:
    """Execute a run alone, and keep the lease that tells others so. Raises StoreError if others execute it.

    Yields a function that raises once the lease can no longer be renewed.
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
        with suppress(StoreError):  # the lease expires by itself, and the first error is the informative one
            await asyncio.wrap_future(store.leases.give_back(lease))


async def wait_for_leases(store: Store, run_id: str, engine: RunEngine | WorkerFleet, monitor: RunMonitor) -> None:
    """Wait until the leases of a killed process that executed this run have expired.

    Returns after some time even if another process is still executing the run; the next attempt to take it then
    raises the error.
    """
    end = time.monotonic() + 2 * LEASE_S
    while time.monotonic() < end:
        who = await read_stored(store.leases.executors, run_id, alone=engine == "local")
        if not who:
            return
        monitor.stage(f"waiting until the leases of {', '.join(who)} end")
        await asyncio.sleep(WORKERS_POLL_S)


def run_progress(store: Store, run_id: str) -> RunProgress:
    """Return a run's progress as its store shows it."""
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
    """Return why no worker takes a run: there are none, or all have refused it. "" if one may take it."""
    alive = [worker for worker in store.leases.workers() if worker.alive and worker.run_id is None]
    if not alive:
        if fleet is not None:
            return fleet.idle_reason()
        return f"no worker is there; start some with: understudy worker --store '{store.location}'"
    reasons = {worker.id: worker.leaves[run_id] for worker in alive if run_id in worker.leaves}
    if len(reasons) < len(alive):
        return ""
    return "no worker takes it: " + "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


class WorkersAtWork:
    """A run executed by workers, as displays see it. `drain` ends this process; the workers continue."""

    def __init__(self, run_id: str, progress: RunProgress) -> None:
        self.run_id = run_id
        self.progress = progress
        self.draining = False

    def drain(self) -> None:
        """Stop waiting for the workers."""
        self.draining = True


async def finish_by_workers(
    store: Store, run_id: str, outputs: RolloutFiles | None, monitor: RunMonitor, engine: RunEngine | WorkerFleet
) -> tuple[str, ...]:
    """Wait until all rollouts of a run that is open to workers have ended, and write their files, if it has any.

    With `detached`, it returns without waiting. A `fleet` is started; when the run is drained, its rollouts in
    progress are waited for. Returns notes about the files.
    """
    if engine == "detached":
        return ("its rollouts are queued for workers: understudy worker --store",)
    fleet = None if isinstance(engine, str) else engine
    at_work = WorkersAtWork(run_id, await read_stored(run_progress, store, run_id))
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
            at_work.progress = await read_stored(run_progress, store, run_id)
            idle = at_work.progress.running == 0 and at_work.progress.done < at_work.progress.total
            reason = ""
            if idle:
                reason = await read_stored(waiting_for, store, run_id, fleet)
            monitor.waiting(reason)
            if outputs is not None:
                await through_outages(outputs.catch_up)
        if outputs is not None:
            await through_outages(outputs.finish)
    finally:
        monitor.stopped()
    return () if outputs is None else outputs.notes()
