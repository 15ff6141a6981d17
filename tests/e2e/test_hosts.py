"""Runs on eight hosts, between which packets are late, lost and cut off: each rollout ends once.

The hosts are namespaces (`support.hosts`); PostgreSQL, workers and the real CLI are what they are.
UNDERSTUDY_TEST_ROLLOUTS says how many rollouts there are, a tenth of them by the real CLI; UNDERSTUDY_TEST_SEED
decides what is lost and cut.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from understudy.model.server import KEY_VARIABLE
from understudy.tasks.records import dump

from support import UNDERSTUDY, calc_task, hosts, postgresql, require
from support.hosts import Host, HostNetwork, RandomCuts
from support.postgresql import PostgresqlServer
from support.workers import assert_no_late_writes, check, options, started, worker

pytestmark = [pytest.mark.services, pytest.mark.e2e, pytest.mark.timeout(3600)]

ROLLOUTS = int(os.environ.get("UNDERSTUDY_TEST_ROLLOUTS", "200"))
SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", "17"))
WORKERS = ("one", "two", "three", "four", "five")
TASKS = 4
LEASE_S = 8.0
CUTS_S = {"database": 4.0, "model": 4.0, "run": 8.0, **dict.fromkeys(WORKERS, LEASE_S + 4.0)}
"""For how many seconds each host may be cut off at most: workers lose their leases, or do not."""


@contextmanager
def model_server(host: Host, policy: str, port: int, tmp_path: Path) -> Iterator[tuple[str, ...]]:
    """A scripted model on a host; what `run` needs to use it."""
    arguments = ("-m", "understudy.model.server", "--policy", policy, "--host", host.address, "--port", f"{port}")
    with started(*host.enter, sys.executable, *arguments, "--tasks", tmp_path / "tasks.jsonl") as server:
        assert server.stdout is not None and server.stdout.readline().startswith("{")
        config = tmp_path / f"{policy}.toml"
        config.write_text(
            "[models.high]\n"
            f'backend = "embedded"\nbase_url = "http://{host.address}:{port}/v1"\napi_key_env = "{KEY_VARIABLE}"\n'
        )
        yield "--config", f"{config}"


class Site:
    """Eight hosts with a database and models on two of them, and what runs there."""

    def __init__(self, network: HostNetwork, server: PostgresqlServer, tmp_path: Path, stack: ExitStack) -> None:
        self.network = network
        self.stack = stack
        self.url = server.new_store()
        """The store, for the test itself, whose connection is not cut."""
        self.store = server.remote(self.url)
        self._tmp_path = tmp_path
        dump([calc_task(number) for number in range(TASKS)], tmp_path / "tasks.jsonl")
        self._idle = stack.enter_context(model_server(network["model"], "idle", 8000, tmp_path))
        self._oracle = stack.enter_context(model_server(network["model"], "oracle", 8001, tmp_path))

    def small(self, samples: int, *more: str, until: str = "true") -> list[str]:
        """The arguments of a run by a small program of ours, which works on until a command succeeds."""
        work = f"python3 {self._tmp_path / 'client.py'} 3 {self._tmp_path / 'seen'}"
        command = f"{work}; until {until}; do sleep 0.1; done"
        return options(self._tmp_path, self.store, *more, samples=samples, command=command, model=self._idle)

    def real(self, samples: int, *more: str) -> list[str]:
        """The arguments of a run by the real CLI."""
        return [
            *("run", *self._oracle, "--tasks", f"{self._tmp_path / 'tasks.jsonl'}", "-n", f"{samples}"),
            *("-o", f"{self._tmp_path / 'real'}", "--store", self.store.secret_url, "--json", *more),
        ]

    def start(self, host: str, *command: str | Path) -> subprocess.Popen[str]:
        """Start a command on a host."""
        return self.stack.enter_context(started(*self.network[host].enter, *command))

    def work(self, host: str) -> subprocess.Popen[str]:
        """Start a worker on a host."""
        return self.stack.enter_context(worker(self.store, "--lease", f"{LEASE_S}", host=self.network[host]))

    def finish(self, runs: Sequence[subprocess.Popen[str]], cuts: RandomCuts, rollouts: int) -> None:
        """Wait for a run by the small program and one by the CLI, while hosts are cut off; check all rollouts."""
        with cuts:
            ended = [run.communicate(timeout=3000) for run in runs]
        for run, (_, stderr) in zip(runs, ended, strict=True):
            assert run.returncode == 0, stderr
        small, real = (json.loads(out) for out, _ in ended)
        assert (small["pending"], small["infrastructure_failures"]) == (0, 0)
        assert (real["pending"], real["infrastructure_failures"]) == (0, 0)
        assert real["solved"] == real["rollouts"] and small["rollouts"] + real["rollouts"] == rollouts
        ends = check(self._tmp_path, self.url, rollouts)
        assert_no_late_writes(self.url)
        packets = self.network.count()
        sys.stderr.write(f"seed {SEED}: {dict(cuts.made)}; packets: {dict(packets)}; attempts: {dict(ends)}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """Eight hosts, of which two have the database and the models."""
    require([*hosts.problems(), *postgresql.problems()])
    monkeypatch.setenv(KEY_VARIABLE, "key-of-the-scripted-models")
    with (
        hosts.running_network("database", "model", "run", *WORKERS, seed=SEED) as network,
        postgresql.running_server(host=network["database"]) as server,
        ExitStack() as stack,
    ):
        yield Site(network, server, tmp_path, stack)


def samples(rollouts: int) -> tuple[int, int]:
    """How many samples of each task make so many rollouts: by the small program, and a tenth by the CLI."""
    real = max(1, rollouts // TASKS // 10)
    return rollouts // TASKS - real, real


@pytest.mark.usefixtures("claude_code", "isolation")
def test_workers_end_every_rollout_once(site: Site) -> None:
    small, real = samples(ROLLOUTS)
    for host in WORKERS:
        site.work(host)
    runs = [
        site.start("run", UNDERSTUDY, *arguments)
        for arguments in (site.small(small, "--engine", "workers"), site.real(real, "--engine", "workers"))
    ]
    site.finish(runs, RandomCuts(site.network, SEED, CUTS_S, (0.5, 4.0)), TASKS * (small + real))
