"""The commands of `understudy`, in the order in which help lists them."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy import __version__
from understudy.cli.commands import (
    doctor,
    export,
    gateway,
    grade,
    ingest,
    integrity,
    loop,
    pairs,
    push,
    replay,
    report,
    run,
    show,
    states,
    tasks,
    train,
)

app = typer.Typer(
    name="understudy",
    help="Teach any language model to do Claude Code's job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # which would take [default: …] in a help text for markup, and drop it
    context_settings={"help_option_names": ["-h", "--help"]},
)
# The short help fits a terminal of 80 columns: click would cut the first sentence of a docstring.
for _name, _command, _told in (
    ("run", run.run, "Run an agent on tasks, keep every call, grade every patch."),
    ("show", show.show, "Show what a rollout was asked, did and was graded."),
    ("grade", grade.grade, "Grade predictions, and write the harness's report files."),
    ("integrity", integrity.integrity, "Say after review whether a rollout's patch is clean."),
    ("ingest", ingest.ingest, "Turn session logs into training states."),
    ("states", states.states, "Show, choose or write the states in a store."),
    ("replay", replay.replay, "Ask teachers what they would have done at each turn."),
    ("pairs", pairs.pairs, "Make preference pairs of replays and of rollouts."),
):
    app.command(_name, short_help=_told)(_command)
app.add_typer(export.app, name="export", short_help="Write what a store holds in a form that others read.")
app.command("push", short_help="Push an export to the Hugging Face Hub.")(push.push)
app.add_typer(tasks.app, name="tasks")
train.app.command("loop", short_help="Collect, grade, update, publish, and again.")(loop.loop)
app.add_typer(train.app, name="train", short_help="Train a model on what a run gathered.")
app.command("report", short_help="Show whether a policy got better, beyond chance.")(report.report)
app.add_typer(gateway.app, name="gateway", short_help="Run the gateway on its own, give out keys, steer it.")
app.command("doctor", short_help="Show all that a run needs, with its state.")(doctor.doctor)
app.command("setup", short_help="Fetch what a run needs and is not here yet.")(doctor.setup)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"understudy {__version__}")
        raise typer.Exit


@app.callback()
def _root(  # pyright: ignore[reportUnusedFunction]
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of the command itself."""
