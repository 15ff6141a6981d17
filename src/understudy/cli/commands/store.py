"""`understudy store`: operations on a whole store."""

from __future__ import annotations

from typing import Annotated

import typer

from understudy.cli.options import command_group
from understudy.cli.output import Json, print_facts, print_json, size_text
from understudy.errors import ConfigError, StoreError

app = command_group("Copy stores between directories and PostgreSQL, and keep large contents in S3.")


@app.callback()
def _whole_stores() -> None:  # pyright: ignore[reportUnusedFunction]
    """Copy stores between directories and PostgreSQL, and keep large contents in S3."""


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
            facts = [
                (table.name, f"{table.rows} rows, {table.written} of them now") for table in copies if table.rows
            ]
            print_facts(f"{read.location} → {written.location}, compared", facts)


@app.command()
def bucket(
    location: Annotated[str, typer.Argument(metavar="STORE", help="The store: its directory, or postgresql://…")],
    url: Annotated[
        str | None,
        typer.Argument(
            metavar="[s3://BUCKET/PREFIX]",
            help="Where new large contents go [default: no change].",
        ),
    ] = None,
    endpoint_url: Annotated[
        str | None, typer.Option(help="The S3 server, such as https://HOST:PORT [default: Amazon's].")
    ] = None,
    min_bytes: Annotated[
        int | None, typer.Option(help="How many bytes a content has at least, compressed [default: 131072].")
    ] = None,
    json_: Json = False,
) -> None:
    """Set the S3 bucket for a store's large contents, and compare the bucket with the store.

    boto3 reads the credentials from the environment of each process that uses the store; they are not stored.
    Setting needs the store alone. Fails if objects are missing.
    """
    from understudy.store import Store
    from understudy.store.address import parse_location

    where = parse_location(location)
    if url is not None or endpoint_url is not None or min_bytes is not None:
        with Store.open(where, exclusive=True) as store:
            store.bucket.set(url, endpoint_url=endpoint_url, min_bytes=min_bytes)
    with Store.open(where, create=False, read_only=True) as store:
        if (setting := store.bucket.setting) is None:
            raise ConfigError(
                f"{store.location} has no bucket, so all its contents are in the database; set one with: "
                f"understudy store bucket {store.location} s3://BUCKET/PREFIX"
            )
        use = store.bucket.compare()
    if json_:
        print_json({"bucket": setting, "use": use})
    else:
        facts = [
            ("bucket", str(setting)),
            ("contents from", size_text(setting.min_bytes)),
            ("contents", f"{use.contents}, {size_text(use.bytes)}"),
            ("missing", str(use.missing)),
            ("not needed", f"{use.unneeded}, {size_text(use.unneeded_bytes)}"),
        ]
        print_facts(str(store.location), facts)
    if use.missing:
        raise StoreError(
            f"{store.location}: {use.missing} objects are missing in {setting}, so these contents cannot be read; "
            "restore the objects from versions or a copy of the bucket: nothing else has these contents"
        )
