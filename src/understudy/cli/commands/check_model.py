"""`understudy check-model`: whether a model server can do a run's work, before a night of it."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from understudy.cli.output import Json, print_json, print_table
from understudy.errors import ConfigError
from understudy.gateway.check_model import ModelChecker


def check_model(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address, as http://localhost:8000/v1.")],
    model: Annotated[str | None, typer.Option(help="The model's name there [default: the first].")] = None,
    key_env: Annotated[str | None, typer.Option(help="The environment variable with the server's key.")] = None,
    json_: Json = False,
) -> None:
    """Check a model server before a long run: a few short requests, none of which is stored.

    That tools are in the prompt, that a tool call is read back, exact token ids, logprobs before and after
    temperature, the context, thinking. Exits with 1 when something that a run needs is missing.
    """
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not a server address; expected http://host:port/v1")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise ConfigError(f"the environment variable {key_env} is not set; it must hold the server's key")
    checks = asyncio.run(ModelChecker(url, model=model, key=key).run())
    usable = all(check.ok is not False for check in checks if check.required)
    if json_:
        print_json({"ok": usable, "checks": checks})
    else:
        marks = {True: "ok", False: "missing", None: "not checked"}
        rows: list[tuple[str, ...]] = []
        for check in checks:
            mark = "limited" if check.ok is False and not check.required else marks[check.ok]
            rows.append((mark, check.name, check.seen, check.remedy))
        print_table(("", "what", "seen", "what to do"), rows)
    if not usable:
        raise typer.Exit(1)
