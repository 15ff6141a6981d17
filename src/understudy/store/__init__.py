"""The store: everything that runs did, down to each token, in a directory or in PostgreSQL. Start with `Store`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from understudy.errors import StoreError
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.asks import AskRepository
from understudy.store.bucket_contents import BucketRepository
from understudy.store.calls import CallRepository
from understudy.store.database import Database
from understudy.store.driver import DatabaseDriver
from understudy.store.keys import KeyRepository
from understudy.store.leases import LeaseRepository
from understudy.store.outcomes import OutcomeRepository
from understudy.store.runs import RunRepository
from understudy.store.session_lists import SessionListRepository
from understudy.store.sessions import SessionRepository
from understudy.store.space import SpaceRepository
from understudy.store.sqlite import SqliteDriver
from understudy.store.training import TrainingRepository
from understudy.store.votes import VoteRepository


class Store:
    """Everything that runs did. Safe to use from many threads and from several processes.

    Its repositories read synchronously. Their writes return futures, which resolve once the write is durable (it
    survives a power cut) or fail with a StoreError; do not change arguments before that. In asyncio, use `await
    asyncio.wrap_future(...)`.
    """

    def __init__(self, location: StoreLocation, driver: DatabaseDriver) -> None:
        self.location = location
        try:
            self._database = database = Database(driver)
        except BaseException:
            driver.close()
            raise
        self._closed = False
        self.runs = RunRepository(database)
        self.leases = LeaseRepository(database)
        self.calls = CallRepository(database)
        self.outcomes = OutcomeRepository(database)
        self.keys = KeyRepository(database)
        self.sessions = SessionRepository(database)
        self.session_lists = SessionListRepository(database)
        self.asks = AskRepository(database)
        self.training = TrainingRepository(database)
        self.votes = VoteRepository(database)
        self.space = SpaceRepository(database)
        self.bucket = BucketRepository(database)

    @classmethod
    def open(
        cls,
        location: StoreLocation,
        *,
        create: bool = True,
        read_only: bool = False,
        exclusive: bool = False,
        waits: bool = False,
        wait_s: float | None = None,
    ) -> Self:
        """Open the store in a directory or a database, creating and migrating it as needed.

        A store in a directory that is not writable is opened for reading. `read_only`: nothing is created,
        migrated or written, not even the file's mode, and writes fail. `exclusive`: nobody else may have the store
        open until it is closed; processes that open it meanwhile wait for up to 30 seconds. `waits`: wait for a
        database's server that is unavailable now; an open store always waits for it. `wait_s`: wait at most so
        many seconds for locks of other processes and for the server [default: 30 and 120].

        Raises StoreError if there is no usable store: it is missing and `create` is false, it is damaged or not a
        store, a newer release wrote it, or its server cannot be used; with `read_only` also if it needs a
        migration, with `exclusive` also if another process has it open. Raises StoreLocked, also later, if
        another process holds a lock for longer than `wait_s`.
        """
        if isinstance(location, StoreUrl):
            from understudy.store.postgresql import PostgresqlDriver

            return cls(
                location,
                PostgresqlDriver(
                    location, create=create, read_only=read_only, exclusive=exclusive, waits=waits, wait_s=wait_s
                ),
            )
        driver = SqliteDriver(location, create=create, read_only=read_only, exclusive=exclusive, wait_s=wait_s)
        return cls(location, driver)

    @property
    def directory(self) -> Path:
        """The directory that holds the store. Raises StoreError if the store is in a database."""
        if isinstance(self.location, StoreUrl):
            raise StoreError(
                f"{self.location} is a database, but this needs a store in a directory; copy it into one with: "
                f"understudy store copy '{self.location}' DIRECTORY"
            )
        return self.location

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another process announces that there is something to claim, or until the timeout."""
        self._database.driver.wait_for_change(timeout_s)

    def hold(self, name: str, *, busy: str) -> AbstractContextManager[object]:
        """Return a context manager that holds a named lock of this store.

        The lock ends with this process at the latest.

        For a store in a directory, the lock is a file of that name. Raises ConfigError with the message `busy` if
        another process holds the lock.
        """
        return self._database.driver.hold(name, busy)

    def close(self) -> None:
        """Finish all queued writes and close the store; a directory's store is left as a single file.

        May be called twice.
        """
        if self._closed:
            return
        self._closed = True
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
