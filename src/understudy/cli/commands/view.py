"""`understudy view`: shows stores in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.output import Json
from understudy.errors import ConfigError


def view(
    directories: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="STORE...",
            help=(
                "Directories of runs, loops, gateways or sessions, or directories that contain them, or "
                "postgresql://USER@HOST/DATABASE [default: ./runs, else this directory]."
            ),
        ),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port to listen on; 0 chooses a free one.")
    ] = 8585,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on. Unless it is a loopback address (127.0.0.1, ::1, localhost), the "
            "browser needs the printed token."
        ),
    ] = "127.0.0.1",
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")] = True,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Refuse votes, integrity reviews and gateway commands.")
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="A model's directory, whose tokenizer shows the texts of tokens [default: the run's].",
        ),
    ] = None,
    export: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.html",
            help="Write a single HTML file to share, and exit. It has the named run or loop, or only the "
            "ROLLOUTs named after it.",
        ),
    ] = None,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="With --export: do not redact secrets, names and paths.")
    ] = False,
    max_mb: Annotated[
        int, typer.Option(min=1, max=500, help="With --export: maximum size of the data in the file, in MB.")
    ] = 50,
    openapi: Annotated[
        bool, typer.Option("--openapi", help="Print the API as an OpenAPI 3.1 document and exit.")
    ] = False,
    json_: Json = False,
) -> None:
    """Look at runs, loops, gateways and sessions in the browser, live, until Ctrl-C.

    Stores are opened read-only; only your decisions (votes, integrity) are written to the store. With --json the
    address is printed as one JSON object. `understudy view --export FILE.html RUN [ROLLOUT...]` writes the same
    pages into one file that can be mailed.
    """
    import asyncio

    from understudy.cli.output import print_json

    if openapi:
        import msgspec

        from understudy.view.openapi import document

        typer.echo(msgspec.json.encode(document()))
        return
    from understudy.store.address import parse_location
    from understudy.util.processes import raise_file_limit
    from understudy.view.api import ViewApi
    from understudy.view.catalog import Catalog
    from understudy.view.server import serve_view

    if export is not None:
        _export(export, directories or [], tokenizer, max_mb, unredacted=unredacted, as_json=json_)
        return
    if unredacted:
        raise ConfigError("--unredacted: nothing is redacted in the browser; leave it out, or add --export FILE")
    raise_file_limit()
    here = Path("runs") if Path("runs").is_dir() else Path()
    chosen = [*map(parse_location, directories or ())] or [here]
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
    """Open an address in the user's browser. Returns whether there is one."""
    import webbrowser

    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False


def _export(
    file: Path, names: list[str], tokenizer: Path | None, max_mb: int, *, unredacted: bool, as_json: bool
) -> None:
    """Write the pages of a run, or of some of its rollouts, into one file."""
    from contextlib import closing

    from understudy.cli.output import counted, print_json
    from understudy.redact.redactor import Redactor
    from understudy.store.address import location_name, parse_location
    from understudy.view.api import ViewApi
    from understudy.view.catalog import Catalog
    from understudy.view.export import export_rollouts

    if not names:
        raise ConfigError(
            f"--export {file}: expected a run or a loop to write into this file, got none; name its directory: "
            f"understudy view --export {file} RUN [ROLLOUT]..."
        )
    if file.is_dir():
        raise ConfigError(f"--export: {file} is a directory; name a file, such as {file / 'run.html'}")
    location = parse_location(names[0])
    redactor = None if unredacted else Redactor.from_user_key()
    with closing(ViewApi(Catalog([location]), may_write=False, tokenizer=tokenizer)) as api:
        answers, start = export_rollouts(api, location, names[1:], max_mb * 1_000_000)
        page = answers.page(start, f"{location_name(location)} · Understudy", redactor)
    page.write(file)
    if as_json:
        print_json(
            {
                "file": str(file),
                "bytes": len(page.content),
                "rollouts": page.rollouts,
                "redacted": page.redacted,
                "replaced": page.replaced,
                "notes": page.notes,
            }
        )
        return
    typer.echo(f"written: {file}, {len(page.content) / 1e6:.1f} MB, {page.rollouts} whole rollouts")
    if page.redacted:
        typer.echo(f"redaction replaced: {counted(page.replaced) or 'nothing'}")
    else:
        typer.echo("warning: the file is not redacted and may contain secrets; only you can read it")
    for note in page.notes:
        typer.echo(f"note: {note}")
