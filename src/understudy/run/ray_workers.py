"""A run's workers as Ray actors: Ray places and restarts them, the store decides which worker has which rollout.

Ray's report that an actor died is not relied on: its rollouts go to other workers when its leases expire, and from
then on each of its writes is refused.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec import Struct

from understudy.errors import ConfigError, UnderstudyError
from understudy.run.executors import LEASE_S, worker_name
from understudy.run.ray_cluster import RayOptions, connected
from understudy.run.worker import RunWorker
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.runs import Lease
from understudy.types import ErrorInfo, info_of
from understudy.util.garbage import collect_garbage_rarely
from understudy.util.processes import raise_file_limit
from understudy.util.text import visible_line

_RESTART_PAUSE_S = 30.0
"""After how many seconds an actor whose worker ended with an error starts again."""

_MAX_FAILURES = 3
"""A worker has failed for good after this many errors in a row, each within _RESTART_PAUSE_S seconds of its start.
"""

_STOP_TIMEOUT_S = 15.0


class RayWorker:
    """The code that runs in an actor: a worker that claims rollouts of one run, or of a `loop`'s runs."""

    def __init__(self, store_url: str, run_id: str, loop: str, capacity: int) -> None:
        self._store_url = store_url
        self._run_ids = () if loop else (run_id,)
        self._loop = loop
        self._capacity = capacity
        self._worker: RunWorker | None = None
        self._work: asyncio.Task[ErrorInfo | None] | None = None
        self._draining = False

    async def work(self) -> ErrorInfo | None:
        """Work until `drain` or `stop` was called and nothing runs.

        Returns the error that ended it earlier, if any.

        Ray calls it again in an actor that it has restarted.
        """
        self._work = asyncio.create_task(self._until_drained())
        try:
            return await self._work
        except asyncio.CancelledError:
            return None

    async def _until_drained(self) -> ErrorInfo | None:
        raise_file_limit()
        collect_garbage_rarely()
        try:
            with (
                Store.open(StoreUrl(self._store_url), create=False) as store,
                tempfile.TemporaryDirectory(
                    prefix="understudy-", dir="/tmp", ignore_cleanup_errors=True
                ) as directory,
            ):
                self._worker = RunWorker(
                    store,
                    Path(directory),
                    capacity=self._capacity,
                    lease=Lease(worker_name(), LEASE_S),
                    run_ids=self._run_ids,
                    loop=self._loop,
                    report=_report,
                )
                if self._draining:
                    self._worker.drain()
                await self._worker.run()
        except UnderstudyError as error:
            return info_of(error)
        return None

    async def drain(self) -> None:
        """Claim nothing more. Running rollouts are finished."""
        self._draining = True
        if self._worker is not None:
            self._worker.drain()

    async def stop(self) -> None:
        """Stop at once. Running rollouts are requeued before this returns."""
        self._draining = True
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)


def _report(line: str) -> None:
    """Print a line to the actor's log, which Ray keeps."""
    sys.stderr.write(f"understudy: {line}\n")
    sys.stderr.flush()


class _WorkerFailure(Struct, frozen=True):
    """An actor's error, after which it starts again, and the number of errors in a row."""

    message: str
    count: int


class RayFleet:
    """The actors of a run, or of all runs of a training `loop`. Belongs to one event loop."""

    def __init__(self, ray: Any, store_url: str, options: RayOptions, workers: int, loop: str = "") -> None:
        self._ray = ray
        self._store_url = store_url
        self._options = options
        self._size = workers
        self._loop = loop
        self._actors: list[Any] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._placed: set[int] = set()
        self._faults: dict[int, _WorkerFailure] = {}

    def start(self, run_id: str) -> None:
        """Have Ray start the actors, which a loop's first run does for all."""
        if self._actors:
            return
        actor = self._ray.remote(RayWorker).options(
            num_cpus=self._options.cpus,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy="SPREAD",
        )
        self._actors = [
            actor.remote(self._store_url, run_id, self._loop, self._options.ray_capacity)
            for _ in range(self._size)
        ]
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._size)]

    async def _keep(self, number: int) -> None:
        """Keep an actor working until it is drained.

        If its worker ends with an error, it starts again after a while.
        """
        actor, now, count = self._actors[number], asyncio.get_running_loop().time, 0
        while True:
            started_at = now()
            try:
                await asyncio.wrap_future(actor.__ray_ready__.remote().future())
                self._placed.add(number)
                started_at = now()
                error = await asyncio.wrap_future(actor.work.remote().future())
            except self._ray.exceptions.RayError as failure:
                error = ErrorInfo("run", type(failure).__name__, str(failure))
            if error is None:
                return
            count = count + 1 if now() - started_at < _RESTART_PAUSE_S else 1
            self._faults[number] = _WorkerFailure(visible_line(error.message), count)
            await asyncio.sleep(_RESTART_PAUSE_S)
            self._faults.pop(number)

    def drain(self) -> None:
        """Have the actors claim nothing more. May be called again, for actors that were restarted meanwhile."""
        for actor in self._actors:
            actor.drain.remote()

    def idle_reason(self) -> str:
        """Return why no worker of this fleet works. Raises ConfigError if all of them have failed for good."""
        # copied, because the event loop may change it while this thread reads it
        faults = list(self._faults.items())
        if faults:
            number, fault = faults[-1]
            if len(faults) == len(self._actors) and all(fault.count >= _MAX_FAILURES for _, fault in faults):
                raise ConfigError(
                    f"--engine ray: the workers of all {len(self._actors)} actors have failed {_MAX_FAILURES} "
                    f"times in a row, the last one with: {fault.message}; correct what this names on the "
                    "cluster's nodes, then run the same command again"
                )
            actor = f"actor {number + 1} of {len(self._actors)}"
            return f"{actor} begins anew in {_RESTART_PAUSE_S:.0f} s: {fault.message}"
        free, total = (
            resources.get("CPU", 0.0)
            for resources in (self._ray.available_resources(), self._ray.cluster_resources())
        )
        return (
            f"Ray has started no worker yet: {len(self._actors)} actors ask for {self._options.cpus:g} CPUs each, "
            f"and {free:g} of the cluster's {total:g} are free; --ray-cpus says how many one needs"
        )

    async def close(self) -> None:
        """Stop the actors. Their rollouts are requeued."""
        # An actor that Ray has not placed holds nothing, and would not answer.
        stopping = [asyncio.wrap_future(self._actors[number].stop.remote().future()) for number in self._placed]
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if stopping:
            await asyncio.wait(stopping, timeout=_STOP_TIMEOUT_S)
        for actor in self._actors:
            self._ray.kill(actor)


@asynccontextmanager
async def ray_fleet(
    store: StoreLocation | None, options: RayOptions, *, loop: str = ""
) -> AsyncGenerator[RayFleet]:
    """Yield a fleet on a Ray cluster for a run in a store, or for the runs of a training `loop` there. Its actors
    are stopped at the end.

    Raises ConfigError if the store is in a directory, the cluster cannot be reached, or its nodes have another
    release of Understudy.
    """
    if not isinstance(store, StoreUrl):
        raise ConfigError(
            "--engine ray: the run's store is a directory, which actors on other machines cannot reach; name a "
            "database with --store postgresql://USER@HOST/NAME"
        )
    async with connected(options) as (ray, actors):
        fleet = RayFleet(ray, store.secret_url, options, actors, loop)
        try:
            yield fleet
        finally:
            await fleet.close()
