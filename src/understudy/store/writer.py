"""The one writer: a thread that commits queued writes in groups, each write whole or not at all."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from sqlalchemy import Engine

from understudy.errors import StoreError
from understudy.store.blobs import ContentWriter
from understudy.store.sqlite.errors import to_store_error
from understudy.store.tokens import RecentTokens

T = TypeVar("T")

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
