"""The connections of a store and its one writer, which all repositories share; columns that hold JSON."""

from __future__ import annotations

import functools
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast

import msgspec
from sqlalchemy import Connection, Engine, RowMapping, Select

from understudy.errors import StoreError
from understudy.store.contents import ContentWriter, read_blobs
from understudy.store.sqlite import to_store_error, translate_errors
from understudy.store.tokens import RecentTokens
from understudy.types import ErrorInfo, Finding

R = TypeVar("R", bound="Repository")
P = ParamSpec("P")
T = TypeVar("T")
Row = RowMapping | Mapping[str, Any]

encode = msgspec.json.Encoder().encode
canonical = msgspec.json.Encoder(order="sorted").encode
decode_object = msgspec.json.Decoder(dict[str, Any]).decode
_error = msgspec.json.Decoder(ErrorInfo).decode
_findings = msgspec.json.Decoder(tuple[Finding, ...]).decode


def error_column(error: ErrorInfo | None) -> bytes | None:
    """The column of an error. What is not valid Unicode in its message (a file name, say) is replaced."""
    if error is None:
        return None
    return encode(msgspec.structs.replace(error, message=_unicode(error.message)))


def read_error(column: bytes | None) -> ErrorInfo | None:
    """The error in a column."""
    return None if column is None else _error(column)


def findings_column(findings: Sequence[Finding]) -> bytes:
    """The column of findings; what is not valid Unicode in their messages is replaced."""
    return encode([msgspec.structs.replace(finding, message=_unicode(finding.message)) for finding in findings])


def read_findings(column: bytes | None) -> tuple[Finding, ...]:
    """The findings in a column."""
    return () if column is None else _findings(column)


def json_column(encoder: Callable[[object], bytes], value: object, what: str) -> bytes:
    """The column of a value. Raises StoreError with `what` in its message when the value is not JSON."""
    try:
        return encoder(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from error


def row_reader(kind: type[T], **decoders: Callable[[Any], Any]) -> Callable[[Row], T]:
    """What reads a row into a struct with fields of the same names; `decoders` read the columns that they name."""

    def read(row: Row) -> T:
        fields: dict[str, Any] = {**row, **{name: decode(row[name]) for name, decode in decoders.items()}}
        return kind(**fields)

    return read


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()


GROUP = 256
"""The most writes of one transaction: bounds how long the first of them waits."""

GATHER_S = 0.0002
"""How long a group is waited for after one of several: who was answered together comes back together."""


class WriteContext:
    """What a write works with: SQLAlchemy's connection, the DB-API's below it, and the contents."""

    def __init__(self, engine: Engine) -> None:
        self.connection = engine.connect()
        self.raw = cast(sqlite3.Connection, self.connection.connection.dbapi_connection)
        self.contents = ContentWriter(self.raw)
        self.recent = RecentTokens()

    def forget(self) -> None:
        """Drop every cache, after a rollback."""
        self.contents.forget()
        self.recent.clear()

    def close(self) -> None:
        """Give the connection back."""
        self.connection.close()


class _QueuedWrite(Generic[T]):
    def __init__(self, work: Callable[[WriteContext], T]) -> None:
        self.work = work
        self.future: Future[T] = Future()
        self.result: T | None = None


class Writer:
    """Runs writes in the order they come. The thread starts with the first."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._queue: queue.SimpleQueue[_QueuedWrite[Any] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, work: Callable[[WriteContext], T]) -> Future[T]:
        """Queue a write. The future has its result once that is durable, else a StoreError.

        Cancelling the future before its turn drops the write. Raises StoreError after `close`.
        """
        write = _QueuedWrite(work)
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._file} is closed; nothing more can be written")
            if self._thread is None:
                # A daemon: a program that forgot to close the store still ends, with all that was answered.
                self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
                self._thread.start()
            self._queue.put(write)
        return write.future

    def close(self) -> None:
        """Finish what is queued and end the thread."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
            if thread is not None:
                self._queue.put(None)
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        session: WriteContext | None = None
        group: list[_QueuedWrite[Any]] = []
        open_ = True
        while open_:
            item = self._queue.get()
            if len(group) > 1:
                time.sleep(GATHER_S)
            group = []
            while item is not None:
                if item.future.set_running_or_notify_cancel():
                    group.append(item)
                if len(group) >= GROUP:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            open_ = item is not None
            try:
                session = session or WriteContext(self._engine)
                self._commit(session, group)
            except Exception as error:  # noqa: BLE001 - the writer outlives it; who waits is told
                self._fail(group, error)
        if session is not None:
            session.close()

    def _commit(self, session: WriteContext, group: list[_QueuedWrite[Any]]) -> None:
        """One transaction for the group. When one of it fails, which is rare, each is tried alone."""
        if not group:
            return
        raw, in_transaction = session.raw, False
        try:
            raw.execute("BEGIN IMMEDIATE")
            in_transaction = True
            for write in group:
                write.result = write.work(session)
            raw.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - told to the one whose write it is
            if raw.in_transaction:  # SQLite ends it itself on a full disk
                raw.execute("ROLLBACK")
            session.forget()
            if len(group) == 1 or not in_transaction:
                self._fail(group, error)
            else:
                for write in group:
                    self._commit(session, [write])
            return
        for write in group:
            write.future.set_result(write.result)

    def _fail(self, group: list[_QueuedWrite[Any]], error: Exception) -> None:
        store_error = to_store_error(error, self._file)
        for write in group:
            if not write.future.done():
                write.future.set_exception(store_error)


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

    def _read_all(self, query: Select[*tuple[Any, ...]], read: Callable[[RowMapping], T]) -> list[T]:
        """What `read` makes of each row of a query."""
        with self._reading() as connection:
            return [read(row) for row in connection.execute(query).mappings()]

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
