"""`understudy view`: stores in the browser."""

from __future__ import annotations

from typing import Annotated

import typer


def view(
    openapi: Annotated[
        bool, typer.Option("--openapi", help="Print the API as an OpenAPI 3.1 document and end.")
    ] = False,
) -> None:
    """Look at runs, loops, gateways and sessions in the browser."""
    from understudy.cli.output import print_json
    from understudy.view.openapi import document

    if openapi:
        print_json(document())
