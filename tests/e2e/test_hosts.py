"""Runs on eight hosts, between which packets are late, lost and cut off: each rollout ends once.

The hosts are namespaces (`support.hosts`); PostgreSQL, the model, workers, Ray and the real CLI are what they are.
UNDERSTUDY_TEST_ROLLOUTS says how many rollouts workers make, Ray a fifth of that and the real CLI a tenth;
UNDERSTUDY_TEST_SEED decides what is lost and cut. `make soak` makes a thousand.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest

from understudy.model.server import KEY_VARIABLE
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.tasks.records import dump

from support import UNDERSTUDY, calc_task, hosts, postgresql, ray_cluster, require, wait_for
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
    if reason := hosts.unsupported():
        pytest.skip(reason)  # in CI too: no package changes the kernel
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


@pytest.mark.usefixtures("claude_code", "isolation")
def test_three_raylets_end_every_rollout_once_though_one_of_their_hosts_vanishes(
    site: Site, tmp_path: Path
) -> None:
    require(ray_cluster.problems())
    small, real = samples(ROLLOUTS // 5)
    nodes = WORKERS[:3]
    network = site.network
    with ray_cluster.cluster_on(network["run"], [network[name] for name in nodes], 2) as cluster:
        enter = cluster.enter(network["run"])
        more = ("--engine", "ray", "--ray-address", cluster.address, "--ray-capacity", "2")
        runs = [
            site.stack.enter_context(started(*enter, ray_cluster.UNDERSTUDY, *arguments))
            for arguments in (site.small(small, *more, until=f"test -e {tmp_path / 'go'}"), site.real(real, *more))
        ]
        wait_for(lambda: busy_hosts(site.url) == set(nodes), runs[0], 600)
        network.cut(nodes[2])
        (tmp_path / "go").touch()
        cut_s = {"database": 4.0, "model": 4.0, "run": 6.0, nodes[0]: 6.0, nodes[1]: 6.0}
        site.finish(runs, RandomCuts(network, SEED, cut_s, (1.0, 5.0)), TASKS * (small + real))


def busy_hosts(url: StoreUrl) -> set[str]:
    """The hosts whose workers have attempts: a worker's name begins with its host's."""
    with Store.open(url, create=False) as store:
        return {each.id.partition("-")[0] for each in store.leases.workers() if each.held > 0}


def test_a_host_that_vanishes_is_given_up_by_all_others(site: Site, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = site.small(3, until=f"test -e {go}")
    assert site.start("run", UNDERSTUDY, *run, "--engine", "detached").wait(120) == 0
    vanishing, *others = [site.work(name) for name in WORKERS[:3]]
    wait_for(lambda: busy_hosts(site.url) == set(WORKERS[:3]), vanishing)
    site.network.cut("one")
    cut_at = time.time()
    go.touch()
    waiting = site.start("run", UNDERSTUDY, *run, "--engine", "workers")
    out, stderr = waiting.communicate(timeout=300)
    assert waiting.returncode == 0, stderr
    assert json.loads(out)["pending"] == 0 and all(other.poll() is None for other in others)
    with Store.open(site.url) as store:
        attempts = [each for rollout in store.runs.rollouts() for each in store.runs.attempts(rollout.id)]
    lost = [each for each in attempts if each.status == "unresponsive"]
    assert lost
    seconds = ", ".join(f"{(each.ended_at or 0.0) - cut_at:.1f} s" for each in lost)
    # Others may lose theirs too: where it was cut off in a transaction, they wait for that longer than this lease.
    sys.stderr.write(f"attempts were taken {seconds} after the cut; the lease is {LEASE_S:.0f} s\n")

    # Who asks on a host that is cut off is answered, though with an error.
    asking = site.start("one", UNDERSTUDY, "status", site.store.secret_url)
    _, stderr = asking.communicate(timeout=120)
    assert asking.returncode == 2 and "the server cannot be reached; check its address" in stderr, stderr
    assert "Traceback" not in stderr

    # The server does not keep the connections of a host that vanished: they hold a lock, and are few.
    query = "SELECT count(*) FROM pg_stat_activity WHERE client_addr = %s"
    with psycopg.connect(site.url.secret_url, autocommit=True) as database:
        wait_for(
            lambda: database.execute(query, (site.network["one"].address,)).fetchone() == (0,), others[0], 120
        )
    # When it is back, it goes on.
    site.network.mend("one")
    vanishing.send_signal(signal.SIGTERM)
    _, stderr = vanishing.communicate(timeout=120)
    assert vanishing.returncode == 0, stderr
    assert_no_late_writes(site.url)
