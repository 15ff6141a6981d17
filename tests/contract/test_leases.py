"""Leases: a rollout is one worker's at a time, and who lost his can write nothing of it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from understudy.errors import LeaseLost, StoreError
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.leases import FORGET_WORKER_S, MAX_LOST, ClaimedRollout
from understudy.store.runs import Lease
from understudy.types import ErrorInfo, Verdict

from support.store import make_call, prepare, writes_held

LEASE = Lease("a", 60.0)
OVER = Lease("a", -1.0)
"""A lease that has ended when it begins: as of a worker that died."""


@pytest.fixture
def store(location: StoreLocation) -> Iterator[Store]:
    with Store.open(location) as store_of_test:
        prepare(store_of_test, 3)
        store_of_test.leases.open_to_workers("run", "1.0").result()
        yield store_of_test


def claim(store: Store, lease: Lease, limit: int = 1) -> list[ClaimedRollout]:
    return store.leases.claim(lease, ["run"], limit).result()


def by_four(work: Callable[[str], None]) -> None:
    """Call `work` in four threads at once, each with a worker's name, and wait for all."""
    threads = [threading.Thread(target=work, args=(f"w{n}",)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_a_run_is_claimed_where_it_is_open_to_workers(store: Store) -> None:
    prepare(store, 1, run="alone")
    assert [(run.id, run.release) for run in store.leases.open_runs()] == [("run", "1.0")]
    assert store.leases.claim(LEASE, ["alone"], 9).result() == []
    first = claim(store, LEASE, 2)
    assert [(each.rollout.id, each.attempt.number, each.failures) for each in first] == [
        ("run-0", 1, 0),
        ("run-1", 1, 0),
    ]
    assert [each.rollout.id for each in claim(store, Lease("b", 60.0), 9)] == ["run-2"]
    assert claim(store, Lease("b", 60.0)) == [] == store.leases.open_runs()


def test_no_more_sandboxes_start_at_a_time_than_all_workers_may(location: StoreLocation) -> None:
    def work(name: str) -> None:
        with Store.open(location) as own:
            for _ in range(5):
                own.leases.claim(Lease(name, 60.0), ["run"], 2, 3).result()

    def starting() -> list[str]:
        every = [attempt for each in store.runs.rollouts() for attempt in store.runs.attempts(each.id)]
        return [attempt.id for attempt in every if attempt.status == "preparing"]

    with Store.open(location) as store:
        prepare(store, 12)
        store.leases.open_to_workers("run", "1.0").result()
        by_four(work)
        assert len(starting()) == 3
        store.runs.mark_running(starting()[0]).result()
        assert len(store.leases.claim(LEASE, ["run"], 9, 3).result()) == 1
        assert store.leases.claim(LEASE, ["run"], 9, 3).result() == []
        assert len(store.leases.claim(OVER, ["run"], 2).result()) == 2, "without a limit as many as there are"
        # Of a worker that died nothing starts any more.
        assert len(store.leases.claim(LEASE, ["run"], 9, 4).result()) == 1


def test_many_workers_claim_each_rollout_once(location: StoreLocation) -> None:
    claimed: list[str] = []

    def work(name: str) -> None:
        with Store.open(location) as own:
            while some := own.leases.claim(Lease(name, 60.0), ["run"], 3).result():
                claimed.extend(each.rollout.id for each in some)

    with Store.open(location) as store:
        prepare(store, 60)
        store.leases.open_to_workers("run", "1.0").result()
        by_four(work)
        assert sorted(claimed) == sorted(f"run-{n}" for n in range(60))
        assert {rollout.status for rollout in store.runs.rollouts()} == {"preparing"}


def test_what_is_renewed_stays_and_what_ended_goes_to_the_next(store: Store) -> None:
    renewed, lost = claim(store, LEASE, 2)
    store.runs.mark_running(lost.attempt.id).result()
    store.calls.append(make_call(lost.attempt.id)).result()
    assert store.leases.renew(OVER, [lost.attempt.id]).result() == {lost.attempt.id}
    assert store.leases.requeue_expired(1e12).result() == 0, "the server has only just been started"
    store.leases.requeue_expired(0.0).result()
    assert store.leases.renew(LEASE, [renewed.attempt.id, lost.attempt.id]).result() == {renewed.attempt.id}
    assert store.leases.renew(Lease("b", 60.0), [renewed.attempt.id]).result() == frozenset()
    attempt = store.runs.attempt(lost.attempt.id)
    assert attempt.status == "unresponsive"
    assert attempt.error == ErrorInfo("run", "WorkerLost", "worker a did not answer in time")
    assert store.runs.rollout(lost.rollout.id).status == "requeuing"

    # Also among calls of others that are committed together with its own.
    with writes_held(store):
        mine, late = (store.calls.append(make_call(each.attempt.id, 1)) for each in (renewed, lost))
    mine.result()
    with pytest.raises(LeaseLost, match=lost.attempt.id):
        late.result()

    # Nothing that it writes later is taken, whether the rollout was claimed again or not.
    for _ in range(2):
        verdict = Verdict(reward=1.0, reason="late")
        for late in (
            store.calls.append(make_call(lost.attempt.id, 1)),
            store.runs.mark_running(lost.attempt.id),
            store.runs.finish_attempt(lost.attempt.id, "succeeded", "succeeded", patch=b"late", verdict=verdict),
        ):
            with pytest.raises(LeaseLost, match=lost.attempt.id):
                late.result()
        time.sleep(1.1)
        again = [each for each in claim(store, LEASE, 9) if each.rollout.id == lost.rollout.id]
        assert all(each.attempt.number == 2 for each in again)
    assert [call.sequence for call in store.calls.of_attempt(lost.attempt.id)] == [0]
    assert (store.runs.patch(lost.attempt.id), store.runs.verdict(lost.attempt.id)) == (None, None)
    store.calls.append(make_call(lost.attempt.id)).result()  # what was answered before is there, and said so
    store.calls.append(make_call(f"{lost.rollout.id}.2", 0)).result()


def test_what_a_worker_gives_back_is_claimed_again_and_others_keep_theirs(store: Store) -> None:
    own, other = claim(store, LEASE)[0], claim(store, Lease("b", 60.0))[0]
    assert store.runs.recover("run").result() == 0, "both are being worked on"
    assert store.leases.give_back(LEASE).result() == 1
    assert store.runs.attempt(own.attempt.id).status == "unresponsive"
    assert store.runs.attempt(other.attempt.id).status == "preparing"


def test_a_rollout_that_takes_its_workers_with_it_fails_in_the_end(store: Store) -> None:
    for number in range(1, MAX_LOST + 1):
        claimed = claim(store, OVER, 9)
        assert "run-0" in {each.rollout.id for each in claimed}, number
        store.leases.requeue_expired(0.0).result()
        time.sleep(1.05)
    rollout = store.runs.rollout("run-0")
    assert rollout.status == "failed" and rollout.error is not None and rollout.error.type == "WorkerLost"
    assert len(store.runs.attempts("run-0")) == MAX_LOST


@pytest.mark.parametrize("comes_back", [True, False])
def test_only_workers_that_do_not_come_back_count_as_taken_by_a_rollout(store: Store, comes_back: bool) -> None:
    store.leases.announce(LEASE, "1.0", 9, {}).result()
    for number in range(MAX_LOST):
        claimed = claim(store, Lease(LEASE.worker, 0.2), 9)
        assert "run-0" in {each.rollout.id for each in claimed}, number
        time.sleep(1.05)  # longer than its lease, and than a rollout rests
        store.leases.requeue_expired(0.0).result()
        if comes_back:
            assert store.leases.renew(LEASE, [each.attempt.id for each in claimed]).result() == frozenset()
        time.sleep(1.05)
    assert store.runs.rollout("run-0").status == ("requeuing" if comes_back else "failed")


def test_workers_that_were_told_to_stop_take_no_rollout_with_them(store: Store) -> None:
    for _ in range(MAX_LOST + 1):
        assert "run-0" in {each.rollout.id for each in claim(store, LEASE, 9)}
        store.leases.give_back(LEASE).result()
        time.sleep(1.05)
    claim(store, OVER, 9)
    store.leases.requeue_expired(0.0).result()
    assert store.runs.rollout("run-0").status == "requeuing"


def test_a_run_is_executed_by_one_process_or_by_workers(store: Store) -> None:
    alone, other = Lease("alone", 60.0), Lease("other", 60.0)
    claim(store, LEASE)
    with pytest.raises(StoreError, match="run is being executed by a; wait until it ends"):
        store.leases.execute_alone("run", alone, "1.0").result()
    assert [run.id for run in store.leases.open_runs()] == ["run"], "what was refused changed nothing"
    store.leases.give_back(LEASE).result()

    store.leases.execute_alone("run", alone, "1.0").result()
    assert store.leases.open_runs() == [] == claim(store, LEASE)
    for refused in (
        store.leases.execute_alone("run", other, "1.0"),
        store.leases.open_to_workers("run", "1.0"),
    ):
        with pytest.raises(StoreError, match="run is being executed by alone"):
            refused.result()
    store.leases.execute_alone("run", Lease("alone", -1.0), "1.0").result()  # it dies
    store.leases.execute_alone("run", other, "1.0").result()
    assert [each.id for each in store.leases.workers()] == ["other"]
    store.leases.give_back(other).result()
    store.leases.open_to_workers("run", "1.0").result()
    assert claim(store, LEASE) != []


def test_workers_are_listed_with_what_they_leave_to_others(store: Store) -> None:
    store.leases.announce(LEASE, "1.0", 4, {}).result()
    store.leases.announce(OVER, "1.0", 4, {"run": "no agent here"}).result()
    store.leases.announce(Lease("b", 60.0), "1.1", 2, {}).result()
    first, second = store.leases.workers()
    assert (first.id, first.release, first.capacity, first.run_id) == ("a", "1.0", 4, None)
    assert (first.leaves, first.alive, second.alive) == ({"run": "no agent here"}, False, True)
    assert 0 <= first.silent_s < 60
    store.leases.renew(LEASE, []).result()
    assert all(each.alive for each in store.leases.workers())
    store.leases.give_back(LEASE).result()
    assert [each.id for each in store.leases.workers()] == ["b"]
    store.leases.renew(Lease("b", -FORGET_WORKER_S - 1), []).result()
    store.leases.requeue_expired(1e12).result()
    assert [each.id for each in store.leases.workers()] == ["b"], "the server has only just been started"
    store.leases.requeue_expired(0.0).result()
    assert store.leases.workers() == []


def test_a_worker_that_was_forgotten_is_listed_again_when_it_renews(store: Store) -> None:
    store.leases.announce(Lease("b", -FORGET_WORKER_S - 1), "1.1", 2, {"run": "no agent here"}).result()
    store.leases.requeue_expired(0.0).result()
    assert store.leases.workers() == []
    store.leases.renew(Lease("b", 60.0), []).result()
    (back,) = store.leases.workers()
    assert (back.id, back.release, back.capacity, back.alive) == ("b", "1.1", 2, True)
    assert back.leaves == {"run": "no agent here"}


def test_who_executes_a_run_alone_is_alive_while_it_is_heard_of(store: Store) -> None:
    store.leases.execute_alone("run", Lease("alone", 0.0), "1.0").result()  # as in a directory, with its lock
    (alone,) = store.leases.workers()
    assert (alone.id, alone.run_id, alone.alive) == ("alone", "run", True)
    store.leases.execute_alone("run", Lease("next", 0.0), "1.0").result()


def test_who_waits_for_a_change_is_woken(store: Store, location: StoreLocation) -> None:
    with Store.open(location) as waiting:
        waiting.wait_for_change(0.1)
        waiting.wait_for_change(0.1)
        woken = threading.Event()

        def wait() -> None:
            waiting.wait_for_change(60.0)
            woken.set()

        thread = threading.Thread(target=wait)
        thread.start()
        time.sleep(0.2)
        store.leases.open_to_workers("run", "1.0").result()
        assert woken.wait(30)
        thread.join()
