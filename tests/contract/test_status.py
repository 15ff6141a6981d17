"""How runs stand: queues, workers, faults, phases; of a store in a directory, and in a database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from understudy.errors import ConfigError
from understudy.report.status import PhaseSeconds, store_status
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.runs import Lease
from understudy.types import ErrorInfo

from support import understudy
from support.store import prepare

WORKER = Lease("machine-1", 60.0)


@pytest.fixture
def store(location: StoreLocation) -> Iterator[Store]:
    with Store.open(location) as store_of_test:
        prepare(store_of_test, 4)
        store_of_test.leases.open_to_workers("run", "1.0").result()
        store_of_test.leases.announce(WORKER, "1.0", 3, {}).result()
        first, second, _ = store_of_test.leases.claim(WORKER, ["run"], 3).result()
        store_of_test.runs.mark_running(first.attempt.id).result()
        store_of_test.runs.finish_attempt(
            first.attempt.id, "succeeded", "succeeded", timings={"agent_s": 2.0, "grade_s": 0.5}
        ).result()
        error = ErrorInfo("sandbox", "SandboxError", "no space")
        store_of_test.runs.finish_attempt(second.attempt.id, "failed", "requeuing", error=error).result()
        yield store_of_test


def test_a_run_is_shown_with_its_queue_its_workers_and_its_faults(store: Store) -> None:
    prepare(store, 1, run="other")
    status = store_status(store)
    assert [each.queue.run_id for each in status.runs] == ["run", "other"]
    run = status.runs[0]
    assert run.queue.rollouts == {"succeeded": 1, "preparing": 1, "requeuing": 1, "queuing": 1}
    assert run.queue.oldest_s is not None and run.queue.oldest_s < 60
    assert (run.queue.engine, run.queue.release, run.faults, run.given_up) == ("workers", "1.0", {"sandbox": 1}, 0)
    assert run.phases == {"agent": PhaseSeconds(1, 2.0, 2.0), "grade": PhaseSeconds(1, 0.5, 0.5)}
    (worker,) = status.workers
    assert (worker.id, worker.capacity, worker.held, worker.alive) == ("machine-1", 3, 1, True)
    assert [each.queue.run_id for each in store_status(store, "other").runs] == ["other"]
    with pytest.raises(ConfigError, match="has no run 'none' with rollouts; give one of: run, other"):
        store_status(store, "none")


def test_an_empty_store_has_no_run_to_choose_from(tmp_path: Path):
    with (
        Store.open(tmp_path / "s") as store,
        pytest.raises(ConfigError, match="has no run 'x' with rollouts; it has none at all yet"),
    ):
        store_status(store, "x")


def test_the_command_shows_it_and_changes_nothing(store: Store, location: StoreLocation) -> None:
    name = location.secret_url if isinstance(location, StoreUrl) else str(location)
    done = understudy("status", name)
    assert done.returncode == 0, done.stderr
    for text in (
        "run run",
        "1 preparing, 1 queuing, 1 requeuing, 1 succeeded",
        "p99 2.00 s",
        "machine-1",
        "any run",
    ):
        assert text in done.stdout
    assert "not-a-secret" not in done.stdout
    assert store.leases.workers()[0].held == 1


def test_prometheus_reads_it(store: Store, location: StoreLocation) -> None:
    store.leases.announce(WORKER, "1.0", 3, {'odd "run"\n': "failures in a row"}).result()
    name = location.secret_url if isinstance(location, StoreUrl) else str(location)
    done = understudy("status", name, "--prometheus")
    assert done.returncode == 0, done.stderr
    samples = {
        (each.name.removeprefix("understudy_"), *sorted(each.labels.values())): each.value
        for family in text_string_to_metric_families(done.stdout)
        for each in family.samples
    }
    assert samples["rollouts", "run", "succeeded"] == samples["rollouts", "queuing", "run"] == 1
    assert samples["infrastructure_failures", "run", "sandbox"] == 1 and samples["rollouts_given_up", "run"] == 0
    assert 0 <= samples["queue_oldest_seconds", "run"] < 60
    assert samples["phase_seconds", "0.99", "agent", "run"] == 2.0
    assert samples["phase_attempts", "grade", "run"] == 1
    assert [samples[f"worker_{each}", "machine-1"] for each in ("up", "capacity", "leases")] == [1, 3, 1]
    assert samples["worker_leaves_run", "machine-1", 'odd "run"\n'] == 1
    assert "not-a-secret" not in done.stdout


@pytest.mark.parametrize("command", ["states", "pairs"])
def test_stores_of_sessions_are_read_wherever_they_are(location: StoreLocation, command: str) -> None:
    Store.open(location).close()
    name = location.secret_url if isinstance(location, StoreUrl) else str(location)
    done = understudy(command, name)
    assert done.returncode == 0, done.stderr


def test_a_store_without_rollouts_says_so(location: StoreLocation) -> None:
    with Store.open(location) as store:
        assert store_status(store).runs == []
