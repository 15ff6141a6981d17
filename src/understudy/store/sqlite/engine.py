"""Opening the database file: pragmas, and the migrations that an older or a new one needs."""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from understudy.errors import StoreError
from understudy.store.schema import HEAD
from understudy.store.sqlite.errors import to_store_error, translate_errors

FILE = "store.db"
BUSY_S = 30.0
MIGRATIONS = Path(__file__).parent.parent / "migrations"

# FULL: a commit that was answered survives a power cut. The rest trades a WAL of up to 32 MiB, and as much memory,
# for checkpoints that are rare enough not to be felt.
_PRAGMAS = ("foreign_keys = ON", "synchronous = FULL", "wal_autocheckpoint = 8000", "cache_size = -32768")

_READ_BY_VIEWS = "0004"
_VIEWS = (
    "CREATE TEMP VIEW rollouts AS SELECT rollouts.*, COALESCE(json_extract(CAST(runs.config AS TEXT), '$.agent'), "
    "'claude-code') AS agent, NULL AS agent_version FROM main.rollouts JOIN main.runs ON runs.id = run_id",
    "CREATE TEMP TABLE token_values (step, call_id, version, logprobs, ratios, advantages)",
)
"""What a store at schema `_READ_BY_VIEWS` lacks, for those that are on a medium that cannot be written."""

# Alembic's operations go through module-level proxies: one migration at a time in a process.
_migrating = threading.Lock()


def open_engine(directory: Path, *, create: bool) -> Engine:
    """An engine on the store in `directory`, at the newest schema.

    Connections are in autocommit mode; who writes says BEGIN and COMMIT. One that cannot be written here is opened
    to be read. Raises StoreError.
    """
    file = directory / FILE
    try:
        if create:
            directory.mkdir(parents=True, exist_ok=True)
        elif not file.is_file():
            raise StoreError(
                f"{directory} holds no store ({FILE} is not there); give a directory that `understudy run` or "
                "`understudy ingest` wrote"
            )
    except OSError as error:
        raise StoreError(f"{directory} cannot hold a store: {error}; give one that can be written") from error
    writable = is_writable(file)
    address = str(file) if writable else reading_uri(file)
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        creator=lambda: sqlite3.connect(
            address, uri=not writable, timeout=BUSY_S, cached_statements=256, check_same_thread=False
        ),
        isolation_level="AUTOCOMMIT",
    )
    event.listen(engine, "connect", _set_up)
    try:
        with translate_errors(file), engine.connect() as connection:
            if (version := _version(connection, file)) != HEAD:
                if not writable and version == _READ_BY_VIEWS:
                    # Nothing can be migrated here. What the last migration added is shown by views instead.
                    event.listen(engine, "connect", _add_views)
                    engine.dispose()
                elif not writable:
                    raise StoreError(
                        f"{file} is at schema {version or 'none'}, this release at {HEAD}, and it cannot be "
                        "written here; copy its directory to where it can be brought up"
                    )
                else:
                    with _alone(directory):
                        _migrate(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine


def is_writable(file: Path) -> bool:
    """Whether this process can write a store's file, or make it, and SQLite's log beside it."""
    return os.access(file.parent, os.W_OK) and (not os.access(file, os.F_OK) or os.access(file, os.W_OK))


def reading_uri(file: Path) -> str:
    """The URI by which SQLite only reads a store. Raises StoreError when that needs what is not there.

    Reading beside others needs their log and its index. Where both are absent nobody writes, and they cannot be
    made in a directory that is read-only: then the file is all there is, and is taken not to change.
    """
    uri = f"{file.absolute().as_uri()}?mode=ro"
    log, index = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm"))
    if is_writable(file) or (log.exists() and index.exists()):
        return uri
    if log.exists() and log.stat().st_size:
        raise StoreError(
            f"{file}: its last writes are in {log.name} still, and it cannot be written here; copy its "
            "directory, with that file, to where it can be written"
        )
    return f"{uri}&immutable=1"


def _set_up(raw: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = raw.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _add_views(raw: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = raw.cursor()
    for statement in _VIEWS:
        cursor.execute(statement)
    cursor.close()


def _version(connection: Connection, file: Path) -> str | None:
    """The migration that the file is at; None when it is empty."""
    names = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
    if not names:
        return None
    if "alembic_version" not in names:
        raise StoreError(f"{file} is an SQLite database but not a store; give another directory")
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def _migrate(connection: Connection, file: Path) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    version = _version(connection, file)  # again, now that nobody else migrates
    if version == HEAD:
        return
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    revisions = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if version is not None and version not in revisions:
        raise StoreError(
            f"{file} was written by a newer release (schema {version}; this one knows up to {HEAD}); "
            "update understudy"
        )
    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    # A table that is made anew is dropped in between, which rows that name its rows would forbid.
    connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        with _migrating:
            command.upgrade(config, "head")
        if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            raise StoreError(
                f"{file}: the store is damaged: rows name rows that are not there; restore it from a copy"
            )
        connection.exec_driver_sql("COMMIT")
    except Exception as error:
        if _in_transaction(connection):
            connection.exec_driver_sql("ROLLBACK")
        raise to_store_error(error, file) from error
    finally:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")


def _in_transaction(connection: Connection) -> bool:
    return bool(getattr(connection.connection.dbapi_connection, "in_transaction", False))


@contextmanager
def _alone(directory: Path) -> Generator[None]:
    """One process at a time, by a lock on the directory itself; it goes with the process."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
