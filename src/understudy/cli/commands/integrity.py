"""`understudy integrity`: a person's word on a patch that the grader took for suspicious, or did not."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from understudy.errors import ConfigError


class IntegrityStatus(StrEnum):
    """What a patch may be."""

    clean = "clean"
    suspicious = "suspicious"


def integrity(
    rollout: Annotated[str, typer.Argument(help="A rollout's id or its beginning, or an attempt's id.")],
    status: Annotated[IntegrityStatus, typer.Argument(help="What it is.")],
    reason: Annotated[str, typer.Option("--reason", help="Why, for whoever reads it later.")],
    directory: Annotated[
        Path | None, typer.Option("--dir", help="A run's output directory [default: the newest in ./runs].")
    ] = None,
) -> None:
    """Say after review whether a rollout's patch is clean or suspicious.

    Exports leave suspicious ones out. What the grader found stays on record beside it.
    """
    from understudy.cli.commands.show import newest_run
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
