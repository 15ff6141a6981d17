"""Everything that only SQLite understands: opening a file, errors, the writer's connection, filters of turns."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import sqlite3
import stat
import tempfile
import time
import typing
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool
from sqlalchemy.schema import CreateIndex, CreateTable

from understudy.errors import StoreError, StoreInUse
from understudy.store.driver import DatabaseDriver, WriterSession
from understudy.store.migrate import migrate_connection, unknown_schema
from understudy.store.schema import HEAD, metadata
from understudy.store.statements import HotStatement
from understudy.store.turn_filters import restrict_to_turns
from understudy.util.files import locked

_HINTS = {
    "database or disk is full": "the disk is full: nothing of this write was stored and the store is intact; "
    "free some space, then run the same command again",
    "disk i/o error": "the disk reported an I/O error: nothing of this write was stored and the store is intact; "
    "check for a full disk, a quota, or a fault in the system log, then run the same command again",
    "database is locked": "another process held the store's lock for too long; "
    "find out which process has it open, then run the same command again",
    "readonly database": "the store is read-only for this user; make its directory and files writable",
    "because it is a view": "the store is read-only here: an earlier release wrote it, and it was not brought up",
    "unable to open database": "the store cannot be opened; check the owner and the mode of the directory",
    "file is not a database": "not an SQLite file; expected a store's directory, or restore it from a copy",
    "malformed": "the store is damaged; restore it from a copy",
    "no such table": "the store is damaged: it lacks a table; restore it from a copy",
}


def to_store_error(error: Exception, file: Path) -> StoreError:
    """The StoreError that says what happened to which file, and what to do next."""
    if isinstance(error, StoreError):
        return error
    cause: BaseException | Any = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause)
    for sign, hint in _HINTS.items():
        if sign in text.lower():
            return StoreError(f"{file}: {hint} ({text})")
    if isinstance(cause, sqlite3.IntegrityError) and "FOREIGN KEY" in text:
        return StoreError(f"{file}: a row names a run, task, rollout or attempt that is not in the store ({text})")
    if isinstance(cause, sqlite3.IntegrityError) and "UNIQUE" in text:
        return StoreError(f"{file}: another row with the same key exists already ({text})")
    return StoreError(f"{file}: the store cannot be read or written: {type(cause).__name__}: {text}")


@contextmanager
def translate_errors(file: Path) -> Generator[None]:
    """Raise what SQLAlchemy, sqlite3, msgspec and readers raise inside as a StoreError that names the file."""
    try:
        yield
    except StoreError as error:
        if str(file) in str(error):
            raise
        raise StoreError(f"{file}: {error}") from error
    except (SQLAlchemyError, sqlite3.Error, msgspec.MsgspecError) as error:
        raise to_store_error(error, file) from error


FILE = "store.db"
BUSY_S = 30.0
_POLL_S = 0.5

# FULL: a commit that was answered survives a power cut. The rest trades a WAL of up to 32 MiB, and as much memory,
# for checkpoints that are rare enough not to be felt.
_PRAGMAS = ("foreign_keys = ON", "synchronous = FULL", "wal_autocheckpoint = 8000", "cache_size = -32768")

_VOTES = "CREATE TEMP TABLE votes (subject, subject_id, voter, label, note, voted_at)"
_AGENTS = (
    "CREATE TEMP VIEW rollouts AS SELECT rollouts.*, COALESCE(json_extract(CAST(runs.config AS TEXT), '$.agent'), "
    "'claude-code') AS agent, NULL AS agent_version FROM main.rollouts JOIN main.runs ON runs.id = run_id",
    "CREATE TEMP TABLE token_values (step, call_id, version, logprobs, ratios, advantages)",
)
_LEASES = (
    "CREATE TEMP VIEW runs AS SELECT *, 'local' AS engine, NULL AS release FROM main.runs",
    "CREATE TEMP VIEW attempts AS SELECT *, NULL AS worker, NULL AS lease_until FROM main.attempts",
)
_WORKERS = ("CREATE TEMP TABLE workers (id, release, capacity, run_id, started_at, seen_at, lease_until, leaves)",)
_READ_BY_VIEWS: dict[str | None, tuple[str, ...]] = {
    "0004": (*_AGENTS, _VOTES, *_LEASES, *_WORKERS),
    "0005": (_VOTES, *_LEASES, *_WORKERS),
    "0006": (*_LEASES, *_WORKERS),
    "0007": _WORKERS,
}
"""What a store at an older schema lacks: such a store is read through these where it cannot be migrated, because
it is on a medium that cannot be written, or is only to be read."""


def _make_private(directory: Path, file: Path) -> None:
    """Let the owner alone read a store: it has everything that agents and people wrote.

    So the directory is the owner's alone where it holds a store or nothing yet; one with other things in it
    belongs to more than the store, and the file alone is made private. What SQLite puts beside it gets the
    file's mode.
    """
    if not file.exists():
        directory_is_ours = not any(directory.iterdir())
        _make_database(file)
    else:
        directory_is_ours = True
    for path in (directory, file) if directory_is_ours else (file,):
        status = path.stat()
        if status.st_uid == os.geteuid() and status.st_mode & 0o077:
            path.chmod(stat.S_IMODE(status.st_mode) & ~0o077)


def _make_database(file: Path) -> None:
    """Put a database without tables where there is no file; one that another process puts there first stays.

    It appears as a whole, so a file without content is never a store that was about to be made.
    """
    handle, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=file.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # writes the first page
        with _alone(file.parent):
            if not file.exists():
                Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)


def open_engine(directory: Path, *, create: bool, read_only: bool = False, exclusive: bool = False) -> Engine:
    """An engine on the store in `directory`, at the newest schema; with `exclusive` one connection, alone on it.

    Connections are in autocommit mode; who writes says BEGIN and COMMIT. One that cannot be written here is opened
    to be read, and with `read_only` any is: it is not brought up to the newest schema then. Raises StoreError.
    """
    file = directory / FILE
    try:
        if create and not read_only:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_private(directory, file)
        elif not file.is_file():
            raise StoreError(
                f"{directory} has no store ({FILE} is missing); give a directory that `understudy run` or "
                "`understudy ingest` wrote"
            )
        if file.stat().st_size == 0:
            raise StoreError(
                f"{file} is empty (0 bytes), so its content is lost; restore it from a copy, or remove the file "
                f"to start with an empty store"
            )
    except (OSError, sqlite3.Error) as error:
        raise StoreError(f"{directory} cannot contain a store: {error}; give a writable directory") from error
    writable = is_writable(file) and not read_only
    address = str(file) if writable else reading_uri(file)
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        creator=lambda: sqlite3.connect(
            address,
            uri=not writable,
            timeout=0.0 if exclusive else BUSY_S,
            cached_statements=256,
            check_same_thread=False,
        ),
        isolation_level="AUTOCOMMIT",
        poolclass=StaticPool if exclusive else QueuePool,
    )
    event.listen(engine, "connect", partial(_set_up, exclusive))
    try:
        if exclusive:
            _refuse_others(engine, file)
        with translate_errors(file), engine.connect() as connection:
            if (version := _version(connection, file)) != HEAD:
                if not writable and version in _READ_BY_VIEWS:
                    # Nothing can be migrated here. What later migrations added is shown by views instead.
                    event.listen(engine, "connect", partial(_add_views, _READ_BY_VIEWS[version]))
                    engine.dispose()
                elif read_only and is_writable(file):
                    raise StoreError(
                        f"{file} is at schema {version or 'none'}, this release at {HEAD}; migrate it with: "
                        f"understudy show --dir {directory}"
                    )
                elif not writable:
                    raise StoreError(
                        f"{file} is at schema {version or 'none'}, this release at {HEAD}, and it cannot be "
                        "written here; copy its directory to a writable place, and migrate it there with: "
                        "understudy show"
                    )
                else:
                    with _alone(directory):
                        _migrate(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _refuse_others(engine: Engine, file: Path) -> None:
    """Take the file's lock, which every open connection shares. Raises StoreError where there are others."""
    if not is_writable(file):
        raise StoreError(f"{file} cannot be written by this user; let its owner do this")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
            connection.exec_driver_sql("COMMIT")
    except SQLAlchemyError as error:
        if "locked" not in str(error):
            raise to_store_error(error, file) from error
        raise StoreInUse(
            f"{file} is in use: another process has it open (a run, a worker, a gateway, an export or a viewer); "
            "end that, then run the same command again"
        ) from error


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
            f"{file}: its last writes are still in {log.name}, and the directory is read-only; copy "
            f"the directory, with that file, to a writable place"
        )
    return f"{uri}&immutable=1"


class SqliteSession(WriterSession):
    """A connection to a store's file, to write with."""

    dialect = "sqlite"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._raw = typing.cast(sqlite3.Connection, connection.connection.dbapi_connection)
        self._cursor = self._raw.cursor()

    def begin(self, group: int) -> bool:
        """Wait for the file's lock, and begin."""
        self._raw.execute("BEGIN IMMEDIATE")
        return True

    def commit(self, group: int) -> None:
        """Commit."""
        self._raw.execute("COMMIT")

    def rollback(self) -> None:
        """Undo what SQLite did not undo itself, as it does on a full disk."""
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def insert(self, statement: HotStatement, row: Sequence[Any]) -> int | None:
        """Insert a row."""
        cursor = self._cursor.execute(statement.sqlite, row)
        return cursor.lastrowid if cursor.rowcount == 1 else None

    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """The first row of a query."""
        return self._cursor.execute(statement.sqlite, values).fetchone()

    def fetch_all(self, statement: HotStatement, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of a query."""
        return self._cursor.execute(statement.sqlite, values).fetchall()

    def insert_many(self, statement: HotStatement, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows."""
        self._cursor.executemany(statement.sqlite, rows)

    def notify(self) -> None:
        """Nothing: who waits for a file's changes asks again and again."""

    def close(self) -> None:
        """Give the connection back."""
        self.connection.close()


class SqliteDriver(DatabaseDriver):
    """A store's file."""

    dialect = "sqlite"
    exceptions = (sqlite3.Error,)

    def __init__(self, directory: Path, *, create: bool, read_only: bool, exclusive: bool = False) -> None:
        """Open it, as `open_engine`."""
        self.file = directory / FILE
        self._read_only = read_only
        engine = open_engine(directory, create=create, read_only=read_only, exclusive=exclusive)
        super().__init__(str(self.file), engine)

    def open_session(self) -> SqliteSession:
        """A connection to write with."""
        return SqliteSession(self.engine.connect())

    def store_error(self, error: Exception) -> StoreError:
        """What happened to the file."""
        return to_store_error(error, self.file)

    def repeatable_for_s(self, error: Exception) -> float:
        """Never: SQLite itself waits for the lock."""
        return 0.0

    def turns_connection(self) -> AbstractContextManager[sqlite3.Connection]:
        """A connection for expressions of users."""
        return filter_connection(self.file)

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait a moment."""
        time.sleep(min(timeout_s, _POLL_S))

    def hold(self, name: str, busy: str) -> AbstractContextManager[object]:
        """Hold a lock on a file beside the store's."""
        return locked(self.file.parent / name, busy=busy, remedy="give a directory that you can write")

    def file_size(self) -> tuple[int, int | None]:
        """What the file and its log take, and the pages that hold nothing."""
        size = sum(
            path.stat().st_size for path in (self.file, self.file.with_name(f"{FILE}-wal")) if path.exists()
        )
        with self.engine.connect() as connection:
            free = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("freelist_count", "page_size")
            ]
        return size, free[0] * free[1]

    def compact(self) -> str:
        """Write the file anew, where at least a twentieth of it holds nothing."""
        size, free = self.file_size()
        if not free or free * 20 < size:
            return ""
        # A copy of what is left, then the same in the log, before the file is cut.
        needed, room = 2 * (size - free), shutil.disk_usage(self.file.parent).free
        if needed > room:
            return (
                f"{self.file}: {free} bytes of it hold nothing and will be used again, but to give them back "
                f"takes {needed} bytes of room, and {room} are free; make room, then run the same command again"
            )
        with self.engine.connect() as connection:
            raw = typing.cast(sqlite3.Connection, connection.connection.dbapi_connection)
            # So that a signal, as of Ctrl-C, is heeded meanwhile: the file stays as it was then.
            raw.set_progress_handler(lambda: 0, 100_000)
            try:
                raw.execute("VACUUM")
            except sqlite3.OperationalError as error:
                raise KeyboardInterrupt if "interrupted" in str(error) else error from error
            finally:
                raw.set_progress_handler(None, 0)
            raw.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return ""

    def close(self) -> None:
        """Leave one file that can be copied."""
        try:
            if is_writable(self.file) and not self._read_only:
                with self.errors(), self.engine.connect() as connection:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self.engine.dispose()


class ChangeCounter:
    """Says whether other processes, or other connections, have written a store since it was last asked.

    Raises StoreError when the file cannot be read.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        with translate_errors(file):
            self._raw = sqlite3.connect(
                reading_uri(file), uri=True, isolation_level=None, timeout=BUSY_S, check_same_thread=False
            )

    def read(self) -> int:
        """A number that differs from the last one where something was committed in between."""
        with translate_errors(self._file):
            return self._raw.execute("PRAGMA data_version").fetchone()[0]

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()


def _set_up(exclusive: bool, raw: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = raw.cursor()
    if exclusive:
        # Before anything is read: then the lock is on the file, which all connections share while they are open.
        cursor.execute("PRAGMA locking_mode = EXCLUSIVE")
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _add_views(views: Sequence[str], raw: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = raw.cursor()
    for statement in views:
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
    version = _version(connection, file)  # again, now that nobody else migrates
    if version == HEAD:
        return
    if version is not None and (message := unknown_schema(version)):
        raise StoreError(f"{file} {message}")
    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    # A table that is made anew is dropped in between, which rows that name its rows would forbid.
    connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        if version is None:
            for statement in _newest_schema():
                connection.exec_driver_sql(statement)
        else:
            migrate_connection(connection)
        if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            raise StoreError(f"{file}: the store is damaged: rows refer to missing rows; restore it from a copy")
        connection.exec_driver_sql("COMMIT")
    except Exception as error:
        if _in_transaction(connection):
            connection.exec_driver_sql("ROLLBACK")
        raise to_store_error(error, file) from error
    finally:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")


@functools.cache
def _newest_schema() -> tuple[str, ...]:
    """The statements that make in an empty database what all migrations come to, in a thirtieth of their time."""
    dialect = SQLiteDialect_pysqlite()
    tables = metadata.sorted_tables
    creations = [*map(CreateTable, tables), *(CreateIndex(index) for table in tables for index in table.indexes)]
    return (
        *(str(creation.compile(dialect=dialect)) for creation in creations),
        "CREATE TABLE alembic_version "
        "(version_num VARCHAR(32) NOT NULL, CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))",
        f"INSERT INTO alembic_version VALUES ('{HEAD}')",
    )


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


@contextmanager
def filter_connection(file: Path) -> Generator[sqlite3.Connection]:
    """A connection that reads, of the tables of sessions alone."""
    with translate_errors(file):
        raw = sqlite3.connect(reading_uri(file), uri=True, isolation_level=None)
        try:
            restrict_to_turns(raw)
            yield raw
        finally:
            raw.close()
