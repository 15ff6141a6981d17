"""Write the reference pages of the documentation's site: all commands, from the commands themselves, and Python.

python scripts/reference.py DIRECTORY
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from understudy.cli.app import app

_COMMANDS = """# Commands

Every command with its arguments and options, as `understudy COMMAND --help` shows them.
"""
_PYTHON = """# Python

What may be called from Python, and the protocols that packages with agents, sandboxes or formats of their own
implement. Everything else is private and changes without notice.
"""
MODULES = (
    "understudy.ingest.iterate",
    "understudy.ingest.trace_store",
    "understudy.store",
    "understudy.types",
    "understudy.train.engines.verl",
    "understudy.agents.base",
    "understudy.sandbox.base",
    "understudy.export.base",
)


def commands(group: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """The commands below a group: their whole names, themselves, and a context of click for each."""
    context = group.make_context(path, [], resilient_parsing=True)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        whole = f"{path} {name}"
        yield whole, command, command.make_context(whole, [], resilient_parsing=True)
        if hasattr(command, "list_commands"):
            yield from commands(command, whole)


def section(name: str, command: Any, context: Any) -> str:
    """The text about one command, in Markdown."""
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [record for record in records if record is not None and "--help" not in record[0]]
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    parts = [f"## {name.removeprefix('understudy ')}", inspect.cleandoc(command.help or ""), f"```\n{usage}\n```"]
    if rows:
        lines = ["| argument or option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(names)}` | {_prose(_cell(text))} |" for names, text in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _prose(text: str) -> str:
    # What stands in angle or square brackets is neither HTML nor a link.
    return text.replace("<", "&lt;").replace("[", "\\[").replace("*", "\\*")


def commands_page() -> str:
    """The page of all commands."""
    group = typer.main.get_command(app)
    return "\n".join([_COMMANDS, *(section(*each) for each in commands(group, "understudy"))])


def main() -> None:
    """Write the pages into the directory that is named."""
    os.environ["COLUMNS"] = "200"
    directory = Path(sys.argv[1])
    (directory / "commands.md").write_text(commands_page())
    modules = "\n\n".join(f"::: {module}" for module in MODULES)
    (directory / "python.md").write_text(f"{_PYTHON}\n{modules}\n")


if __name__ == "__main__":
    main()
