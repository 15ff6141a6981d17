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
from understudy.store.session_lists import SessionListRepository
from understudy.store.sessions import SessionRepository
from understudy.store.sqlite import FILE, is_writable, open_engine
from understudy.store.training import TrainingRepository
from understudy.store.votes import VoteRepository


class Store:
    """One directory with everything runs did. Safe to use from many threads, and from several processes.

    Its repositories read at once. Their writes return futures, resolved once the write survives a power cut, else
    with a StoreError; what is passed must not be changed before. In asyncio, `await asyncio.wrap_future(...)`.
    """

    def __init__(self, directory: Path, engine: Engine, *, read_only: bool = False) -> None:
        self.directory = directory
        self._read_only = read_only
        self._database = database = Database(engine, directory / FILE)
        self._closed = False
        self.runs = RunRepository(database)
        self.calls = CallRepository(database)
        self.outcomes = OutcomeRepository(database)
        self.keys = KeyRepository(database)
        self.sessions = SessionRepository(database)
        self.session_lists = SessionListRepository(database)
        self.asks = AskRepository(database)
        self.training = TrainingRepository(database)
        self.votes = VoteRepository(database)

    @classmethod
    def open(cls, directory: Path, *, create: bool = True, read_only: bool = False) -> Self:
        """Open the store in a directory, created and migrated as needed; one that cannot be written can be read.

        With `read_only` nothing of it is created, migrated or written, not even its file's mode; writes fail.
        Raises StoreError when there is none and `create` is false, when it is no store or a damaged one, when a
        newer release wrote it, and with `read_only` when an older one did whose stores have to be migrated.
        """
        return cls(directory, open_engine(directory, create=create, read_only=read_only), read_only=read_only)

    def close(self) -> None:
        """Finish every queued write, then leave one file that can be copied. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._database.writer.close()
        try:
            if is_writable(self._database.file) and not self._read_only:
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
