"""The commands of `understudy`, in the order in which help lists them.

A command's module is imported when the command is called. So `understudy --help` is quick, and the modules may
import what they need at their top.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from understudy import __version__

_COMMANDS = {
    "demo": ("demo", "See the whole loop work: a small model gets better."),
    "run": ("run", "Run an agent on tasks, keep every call, grade every patch."),
    "worker": ("worker", "Execute rollouts that others enqueued in a store."),
    "status": ("status", "Show how runs stand, and who works on them."),
    "store": ("store", "Copy stores between directories and PostgreSQL."),
    "du": ("disk", "Show what takes room on disk and in databases."),
    "prune": ("disk", "Remove what is not needed any more."),
    "show": ("show", "Show what a rollout was asked, did and was graded."),
    "grade": ("grade", "Grade predictions, and write the harness's report files."),
    "integrity": ("show", "Say after review whether a rollout's patch is clean."),
    "ingest": ("ingest", "Turn session logs into training states."),
    "states": ("states", "Show, choose or write the states in a store."),
    "replay": ("replay", "Ask teachers what they would have done at each turn."),
    "pairs": ("pairs", "Make preference pairs of replays and of rollouts."),
    "redact": ("redact", "Say what redaction would replace, before an export."),
    "export": ("export", "Write what a store holds in a form that others read."),
    "verify": ("verify", "Check the lineage of a dataset or a run."),
    "push": ("export", "Push an export to the Hugging Face Hub."),
    "tasks": ("tasks", "Make tasks, and check those you have."),
    "train": ("train", "Train a model on what a run gathered."),
    "models": ("models", "Fetch pretrained models, and list those that are here."),
    "report": ("report", "Show whether a policy got better, beyond chance."),
    "view": ("view", "Look at stores in the browser, live."),
    "gateway": ("gateway", "Run the gateway on its own, give out keys, steer it."),
    "sandboxes": ("sandboxes", "List and end the sandboxes on other machines."),
    "agents": ("agents", "Try other versions of agents."),
    "check-model": ("check_model", "Check a model server before a long run."),
    "doctor": ("doctor", "Show all that a run needs, with its state."),
    "setup": ("doctor", "Fetch what a run needs and is not here yet."),
}
"""Command name → its module in `commands/`, which defines it as a function of that name or as `app`, and its
line of help.
"""


class _Commands(TyperGroup):
    """The commands by name. Listing them imports none of them.

    Newer releases of Typer contain click and older ones depend on it, so click's types are not named here.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = import_module(f"understudy.cli.commands.{_COMMANDS[cmd_name][0]}")
        function = getattr(module, cmd_name.replace("-", "_"), None)
        if function is None:
            return typer.main.get_command(module.app)
        single = typer.Typer(rich_markup_mode=None, add_completion=False)
        single.command(cmd_name)(function)
        return typer.main.get_command(single)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


app = typer.Typer(
    cls=_Commands,
    name="understudy",
    help="Teach any language model to do Claude Code's job.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # Rich's markup would treat "[default: …]" in a help text as a style, and drop it.
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
    """The options of `understudy` itself."""
