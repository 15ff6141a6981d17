"""`understudy status`: the progress of the runs in a store, and who works on them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.output import Json, counted, print_facts, print_json, print_table

if TYPE_CHECKING:
    from understudy.report.status import RunStatus
    from understudy.store.leases import Worker


def status(
    directory: Annotated[
        str | None,
        typer.Argument(metavar="DIR", help="A run's directory, or its database [default: the newest in ./runs]."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Only this run [default: all unfinished runs, else the newest].")
    ] = None,
    json_: Json = False,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in Prometheus's text format.")
    ] = False,
) -> None:
    """Show the progress of runs: what is queued and since when, who works on it, what failed, how long phases
    take.
    """
    from understudy.cli.commands.show import newest_run
    from understudy.report.status import store_status
    from understudy.store import Store
    from understudy.store.address import parse_location

    location = newest_run(Path("runs")) if directory is None else parse_location(directory)
    with Store.open(location, create=False, read_only=True) as store:
        stored = store_status(store, run)
    if prometheus:
        from understudy.report.status_metrics import status_metrics

        typer.echo(status_metrics(stored), nl=False)
        return
    if json_:
        print_json(stored)
        return
    for run_status in stored.runs:
        _print_run(run_status)
    if not stored.runs:
        typer.echo(f"{stored.store} has no rollouts")
    if stored.workers:
        head = ("worker", "release", "at a time", "has", "heard of", "executes", "leaves to others")
        print_table(head, map(_worker_row, stored.workers))


def _print_run(status: RunStatus) -> None:
    queue = status.queue
    facts: list[tuple[str, object]] = [("rollouts", counted(queue.rollouts))]
    if queue.oldest_s is not None:
        facts.append(("queued for", f"{queue.oldest_s:.0f} s, the oldest"))
    if queue.engine == "workers":
        facts.append(("open to", f"workers of release {queue.release}"))
    if status.faults:
        facts.append(("faults", f"{counted(status.faults)}; {status.given_up} rollouts failed"))
    for name, times in status.phases.items():
        facts.append((name, f"{times.p50_s:.2f} s, p99 {times.p99_s:.2f} s, of {times.attempts} attempts"))
    print_facts(f"run {queue.run_id}", facts)


def _worker_row(worker: Worker) -> tuple[object, ...]:
    from understudy.store.leases import GATEWAY

    last_heartbeat = f"{worker.silent_s:.0f} s ago" + ("" if worker.alive else ", its leases are over")
    leaves = "; ".join(f"{run}: {reason}" for run, reason in worker.leaves.items())
    executes = "any run" if worker.run_id is None else f"run {worker.run_id} alone"
    if worker.run_id == GATEWAY:
        executes = "the clients of a gateway"
    return (worker.id, worker.release, worker.capacity or "", worker.held, last_heartbeat, executes, leaves)
