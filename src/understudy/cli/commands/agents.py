"""`understudy agents try`: how another version of an agent behaves differently."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.output import Json

app = typer.Typer(
    help="Try other versions of agents.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


@app.callback()
def _agents() -> None:  # pyright: ignore[reportUnusedFunction]
    """Try other versions of agents."""


@app.command("try")
def try_agent(
    agent: Annotated[
        str,
        typer.Argument(
            metavar="NAME[@VERSION]",
            help="The agent and its version, such as claude-code@2.1.198; without a version, the pinned one.",
        ),
    ],
    behaviour: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A behaviour to try; can be repeated [default: all]."),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Directory for a recording of the requests and responses of this version, NAME.jsonl.xz."
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Run a version of an agent through conformance tests, and show what changed compared with the pinned version.

    The real agent works in local sandboxes without network, with a scripted model: edits, parallel tools, server
    errors, broken streams, limits, interruption. Without a version, only the pinned one runs. Exits with 1 if a
    behaviour is not as required.
    """
    from understudy.agents.install import install
    from understudy.cli.interrupts import run_stoppable
    from understudy.cli.output import print_json, print_table
    from understudy.run.behaviours import chosen_behaviours, missing_behaviours
    from understudy.run.trial import VersionTrial, changes, parse_version, try_version

    def report(text: str) -> None:
        if not json_:
            typer.echo(text, err=True)

    async def trials() -> list[VersionTrial]:
        versions = parse_version(agent)
        latest_version = versions[-1]
        behaviours = chosen_behaviours(latest_version.agent, behaviour or ())
        for package in versions:  # before the first takes its minutes
            install(package.agent, package=package)
        return [
            await try_version(package, behaviours, report, record if package is latest_version else None)
            for package in versions
        ]

    tried = run_stoppable(trials(), lambda: False)
    changed, problems = changes(tried[0], tried[-1]), tried[-1].problems
    if json_:
        print_json({"trials": tried, "changes": changed, "problems": problems})
    else:
        rows = [
            (same[0].behaviour, *(_state(observation.problems) for observation in same))
            for same in zip(*(trial.observations for trial in tried), strict=True)
        ]
        print_table(("behaviour", *(trial.version for trial in tried)), rows)
        for name, reason in missing_behaviours(tried[-1].agent).items():
            typer.echo(f"not tried: {name}: {reason}")
        turns = sum(observation.turns for observation in tried[-1].observations)
        misses = sum(len(observation.log_differences) for observation in tried[-1].observations)
        typer.echo(f"\n{turns} answers, {misses} of them otherwise in its own log")
        for title, lines in (("not as it must be", problems), ("changed", changed)):
            typer.echo("".join(f"{title}: {line}\n" for line in lines), nl=False)
    if problems:
        raise typer.Exit(1)


def _state(problems: list[str]) -> str:
    return f"{len(problems)} problems" if problems else "as it must be"
