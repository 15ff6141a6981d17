"""How the runs of a store stand now: queues, workers, faults by boundary, how long each phase takes."""

from __future__ import annotations

from collections import Counter, defaultdict

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.store import Store
from understudy.store.leases import RunQueue, Worker
from understudy.util.statistics import percentile


class PhaseSeconds(Struct, frozen=True):
    """How long a phase of ended attempts took, in seconds: half of the attempts took at most `p50_s`."""

    attempts: int
    p50_s: float
    p99_s: float


class RunStatus(Struct, frozen=True, kw_only=True):
    """The state of a run. `faults` counts the errors that ended attempts, by boundary.

    `given_up` counts the rollouts among these that failed for good.
    """

    queue: RunQueue
    faults: dict[str, int]
    given_up: int
    phases: dict[str, PhaseSeconds]


_MAX_RUNS = 20
"""How many runs, the newest ones, an error lists."""


class StoreStatus(Struct, frozen=True):
    """Runs, the oldest first, and the worker processes, including some that were lost recently."""

    store: str
    runs: list[RunStatus]
    workers: list[Worker]


def store_status(store: Store, run_id: str | None = None) -> StoreStatus:
    """Return the status of one run; by default, of the unfinished runs, or of the newest if all have ended. Raises
    ConfigError if the store has no such run.
    """
    queues = store.leases.queues()
    if run_id is not None:
        chosen = [queue for queue in queues if queue.run_id == run_id]
        if not chosen:
            names = ", ".join(queue.run_id for queue in queues[-_MAX_RUNS:])
            remedy = f"give one of: {names}" if names else "it has none at all yet: give the directory of another"
            raise ConfigError(f"--run: {store.location} has no run {run_id[:200]!r} with rollouts; {remedy}")
    else:
        chosen = [queue for queue in queues if queue.is_open] or queues[-1:]
    return StoreStatus(str(store.location), [_status(store, queue) for queue in chosen], store.leases.workers())


def _status(store: Store, queue: RunQueue) -> RunStatus:
    faults = store.outcomes.faults(queue.run_id)
    phases: defaultdict[str, list[float]] = defaultdict(list)
    for timings in store.outcomes.timings(queue.run_id):
        for name, seconds in timings.items():
            phases[name.removesuffix("_s")].append(seconds)
    return RunStatus(
        queue=queue,
        faults=dict(Counter(fault.error.boundary for fault in faults).most_common()),
        given_up=sum(fault.given_up for fault in faults),
        phases={
            name: PhaseSeconds(len(seconds), percentile(seconds, 0.5), percentile(seconds, 0.99))
            for name, seconds in phases.items()
        },
    )
