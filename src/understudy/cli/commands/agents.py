"""`understudy agents try`: what another version of an agent does otherwise."""

from __future__ import annotations

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
    agent: Annotated[str, typer.Argument(metavar="NAME[@VERSION]", help="As claude-code@2.1.198.")],
    json_: Json = False,
) -> None:
    """Run a version of an agent through conformance behaviours, and say what changed against the pinned one.

    The real agent works in local sandboxes without network, before a scripted model: edits, parallel tools, faults
    of the server, limits. Without a version the pinned one runs alone. Ends with 1 where a behaviour is not as it
    must be.
    """
    import asyncio

    from understudy.cli.output import print_json, print_table
    from understudy.run.trial import VersionTrial, changes, parse_version, try_version

    def tell(text: str) -> None:
        if not json_:
            typer.echo(text, err=True)

    async def trials() -> list[VersionTrial]:
        versions = parse_version(agent)
        return [await try_version(version, tell) for version in versions]

    tried = asyncio.run(trials())
    changed, problems = changes(tried[0], tried[-1]), tried[-1].problems
    if json_:
        print_json({"trials": tried, "changes": changed, "problems": problems})
    else:
        rows = [
            (same[0].behaviour, *(_state(one.problems) for one in same))
            for same in zip(*(trial.observations for trial in tried), strict=True)
        ]
        print_table(("behaviour", *(trial.version for trial in tried)), rows)
        turns = sum(one.turns for one in tried[-1].observations)
        misses = sum(len(one.misses) for one in tried[-1].observations)
        typer.echo(f"\n{turns} answers, {misses} of them otherwise in its own log")
        for title, lines in (("not as it must be", problems), ("changed", changed)):
            typer.echo("".join(f"{title}: {line}\n" for line in lines), nl=False)
    if problems:
        raise typer.Exit(1)


def _state(problems: list[str]) -> str:
    return f"{len(problems)} problems" if problems else "as it must be"
