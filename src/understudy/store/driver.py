"""What the store needs from a database. `store.sqlite` and `store.postgresql` implement it."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from understudy.errors import StoreError
from understudy.store.outage_retry import repeat_for
from understudy.store.statements import DatabaseDialect, HotStatement

OUTAGE_S = 120.0
"""How long an unavailable server is waited for, in seconds."""


class WriterSession(ABC):
    """The writer's connection: its transactions, and the hot statements that bypass SQLAlchemy."""

    dialect: ClassVar[DatabaseDialect]
    is_remote: ClassVar[bool]
    """Whether each statement is a round trip to a server, so that many of them are better sent together."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def begin(self, group: int) -> bool:
        """Begin the transaction of the group with this number. Returns False if that group was committed already.

        This happens if the connection was lost during the commit, when its outcome was unknown.
        """

    @abstractmethod
    def commit(self, group: int) -> None:
        """Commit the transaction, so that all of it is durable."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll back the transaction if there is one."""

    @abstractmethod
    def insert(self, statement: HotStatement, row: Sequence[Any]) -> int | None:
        """Insert a row. Returns its number, or None if the statement did nothing because an equal row exists."""

    @abstractmethod
    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """Return the first row of a query, or None."""

    @abstractmethod
    def fetch_all(self, statement: HotStatement, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""

    @abstractmethod
    def insert_many(self, statement: HotStatement, rows: Sequence[Sequence[Any]]) -> None:
        """Insert several rows."""

    def insert_each(self, statement: HotStatement, rows: Sequence[Sequence[Any]]) -> list[int | None]:
        """Insert different rows with a statement of `hot_insert_once`; return for each what `insert` would."""
        return [self.insert(statement, row) for row in rows]

    @abstractmethod
    def notify(self) -> None:
        """Wake up processes that wait for changes, once the transaction is committed."""

    @abstractmethod
    def close(self) -> None:
        """Return or drop the connection."""


class DatabaseDriver(ABC):
    """An open database with a store in it. `name` identifies it in errors, and never contains a password."""

    dialect: ClassVar[DatabaseDialect]
    exceptions: tuple[type[Exception], ...]

    def __init__(self, name: str, engine: Engine, outage_s: float) -> None:
        """`outage_s`: how long the server of the store's bucket is waited for, in seconds."""
        self.name = name
        self.engine = engine
        self.outage_s = outage_s

    @abstractmethod
    def open_session(self, name: str) -> WriterSession:
        """Open a connection for writing. Two that are open at a time have different names."""

    @abstractmethod
    def store_error(self, error: Exception) -> StoreError:
        """Convert an error to a StoreError that says what happened to which database, and what to do next."""

    @abstractmethod
    def repeatable_for_s(self, error: Exception) -> float:
        """Return for how many seconds a write that met this error should be retried; 0 for never."""

    @abstractmethod
    def turns_connection(self) -> AbstractContextManager[sqlite3.Connection]:
        """Open a connection that can only read the session tables. It evaluates users' filter expressions, which
        are written in SQLite's SQL.
        """

    @abstractmethod
    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another process announces a change, or until the timeout."""

    @abstractmethod
    def hold(self, name: str, busy: str) -> AbstractContextManager[object]:
        """Hold a lock of this store until the context, or this process, ends. Raises ConfigError(busy) if another
        process holds it.
        """

    @abstractmethod
    def file_size(self) -> tuple[int, int | None]:
        """Return the bytes that the database takes on disk, and how many of them are unused (None: unknown)."""

    @abstractmethod
    def compact(self) -> str:
        """Return unused space to the file system. Returns why that was not done, or "" if it was."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def connect(self) -> Connection:
        """Take a connection for reading. If the server is unavailable, wait until it is back."""
        return repeat_for(self.engine.connect, self.repeatable_for_s)

    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> Sequence[Any] | None:
        """Return the first row of a query, or None, on a connection for reading."""
        with self.connect() as connection:
            return connection.exec_driver_sql(statement.text(self.dialect), tuple(values)).first()

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise errors of SQLAlchemy, the DB-API, msgspec and readers inside the block as StoreErrors with the
        name.
        """
        try:
            yield
        except StoreError as error:
            if self.name in str(error):
                raise
            raise type(error)(f"{self.name}: {error}") from error
        except (SQLAlchemyError, msgspec.MsgspecError, *self.exceptions) as error:
            raise self.store_error(error) from error
