"""What the repositories of a store share: connections to read with, and the queue of the one writer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine, Select

from understudy.store.blobs import read_blobs
from understudy.store.sqlite.errors import translate_errors
from understudy.store.writer import WriteContext, Writer

R = TypeVar("R", bound="Repository")
P = ParamSpec("P")
T = TypeVar("T")


class Database:
    """An open store: its file, its connections, and its writer."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self.engine = engine
        self.file = file
        self.writer = Writer(engine, file)

    @contextmanager
    def reading(self) -> Generator[Connection]:
        """A connection to read with; what goes wrong inside is raised as a StoreError that names the file."""
        with translate_errors(self.file), self.engine.connect() as connection:
            yield connection

    def read_content(self, query: Select[Any]) -> bytes | None:
        """The blob whose id a query returns; None when it returns no row, or NULL."""
        with self.reading() as connection:
            blob: int | None = connection.execute(query).scalar()
            return None if blob is None else read_blobs(connection, [blob])[blob]


class Repository:
    """The reads and writes on one kind of record.

    Reads run at once, in the caller's thread. Writes (methods with `@queued`) return a future, resolved once the
    write survives a power cut, else with a StoreError; arguments must not be changed before that.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._reading = database.reading

    @property
    def _file(self) -> Path:
        return self._database.file


def queued(write: Callable[Concatenate[R, WriteContext, P], T]) -> Callable[Concatenate[R, P], Future[T]]:
    """Make a repository's method a write: callers leave the context out, and get a future of the result.

    The method runs in the writer's thread, inside its transaction. It may run twice: when another write of the
    same group failed, each is repeated alone.
    """

    @functools.wraps(write)
    def submit(self: R, /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        writer = self._database.writer  # pyright: ignore[reportPrivateUsage]
        return writer.submit(lambda context: write(self, context, *args, **kwargs))

    return submit
