"""The store: one directory with everything a run did, down to the token. `Store` is the way in."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from sqlalchemy import Engine

from understudy.store.asks import AskRepository
from understudy.store.calls import CallRepository
from understudy.store.database import Database
from understudy.store.keys import KeyRepository
from understudy.store.outcomes import OutcomeRepository
from understudy.store.runs import RunRepository
from understudy.store.sessions import SessionRepository
from understudy.store.sqlite import FILE, is_writable, open_engine
from understudy.store.training import TrainingRepository


class Store:
    """One directory with everything runs did. Safe to use from many threads, and from several processes.

    Its repositories read at once. Their writes return futures, resolved once the write survives a power cut, else
    with a StoreError; what is passed must not be changed before. In asyncio, `await asyncio.wrap_future(...)`.
    """

    def __init__(self, directory: Path, engine: Engine) -> None:
        self.directory = directory
        self._database = database = Database(engine, directory / FILE)
        self._closed = False
        self.runs = RunRepository(database)
        self.calls = CallRepository(database)
        self.outcomes = OutcomeRepository(database)
        self.keys = KeyRepository(database)
        self.sessions = SessionRepository(database)
        self.asks = AskRepository(database)
        self.training = TrainingRepository(database)

    @classmethod
    def open(cls, directory: Path, *, create: bool = True) -> Self:
        """Open the store in a directory, created and migrated as needed; one that cannot be written can be read.

        Raises StoreError when there is none and `create` is false, when it is no store or a damaged one, and
        when a newer release wrote it.
        """
        return cls(directory, open_engine(directory, create=create))

    def close(self) -> None:
        """Finish every queued write, then leave one file that can be copied. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._database.writer.close()
        try:
            if is_writable(self._database.file):
                with self._database.reading() as connection:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._database.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
