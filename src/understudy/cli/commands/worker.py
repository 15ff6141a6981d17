"""`understudy worker`: executes rollouts of runs that were enqueued in a store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from msgspec import Struct, field

from understudy.cli.interrupts import run_stoppable
from understudy.cli.options import command
from understudy.cli.settings import DRAIN_TIMEOUT_S, DrainTimeout, default_concurrency
from understudy.errors import BackendError
from understudy.run.executors import LEASE_S, worker_name
from understudy.run.worker import RunWorker
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.store.runs import Lease
from understudy.util.garbage import collect_garbage_rarely
from understudy.util.processes import raise_file_limit
from understudy.util.settings import option


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy worker`."""

    table: ClassVar[str] = "worker"
    needs_table: ClassVar[bool] = False
    store: Annotated[str, option("The store of the runs: postgresql://USER@HOST/DATABASE, or a directory.")]
    capacity: Annotated[
        int, option("Rollouts to execute at a time [default: CPUs + 1].", "--capacity", "-j", ge=1)
    ] = field(default_factory=default_concurrency)
    runs: Annotated[
        tuple[str, ...],
        option("Only execute this run; repeatable [default: all runs that are open to workers].", "--run"),
    ] = ()
    max_starting: (
        Annotated[
            int,
            option("Claim nothing while so many sandboxes of all workers are starting [default: no limit].", ge=1),
        ]
        | None
    ) = None
    lease: Annotated[
        float,
        option("Seconds without a heartbeat after which other workers take over this worker's rollouts.", ge=2),
    ] = LEASE_S
    stop_when_idle: Annotated[bool, option("Exit when no rollout is left to claim.", "--stop-when-idle")] = False
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S


@command
def worker(settings: WorkerSettings) -> None:
    """Execute rollouts of runs that were enqueued with `understudy run --engine workers`.

    Any number of workers may share a store. Ctrl-C or SIGTERM lets running rollouts finish, for up to
    --drain-timeout seconds; what is left then, or at a second signal, is requeued for other workers.
    """
    raise_file_limit()
    collect_garbage_rarely()
    lease = Lease(worker_name(), settings.lease)
    with (
        Store.open(parse_location(settings.store), create=False) as store,
        tempfile.TemporaryDirectory(prefix="understudy-", dir="/tmp", ignore_cleanup_errors=True) as directory,
    ):
        store.bucket.check()
        workers: list[RunWorker] = []

        async def work() -> int:
            workers.append(
                RunWorker(
                    store,
                    Path(directory),
                    capacity=settings.capacity,
                    lease=lease,
                    run_ids=settings.runs,
                    stop_when_idle=settings.stop_when_idle,
                    max_starting=settings.max_starting,
                    report=lambda line: typer.echo(f"understudy: {line}", err=True),
                )
            )
            typer.echo(f"understudy: worker {lease.worker} on {store.location}", err=True)
            return await workers[0].run()

        executed = run_stoppable(
            work(), lambda: bool(workers) and workers[0].drain(), drain_timeout_s=settings.drain_timeout
        )
    typer.echo(f"understudy: worker {lease.worker} has ended, {executed} attempts ended here", err=True)
    if unresolved := workers[0].unresolved:
        run_id, reason = next(iter(unresolved.items()))
        raise BackendError(
            f"{len(unresolved)} runs were not begun, since the name of a host does not resolve on this machine; "
            f"check its DNS or /etc/hosts, then start the worker again. Run {run_id}: {reason}"
        )
