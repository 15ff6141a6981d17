"""A worker's event loop goes on while PostgreSQL does not answer: what it reads waits in a thread, or is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest

from understudy.run.config import RunConfig
from understudy.run.rollout_files import RolloutFiles
from understudy.run.worker import RunWorker
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.runs import Lease

from support.workers import enqueue

pytestmark = pytest.mark.services

WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = %s::regclass"


@asynccontextmanager
async def locked(url: StoreUrl, table: str) -> AsyncGenerator[psycopg.AsyncConnection]:
    """Nobody can read a table meanwhile, as if the server could not be reached. The event loop itself mends it."""
    async with await psycopg.AsyncConnection.connect(url.secret_url) as connection:
        await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE".encode())
        yield connection
        await connection.rollback()


async def until(holds: Callable[[], Awaitable[bool]], lines: list[str]) -> None:
    """Wait until something holds; the worker must not have given up before, which it reports."""
    while True:
        assert lines == []
        if await holds():
            return
        await asyncio.sleep(0.02)


async def until_read(url: StoreUrl, table: str, lines: list[str]) -> None:
    """Wait until somebody waits for a table."""
    async with await psycopg.AsyncConnection.connect(url.secret_url, autocommit=True) as connection:

        async def is_waiting() -> bool:
            return await (await connection.execute(WAITING, (table,))).fetchone() != (0,)

        await until(is_waiting, lines)


def holds_attempt(store: Store) -> bool:
    return any(worker.held for worker in store.leases.workers())


def test_tasks_are_waited_for_in_a_thread_and_read_once(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    lines: list[str] = []

    async def work(store: Store) -> int:
        (tmp_path / "w").mkdir()
        lease = Lease("w", 60.0)
        worker = RunWorker(
            store, tmp_path / "w", capacity=1, lease=lease, stop_when_idle=True, report=lines.append
        )
        async with locked(postgresql_store, "tasks"):
            working = asyncio.create_task(worker.run())
            await until_read(postgresql_store, "tasks", lines)
        await until(lambda: asyncio.to_thread(holds_attempt, store), lines)
        async with locked(postgresql_store, "tasks"):  # what was opened is enough to validate and to execute
            return await working

    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=1).returncode == 0
    with Store.open(postgresql_store) as store:
        assert asyncio.run(work(store)) == 4
        assert {rollout.status for rollout in store.runs.rollouts()} == {"succeeded"}
    assert lines == []


@pytest.mark.parametrize("table", ["runs", "rollouts"])
def test_runs_and_rollouts_are_waited_for_in_a_thread(
    tmp_path: Path, postgresql_store: StoreUrl, table: str
) -> None:
    lines: list[str] = []

    async def work(store: Store) -> None:
        (tmp_path / "w").mkdir()
        worker = RunWorker(store, tmp_path / "w", capacity=1, lease=Lease("w", 60.0), report=lines.append)
        (run,) = store.leases.open_runs()
        async with locked(postgresql_store, table):
            opening = asyncio.create_task(worker._open(run))  # pyright: ignore[reportPrivateUsage]
            await until_read(postgresql_store, table, lines)
        await opening
        opened = worker._opened[run.id]  # pyright: ignore[reportPrivateUsage]
        assert len(opened.context.tasks) == 4
        await opened.close()

    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=1).returncode == 0
    with Store.open(postgresql_store) as store:
        asyncio.run(work(store))
    assert lines == []


def test_the_files_of_a_rollout_are_written_beside_the_event_loop(
    tmp_path: Path, postgresql_store: StoreUrl
) -> None:
    async def write(store: Store) -> None:
        (run,) = store.runs.all()
        (rollout, *_) = store.runs.rollouts()
        files = RolloutFiles(store, msgspec.convert(run.config, RunConfig), tmp_path / "files")
        async with locked(postgresql_store, "rollouts"):
            writing = asyncio.create_task(files.write(rollout.id))
            await until_read(postgresql_store, "rollouts", [])
        await writing

    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=1).returncode == 0
    with Store.open(postgresql_store) as store:
        asyncio.run(write(store))
