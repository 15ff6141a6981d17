"""One store as the viewer reads it: a directory with a store or with a loop, or a database."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Literal

from understudy.errors import StoreError, UnderstudyError
from understudy.report.directories import store_id
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.postgresql import PostgresqlDriver
from understudy.store.sqlite import FILE, ChangeCounter
from understudy.view.faults import ViewRefused, missing
from understudy.view.schema.stores import StoreState

Stamp = tuple[int, ...]
"""Changes with every write. Of each file, or of the database: its identity, its size, and when it was written."""


class ViewedStore(ABC):
    """A store, or a loop, and where it is. `name` is what lists call it."""

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
        """The directory that it is in. Raises ViewRefused for one in a database."""
        if isinstance(self.location, StoreUrl):
            raise ViewRefused(
                400,
                "database",
                f"{self.location} is a database, and this needs a directory",
                "start the viewer with the directory that has it",
            )
        return self.location

    @abstractmethod
    def stamp(self) -> Stamp:
        """What changes with every write; empty when the store is gone or cannot be reached."""

    @abstractmethod
    def state(self) -> tuple[StoreState, object]:
        """Whether it can be read, and what differs after every change of it."""

    @abstractmethod
    def reading(self) -> Store:
        """The store, open for reading alone; opened again where another one is in its place.

        Raises ViewRefused where it is gone, StoreError where it cannot be read.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


class ViewedDirectory(ViewedStore):
    """A directory with a store, or with a loop; it is named by its path below the directory that was given."""

    def __init__(self, directory: Path, name: str, kind: Literal["store", "loop"], parent_id: str | None) -> None:
        super().__init__(directory, name, kind, parent_id)
        self._store: Store | None = None
        self._counter: ChangeCounter | None = None
        self._file: tuple[int, int] | None = None

    def stamp(self) -> Stamp:
        """Sizes and times of the files."""
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
        """The store; opened again where another file is in its place: SQLite would go on reading the former."""
        with self._lock:
            self._check_file()
            if self._store is None:
                self._store = Store.open(self.directory, create=False, read_only=True)
            return self._store

    def state(self) -> tuple[StoreState, object]:
        """The state, and a number that differs after every change by another process."""
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
                self._counter = ChangeCounter(self.directory / FILE)
            return self._counter.read()

    def _check_file(self) -> None:
        """Let go of a file that was deleted or replaced: SQLite would go on reading it."""
        try:
            status = (self.directory / FILE).stat()
        except OSError as error:
            self._release()
            raise missing(
                f"{self.directory} holds no store any more ({FILE}: {error.strerror})",
                "it was deleted or moved; reload the list of stores",
            ) from error
        if self._file != (status.st_dev, status.st_ino):
            self._release()
            self._file = (status.st_dev, status.st_ino)

    def close(self) -> None:
        """Let go of the file."""
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
    """A store in PostgreSQL, named as its database. The server itself refuses writes of these connections."""

    def __init__(self, url: StoreUrl) -> None:
        super().__init__(url, url.database, "store", None)
        self.url = url
        self._driver: PostgresqlDriver | None = None
        self._store: Store | None = None
        self._identity: int | None = None
        self._away: tuple[float, str] | None = None

    def stamp(self) -> Stamp:
        """The counter of its writers' transactions, and when the last one was committed."""
        try:
            return self._changes()
        except UnderstudyError:
            return ()

    def state(self) -> tuple[StoreState, object]:
        """The state, and the stamp; of a database that cannot be reached, what is the matter."""
        try:
            return "ok", self._changes()
        except UnderstudyError as error:
            return "unreadable", str(error)

    def reading(self) -> Store:
        """The store; opened again where the database was made anew."""
        self._changes()
        return self._opened()[1]

    def _changes(self) -> Stamp:
        began, away = time.monotonic(), self._away
        if away is not None and began < away[0]:
            raise StoreError(away[1])
        try:
            stamp = self._opened()[0].changes()
        except StoreError as error:
            # A host that does not even refuse is waited for long, and other stores with it: it is asked seldom.
            if (took := time.monotonic() - began) > 1:
                self._away = time.monotonic() + 3 * took, str(error)
            raise
        with self._lock:
            if self._identity not in (None, stamp[0]):
                self._release()
            self._identity = stamp[0]
        return stamp

    def _opened(self) -> tuple[PostgresqlDriver, Store]:
        with self._lock:
            if self._driver is None or self._store is None:
                # A server that is away is an error on the page at once, and asked again with the next request.
                self._driver = PostgresqlDriver(self.url, create=False, read_only=True, outage_s=0.0)
                self._store = Store(self.url, self._driver)
            return self._driver, self._store

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
