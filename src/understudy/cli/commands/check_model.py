"""`understudy check-model`: whether a model server supports what a run needs, before a long run."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated

import typer

from understudy.cli.output import Json, print_json, print_table
from understudy.errors import ConfigError
from understudy.gateway.check_model import ModelChecker


def check_model(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's address, such as http://localhost:8000/v1.")
    ],
    model: Annotated[
        str | None, typer.Option(help="The model's name at the server [default: the server's first model].")
    ] = None,
    key_env: Annotated[
        str | None, typer.Option(help="The environment variable that holds the server's API key.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check a model server before a long run, with a few short requests; none is stored.

    Checks that tools are in the prompt, that tool calls are parsed, exact token ids, logprobs before and after
    temperature, the context length, and thinking. Exits with 1 if something that a run needs is missing.
    """
    if not url.startswith(("http://", "https://")):
        address = url.rpartition("@")[2][:200]  # without a name and password
        raise ConfigError(f"URL: {address!r} is no address of a server; give one such as http://localhost:8000/v1")
    key = os.environ.get(key_env) if key_env else None
    if key_env and not key:
        raise ConfigError(
            f"--key-env: the environment variable {key_env} is not set; set it to the server's API key, or leave "
            "the option out"
        )
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
