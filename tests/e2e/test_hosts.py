"""Runs on eight hosts, between which packets are late, lost and cut off: each rollout ends once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from understudy.model.server import KEY_VARIABLE
from understudy.tasks.records import dump

from support import UNDERSTUDY, calc_task, hosts, postgresql, require
from support.hosts import Host, HostNetwork, RandomCuts
from support.workers import check, options, started, worker

pytestmark = [pytest.mark.services, pytest.mark.e2e, pytest.mark.timeout(3600)]

ROLLOUTS = int(os.environ.get("UNDERSTUDY_TEST_ROLLOUTS", "200"))
SEED = int(os.environ.get("UNDERSTUDY_TEST_SEED", "17"))
WORKERS = ("one", "two", "three", "four", "five")
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


@pytest.fixture
def network() -> Iterator[HostNetwork]:
    """Eight hosts."""
    require([*hosts.problems(), *postgresql.problems()])
    with hosts.running_network("database", "model", "run", *WORKERS, seed=SEED) as network:
        yield network


@pytest.mark.usefixtures("claude_code", "isolation")
def test_every_rollout_ends_once_on_a_network_that_loses_and_is_cut(
    tmp_path: Path, network: HostNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "key-of-the-scripted-model")
    tasks = [calc_task(number) for number in range(4)]
    dump(tasks, tmp_path / "tasks.jsonl")
    by_cli, by_shell = ROLLOUTS // 40, ROLLOUTS // 4 - ROLLOUTS // 40  # of each task
    with postgresql.running_server(host=network["database"]) as server, ExitStack() as stack:
        url = server.new_store()
        store = server.remote(url)
        idle = stack.enter_context(model_server(network["model"], "idle", 8000, tmp_path))
        oracle = stack.enter_context(model_server(network["model"], "oracle", 8001, tmp_path))
        shell = options(tmp_path, store, "--engine", "workers", samples=by_shell, model=idle)
        cli = [
            *("run", *oracle, "--tasks", f"{tmp_path / 'tasks.jsonl'}", "-n", f"{by_cli}", "--engine", "workers"),
            *("-o", f"{tmp_path / 'cli'}", "--store", store.secret_url, "--json"),
        ]
        for name in WORKERS:
            stack.enter_context(worker(store, "--lease", f"{LEASE_S}", host=network[name]))
        runs = [
            stack.enter_context(started(*network["run"].enter, UNDERSTUDY, *arguments))
            for arguments in (shell, cli)
        ]
        with RandomCuts(network, SEED, CUTS_S, (0.5, 4.0)) as cuts:
            ended = [run.communicate(timeout=3000) for run in runs]
        for run, (_, stderr) in zip(runs, ended, strict=True):
            assert run.returncode == 0, stderr
        summaries = [json.loads(out) for out, _ in ended]
        assert [summary["rollouts"] for summary in summaries] == [4 * by_shell, 4 * by_cli]
        assert all((summary["pending"], summary["infrastructure_failures"]) == (0, 0) for summary in summaries)
        assert summaries[1]["solved"] == 4 * by_cli
        ends = check(tmp_path, url, ROLLOUTS)
        sys.stderr.write(f"seed {SEED}: {dict(cuts.made)}; packets: {network.count()}; attempts: {dict(ends)}\n")
