"""Which runs a worker leaves to others, and what it says of it."""

from __future__ import annotations

import asyncio
import socket
import sqlite3
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from understudy import __version__
from understudy.errors import BackendError, SandboxError
from understudy.run import worker as worker_module
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


class _Models(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"object": "list", "data": [{"id": "m", "object": "model"}]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_host_whose_name_does_not_resolve_is_given_up_by_a_worker_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address, wrong = f"127.0.0.1:{server.server_port}", "no-such-host.invalid:8000"
    dump([quick_task(0)], tmp_path / "tasks.jsonl")
    options = ("--engine", "detached", "--agent", "shell", "--agent-command", "true", "--sandbox", "unsafe-local")
    run = ("run", "vllm", "--base-url", f"http://{address}/v1", "--backend-model-high", "m", "-n", "1")
    places = ("-t", tmp_path / "tasks.jsonl", "-o", tmp_path / "out", "--store", tmp_path / "store")
    queued = understudy(*run, *places, *options)
    server.shutdown()
    server.server_close()
    assert queued.returncode == 0, queued.stderr
    with sqlite3.connect(tmp_path / "store" / "store.db") as raw:
        raw.execute("UPDATE runs SET config = CAST(replace(CAST(config AS TEXT), ?, ?) AS BLOB)", (address, wrong))
    raw.close()
    lines: list[str] = []
    monkeypatch.setattr(worker_module, "_REOPEN_PAUSE_S", 0.1)
    monkeypatch.setattr(worker_module, "_RESOLVE_TIMEOUT_S", 1.0)

    async def work(store: Store) -> RunWorker:
        (tmp_path / "w").mkdir()
        lease = Lease("w", 60.0)
        worker = RunWorker(
            store, tmp_path / "w", capacity=1, lease=lease, stop_when_idle=True, report=lines.append
        )
        async with asyncio.timeout(50):
            await worker.run()
        return worker

    with Store.open(tmp_path / "store") as store:
        worker = asyncio.run(work(store))
    (reason,) = worker.unresolved.values()
    assert "cannot resolve no-such-host.invalid" in reason and "check the host name" in reason
    assert "cannot be begun yet" in lines[0], "it was tried again for a while"
    assert "is left to other workers" in lines[-1]


def test_a_server_that_is_away_is_not_given_up() -> None:
    away, unknown = BackendError("no response"), BackendError("no response")
    away.__cause__ = ConnectionRefusedError("refused")
    unknown.__cause__ = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    is_unresolved = worker_module._is_unresolved  # pyright: ignore[reportPrivateUsage]
    assert not is_unresolved(away) and is_unresolved(unknown)
    assert is_unresolved(SandboxError("ssh: Could not resolve hostname nowhere: Name or service not known"))
