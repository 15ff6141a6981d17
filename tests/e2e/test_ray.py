"""Runs whose workers are actors of a real Ray cluster: three raylets on loopback, a store in PostgreSQL."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from understudy.run.ray_cluster import RayOptions
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.tasks.records import dump

from fakes.loop_program import quick_task, small_loop
from fakes.policy import FakePolicy
from support import ray_cluster, require, understudy, wait_for
from support.ray_cluster import SOURCE, RayCluster
from support.workers import check, options, running

pytestmark = [pytest.mark.services, pytest.mark.e2e, pytest.mark.timeout(900)]  # Ray begins slowly


OTHER = """Metadata-Version: 2.1
Name: understudy
Version: 99.0
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """Three nodes with room for an actor of four rollouts, and a smaller one that has another release."""
    require(ray_cluster.problems())
    other = tmp_path_factory.mktemp("other")
    (other / "understudy-99.0.dist-info").mkdir()
    (other / "understudy-99.0.dist-info" / "METADATA").write_text(OTHER)
    with ray_cluster.running_cluster((2, SOURCE), (2, SOURCE), (2, SOURCE), (1, f"{other}:{SOURCE}")) as cluster:
        yield cluster


@contextmanager
def started(cluster: RayCluster, arguments: list[str], *more: str) -> Iterator[subprocess.Popen[str]]:
    """The command on the cluster, killed afterwards where it has not ended."""
    process = subprocess.Popen(
        [ray_cluster.UNDERSTUDY, *arguments, "--engine", "ray", "--ray-address", cluster.address, *more],
        env=ray_cluster.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def at_work(location: StoreUrl) -> list[int]:
    """The processes of workers that have attempts: a worker's name has it."""
    with Store.open(location, create=False) as store:
        return [int(worker.id.split("-")[-2]) for worker in store.leases.workers() if worker.held > 0]


def parent(process: int) -> int:
    """The process that started another one."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_every_rollout_ends_once_though_the_run_is_stopped_and_a_raylet_killed(
    tmp_path: Path, postgresql_store: StoreUrl, cluster: RayCluster
) -> None:
    arguments = [*options(tmp_path, postgresql_store, samples=9), "--ray-capacity", "4"]
    with started(cluster, arguments, "--ray-workers", "1") as run:
        wait_for(lambda: running(postgresql_store) > 0, run, 300)
        run.send_signal(signal.SIGINT)
        out, stderr = run.communicate(timeout=200)
    assert run.returncode == 130, stderr
    assert json.loads(out)["pending"] > 12 and running(postgresql_store) == 0
    with started(cluster, arguments) as run:
        wait_for(lambda: len(at_work(postgresql_store)) == 3, run, 300)
        worker = at_work(postgresql_store)[0]
        assert parent(worker) in cluster.raylets
        for process in (parent(worker), worker):
            os.kill(process, signal.SIGKILL)
        out, stderr = run.communicate(timeout=400)
    assert run.returncode == 0, stderr
    summary = json.loads(out)
    assert (summary["rollouts"], summary["pending"], summary["infrastructure_failures"]) == (36, 0, 0)
    ends = check(tmp_path, postgresql_store, 36)
    assert ends["unresponsive"] >= 1 and set(ends) <= {"succeeded", "unresponsive"}
    assert len(list((tmp_path / "out").glob("stream_*.json"))) == 36
    assert "not-a-secret" not in out + stderr


def test_who_waits_for_a_place_is_told_and_a_second_signal_stops_at_once(
    tmp_path: Path, postgresql_store: StoreUrl, cluster: RayCluster
) -> None:
    arguments = options(tmp_path, postgresql_store, samples=1)
    with started(cluster, arguments, "--ray-cpus", "50") as run:
        stderr = ""
        assert run.stderr is not None
        while "Ray has started no worker yet: 1 actors ask for 50 CPUs each" not in stderr:
            line = run.stderr.readline()
            assert line, stderr
            stderr += line
        run.send_signal(signal.SIGTERM)
        assert run.wait(60) == 130


def test_what_cannot_be_is_refused_before_anything_is_validated(
    tmp_path: Path, postgresql_store: StoreUrl, cluster: RayCluster
) -> None:
    arguments = options(tmp_path, postgresql_store, samples=1)
    with started(cluster, arguments, "--ray-cpus", "1") as run:
        _, stderr = run.communicate(timeout=200)
    assert run.returncode == 2
    assert "expected Understudy 0.1.0 on every node, got 99.0 on " in stderr
    assert "install understudy==0.1.0 on those nodes" in stderr and "validating" not in stderr
    with started(RayCluster("127.0.0.1:1", []), arguments) as run:
        _, stderr = run.communicate(timeout=200)
    assert run.returncode == 2 and "validating" not in stderr
    assert "--ray-address 127.0.0.1:1: " in stderr and "`ray start --head`" in stderr and "Traceback" not in stderr


def test_a_store_in_a_directory_is_refused(tmp_path: Path) -> None:
    done = understudy(*options(tmp_path, tmp_path / "store", samples=1), "--engine", "ray")
    assert done.returncode == 2
    assert "machines cannot reach; name a database with --store postgresql://USER@HOST/NAME" in done.stderr


def test_who_has_no_ray_is_told_how_to_get_it(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    done = understudy(*options(tmp_path, postgresql_store, samples=1), "--engine", "ray")
    assert done.returncode == 2
    assert "pip install 'understudy[ray]'" in done.stderr


async def test_the_runs_of_a_training_loop_are_executed_by_one_fleet(
    tmp_path: Path, postgresql_store: StoreUrl, cluster: RayCluster
) -> None:
    ray = RayOptions(ray_address=cluster.address, ray_workers=2, ray_capacity=4)
    order = replace(
        small_loop(tmp_path), store=postgresql_store.secret_url, engine="ray", ray=ray, steps=1, eval_every=1
    )
    tests = Path(__file__).parents[1]
    async with FakePolicy(Path(order.model), "first") as policy:
        content = msgspec.json.encode(replace(order, url=f"{policy.url}/v1")).decode()
        process = await asyncio.create_subprocess_exec(
            *(ray_cluster.PYTHON, "-m", "fakes.loop_program", content),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tests,
            env={**ray_cluster.environment(), "PYTHONPATH": f"{SOURCE}:{tests}:{sysconfig.get_path('purelib')}"},
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = msgspec.json.decode(out)
    assert (summary["steps"], summary["updates"], summary["rollouts"]) == (1, 1, 6)
    with Store.open(postgresql_store, create=False) as store:
        rollouts = [each for run in store.runs.all() for each in store.runs.rollouts(run.id)]
        engines = {queue.engine for queue in store.leases.queues()}
    # A step of six rollouts, and two evaluations of two tasks.
    assert len(rollouts) == 10 and {each.status for each in rollouts} == {"succeeded"}
    assert engines == {"workers"}


def test_patches_are_graded_by_the_nodes_of_a_cluster(tmp_path: Path, cluster: RayCluster) -> None:
    tasks = [quick_task(number) for number in range(4)]
    dump(tasks, tmp_path / "tasks.jsonl")
    wrong = [{"instance_id": tasks[0].instance_id, "model_name_or_path": "m", "model_patch": tasks[1].gold_patch}]
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    for predictions, resolved in (("gold", 4), (tmp_path / "wrong.json", 0)):
        arguments = [
            "grade",
            str(predictions),
            "--tasks",
            str(tmp_path / "tasks.jsonl"),
            "--sandbox",
            "unsafe-local",
        ]
        arguments += ["-o", str(tmp_path / str(resolved)), "--json", "--ray-capacity", "4"]
        with started(cluster, arguments) as grading:
            out, stderr = grading.communicate(timeout=300)
        assert grading.returncode == 0, stderr
        assert json.loads(out)["resolved"] == resolved
        reports = list((tmp_path / str(resolved)).glob("logs/run_evaluation/understudy/*/*/report.json"))
        assert len(reports) == (resolved or 1)


def test_a_run_is_graded_anew_by_the_nodes_of_a_cluster(tmp_path: Path, cluster: RayCluster) -> None:
    tasks = [quick_task(number) for number in range(2)]
    dump(tasks, tmp_path / "tasks.jsonl")
    run = ("run", "embedded", "--policy", "idle", "--tasks", tmp_path / "tasks.jsonl", "-o", tmp_path / "run")
    agent = ("--agent", "shell", "--agent-command", "true", "--sandbox", "unsafe-local", "--json")
    done = understudy(*run, *agent)
    assert done.returncode == 0, done.stderr
    with Store.open(tmp_path / "run") as store:
        for graded in store.outcomes.decisions():
            store.runs.replace_verdict(graded.attempt.id, replace(graded.verdict, reward=1.0)).result()
    arguments = ["grade", "--regrade", str(tmp_path / "run"), "--json", "--ray-capacity", "4"]
    with started(cluster, arguments) as grading:
        out, stderr = grading.communicate(timeout=300)
    assert grading.returncode == 0, stderr
    summary = json.loads(out)
    assert (summary["rollouts"], summary["solved"], summary["errors"]) == (2, 0, {})
    assert sorted(summary["changed"].values()) == [[1.0, 0.0]] * 2
    with Store.open(tmp_path / "run") as store:
        assert {graded.verdict.reward for graded in store.outcomes.decisions()} == {0.0}


def test_what_cannot_be_graded_on_ray_is_refused() -> None:
    done = understudy("grade", "gold", "--tasks", "x.jsonl", "--engine", "ray", "--official")
    assert done.returncode == 2 and "--engine ray: unsupported with --official" in done.stderr
