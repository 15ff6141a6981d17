"""One store as the viewer reads it: a directory with a store or a loop, or a database."""

from __future__ import annotations

import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from understudy.errors import StoreError, UnderstudyError
from understudy.report.directories import store_id
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.postgresql import PostgresqlDriver
from understudy.store.sqlite import FILE, ChangeCounter
from understudy.view.faults import ViewRefused, not_found
from understudy.view.schema.stores import StoreState

TIMEOUT_S = 3.0
"""For how many seconds a request waits for another process that has locked a store, or for a database."""

Stamp = tuple[int, ...]
"""Changes with every write: for each file, or for the database, its identity, size and last write time."""


class ViewedStore(ABC):
    """A store or a loop, and its location. `name` is its name in lists."""

    def __init__(
        self, location: StoreLocation, name: str, kind: Literal["store", "loop"], parent_id: str | None
    ) -> None:
        self.id = store_id(location)
        self.location = location
        self.name = name
        self.kind = kind
        self.parent_id = parent_id
        self._lock = threading.Lock()

    @property
    def directory(self) -> Path:
        """The directory that contains it. Raises ViewRefused for a store in a database."""
        if isinstance(self.location, StoreUrl):
            raise ViewRefused(
                400,
                "database",
                f"{self.location} is a database; expected a store in a directory",
                "restart `understudy view` with the directory that has it",
            )
        return self.location

    @abstractmethod
    def stamp(self) -> Stamp:
        """Return a value that changes with every write; empty if the store is gone or cannot be reached."""

    @abstractmethod
    def state(self) -> tuple[StoreState, object]:
        """Return whether it can be read, and a value that changes with every write."""

    @abstractmethod
    def reading(self) -> Store:
        """Return the store, opened read-only, and reopened if another one took its place.

        Raises ViewRefused if it is gone, StoreError if it cannot be read.
        """

    @contextmanager
    def short_read(self) -> Generator[Store]:
        """Yield the store for one short read, as `reading`, after which it need not remain open."""
        yield self.reading()

    @abstractmethod
    def close(self) -> None:
        """Close it."""


class ViewedDirectory(ViewedStore):
    """A directory with a store or a loop. Its name is its path relative to the given directory."""

    def __init__(self, directory: Path, name: str, kind: Literal["store", "loop"], parent_id: str | None) -> None:
        super().__init__(directory, name, kind, parent_id)
        self._store: Store | None = None
        self._counter: ChangeCounter | None = None
        self._file: tuple[int, int] | None = None

    def stamp(self) -> Stamp:
        """Return sizes and times of the files."""
        names = ("state.json", "loop.json", "metrics.jsonl") if self.kind == "loop" else (FILE, f"{FILE}-wal")
        stamp: list[int] = []
        for name in names:
            try:
                status = (self.directory / name).stat()
            except OSError:
                continue
            stamp += (status.st_ino, status.st_size, status.st_mtime_ns)
        return tuple(stamp)

    def reading(self) -> Store:
        """Return the store.

        It is reopened if its file was replaced, because SQLite would continue to read the old one.
        """
        with self._lock:
            self._check_file()
            if self._store is None:
                self._store = Store.open(self.directory, create=False, read_only=True, wait_s=TIMEOUT_S)
            return self._store

    @contextmanager
    def short_read(self) -> Generator[Store]:
        """Yield the store, and close it again unless it was open: there may be thousands, each with open files."""
        with self._lock:
            self._check_file()
            store = self._store
        if store is not None:
            yield store
            return
        with Store.open(self.directory, create=False, read_only=True, wait_s=TIMEOUT_S) as store:
            yield store

    def state(self) -> tuple[StoreState, object]:
        """Return the state, and a number that changes with every write of another process."""
        stamp = self.stamp()
        if not stamp:
            return "missing", None
        if self.kind == "loop":
            return "ok", stamp
        try:
            return "ok", (stamp[0], self._changes())
        except ViewRefused:
            return "missing", None
        except UnderstudyError:
            return "unreadable", stamp

    def _changes(self) -> int:
        with self._lock:
            self._check_file()
            if self._counter is None:
                self._counter = ChangeCounter(self.directory / FILE, TIMEOUT_S)
            return self._counter.read()

    def _check_file(self) -> None:
        """Close a file that was deleted or replaced, because SQLite would continue to read it."""
        try:
            status = (self.directory / FILE).stat()
        except OSError as error:
            self._release()
            raise not_found(
                f"{self.directory} holds no store any more ({FILE}: {error.strerror})",
                "it was deleted or moved; reload the list of stores",
            ) from error
        if not stat.S_ISREG(status.st_mode):
            self._release()
            raise not_found(
                f"{self.directory} holds no store any more ({FILE} is not a regular file)",
                "put the store back; reload the list of stores",
            )
        if self._file != (status.st_dev, status.st_ino):
            self._release()
            self._file = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        store, self._store = self._store, None
        counter, self._counter = self._counter, None
        self._file = None
        if store is not None:
            store.close()
        if counter is not None:
            counter.close()


class ViewedDatabase(ViewedStore):
    """A store in PostgreSQL, named after its database. The server itself rejects writes on these connections."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url, url.database, "store", None)
        self.url = url
        self._driver: PostgresqlDriver | None = None
        self._store: Store | None = None
        self._identity: int | None = None
        # One thread asks for changes, because a server that does not respond may block it without limit.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="view-database")
        self._pending_query: tuple[Future[Stamp], float] | None = None

    def stamp(self) -> Stamp:
        """Return the counter of its writers' transactions, and the time of the last commit."""
        try:
            return self._changes()
        except UnderstudyError:
            return ()

    def state(self) -> tuple[StoreState, object]:
        """Return the state and the stamp; for a database that cannot be reached, the reason."""
        try:
            return "ok", self._changes()
        except UnderstudyError as error:
            return "unreadable", str(error)

    def reading(self) -> Store:
        """Return the store. It is reopened if the database was recreated."""
        self._changes()
        if (store := self._store) is None:
            raise StoreError(
                f"{self.name}: the database was closed, because the viewer is ending; restart `understudy view`"
            )
        return store

    def _changes(self) -> Stamp:
        """Return the stamp. Raises StoreError at once while the server has not responded for TIMEOUT_S."""
        now = time.monotonic()
        with self._lock:
            if self._pending_query is None:
                self._pending_query = self._thread.submit(self._query_stamp), now
            pending = self._pending_query
        future, since = pending
        # The first request, when the viewer starts, waits as long as connecting takes.
        timeout_s = None if self._identity is None else max(0.0, since + TIMEOUT_S - now)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            raise StoreError(
                f"{self.name}: the database server has not responded for {TIMEOUT_S:g} s; it is read again once "
                "it responds; check that it runs"
            ) from error
        finally:
            with self._lock:
                if future.done() and self._pending_query is pending:
                    self._pending_query = None

    def _query_stamp(self) -> Stamp:
        """Connect if necessary, and return the stamp. Only called in the one thread."""
        stamp = self._connect().changes()
        if self._identity not in (None, stamp[0]):
            self._release()
            stamp = self._connect().changes()
        self._identity = stamp[0]
        return stamp

    def _connect(self) -> PostgresqlDriver:
        if self._driver is None or self._store is None:
            # An unavailable server is shown as an error at once, and tried again with the next request.
            self._driver = PostgresqlDriver(self.url, create=False, read_only=True, outage_s=0.0, wait_s=TIMEOUT_S)
            self._store = Store(self.url, self._driver)
        return self._driver

    def close(self) -> None:
        """Close the connections."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._release()

    def _release(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
