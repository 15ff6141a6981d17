"""What the store asks of a database: `store.sqlite` and `store.postgresql` answer it, each in its own way."""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar

import msgspec
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from understudy.errors import StoreError
from understudy.store.statements import DatabaseDialect, HotStatement


class WriterSession(ABC):
    """The writer's connection: its transactions, and the statements that bypass SQLAlchemy."""

    dialect: ClassVar[DatabaseDialect]

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    @abstractmethod
    def begin(self, group: int) -> bool:
        """Begin the transaction of the group with this number. False when it was committed before.

        That happens where the connection was lost while it was committed, so that nobody knew.
        """

    @abstractmethod
    def commit(self, group: int) -> None:
        """End it, so that all of it survives a power cut."""

    @abstractmethod
    def rollback(self) -> None:
        """Undo it, if it was begun."""

    @abstractmethod
    def insert(self, statement: HotStatement, row: Sequence[Any]) -> int | None:
        """Insert a row; its number, or None where the statement did nothing, as there is an equal one."""

    @abstractmethod
    def fetch_one(self, statement: HotStatement, values: Sequence[Any]) -> tuple[Any, ...] | None:
        """The first row of a query."""

    @abstractmethod
    def fetch_all(self, statement: HotStatement, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """The rows of a query."""

    @abstractmethod
    def insert_many(self, statement: HotStatement, rows: Sequence[Sequence[Any]]) -> None:
        """Insert rows."""

    @abstractmethod
    def notify(self) -> None:
        """Wake those who wait for changes, once the transaction is committed."""

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""


class DatabaseDriver(ABC):
    """One database with a store in it, open. `name` is what errors call it, and never has a password in it."""

    dialect: ClassVar[DatabaseDialect]
    exceptions: tuple[type[Exception], ...]

    def __init__(self, name: str, engine: Engine) -> None:
        self.name = name
        self.engine = engine

    @abstractmethod
    def open_session(self) -> WriterSession:
        """A connection to write with."""

    @abstractmethod
    def store_error(self, error: Exception) -> StoreError:
        """The StoreError that says what happened to which database, and what to do next."""

    @abstractmethod
    def repeatable_for_s(self, error: Exception) -> float:
        """For how many seconds a write that met this error is tried again; 0: it is not."""

    @abstractmethod
    def turns_connection(self) -> AbstractContextManager[sqlite3.Connection]:
        """A connection that reads the tables of sessions alone, for expressions of users, which are SQLite's."""

    @abstractmethod
    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another process says that something changed, or the time is over."""

    @abstractmethod
    def hold(self, name: str, busy: str) -> AbstractContextManager[object]:
        """Hold a lock of this store, which ends with this process. Raises ConfigError(busy) if it is held."""

    @abstractmethod
    def file_size(self) -> tuple[int, int | None]:
        """The bytes that the database takes on disk, and how many of them hold nothing; None: not known."""

    @abstractmethod
    def compact(self) -> str:
        """Give what holds nothing back to the file system. Returns why that was not done; "" where it was."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections."""

    def connect(self) -> Connection:
        """A connection to read with; where the server is away, as soon as it is back."""
        began, pause_s = time.monotonic(), 0.05
        while True:
            try:
                return self.engine.connect()
            except Exception as error:
                if time.monotonic() - began + pause_s > self.repeatable_for_s(error):
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)

    @contextmanager
    def errors(self) -> Generator[None]:
        """Raise what SQLAlchemy, the DB-API, msgspec and readers raise inside as a StoreError with the name."""
        try:
            yield
        except StoreError as error:
            if self.name in str(error):
                raise
            raise type(error)(f"{self.name}: {error}") from error
        except (SQLAlchemyError, msgspec.MsgspecError, *self.exceptions) as error:
            raise self.store_error(error) from error
