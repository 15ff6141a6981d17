"""`understudy show`: one rollout as a readable transcript, or the list of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.cli.transcript import Record
    from understudy.store import Store
    from understudy.types import Rollout


def show(
    rollout: Annotated[
        str | None, typer.Argument(help="A rollout's id, or its beginning; without it the rollouts are listed.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A run's output directory [default: the newest in ./runs].")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Shorten nothing.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a rollout was asked, did and was graded: turns, tools, subagents, patch, tests, errors."""
    from understudy.store import Store

    with Store.open(directory or newest(Path("runs")), create=False) as store:
        if rollout is None:
            _list(store, json_)
        else:
            _show(store, store.find_rollout(rollout), full=full, as_json=json_)


def newest(runs: Path) -> Path:
    """The directory in `runs` whose store was written last. Raises ConfigError when there is none."""
    found = {path.parent: path.stat().st_mtime for path in runs.glob("*/store.db*")}
    if not found:
        raise ConfigError(f"no run's output directory in {runs.absolute()}; name one with --dir")
    return max(found, key=lambda path: found[path])


def _show(store: Store, rollout: Rollout, *, full: bool, as_json: bool) -> None:
    from understudy.cli.transcript import Printer, console, summary
    from understudy.trajectory.tree import build

    record = _record(store, rollout)
    trajectory = build(record.calls)
    if as_json:
        _print_json(summary(record, trajectory))
    else:
        Printer(console(), full=full).show(record, trajectory)


def _record(store: Store, rollout: Rollout) -> Record:
    """What the store has of a rollout: its graded attempt, else its last one."""
    from understudy.cli.transcript import Record

    attempts = store.attempts(rollout.id)
    verdicts = [store.verdict(attempt.id) for attempt in attempts]
    graded = [number for number, verdict in enumerate(verdicts) if verdict is not None]
    shown = graded[-1] if graded else len(attempts) - 1
    attempt = attempts[shown] if attempts else None
    return Record(
        rollout=rollout,
        attempts=attempts,
        task=store.task(rollout.run_id, rollout.task_id),
        attempt=attempt,
        calls=list(store.calls(attempt.id)) if attempt else [],
        patch=store.patch(attempt.id) if attempt else None,
        verdict=verdicts[shown] if attempts else None,
    )


def _list(store: Store, as_json: bool) -> None:
    import msgspec
    from rich.table import Table
    from rich.text import Text

    from understudy.cli.transcript import console, visible

    rows: list[tuple[Rollout, int, float | None]] = []
    for rollout in store.rollouts():
        verdicts = [store.verdict(attempt.id) for attempt in store.attempts(rollout.id)]
        rewards = [verdict.reward for verdict in verdicts if verdict is not None]
        rows.append((rollout, len(verdicts), rewards[-1] if rewards else None))
    if as_json:
        listed = [
            {**msgspec.to_builtins(r), "attempts": attempts, "reward": reward} for r, attempts, reward in rows
        ]
        _print_json({"rollouts": listed})
        return
    table = Table("rollout", "task", "sample", "status", "reward", "attempts", "error", box=None)
    for rollout, attempts, reward in rows:
        cells = (
            rollout.id,
            rollout.task_id,
            str(rollout.sample_index),
            rollout.status,
            "" if reward is None else f"{reward:g}",
            str(attempts),
            "" if rollout.error is None else f"{rollout.error.boundary}: {rollout.error.message}",
        )
        table.add_row(*(Text(visible(cell)) for cell in cells))
    console().print(table)


def _print_json(value: Any) -> None:
    """Print JSON in ASCII: what a transcript holds cannot steer a terminal from there either."""
    import json

    typer.echo(json.dumps(value))
