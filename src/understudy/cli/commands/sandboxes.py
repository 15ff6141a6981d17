"""`understudy sandboxes`: lists and ends sandboxes on other machines, and serves one there."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.options import command_group
from understudy.cli.output import Json, print_json
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.sandbox.base import RemoteSandboxes
    from understudy.sandbox.remote.messages import RemoteEnvironment

app = command_group("List and end the sandboxes on other machines; serve one of this machine.")

_Kind = Annotated[
    str,
    typer.Option(
        "--sandbox",
        help="Where they are: ssh:MACHINE, kubernetes:NAMESPACE or harbor:PROVIDER, as in `understudy run`.",
    ),
]


@app.command("list")
def list_sandboxes(sandbox: _Kind, json_: Json = False) -> None:
    """Show the open sandboxes, oldest first: their run and attempt, since when, and until when."""
    kind = _remote(sandbox)
    open_sandboxes = asyncio.run(kind.sandboxes())
    if json_:
        print_json(open_sandboxes)
        return
    now = time.time()
    for open_sandbox in open_sandboxes:
        labels = " ".join(f"{name}={value}" for name, value in sorted(open_sandbox.labels.items()))
        seconds_left = open_sandbox.deadline - now
        typer.echo(
            f"{open_sandbox.id}  open for {now - open_sandbox.opened:.0f} s, "
            f"{seconds_left:.0f} s left  {labels}".rstrip()
        )
    typer.echo(f"{len(open_sandboxes)} open", err=True)


@app.command("reap")
def reap_sandboxes(
    sandbox: _Kind,
    ids: Annotated[list[str] | None, typer.Argument(help="The ids of sandboxes to end.")] = None,
    run: Annotated[str | None, typer.Option(help="End all sandboxes of this run.")] = None,
    json_: Json = False,
) -> None:
    """End sandboxes that are past their deadline, are named, or belong to the given run.

    An attempt whose sandbox was ended is retried.
    """
    kind = _remote(sandbox)

    async def reap() -> list[str]:
        of_run = [
            sandbox.id
            for sandbox in await kind.sandboxes()
            if run is not None and sandbox.labels.get("run") == run
        ]
        return await kind.reap([*(ids or ()), *of_run])

    ended = asyncio.run(reap())
    if json_:
        print_json(ended)
        return
    for sandbox_id in ended:
        typer.echo(sandbox_id)
    typer.echo(f"{len(ended)} ended", err=True)


@app.command("serve")
def serve() -> None:
    """Serve one local sandbox over stdin and stdout until stdin closes; sandboxes on other machines start it."""
    from understudy.config import cache_dir
    from understudy.sandbox.remote.worker import serve_sandbox

    reason = asyncio.run(serve_sandbox(cache_dir(), _environment))
    typer.echo(f"understudy: {reason}", err=True)


def _environment() -> RemoteEnvironment:
    """Return what this machine offers for running tasks."""
    from understudy.config import cache_dir
    from understudy.sandbox.remote.messages import RemoteEnvironment, RemoteMount
    from understudy.tasks.environment import python_environment

    standard = python_environment(cache_dir())
    mounts = tuple(RemoteMount(mount.target, path=str(mount.source)) for mount in standard.mounts)
    return RemoteEnvironment(mounts, standard.path_prefixes, standard.env)


def _remote(name: str) -> RemoteSandboxes:
    """Open the sandboxes of another machine. Raises ConfigError for a kind that is local to this machine."""
    from understudy.sandbox.base import RemoteSandboxes, open_kind

    kind = open_kind(name)
    if not isinstance(kind, RemoteSandboxes):
        raise ConfigError(
            f"--sandbox {name}: its sandboxes are on this machine, where they end with their run; give a kind of "
            "sandbox on another machine, such as ssh:MACHINE"
        )
    return kind
