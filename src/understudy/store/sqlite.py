"""Everything specific to SQLite: opening a file, errors, the writer's connection, filters of turns."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shlex
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

from understudy.errors import StoreError, StoreInUse, StoreLocked
from understudy.store.decoding import damaged
from understudy.store.driver import OUTAGE_S, DatabaseDriver, WriterSession
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
    "readonly database": "the store is read-only for this user; make its directory and files writable",
    "because it is a view": "the store is read-only here, and has the schema of an earlier release, which cannot "
    "be written; open it once where it is writable, as `understudy show --dir DIRECTORY` does",
    "unable to open database": "the store cannot be opened; check the owner and the mode of the directory",
    "file is not a database": "not an SQLite file; expected a store's directory, or restore it from a copy",
    "malformed": str(damaged("a page of the file is malformed")),
    "no such table": str(damaged("it lacks a table")),
}


def to_store_error(error: Exception, file: Path) -> StoreError:
    """Convert an error to a StoreError that says what happened to which file, and what to do next."""
    if isinstance(error, StoreError):
        if str(file) not in str(error):
            error.args = (f"{file}: {error}",)  # the same error, whose class its callers ask for
        return error
    if isinstance(error, msgspec.MsgspecError):
        return StoreError(f"{file}: {damaged(f'it contains a value of another form ({error})')}")
    cause: BaseException | Any = error.orig if isinstance(error, DBAPIError) else error
    text = str(cause)
    if getattr(cause, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
        return StoreLocked(
            f"{file}: another process held the store's lock for too long; end the process that has it open "
            f"(`lsof {shlex.quote(str(file))}` names it), or wait for it, then run the same command again ({text})"
        )
    for sign, hint in _HINTS.items():
        if sign in text.lower():
            return StoreError(f"{file}: {hint} ({text})")
    if isinstance(cause, sqlite3.IntegrityError) and "FOREIGN KEY" in text:
        return StoreError(
            f"{file}: a row names a run, task, rollout or attempt that is not in the store; store that first "
            f"({text})"
        )
    if isinstance(cause, sqlite3.IntegrityError) and "UNIQUE" in text:
        return StoreError(f"{file}: another row with the same key exists already; use another id ({text})")
    return StoreError(
        f"{file}: SQLite failed: {type(cause).__name__}: {text}; check the free disk space, and the permissions "
        "of the file and its directory"
    )


@contextmanager
def translate_errors(file: Path) -> Generator[None]:
    """Turn errors of SQLAlchemy, sqlite3 and msgspec in the block into StoreErrors that name the file. A
    StoreError that does not name it is completed.
    """
    try:
        yield
    except (StoreError, SQLAlchemyError, sqlite3.Error, msgspec.MsgspecError) as error:
        raise to_store_error(error, file) from error


FILE = "store.db"
BUSY_S = 30.0
_POLL_S = 0.5

# FULL: an acknowledged commit survives a power cut. The other settings allow a WAL of up to 32 MiB, and as much
# memory, so that checkpoints are rare.
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
_SIZES = (
    "CREATE TEMP VIEW traces AS SELECT *, NULL AS tools_source, NULL AS tools_bytes, NULL AS tools_escaped "
    "FROM main.traces",
    "CREATE TEMP VIEW turns AS SELECT rowid, *, NULL AS prompt_bytes, NULL AS prompt_escaped, "
    "NULL AS prompt_messages, NULL AS prompt_images, NULL AS answer_chars FROM main.turns",
)
_BUCKET = (
    "CREATE TEMP VIEW blobs AS SELECT *, NULL AS bucket_bytes FROM main.blobs",
    "CREATE TEMP TABLE settings (name, value)",
)
_READ_BY_VIEWS: dict[str | None, tuple[str, ...]] = {
    "0004": (*_AGENTS, _VOTES, *_LEASES, *_WORKERS, *_SIZES, *_BUCKET),
    "0005": (_VOTES, *_LEASES, *_WORKERS, *_SIZES, *_BUCKET),
    "0006": (*_LEASES, *_WORKERS, *_SIZES, *_BUCKET),
    "0007": (*_WORKERS, *_SIZES, *_BUCKET),
    "0008": (*_SIZES, *_BUCKET),
    "0009": _BUCKET,
}
"""What a store at an older schema lacks: such a store is read through these where it cannot be migrated, because
it is on a medium that cannot be written, or is only to be read."""


def _make_private(directory: Path, file: Path) -> None:
    """Make a store readable for its owner only, since it holds everything that agents and people wrote.

    The directory is made private too if it is empty or already holds a store. If it has other contents, it may
    serve other purposes, so only the file is made private. SQLite gives the files beside it the same mode.
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
    """Create a database without tables unless there is a file. A file that another process creates first is kept.

    The database is renamed into place, so that an empty file is always a damaged store, never an unfinished one.
    """
    handle, name = tempfile.mkstemp(prefix=f".{FILE}-", dir=file.parent)
    os.close(handle)
    try:
        with contextlib.closing(sqlite3.connect(name)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")  # this writes the first page
        with _directory_lock(file.parent):
            if not file.exists():
                Path(name).rename(file)
    finally:
        Path(name).unlink(missing_ok=True)


def open_engine(
    directory: Path, *, create: bool, read_only: bool = False, exclusive: bool = False, wait_s: float = BUSY_S
) -> Engine:
    """Open an engine on the store in `directory`, migrated to the newest schema.

    `exclusive`: one connection, alone. `wait_s`: for how long to wait for locks of other processes, in seconds.

    Connections are in autocommit mode, so writers issue BEGIN and COMMIT themselves. A store that is not writable
    here, or opened with `read_only`, is opened for reading and not migrated. Raises StoreError.
    """
    file = directory / FILE
    try:
        if create and not read_only:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            _make_private(directory, file)
        elif not file.is_file():
            reason = f"{FILE} is missing" if directory.is_dir() else "there is no such directory"
            raise StoreError(
                f"{directory} has no store ({reason}); name a directory that `understudy run`, "
                "`understudy ingest` or `understudy gateway serve` wrote"
            )
        if file.stat().st_size == 0:
            raise StoreError(
                f"{file} is empty (0 bytes), so its content is lost; restore it from a copy, or remove the file "
                f"to start with an empty store"
            )
    except (OSError, sqlite3.Error) as error:
        raise StoreError(
            f"{directory} cannot contain a store: {error}; name a directory that you can write to"
        ) from error
    writable = is_writable(file) and not read_only
    address = str(file) if writable else reading_uri(file)
    engine = create_engine(
        URL.create("sqlite", database=str(file)),
        creator=lambda: sqlite3.connect(
            address,
            uri=not writable,
            timeout=0.0 if exclusive else wait_s,
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
                    # This store cannot be migrated here, so views stand in for what later migrations added.
                    event.listen(engine, "connect", partial(_add_views, _READ_BY_VIEWS[version]))
                    engine.dispose()
                elif version is not None and (message := unknown_schema(version)):
                    raise StoreError(f"{file} {message}")
                elif read_only and is_writable(file):
                    raise StoreError(
                        f"{file} is at schema {version or 'none'}, this release at {HEAD}; migrate it with: "
                        f"understudy show --dir {directory}"
                    )
                elif not writable:
                    raise StoreError(
                        f"{file} is at schema {version or 'none'}, this release at {HEAD}, and the file is not "
                        "writable, so it cannot be migrated; copy its directory to a writable place, and "
                        "migrate it there with: understudy show"
                    )
                else:
                    with _directory_lock(directory):
                        _migrate(connection, file)
    except BaseException:
        engine.dispose()
        raise
    return engine


def _refuse_others(engine: Engine, file: Path) -> None:
    """Take the file's lock, which every open connection shares. Raises StoreError if others have it open."""
    if not is_writable(file):
        raise StoreError(f"{file} is not writable for this user; run this command as its owner")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("BEGIN EXCLUSIVE")
            connection.exec_driver_sql("COMMIT")
    except SQLAlchemyError as error:
        if "locked" not in str(error):
            raise to_store_error(error, file) from error
        raise StoreInUse(
            f"{file} is in use: another process has it open (a run, a worker, a gateway, an export or a viewer); "
            "end that process, then run the same command again"
        ) from error


def is_writable(file: Path) -> bool:
    """Return whether this process can write or create a store's file, and SQLite's log beside it."""
    return os.access(file.parent, os.W_OK) and (not os.access(file, os.F_OK) or os.access(file, os.W_OK))


def reading_uri(file: Path) -> str:
    """Return the URI with which SQLite opens a store read-only. Raises StoreError if that is impossible.

    Reading while others write needs their log (-wal) and its index (-shm). If both are absent, nobody is writing,
    and in a read-only directory they cannot be created: then the file is complete and treated as immutable.
    """
    uri = f"{file.absolute().as_uri()}?mode=ro"
    log, index = (file.with_name(file.name + suffix) for suffix in ("-wal", "-shm"))
    if is_writable(file) or (log.exists() and index.exists()):
        return uri
    if log.exists() and log.stat().st_size:
        raise StoreError(
            f"{file}: its last writes are still in {log.name}, and the directory is read-only, so they cannot be "
            "read; copy the directory, with that file, to a writable place"
        )
    return f"{uri}&immutable=1"


class SqliteSession(WriterSession):
    """A connection for writing to a store's file."""

    dialect = "sqlite"
    is_remote = False

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
        """Roll back, unless SQLite has already done so, as it does on a full disk."""
        if self._raw.in_transaction:
            self._raw.execute("ROLLBACK")

    def insert(self, statement: HotStatement, row: Sequence[Any]) -> int | None:
        """Insert a row. Returns its number, or None if nothing was inserted."""
        cursor = self._cursor.execute(statement.sqlite, row)
        return cursor.lastrowid if cursor.rowcount == 1 else None

    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""
        return self._cursor.execute(statement.sqlite, values).fetchone()

    def fetch_all(self, statement: HotStatement, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""
        return self._cursor.execute(statement.sqlite, values).fetchall()

    def insert_many(self, statement: HotStatement, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows."""
        self._cursor.executemany(statement.sqlite, rows)

    def notify(self) -> None:
        """Do nothing: processes that wait for changes of a file poll it."""

    def close(self) -> None:
        """Return the connection to the pool."""
        self.connection.close()


class SqliteDriver(DatabaseDriver):
    """A store in an SQLite file."""

    dialect = "sqlite"
    exceptions = (sqlite3.Error,)

    def __init__(
        self,
        directory: Path,
        *,
        create: bool,
        read_only: bool,
        exclusive: bool = False,
        wait_s: float | None = None,
    ) -> None:
        """Open it; see `open_engine`."""
        self.file = directory / FILE
        self._read_only = read_only
        engine = open_engine(
            directory,
            create=create,
            read_only=read_only,
            exclusive=exclusive,
            wait_s=BUSY_S if wait_s is None else wait_s,
        )
        super().__init__(str(self.file), engine, OUTAGE_S if wait_s is None else wait_s)

    def open_session(self, name: str) -> SqliteSession:
        """Open a connection for writing."""
        return SqliteSession(self.engine.connect())

    def store_error(self, error: Exception) -> StoreError:
        """Convert an error to a StoreError that names the file."""
        return to_store_error(error, self.file)

    def repeatable_for_s(self, error: Exception) -> float:
        """Return 0: SQLite itself waits for locks."""
        return 0.0

    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> Sequence[Any] | None:
        """See DatabaseDriver. It bypasses SQLAlchemy, which takes five times as long."""
        connection = self.engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(statement.sqlite, values)
            return cursor.fetchone()
        finally:
            connection.close()

    def turns_connection(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open a restricted connection for users' expressions."""
        return filter_connection(self.file)

    def wait_for_change(self, timeout_s: float) -> None:
        """Sleep for a moment, since changes of a file are polled."""
        time.sleep(min(timeout_s, _POLL_S))

    def hold(self, name: str, busy: str) -> AbstractContextManager[object]:
        """Hold a lock on a file beside the store's."""
        return locked(self.file.parent / name, busy=busy, remedy="give a directory that you can write")

    def file_size(self) -> tuple[int, int | None]:
        """Return the size of the file and its log, and the bytes of its free pages."""
        size = sum(
            path.stat().st_size for path in (self.file, self.file.with_name(f"{FILE}-wal")) if path.exists()
        )
        with self.engine.connect() as connection:
            free_pages = [
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("freelist_count", "page_size")
            ]
        return size, free_pages[0] * free_pages[1]

    def compact(self) -> str:
        """Rewrite the file if at least a twentieth of it is unused."""
        size, unused_bytes = self.file_size()
        if not unused_bytes or unused_bytes * 20 < size:
            return ""
        # VACUUM needs room for a copy of the data, and again for the same in the log, before the file is
        # truncated.
        needed_bytes, free_disk_bytes = 2 * (size - unused_bytes), shutil.disk_usage(self.file.parent).free
        if needed_bytes > free_disk_bytes:
            return (
                f"{self.file}: returning its {unused_bytes} unused bytes to the disk needs {needed_bytes} free "
                f"bytes, got {free_disk_bytes}; free some space there, then run the same command again (it "
                "reuses them until then)"
            )
        with self.engine.connect() as connection:
            raw = typing.cast(sqlite3.Connection, connection.connection.dbapi_connection)
            # The handler lets Python process signals such as Ctrl-C during VACUUM; the file then stays unchanged.
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
        """Write the log back, so that a single file remains, and close all connections."""
        try:
            if is_writable(self.file) and not self._read_only:
                with self.errors(), self.engine.connect() as connection:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self.engine.dispose()


class ChangeCounter:
    """Tells whether other processes, or other connections, wrote to a store since it was last asked.

    Raises StoreError if the file cannot be read.
    """

    def __init__(self, file: Path, wait_s: float = BUSY_S) -> None:
        self._file = file
        with translate_errors(file):
            self._raw = sqlite3.connect(
                reading_uri(file), uri=True, isolation_level=None, timeout=wait_s, check_same_thread=False
            )

    def read(self) -> int:
        """Return a number that changes whenever another connection has committed."""
        with translate_errors(self._file):
            return self._raw.execute("PRAGMA data_version").fetchone()[0]

    def close(self) -> None:
        """Close the connection."""
        self._raw.close()


def _set_up(exclusive: bool, raw: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = raw.cursor()
    if exclusive:
        # This must come before anything is read, so that the lock covers the file, which all open connections
        # share.
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
    """Return the file's schema version, or None if it is empty."""
    names = set(connection.exec_driver_sql("SELECT name FROM sqlite_master").scalars())
    if not names:
        return None
    if "alembic_version" not in names:
        raise StoreError(f"{file} is an SQLite database but not a store of Understudy; name another directory")
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def _migrate(connection: Connection, file: Path) -> None:
    version = _version(connection, file)  # again, now that no other process can migrate
    if version == HEAD:
        return
    if version is not None and (message := unknown_schema(version)):
        raise StoreError(f"{file} {message}")
    connection.exec_driver_sql("PRAGMA journal_mode = WAL")
    # Recreating a table drops it in between, which foreign keys would forbid.
    connection.exec_driver_sql("PRAGMA foreign_keys = OFF")
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        if version is None:
            for statement in _newest_schema():
                connection.exec_driver_sql(statement)
        else:
            migrate_connection(connection)
        if connection.exec_driver_sql("PRAGMA foreign_key_check").first() is not None:
            raise damaged("rows refer to missing rows")
        connection.exec_driver_sql("COMMIT")
    except Exception as error:
        if _in_transaction(connection):
            connection.exec_driver_sql("ROLLBACK")
        raise to_store_error(error, file) from error
    finally:
        connection.exec_driver_sql("PRAGMA foreign_keys = ON")


@functools.cache
def _newest_schema() -> tuple[str, ...]:
    """Return the statements that create the newest schema in an empty database, 30 times faster than all
    migrations.
    """
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
def _directory_lock(directory: Path) -> Generator[None]:
    """Hold a lock on the directory itself, so that one process at a time runs the block.

    It ends with the process.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextmanager
def filter_connection(file: Path) -> Generator[sqlite3.Connection]:
    """Open a connection that can only read the session tables; those of an older schema through views."""
    with translate_errors(file):
        raw = sqlite3.connect(reading_uri(file), uri=True, isolation_level=None)
        try:
            (version,) = raw.execute("SELECT version_num FROM alembic_version").fetchone()
            for statement in _READ_BY_VIEWS.get(version, ()):
                raw.execute(statement)
            restrict_to_turns(raw)
            yield raw
        finally:
            raw.close()
