"""Runs whose sandboxes are on another machine: the real CLI, the gateway here, the relay between them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.store import Store

from support import UNDERSTUDY, kills, require, ssh_server, understudy

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.services,
    pytest.mark.usefixtures("claude_code", "isolation"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshMachine]:
    require(ssh_server.problems())
    with ssh_server.ssh_machine(tmp_path_factory.mktemp("ssh")) as started:
        yield started


def workers(machine: ssh_server.SshMachine) -> list[int]:
    """The processes that serve sandboxes of this machine."""
    pids: list[int] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"sandboxes\0serve" in path.read_bytes() and (
                str(machine.cache).encode() in path.with_name("environ").read_bytes()
            ):
                pids.append(int(path.parent.name))
        except OSError:
            continue
    return pids


def assert_whole(out: Path, rollouts: int) -> None:
    """Every rollout ended once, solved, and what its agent was answered is stored."""
    with Store.open(out, create=False) as store:
        assert len(store.runs.rollouts()) == rollouts
        for rollout in store.runs.rollouts():
            assert rollout.status == "succeeded"
            attempts = store.runs.attempts(rollout.id)
            assert [attempt.status for attempt in attempts].count("succeeded") == 1
            verdict = store.runs.verdict(attempts[-1].id)
            assert verdict is not None and verdict.reward == 1
            assert any(call.status == "ok" for call in store.calls.of_attempt(attempts[-1].id))


def test_the_real_cli_solves_tasks_on_another_machine(
    machine: ssh_server.SshMachine, calc_tasks: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = understudy(
        "run", "embedded", "--tasks", calc_tasks, "--limit", "2", "--sandbox", machine.name, "-j", "2", "-o", out,
        "--json", timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["rollouts"], summary["solved"], summary["infrastructure_failures"]) == (2, 2, 0)
    assert_whole(out, 2)
    assert workers(machine) == []
    listed = understudy("sandboxes", "list", "--sandbox", machine.name, "--json")
    assert (listed.returncode, json.loads(listed.stdout)) == (0, []), listed.stderr


def test_workers_are_killed_at_random_moments(
    machine: ssh_server.SshMachine, calc_tasks: Path, tmp_path: Path
) -> None:
    out, moments = tmp_path / "out", random.Random(5)
    command = [str(UNDERSTUDY), "run", "embedded", "--tasks", str(calc_tasks), "--limit", "2", "-j", "2"]
    command += ["--sandbox", machine.name, "-o", str(out), "--json"]
    killed = 0
    # An attempt that lost its sandbox is tried again, three times at most; the same command takes up what is left.
    for _ in range(5):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while process.poll() is None:
            if killed < kills(2) and (pids := workers(machine)):
                time.sleep(moments.random())
                try:
                    os.kill(moments.choice(pids), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    pass
            time.sleep(0.1)
        _, stderr = process.communicate()
        if process.returncode == 0:
            break
    assert process.returncode == 0, stderr
    assert killed
    assert_whole(out, 2)
