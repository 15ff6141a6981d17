"""Output of commands: JSON for `--json`, tables, and counts as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
"""The `--json` option of most commands."""

_UNWRAPPED_WIDTH = 1 << 16
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def print_json(value: Any) -> None:
    """Print a value as one line of JSON. Invalid Unicode in it, as in a file name, is replaced.

    An object gets the key `schema`, the version of the output format.
    """
    import msgspec

    from understudy.types import SCHEMA

    try:
        data = msgspec.json.encode(value)
    except UnicodeEncodeError:
        from understudy.export.parquet import json_bytes

        data = json_bytes(value)
    if data.startswith(b"{"):
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        data = msgspec.json.encode({"schema": SCHEMA, **fields})
    typer.echo(data)


def console() -> Console:
    """Return a console on stdout that interprets no markup, and wraps lines only on a terminal."""
    from rich.console import Console, ConsoleDimensions

    result = Console(markup=False, highlight=False, emoji=False)
    width, height = result.size
    # Set once, because otherwise each printed line would query the terminal's size several times.
    result.size = ConsoleDimensions(width if result.is_terminal else _UNWRAPPED_WIDTH, height)
    return result


def print_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows below their headings."""
    from rich.table import Table
    from rich.text import Text

    from understudy.util.text import visible

    table = Table(*head, box=None)
    for row in rows:
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    console().print(table)


def print_facts(title: str, facts: Iterable[tuple[str, object]]) -> None:
    """Print a summary, with a name and a value in each row."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from understudy.util.text import visible

    table = Table(show_header=False, title=title, title_justify="left")
    for name, value in facts:
        table.add_row(name, Text(visible(str(value))))
    Console().print(table)


def counted(counts: Mapping[Any, float]) -> str:
    """Return counts as text: `3 read, 1 lost`.

    Control characters in names, which may come from logs, are made visible.
    """
    from understudy.util.text import visible

    return ", ".join(f"{count} {visible(name)}" for name, count in counts.items())


def size_text(size: float | None) -> str:
    """Format a number of bytes with a fitting unit."""
    if size is None:
        return ""
    power = min(len(_UNITS) - 1, (int(size).bit_length() - 1) // 10) if size >= 1 else 0
    return f"{size / 1024**power:.{1 if power else 0}f} {_UNITS[power]}"
