"""`understudy show`: one rollout, or one client of a gateway, as a readable transcript; or the list of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli.output import Json, console, print_table
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.cli.transcript import RolloutRecord
    from understudy.store import Store
    from understudy.types import Attempt, Rollout


def show(
    rollout: Annotated[
        str | None,
        typer.Argument(
            help="A rollout's id or its beginning, an attempt's id, or the name of a gateway's client; without it "
            "all are listed."
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A run's output directory [default: the newest in ./runs].")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Print everything in full.")] = False,
    json_: Json = False,
) -> None:
    """Show what a rollout was asked, did and was graded.

    First a line for each branch, with its role; then turns, tools, patch, tests, errors.
    """
    from understudy.store import Store

    with Store.open(directory or newest_run(Path("runs")), create=False) as store:
        if rollout is None:
            _list(store, json_)
        else:
            _show(_record(store, rollout), full=full, as_json=json_)


def newest_run(runs: Path) -> Path:
    """The directory in `runs` whose store was written last. Raises ConfigError when there is none."""
    stores = {path.parent: path.stat().st_mtime for path in runs.glob("*/store.db*")}
    if not stores:
        raise ConfigError(f"no run's output directory in {runs.absolute()}; name one with --dir")
    return max(stores, key=lambda path: stores[path])


def _show(record: RolloutRecord, *, full: bool, as_json: bool) -> None:
    from understudy.cli.transcript import TranscriptPrinter, summary
    from understudy.trajectory.tree import build

    trajectory = build(record.calls)
    if as_json:
        _print_json(summary(record, trajectory))
    else:
        TranscriptPrinter(console(), full=full).show(record, trajectory)


def _record(store: Store, name: str) -> RolloutRecord:
    """What the store has under a name: a client's or an attempt's, else the rollout whose id begins so."""
    from understudy.cli.transcript import RolloutRecord
    from understudy.store.keys import CLIENT

    attempts = {attempt.id: attempt for attempt in store.keys.clients()}
    if client := attempts.get(CLIENT + name) or attempts.get(name):
        return RolloutRecord(
            rollout=None,
            attempts=[client],
            task=None,
            attempt=client,
            calls=list(store.calls.of_attempt(client.id)),
            patch=None,
            verdict=None,
        )
    rollout_id, dot, number = name.rpartition(".")
    if dot and number.isdecimal() and any(rollout.id == rollout_id for rollout in store.runs.rollouts()):
        return _rollout_record(store, store.runs.rollout(rollout_id), store.runs.attempt(name))
    return _rollout_record(store, store.runs.find_rollout(name))


def _rollout_record(store: Store, rollout: Rollout, chosen: Attempt | None = None) -> RolloutRecord:
    """What the store has of a rollout: the chosen attempt, else its graded one, else its last one."""
    from understudy.cli.transcript import RolloutRecord

    attempts = store.runs.attempts(rollout.id)
    verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
    graded = [number for number, verdict in enumerate(verdicts) if verdict is not None]
    shown = graded[-1] if graded else len(attempts) - 1
    if chosen is not None:
        shown = attempts.index(chosen)
    attempt = attempts[shown] if attempts else None
    return RolloutRecord(
        rollout=rollout,
        attempts=attempts,
        task=store.runs.task(rollout.run_id, rollout.task_id),
        attempt=attempt,
        calls=list(store.calls.of_attempt(attempt.id)) if attempt else [],
        patch=store.runs.patch(attempt.id) if attempt else None,
        verdict=verdicts[shown] if attempts else None,
    )


def _list(store: Store, as_json: bool) -> None:
    import msgspec

    from understudy.store.keys import CLIENT

    rollouts: list[dict[str, Any]] = []
    for rollout in store.runs.rollouts():
        attempts = store.runs.attempts(rollout.id)
        verdicts = [store.runs.verdict(attempt.id) for attempt in attempts]
        last = next((verdict for verdict in reversed(verdicts) if verdict is not None), None)
        rollouts.append(
            {
                **msgspec.to_builtins(rollout),
                "attempts": len(attempts),
                "reward": None if last is None else last.reward,
                "integrity": None if last is None else last.integrity.status,
                "findings": sum(len(attempt.findings) for attempt in attempts),
            }
        )
    clients: list[dict[str, Any]] = [
        {
            "name": client.id.removeprefix(CLIENT),
            "attempt_id": client.id,
            **msgspec.to_builtins(store.calls.usage(client.id)),
        }
        for client in store.keys.clients()
    ]
    if as_json:
        _print_json({"rollouts": rollouts, "clients": clients})
        return
    if rollouts or not clients:
        print_table(
            ("rollout", "task", "sample", "status", "reward", "integrity", "attempts", "findings", "error"),
            [
                (
                    *(row[name] for name in ("id", "task_id", "sample_index", "status")),
                    "" if row["reward"] is None else f"{row['reward']:g}",
                    row["integrity"] or "",
                    row["attempts"],
                    row["findings"] or "",
                    f"{row['error']['boundary']}: {row['error']['message']}" if row["error"] else "",
                )
                for row in rollouts
            ],
        )
    if clients:
        print_table(
            ("client", "calls", "prompt tokens", "completion tokens", "cost"),
            [
                (
                    row["name"],
                    row["calls"],
                    f"{row['prompt_tokens']:,}",
                    f"{row['completion_tokens']:,}",
                    f"${row['cost_usd']:,.4f}" if row["cost_usd"] else "",
                )
                for row in clients
            ],
        )


def _print_json(value: Any) -> None:
    """Print JSON in ASCII: what a transcript holds cannot steer a terminal from there either."""
    import json

    typer.echo(json.dumps(value))


class IntegrityStatus(StrEnum):
    """What a patch may be."""

    clean = "clean"
    suspicious = "suspicious"


def integrity(
    rollout: Annotated[str, typer.Argument(help="A rollout's id or its beginning, or an attempt's id.")],
    status: Annotated[IntegrityStatus, typer.Argument(help="The verdict of the review.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever reads it later.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A run's output directory [default: the newest in ./runs].")
    ] = None,
) -> None:
    """Say after review whether a rollout's patch is clean or suspicious.

    Exports leave suspicious ones out. What the grader found stays on record beside it.
    """
    from understudy.store import Store

    with Store.open(directory or newest_run(Path("runs")), create=False) as store:
        attempt_id = rollout
        rollout_id, _, number = rollout.rpartition(".")
        if not (number.isdecimal() and any(each.id == rollout_id for each in store.runs.rollouts())):
            match = store.runs.find_rollout(rollout)
            graded = [each.id for each in store.runs.attempts(match.id) if store.runs.verdict(each.id) is not None]
            if not graded:
                raise ConfigError(f"rollout {match.id} has no verdict that could be reviewed")
            attempt_id = graded[-1]
        store.runs.review(attempt_id, status.value, reason).result()
    typer.echo(f"{attempt_id} is {status.value} now")
