"""`understudy view`: stores in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.output import Json


def view(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="DIR...",
            help="Directories of runs, loops, gateways, sessions, or of many [default: runs, else this one].",
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 8585,
    host: Annotated[
        str, typer.Option(help="Where to listen. Any address but this machine's own needs the token it prints.")
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")] = True,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse votes, words on integrity, and orders to gateways.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR", help="A model's directory, for the texts of tokens [default: the run's]."
        ),
    ] = None,
    openapi: Annotated[
        bool, typer.Option("--openapi", help="Print the API as an OpenAPI 3.1 document and end.")
    ] = False,
    json_: Json = False,
) -> None:
    """Look at runs, loops, gateways and sessions in the browser, live, until Ctrl-C.

    Stores are opened for reading alone; what a person decides there (votes, integrity) is written to the store.
    With --json the address is printed as one JSON object.
    """
    import asyncio

    from understudy.cli.output import print_json

    if openapi:
        from understudy.view.openapi import document

        print_json(document())
        return
    from understudy.view.api import ViewApi
    from understudy.view.catalog import Catalog
    from understudy.view.server import serve_view

    chosen = directories or [Path("runs") if Path("runs").is_dir() else Path()]
    api = ViewApi(Catalog(chosen), may_write=not read_only, tokenizer=tokenizer)

    def started(url: str, token: str | None) -> None:
        address = url + (f"/?token={token}" if token else "/")
        if json_:
            print_json({"url": address, "api": f"{url}/api/stores", "read_only": read_only})
        else:
            typer.echo(f"the viewer is at {address} (Ctrl-C ends it)")
        if browser and not json_ and not _open_browser(address):
            typer.echo("no browser could be opened here; open the address yourself", err=True)

    asyncio.run(serve_view(api, host, port, started))


def _open_browser(address: str) -> bool:
    """Open an address in the user's browser; whether there is one."""
    import webbrowser

    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
