"""Which runs a worker leaves to others, and what it says of it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from understudy import __version__
from understudy.run.worker import RunWorker
from understudy.store import Store
from understudy.store.runs import Lease
from understudy.tasks.records import dump

from fakes.loop_program import quick_task
from support import understudy
from support.store import make_task


def test_a_refused_run_is_looked_at_again_when_another_release_enqueues_it(tmp_path: Path) -> None:
    lines: list[str] = []

    async def work(store: Store) -> None:
        """What a worker does with the runs that are open now; twice, as it must not repeat itself."""
        worker = RunWorker(store, tmp_path, capacity=1, lease=Lease("w", 60.0), report=lines.append)
        for release in ("9.9", __version__):
            store.leases.open_to_workers("run", release).result()
            for _ in range(2):
                assert await worker._claim() == 0  # pyright: ignore[reportPrivateUsage]

    with Store.open(tmp_path / "store") as store:
        # No worker can execute it: its agent is none, and its name is hostile.
        store.runs.create("run", {"agent": "\x1b]0;pwned\x07\nsecond line"}).result()
        store.runs.add_tasks("run", [task := make_task()]).result()
        store.runs.create_rollouts("run", [("rollout", task.instance_id, 0)]).result()
        asyncio.run(work(store))
    first, second = lines
    assert "it was enqueued by Understudy 9.9" in first
    assert "run run is left to other workers" in second and "9.9" not in second
    assert not any(character in line for line in lines for character in "\x1b\x07\n")


def test_a_worker_of_a_training_loop_leaves_other_runs_to_others(tmp_path: Path) -> None:
    lines: list[str] = []
    runs = {"run": {}, "of-loop": {"wave": "loop-1/step-0001"}, "of-another": {"wave": "loop-12/step-0001"}}

    async def work(store: Store) -> None:
        lease = Lease("w", 60.0)
        worker = RunWorker(store, tmp_path, capacity=1, lease=lease, loop="loop-1", report=lines.append)
        assert await worker._claim() == 0  # pyright: ignore[reportPrivateUsage]

    with Store.open(tmp_path / "store") as store:
        for run_id, config in runs.items():
            # No worker can execute these: their agent is none. What is tried is reported.
            store.runs.create(run_id, {"agent": "none", **config}).result()
            store.runs.add_tasks(run_id, [task := make_task()]).result()
            store.runs.create_rollouts(run_id, [(f"{run_id}-0", task.instance_id, 0)]).result()
            store.leases.open_to_workers(run_id, __version__).result()
        asyncio.run(work(store))
    assert len(lines) == 1 and "run of-loop is left to other workers" in lines[0]


def test_a_free_slot_is_filled_though_nothing_in_the_store_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = 3
    change = threading.Event()

    def no_change(timeout_s: float) -> None:
        change.wait(60)

    async def work(store: Store) -> None:
        monkeypatch.setattr(store, "wait_for_change", no_change)
        (tmp_path / "w").mkdir()
        worker = RunWorker(store, tmp_path / "w", capacity=1, lease=Lease("w", 60.0), stop_when_idle=True)
        working = asyncio.create_task(worker.run())
        try:
            async with asyncio.timeout(50):
                while worker.executed < rollouts:
                    await asyncio.wait((working,), timeout=0.05)
        finally:
            change.set()
            await working

    options = ("--engine", "detached", "--agent", "shell", "--agent-command", "true", "--sandbox", "unsafe-local")
    dump([quick_task(0)], tmp_path / "tasks.jsonl")
    run = ("run", "embedded", "--policy", "idle", "-t", tmp_path / "tasks.jsonl", "-n", f"{rollouts}")
    queued = understudy(*run, "-o", tmp_path / "out", "--store", tmp_path / "store", *options)
    assert queued.returncode == 0, queued.stderr
    with Store.open(tmp_path / "store") as store:
        asyncio.run(work(store))
