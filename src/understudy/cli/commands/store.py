"""`understudy store`: operations on a whole store."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy.cli.options import command_group
from understudy.cli.output import Json, print_facts, print_json
from understudy.errors import ConfigError

app = command_group("Copy stores between directories and PostgreSQL.")


@app.callback()
def _whole_stores() -> None:  # pyright: ignore[reportUnusedFunction]
    """Copy stores between directories and PostgreSQL."""


@app.command()
def copy(
    source: Annotated[
        str, typer.Argument(metavar="FROM", help="The store to copy: its directory, or postgresql://…")
    ],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="The target: a new directory, or an empty database.")
    ],
    json_: Json = False,
) -> None:
    """Copy everything in a store, and compare the two row by row; every content is checked against its hash.

    After an interruption the same command continues.
    """
    from understudy.store import Store
    from understudy.store.address import parse_location
    from understudy.store.copying import copy_store

    if parse_location(source) == parse_location(target):
        raise ConfigError(f"FROM and TO are the same store, {source}; give another TO")
    with (
        Store.open(parse_location(source), create=False, read_only=True) as read,
        Store.open(parse_location(target)) as written,
    ):
        copies = copy_store(read, written)
        if json_:
            print_json({"tables": copies})
        else:
            facts = [(each.name, f"{each.rows} rows, {each.written} of them now") for each in copies if each.rows]
            print_facts(f"{read.location} → {written.location}, compared", facts)
