"""Ctrl-C: the first lets what runs finish, the second stops at once; the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from understudy.store import Store

from support import UNDERSTUDY, statuses, understudy, wait_for

pytestmark = pytest.mark.usefixtures("isolation")


def start(arguments: list[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [UNDERSTUDY, *arguments], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, process_group=0
    )


def is_running(*command: bytes) -> Iterator[bool]:
    """Of every process, whether it runs just that."""
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield cmdline.read_bytes() == b"".join(word + b"\0" for word in command)


def test_the_first_lets_what_runs_finish(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    agent = ("--agent", "shell", "--agent-command", "sleep 4.00137")
    arguments = ["run", *agent, "--tasks", str(calc_tasks), "-j", "2", "-o", str(out), "--json"]
    process = start(arguments)
    wait_for(lambda: statuses(out)["running"] > 0, process)
    # Until a child has a session of its own, which takes it a moment, the signal ends it as well: both must have.
    wait_for(lambda: sum(is_running(b"sleep", b"4.00137")) == 2, process)
    # A terminal sends it to the whole group.
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    summary = json.loads(stdout)
    assert summary["unsolved"] + summary["pending"] == 4
    assert summary["unsolved"] in (1, 2)
    done = understudy(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unsolved"] == 4
    with Store.open(out, create=False) as store:
        assert all(len(store.runs.attempts(rollout.id)) == 1 for rollout in store.runs.rollouts())


@pytest.mark.services
def test_the_second_stops_at_once(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    agent = ("--agent", "shell", "--agent-command", "sleep 100")
    process = start(["run", *agent, "--tasks", str(calc_tasks), "-j", "2", "-o", str(out)])
    wait_for(lambda: statuses(out)["running"] > 0, process)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "interrupted" in stderr
    assert "same command" in stderr
    assert "Traceback" not in stderr
    assert set(statuses(out)) == {"queuing", "requeuing"}


@pytest.mark.services
def test_draining_has_a_bound_and_the_same_command_continues(calc_tasks: Path, tmp_path: Path):
    out, released = tmp_path / "out", tmp_path / "released"
    agent = ("--agent", "shell", "--agent-command", f"test -e {released} || sleep 100")
    sandbox = ("--sandbox", "unsafe-local")
    arguments = ["run", *agent, *sandbox, "--tasks", str(calc_tasks), "-j", "2", "-o", str(out), "--json"]
    process = start([*arguments, "--drain-timeout", "0.5"])
    wait_for(lambda: statuses(out)["running"] > 0, process)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "the drain timeout of 0.5 s has passed" in stderr
    assert set(statuses(out)) == {"queuing", "requeuing"}
    released.touch()
    done = understudy(*arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["unsolved"] == 4


def test_a_run_in_the_background_is_not_stopped_by_sigint(calc_tasks: Path, tmp_path: Path):
    out = tmp_path / "out"
    agent = ("--agent", "shell", "--agent-command", "sleep 2")
    arguments = ["run", *agent, "--tasks", str(calc_tasks), "-j", "4", "-o", str(out), "--json"]
    process = subprocess.Popen(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", UNDERSTUDY, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: statuses(out)["running"] > 0, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["unsolved"] == 4
