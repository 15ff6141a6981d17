"""The store: everything a run did, down to the token, in a directory or in PostgreSQL. `Store` is the way in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from understudy.errors import StoreError
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.asks import AskRepository
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
    """Everything runs did, in one place. Safe to use from many threads, and from several processes.

    Its repositories read at once. Their writes return futures, resolved once the write survives a power cut, else
    with a StoreError; what is passed must not be changed before. In asyncio, `await asyncio.wrap_future(...)`.
    """

    def __init__(self, location: StoreLocation, driver: DatabaseDriver) -> None:
        self.location = location
        self._database = database = Database(driver)
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

    @classmethod
    def open(
        cls,
        location: StoreLocation,
        *,
        create: bool = True,
        read_only: bool = False,
        exclusive: bool = False,
        waits: bool = False,
    ) -> Self:
        """Open the store in a directory or a database, created and migrated as needed.

        One in a directory that cannot be written can be read. With `read_only` nothing of it is created, migrated
        or written, not even its file's mode; writes fail. With `exclusive` nobody else has it open until it is
        closed: who opens it meanwhile waits, for 30 seconds at most. With `waits` a server that is away is waited
        for, as it is once the store is open. Raises StoreError when there is none and
        `create` is false, when it is no store or a damaged one, when a newer release wrote it, when its server
        cannot be used, with `read_only` when an older release wrote it whose stores have to be migrated, and with
        `exclusive` when another has it open.
        """
        if isinstance(location, StoreUrl):
            from understudy.store.postgresql import PostgresqlDriver

            return cls(
                location,
                PostgresqlDriver(location, create=create, read_only=read_only, exclusive=exclusive, waits=waits),
            )
        return cls(location, SqliteDriver(location, create=create, read_only=read_only, exclusive=exclusive))

    @property
    def directory(self) -> Path:
        """The directory that the store is in. Raises StoreError for one in a database."""
        if isinstance(self.location, StoreUrl):
            raise StoreError(
                f"{self.location} is a database, and this needs a directory; copy the store into one with: "
                f"understudy store copy '{self.location}' DIRECTORY"
            )
        return self.location

    def wait_for_change(self, timeout_s: float) -> None:
        """Wait until another process says that there is something to claim, or the time is over."""
        self._database.driver.wait_for_change(timeout_s)

    def hold(self, name: str, *, busy: str) -> AbstractContextManager[object]:
        """Hold a lock of this store by a name, which ends with this process at the latest.

        In a directory it is the file of that name. Raises ConfigError with `busy` where another process holds it.
        """
        return self._database.driver.hold(name, busy)

    def close(self) -> None:
        """Finish every queued write, then leave a directory's store as one file. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._database.writer.close()
        self._database.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
