"""What `--json` prints."""

from __future__ import annotations

from typing import Any

import typer


def print_json(value: Any) -> None:
    """Print a value as one line of JSON; what is no Unicode in it, as a name of a file may be, is replaced."""
    import msgspec

    try:
        typer.echo(msgspec.json.encode(value))
    except UnicodeEncodeError:
        from understudy.export.files import json_bytes

        typer.echo(json_bytes(value))
