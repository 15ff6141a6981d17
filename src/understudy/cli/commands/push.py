"""`understudy push`: an export to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.display.output import print_json


def push(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The directory of an export.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The dataset on the hub: NAME/DATASET.")],
    private: Annotated[bool, typer.Option("--private/--public", help="Who may see it.")] = True,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Push sessions though they were not redacted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be pushed.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the summary.")] = False,
) -> None:
    """Push an export to the Hugging Face Hub as a dataset, with its card.

    Who you are the hub's own library knows: by `hf auth login`, or HF_TOKEN. A push that was cut off can be made
    again: what the hub has is not sent twice.
    """
    from understudy.cli.commands.export import shortened_list
    from understudy.export import push as pushing

    done = pushing.plan_push(output, repo, private=private, unredacted=unredacted)
    if not dry_run:
        done = pushing.push(output, done, lambda text: typer.echo(text, err=True))
    if json_:
        print_json(done)
        return
    size = sum(done.files.values())
    verb = "would be pushed" if dry_run else "are"
    where = f"{'private' if done.private else 'PUBLIC'} dataset {done.repo}"
    typer.echo(
        f"{len(done.files)} files, {size / 1e6:.1f} MB, {verb} in the {where}: {shortened_list(list(done.files))}"
    )
    if done.url:
        typer.echo(done.url)
