"""Workers of the tests on one store, and what has to hold of a run whatever happened to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.tasks.records import dump

from support import CLIENT, UNDERSTUDY, calc_task, understudy
from support.hosts import Host

LEASE_S = 3.0


def text_of(location: StoreLocation) -> str:
    return location.secret_url if isinstance(location, StoreUrl) else str(location)


@contextmanager
def worker(location: StoreLocation, *arguments: str, host: Host | None = None) -> Iterator[subprocess.Popen[str]]:
    """A worker in a process of its own, which is killed afterwards with all below it."""
    arguments = ("worker", "--store", text_of(location), "-j", "2", "--lease", f"{LEASE_S}", *arguments)
    with started(*([] if host is None else host.enter), UNDERSTUDY, *arguments) as process:
        yield process


@contextmanager
def started(*command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A process of its own, which is killed afterwards with all below it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def options(
    tmp_path: Path,
    location: StoreLocation,
    *arguments: str,
    samples: int = 3,
    command: str = "",
    model: tuple[str, ...] = ("embedded", "--policy", "idle"),
) -> list[str]:
    """The arguments of a run that a small program of ours executes, or another command."""
    tasks, client = tmp_path / "tasks.jsonl", tmp_path / "client.py"
    if not tasks.exists():
        dump([calc_task(number) for number in range(4)], tasks)
    client.write_text(CLIENT + "\nimport time; time.sleep(0.4)\n")
    command = command or f"python3 {client} 3 {tmp_path / 'seen'}"
    return [
        *("run", *model, "--tasks", f"{tasks}", "-n", f"{samples}"),
        *("-o", f"{tmp_path / 'out'}", "--agent", "shell", "--agent-command", command),
        *("--sandbox", "unsafe-local", "--store", text_of(location), "--json", *arguments),
    ]


def enqueue(
    tmp_path: Path, location: StoreLocation, *arguments: str, samples: int = 3, command: str = ""
) -> subprocess.CompletedProcess[str]:
    return understudy(*options(tmp_path, location, *arguments, samples=samples, command=command))


def check(tmp_path: Path, location: StoreLocation, rollouts: int) -> Counter[str]:
    """Every rollout ended once, and every answer that an agent received is stored once. Attempts by status."""
    received = Counter((tmp_path / "seen").read_text().split())
    ends: Counter[str] = Counter()
    stored: Counter[str] = Counter()
    with Store.open(location, create=False) as store:
        assert [rollout.status for rollout in store.runs.rollouts()] == ["succeeded"] * rollouts
        for rollout in store.runs.rollouts():
            attempts = store.runs.attempts(rollout.id)
            assert [attempt.status for attempt in attempts].count("succeeded") == 1
            ends.update(attempt.status for attempt in attempts)
            for attempt in attempts:
                answered = [call for call in store.calls.of_attempt(attempt.id) if call.status == "ok"]
                stored.update(json.loads(call.response)["id"] for call in answered)
    assert set(received.values()) == set(stored.values()) == {1}
    assert set(received) <= set(stored)
    return ends


def running(location: StoreLocation) -> int:
    with Store.open(location, create=False) as store:
        return sum(rollout.status == "running" for rollout in store.runs.rollouts())


def assert_no_late_writes(location: StoreLocation) -> None:
    """What was taken from a worker has no verdict and no patch, and no call that ended later."""
    with Store.open(location, create=False) as store:
        for rollout in store.runs.rollouts():
            for attempt in store.runs.attempts(rollout.id):
                if attempt.status == "unresponsive":
                    assert attempt.ended_at is not None
                    assert (store.runs.verdict(attempt.id), store.runs.patch(attempt.id)) == (None, None)
                    assert all(call.ended_at <= attempt.ended_at for call in store.calls.of_attempt(attempt.id))
