"""Copies whole stores between databases. An interrupted copy can be continued, and the result is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec import Struct
from sqlalchemy import Table, func, select

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.contents import content_hash, read_blobs, read_objects, stored_bytes
from understudy.store.database import WriteContext
from understudy.store.decoding import damaged
from understudy.store.schema import blobs, metadata, settings, turns
from understudy.store.statements import hot_insert_once, row_id

_TABLES = [table for table in metadata.sorted_tables if table is not settings]
"""The settings of a store are its own: where its large contents are."""

_BATCH = 500
_BATCH_BYTES = 32 << 20
_HASH_MASK = (1 << 128) - 1


class TableCopy(Struct, frozen=True):
    """How many rows a table has, and how many of them this copy wrote."""

    name: str
    rows: int
    written: int


def copy_store(source: Store, target: Store, report: Callable[[str], None] = lambda line: None) -> list[TableCopy]:
    """Copy everything in a store into another, which must be empty or an unfinished copy of it, then compare the
    two.

    Row ids stay the same. Large contents come from the source's bucket and go to the target's, as these are set.
    Raises StoreError if the target holds something else, or if the stores differ at the end because the source was
    written meanwhile; calling it again then copies the rest.
    """
    _refuse_different_store(source, target)
    written = {table.name: _copy_table(source, target, table, report) for table in _TABLES}
    target._database.writer.submit(_set_sequences).result()  # pyright: ignore[reportPrivateUsage]
    copies: list[TableCopy] = []
    for table in _TABLES:
        report(f"comparing {table.name}")
        source_summary, target_summary = _summary(source, table), _summary(target, table)
        if source_summary != target_summary:
            difference = (
                f"has {target_summary[0]} rows, expected {source_summary[0]}"
                if source_summary[0] != target_summary[0]
                else f"differs in the content of its {source_summary[0]} rows"
            )
            raise StoreError(
                f"{target.location}: the table {table.name} {difference}, as in {source.location}; run the same "
                "command again while nothing writes to the source"
            )
        copies.append(TableCopy(str(table.name), source_summary[0], written[table.name]))
    _check_contents(target, report)
    return copies


def _refuse_different_store(source: Store, target: Store) -> None:
    """Raise StoreError if the first row of a table in the target differs from the source's."""
    for name in ("runs", "blobs", "sources"):
        table = metadata.tables[name]
        columns = (blobs.c.id, blobs.c.hash) if table is blobs else table.columns
        first_row = select(*columns).order_by(*table.primary_key).limit(1)
        with target._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
            row = connection.execute(first_row).one_or_none()
        if row is None:
            continue
        with source._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
            if connection.execute(first_row).one_or_none() != row:
                raise StoreError(
                    f"{target.location} holds other data than {source.location}; name an empty target, or an "
                    "unfinished copy of this store"
                )


def _number_of(table: Table) -> Any:
    """Return the column that numbers the rows of a table, or None if there is none."""
    columns = list(table.primary_key)
    if table is turns:
        return row_id(turns).label("rowid")
    return (
        columns[0]
        if len(columns) == 1 and columns[0].name in ("id", "key") and table.autoincrement_column is not None
        else None
    )


def _rows(store: Store, table: Table, last_number: int) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Yield the rows of a table in batches; numbered rows in order, from those after `last_number`."""
    number = _number_of(table)
    while True:
        query = select(*table.columns)
        if number is not None:
            query = (
                query.add_columns(number.label("number"))
                .where(number > last_number)
                .order_by(number)
                .limit(_BATCH)
            )
        with store._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
            rows = [tuple(row) for row in connection.execute(query)]
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH]
            yield batch if number is None else [row[:-1] for row in batch]
        if number is None or len(rows) < _BATCH:
            return
        last_number = rows[-1][-1]


def _copy_table(source: Store, target: Store, table: Table, report: Callable[[str], None]) -> int:
    statement = hot_insert_once(table, *(column.name for column in table.columns))
    number, last_number, rows_before = _number_of(table), 0, 0
    with target._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
        rows_before = connection.execute(select(func.count()).select_from(table)).scalar_one()
        if number is not None and table is not turns:
            last_number = connection.execute(select(func.coalesce(func.max(number), 0))).scalar_one()
    rows_read = 0
    for rows in _rows(source, table, last_number):
        for batch in _batches_by_size(rows, _stored_bytes) if table is blobs else (rows,):
            packed = _from_bucket(source, batch) if table is blobs else batch

            def write(context: WriteContext, packed: Sequence[tuple[Any, ...]] = packed) -> None:
                columns = context.contents.columns
                target_rows = [(*row[:2], *columns(*row[1:4])) for row in packed] if table is blobs else packed
                context.session.insert_many(statement, target_rows)

            target._database.writer.submit(write).result()  # pyright: ignore[reportPrivateUsage]
        rows_read += len(rows)
        report(f"copying {table.name}: {rows_read} rows")
    with target._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
        return connection.execute(select(func.count()).select_from(table)).scalar_one() - rows_before


def _batches_by_size(
    rows: Sequence[tuple[Any, ...]], size: Callable[[tuple[Any, ...]], int]
) -> Iterator[Sequence[tuple[Any, ...]]]:
    """Yield rows in parts of about `_BATCH_BYTES`."""
    batch: list[tuple[Any, ...]] = []
    total = 0
    for row in rows:
        batch.append(row)
        total += size(row)
        if total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _stored_bytes(row: tuple[Any, ...]) -> int:
    _, _, _, data, bucket_bytes = row
    return len(data) if bucket_bytes is None else bucket_bytes


def _from_bucket(store: Store, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return rows of contents as they are without a bucket."""
    digests = [digest for _, digest, _, _, bucket_bytes in rows if bucket_bytes is not None]
    if not digests:
        return list(rows)
    contents = read_objects(store._database.bucket, digests)  # pyright: ignore[reportPrivateUsage]
    objects = {digest: content[:2] for digest, content in zip(digests, contents, strict=True)}
    return [(key, digest, *objects.get(digest, (codec, data)), None) for key, digest, codec, data, _ in rows]


def _set_sequences(context: WriteContext) -> None:
    """Make new rows get numbers after the copied ones. PostgreSQL's sequences do not notice explicit numbers."""
    if context.session.dialect != "postgresql":
        return
    for table in metadata.sorted_tables:
        number = _number_of(table)
        if number is not None and table is not turns:
            context.connection.exec_driver_sql(
                f"SELECT setval(pg_get_serial_sequence('{table.name}', '{number.name}'), "
                f"(SELECT coalesce(max({number.name}), 0) + 1 FROM {table.name}), false)"
            ).close()


def _summary(store: Store, table: Table) -> tuple[int, int]:
    """Return how many rows a table has, and the sum of their hashes, which does not depend on their order."""
    count = total = 0
    for rows in _rows(store, table, 0):
        count += len(rows)
        for row in rows:
            # Of contents only the hash is compared, as they may be in a bucket; `_check_contents` reads them.
            row = row[:2] if table is blobs else row
            digest = blake2b(msgspec.msgpack.encode(row), digest_size=16).digest()
            total = (total + int.from_bytes(digest)) & _HASH_MASK
    return count, total


def _check_contents(store: Store, report: Callable[[str], None]) -> None:
    """Read every content. Raises StoreError if one does not match its hash."""
    report("reading every content")
    last_id = 0
    while True:
        query = (
            select(blobs.c.id, blobs.c.hash, stored_bytes())
            .where(blobs.c.id > last_id)
            .order_by(blobs.c.id)
            .limit(_BATCH)
        )
        with store._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
            rows = [tuple(row) for row in connection.execute(query)]
        if not rows:
            return
        for batch in _batches_by_size(rows, lambda row: row[2]):
            with store._database.reading() as connection:  # pyright: ignore[reportPrivateUsage]
                contents = read_blobs(connection, [key for key, _, _ in batch])
            for key, digest, _ in batch:
                if content_hash(contents[key]) != digest:
                    with store._database.driver.errors():  # pyright: ignore[reportPrivateUsage]
                        raise damaged(f"blob {key} does not match its hash")
        last_id = rows[-1][0]
