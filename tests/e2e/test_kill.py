"""A run killed at random moments: every process gets SIGKILL, the same command continues, nothing is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from understudy.sandbox.local.mounts import BOX
from understudy.store import Store
from understudy.tasks.records import dump

from support import CLIENT, UNDERSTUDY, calc_task, kills, understudy

pytestmark = [
    pytest.mark.services,
    pytest.mark.e2e,
]

KILLS = kills(8)


def descendants(root: int) -> list[int]:
    """The process and all below it."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(parent, []).append(int(entry.name))
    children, waiting = [], [root]
    while waiting:
        children.append(waiting.pop())
        waiting.extend(parents.get(children[-1], []))
    return children


def kill_everything(process: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL to the run and every process below it; returns their ids."""
    pids = descendants(process.pid)
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return pids


def sandboxed(out: Path) -> list[int]:
    """Processes of any sandbox that the run in `out` opened: they see its gateway's socket among their mounts."""
    processes: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and str(out) in (entry / "mountinfo").read_text():
                processes.append(int(entry.name))
        except OSError:
            continue  # it ended meanwhile, or is a zombie without mounts
    return processes


def gone(pids: list[int], seconds: float = 5.0) -> bool:
    """Whether all of the processes end within some seconds; the kernel needs a moment to free a namespace."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def mounts_of(directory: Path) -> list[str]:
    """What is mounted that names a path below `directory`, or a sandbox's box; others may mount what they like."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if str(directory) in line or BOX in line]


def kill_and_resume(arguments: list[str], out: Path, moments: random.Random, longest: float) -> int:
    """Start the run and kill it, again and again; returns how often it was killed before it had ended."""
    killed = 0
    for _ in range(KILLS):
        process = subprocess.Popen(
            [UNDERSTUDY, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(0.2, longest))
        killed += process.poll() is None
        assert gone(kill_everything(process))
        assert gone(sandboxed(out))
    return killed


@pytest.mark.usefixtures("claude_code", "isolation")
def test_the_real_cli_killed_and_resumed(tmp_path: Path):
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    dump([calc_task(number) for number in range(6)], tasks)
    mounts, samples = mounts_of(tmp_path), max(2, KILLS // 5)
    arguments = ["run", "embedded", "--tasks", str(tasks), "-n", str(samples), "-j", "2", "-o", str(out), "--json"]
    assert kill_and_resume(arguments, out, random.Random(2), 2.5) >= KILLS / 2
    done = understudy(*arguments)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    rollouts = 6 * samples
    assert (summary["rollouts"], summary["solved"], summary["infrastructure_failures"]) == (rollouts, rollouts, 0)
    assert mounts_of(tmp_path) == mounts
    assert sandboxed(out) == []
    with Store.open(out, create=False) as store:
        for rollout in store.runs.rollouts():
            statuses = Counter(attempt.status for attempt in store.runs.attempts(rollout.id))
            assert statuses["succeeded"] == 1, "a rollout that had ended was repeated, or never ended"
            assert set(statuses) <= {"succeeded", "unresponsive"}
            for attempt in store.runs.attempts(rollout.id):
                sequence = [call.sequence for call in store.calls.of_attempt(attempt.id)]
                assert sequence == list(range(len(sequence)))
    outputs = ("stream_calc-", "dataset-calc-", "logs", "understudy-embedded.")
    remaining = {path.name for path in out.iterdir() if not path.name.startswith(outputs)}
    assert len(list(out.glob("stream_*.json"))) == rollouts
    assert remaining <= {"store.db", "store.db-wal", "store.db-shm", "tasks.jsonl", "gateway.sock", ".lock"}


def test_every_answer_an_agent_received_is_in_the_store_once(tmp_path: Path):
    tasks, out, received_file, client = (tmp_path / name for name in ("tasks.jsonl", "out", "seen", "client.py"))
    dump([calc_task(number) for number in range(4)], tasks)
    client.write_text(CLIENT)
    arguments = [
        *("run", "embedded", "--policy", "idle", "--tasks", str(tasks), "-n", "6", "-j", "2", "-o", str(out)),
        *(
            "--agent",
            "shell",
            "--agent-command",
            f"python3 {client} 6 {received_file}",
            "--sandbox",
            "unsafe-local",
            "--json",
        ),
    ]
    kill_and_resume(arguments, out, random.Random(3), 2.0)
    done = understudy(*arguments)
    assert done.returncode == 0, done.stderr
    received = Counter(received_file.read_text().split())
    with Store.open(out, create=False) as store:
        attempts = [attempt for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)]
        stored = Counter(
            json.loads(call.response)["id"] for attempt in attempts for call in store.calls.of_attempt(attempt.id)
        )
    assert set(received.values()) == {1}
    assert set(stored.values()) == {1}
    assert set(received) <= set(stored)
    assert len(received) >= 24 * 6
