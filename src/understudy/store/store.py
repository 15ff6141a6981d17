"""The store as the rest of the house sees it: reads are direct, writes are queued and answered when durable."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
from sqlalchemy import Connection, Engine, RowMapping, Select, func, select

from understudy.errors import StoreError
from understudy.store import blobs, calls, figures, keys, lives, outcomes
from understudy.store.asks import Asks
from understudy.store.database import FILE, is_writable, open_engine
from understudy.store.figures import Counts, Spent
from understudy.store.keys import StoredKey
from understudy.store.outcomes import AttemptFault, Outcome, VersionUse
from understudy.store.schema import attempts, logs, rollouts, runs, tasks
from understudy.store.schema import calls as call_table
from understudy.store.sessions import Sessions
from understudy.store.sql import read_error, speaking_of
from understudy.store.writer import Writer
from understudy.types import (
    Attempt,
    AttemptStatus,
    Call,
    ErrorInfo,
    Finding,
    IntegrityStatus,
    Rollout,
    RolloutStatus,
    Run,
    Task,
    Verdict,
)

_NOTHING: Mapping[str, Any] = {}
_config = msgspec.json.Decoder(dict[str, Any]).decode
_task = msgspec.json.Decoder(Task).decode


class Store:
    """One directory with everything runs did. Safe to use from many threads, and from several processes.

    Every write returns a future, resolved once the write survives a power cut, else with a StoreError; what is
    passed must not be changed before. In asyncio, `await asyncio.wrap_future(...)`.
    """

    def __init__(self, directory: Path, engine: Engine) -> None:
        self.directory = directory
        self._file = directory / FILE
        self._engine = engine
        self._writer = Writer(engine, self._file)
        self._closed = False

    @classmethod
    def open(cls, directory: Path, *, create: bool = True) -> Self:
        """Open the store in a directory, made and migrated as needed; one that cannot be written can be read.

        Raises StoreError when there is none and `create` is false, when it is no store or a damaged one, and
        when a newer release wrote it.
        """
        return cls(directory, open_engine(directory, create=create))

    def close(self) -> None:
        """Finish every queued write, then leave one file that can be copied. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._writer.close()
        try:
            if is_writable(self._file):
                with self._reading() as connection:
                    connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- runs and tasks --------------------------------------------------------------------------------

    def put_run(self, run_id: str, config: Mapping[str, Any]) -> Future[None]:
        """Store a run; again is fine. StoreError when it is there with another configuration."""
        return self._writer.submit(lambda session: lives.put_run(session, run_id, config))

    def runs(self) -> list[Run]:
        """All runs, oldest first."""
        with self._reading() as connection:
            rows = connection.execute(select(runs).order_by(runs.c.created_at, runs.c.id)).all()
            return [Run(id=row.id, config=_config(row.config), created_at=row.created_at) for row in rows]

    def put_tasks(self, run_id: str, given: Sequence[Task]) -> Future[None]:
        """Store the tasks of a run; again is fine. StoreError when one is there with other content."""
        return self._writer.submit(lambda session: lives.put_tasks(session, run_id, given))

    def task(self, run_id: str, task_id: str) -> Task:
        """A task of a run. Raises StoreError when there is none."""
        query = select(tasks.c.blob_id).where(tasks.c.run_id == run_id, tasks.c.id == task_id)
        if (content := self._content(query)) is None:
            raise StoreError(f"{self._file}: run {run_id} has no task {task_id}")
        with speaking_of(self._file):
            return _task(content)

    # --- rollouts and attempts -------------------------------------------------------------------------

    def create_rollouts(self, run_id: str, given: Sequence[tuple[str, str, int]]) -> Future[None]:
        """Store rollouts (id, task id, sample index) as queuing; those that are there are left alone."""
        return self._writer.submit(lambda session: lives.create_rollouts(session, run_id, given))

    def rollouts(self, run_id: str | None = None) -> list[Rollout]:
        """The rollouts of a run, or all, oldest first, then by task and sample index."""
        query = select(rollouts).order_by(
            rollouts.c.created_at, rollouts.c.run_id, rollouts.c.task_id, rollouts.c.sample_index
        )
        if run_id is not None:
            query = query.where(rollouts.c.run_id == run_id)
        with self._reading() as connection:
            return [_rollout(row) for row in connection.execute(query).mappings()]

    def rollout(self, rollout_id: str) -> Rollout:
        """A rollout by its id. Raises StoreError when there is none."""
        with self._reading() as connection:
            row = connection.execute(select(rollouts).where(rollouts.c.id == rollout_id)).mappings().one_or_none()
        if row is None:
            raise StoreError(f"{self._file}: there is no rollout {rollout_id}")
        return _rollout(row)

    def find_rollout(self, prefix: str) -> Rollout:
        """The one rollout whose id is `prefix`, or starts with it. Raises StoreError when it is not one."""
        starts = func.substr(rollouts.c.id, 1, len(prefix)) == prefix
        with self._reading() as connection:
            found = [_rollout(row) for row in connection.execute(select(rollouts).where(starts)).mappings()]
        if exact := [rollout for rollout in found if rollout.id == prefix]:
            return exact[0]
        if not found:
            raise StoreError(f"{self._file}: no rollout's id begins with {prefix!r}; `understudy show` lists them")
        if len(found) > 1:
            some = ", ".join(rollout.id for rollout in found[:5])
            many = f"the ids of {len(found)} rollouts begin with {prefix!r}: {some}, …"
            raise StoreError(f"{self._file}: {many}; give more of the id")
        return found[0]

    def move_rollout(
        self, rollout_id: str, status: RolloutStatus, *, error: ErrorInfo | None = None
    ) -> Future[None]:
        """Change a rollout that no attempt is at work on: cancel it, queue it again. StoreError when illegal."""
        return self._writer.submit(lambda session: lives.move_rollout(session, rollout_id, status, error))

    def start_attempt(self, rollout_id: str) -> Future[Attempt]:
        """Begin the next attempt of a queuing or requeuing rollout; both are preparing then."""
        return self._writer.submit(lambda session: lives.start_attempt(session, rollout_id))

    def begin_running(self, attempt_id: str) -> Future[None]:
        """An attempt and its rollout turn from preparing to running."""
        return self._writer.submit(lambda session: lives.begin_running(session, attempt_id))

    def finish_attempt(
        self,
        attempt_id: str,
        status: AttemptStatus,
        rollout_status: RolloutStatus,
        *,
        patch: bytes | None = None,
        verdict: Verdict | None = None,
        logs: Mapping[str, bytes] = _NOTHING,
        error: ErrorInfo | None = None,
        timings: Mapping[str, float] = _NOTHING,
        findings: Sequence[Finding] = (),
    ) -> Future[None]:
        """End an attempt, with its rollout and all that came of it, in one transaction. Timings in seconds."""
        return self._writer.submit(
            lambda session: lives.finish_attempt(
                session,
                attempt_id,
                status,
                rollout_status,
                patch=patch,
                verdict=verdict,
                given_logs=logs,
                error=error,
                timings=timings,
                findings=findings,
            )
        )

    def heartbeat(self, attempt_ids: Iterable[str]) -> Future[None]:
        """Note that attempts are alive now; those that ended are left alone."""
        given = list(attempt_ids)
        return self._writer.submit(lambda session: lives.heartbeat(session, given))

    def recover(self, run_id: str) -> Future[int]:
        """After a kill: open attempts become unresponsive, their rollouts requeuing. Returns how many."""
        return self._writer.submit(lambda session: lives.recover(session, run_id))

    def requeue_failed(self, run_id: str) -> Future[int]:
        """Queue again the rollouts that failed or were called off. Returns how many."""
        return self._writer.submit(lambda session: lives.requeue_failed(session, run_id))

    def attempts(self, rollout_id: str) -> list[Attempt]:
        """The attempts of a rollout, first to last."""
        query = select(attempts).where(attempts.c.rollout_id == rollout_id).order_by(attempts.c.number)
        with self._reading() as connection:
            return [lives.attempt_of(row) for row in connection.execute(query).mappings()]

    def attempt(self, attempt_id: str) -> Attempt:
        """An attempt by its id. Raises StoreError when there is none."""
        with self._reading() as connection:
            row = connection.execute(select(attempts).where(attempts.c.id == attempt_id)).mappings().one_or_none()
            if row is None:
                raise StoreError(f"{self._file}: there is no attempt {attempt_id}")
            return lives.attempt_of(row)

    def patch(self, attempt_id: str) -> bytes | None:
        """The patch that an attempt made, if it came so far."""
        return self._content(select(attempts.c.patch_id).where(attempts.c.id == attempt_id))

    def verdict(self, attempt_id: str) -> Verdict | None:
        """What the grader said of an attempt, if it was graded; its integrity as it was last reviewed."""
        with self._reading() as connection:
            return lives.read_verdict(connection, attempt_id)

    def review(self, attempt_id: str, status: IntegrityStatus, note: str) -> Future[None]:
        """Say after review whether a patch is suspicious, and why. StoreError when it has no verdict."""
        return self._writer.submit(lambda session: lives.review(session, attempt_id, status, note))

    def logs(self, attempt_id: str) -> dict[str, bytes]:
        """The files that an attempt left, by name."""
        query = select(logs.c.name, logs.c.blob_id).where(logs.c.attempt_id == attempt_id).order_by(logs.c.name)
        with self._reading() as connection:
            found: dict[str, int] = {row.name: row.blob_id for row in connection.execute(query)}
            contents = blobs.read_blobs(connection, found.values())
        return {name: contents[blob] for name, blob in found.items()}

    # --- clients of a gateway that runs alone ----------------------------------------------------------

    def put_client(self, name: str) -> Future[Attempt]:
        """Name a client; again is fine. Returns its attempt, which has no rollout and does not end."""
        return self._writer.submit(lambda session: keys.put_client(session, name))

    def clients(self) -> list[Attempt]:
        """The attempts that have no rollout, oldest first."""
        alone = select(attempts).where(attempts.c.rollout_id.is_(None))
        query = alone.order_by(attempts.c.started_at, attempts.c.id)
        with self._reading() as connection:
            return [lives.attempt_of(row) for row in connection.execute(query).mappings()]

    def put_key(
        self,
        digest: bytes,
        attempt_id: str,
        *,
        sampling: Mapping[str, Any] = _NOTHING,
        budget: Mapping[str, Any] = _NOTHING,
        expires_at: float | None = None,
    ) -> Future[None]:
        """Keep the hash of an attempt's key, and what the key allows. StoreError while it has one that works."""
        return self._writer.submit(
            lambda session: keys.put_key(
                session, digest, attempt_id, sampling=sampling, budget=budget, expires_at=expires_at
            )
        )

    def revoke_key(self, attempt_id: str) -> Future[bool]:
        """Make an attempt's key worthless. False when there is none, or it was revoked before."""
        return self._writer.submit(lambda session: keys.revoke_key(session, attempt_id))

    def key(self, digest: bytes) -> StoredKey | None:
        """The key with this hash, also one that expired or was revoked; None when there is none."""
        with self._reading() as connection:
            return keys.read_key(connection, digest)

    def keys(self) -> list[StoredKey]:
        """All keys, oldest first, also those that expired or were revoked."""
        with self._reading() as connection:
            return keys.read_keys(connection)

    # --- calls -----------------------------------------------------------------------------------------

    def append_call(self, call: Call) -> Future[None]:
        """Store a call; the same id again is fine. StoreError when its attempt is unknown or its place taken."""
        return self._writer.submit(lambda session: calls.append(session, call))

    def calls(self, attempt_id: str) -> Iterator[Call]:
        """The calls of an attempt in the order of their sequence, exactly as they were appended."""
        with self._reading() as connection:
            return calls.read(connection, "attempt_id = :attempt_id", {"attempt_id": attempt_id})

    def call(self, call_id: str) -> Call:
        """A call by its id. Raises StoreError when there is none."""
        with self._reading() as connection:
            for call in calls.read(connection, "id = :call_id", {"call_id": call_id}):
                return call
        raise StoreError(f"{self._file}: there is no call {call_id}")

    def next_sequence(self, attempt_id: str) -> int:
        """The place after the last call of an attempt; 0 when it has none."""
        query = select(func.max(call_table.c.sequence)).where(call_table.c.attempt_id == attempt_id)
        with self._reading() as connection:
            last: int | None = connection.execute(query).scalar()
        return 0 if last is None else last + 1

    def spent(self, attempt_id: str) -> Spent:
        """What an attempt used so far; nothing when it is not known."""
        with self._reading() as connection:
            return figures.spent(connection, attempt_id)

    def counts(self, run_id: str) -> Counts:
        """A run in figures, as it stands now."""
        with self._reading() as connection:
            return figures.counts(connection, run_id)

    def outcomes(self, run_id: str) -> list[Outcome]:
        """What became of each rollout of a run, by task and sample index."""
        with self._reading() as connection:
            return outcomes.outcomes(connection, run_id)

    def faults(self, run_id: str) -> list[AttemptFault]:
        """The faults that attempts of a run met, whether they were tried again or not, in order of attempt."""
        with self._reading() as connection:
            return list(outcomes.faults(connection, run_id))

    def versions(self, run_id: str) -> list[VersionUse]:
        """The versions of the weights that a run's calls were answered by, in order of their first call."""
        with self._reading() as connection:
            return outcomes.versions(connection, run_id)

    # --- sessions that other programs logged -----------------------------------------------------------

    @property
    def sessions(self) -> Sessions:
        """Their sources, traces and turns."""
        return Sessions(self._writer, self._reading, self._file)

    @property
    def asks(self) -> Asks:
        """What teachers were asked of their states."""
        return Asks(self._writer, self._reading, self._file)

    # --- the ground ------------------------------------------------------------------------------------

    @contextmanager
    def _reading(self) -> Generator[Connection]:
        with speaking_of(self._file), self._engine.connect() as connection:
            yield connection

    def _content(self, query: Select[Any]) -> bytes | None:
        """The blob whose id a query gives, if it gives one."""
        with self._reading() as connection:
            blob: int | None = connection.execute(query).scalar()
            return None if blob is None else blobs.read_blobs(connection, [blob])[blob]


def _rollout(row: RowMapping) -> Rollout:
    fields: dict[str, Any] = {**row, "error": read_error(row["error"])}
    return Rollout(**fields)
