"""The scheduler against a real store, with attempts that end as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from understudy.errors import BackendError, StoreError, TaskError
from understudy.run.scheduler import MAX_ATTEMPTS, RunProgress, Scheduler
from understudy.store import Store
from understudy.types import Attempt, Rollout, Verdict

from support import calc_task

RUN = "run0"
Attempts = Callable[[Rollout, Attempt, bool, Callable[[], None]], Awaitable[Verdict]]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as store:
        tasks = [calc_task(number) for number in range(8)]
        store.runs.create(RUN, {}).result()
        store.runs.add_tasks(RUN, tasks).result()
        store.runs.create_rollouts(RUN, [(f"r{n}", task.instance_id, 0) for n, task in enumerate(tasks)]).result()
        yield store


def scheduler(store: Store, execute: Attempts, concurrency: int = 2) -> Scheduler:
    return Scheduler(store, RUN, execute, concurrency, RunProgress(total=8), retry_pause_s=0.0)


def ending_well(store: Store) -> Attempts:
    async def execute(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        store.runs.mark_running(attempt.id).result()
        verdict = Verdict(reward=1.0, reason="resolved")
        await asyncio.wrap_future(
            store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"", verdict=verdict)
        )
        return verdict

    return execute


async def test_every_rollout_runs_once(store: Store):
    running = scheduler(store, ending_well(store))
    await running.run()
    assert {rollout.status for rollout in store.runs.rollouts(RUN)} == {"succeeded"}
    assert all(len(store.runs.attempts(rollout.id)) == 1 for rollout in store.runs.rollouts(RUN))
    assert (running.progress.done, running.progress.solved, running.progress.running) == (8, 8, 0)


async def test_a_retryable_failure_is_tried_again_and_counted_apart(store: Store):
    well = ending_well(store)

    async def first_fails(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        if attempt.number == 1:
            raise BackendError("the server is down")
        return await well(rollout, attempt, final, leave)

    running = scheduler(store, first_fails)
    await running.run()
    assert {rollout.status for rollout in store.runs.rollouts(RUN)} == {"succeeded"}
    first, second = store.runs.attempts("r0")
    assert (first.status, second.status) == ("failed", "succeeded")
    assert first.error is not None
    assert first.error.boundary == "backend"
    assert running.progress.retried == 8


async def test_a_failure_that_cannot_be_mended_by_trying_again_is_final_at_once(store: Store):
    well = ending_well(store)

    async def one_is_bad(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        if rollout.id == "r3":
            raise TaskError("the tree is broken")
        return await well(rollout, attempt, final, leave)

    await scheduler(store, one_is_bad).run()
    assert len(store.runs.attempts("r3")) == 1
    assert store.runs.rollout("r3").status == "failed"
    assert store.outcomes.counts(RUN).solved == 7


async def test_a_fault_that_nobody_foresaw_is_a_row_and_the_others_go_on(store: Store):
    well = ending_well(store)

    async def one_breaks(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        if rollout.id == "r0":
            raise KeyError("colour")
        return await well(rollout, attempt, final, leave)

    running = scheduler(store, one_breaks)
    await running.run()
    assert [rollout.status for rollout in store.runs.rollouts(RUN)] == ["failed"] + ["succeeded"] * 7
    (attempt,) = store.runs.attempts("r0")
    assert attempt.error is not None
    assert (attempt.error.boundary, "KeyError: 'colour'" in attempt.error.message) == ("understudy", True)


async def test_what_cannot_be_made_ready_ahead_is_left_to_the_attempt(store: Store):
    async def breaks(rollout: Rollout) -> None:
        raise OSError("no space left on device")

    running = scheduler(store, ending_well(store))
    running.prepare = breaks
    await running.run()
    assert {rollout.status for rollout in store.runs.rollouts(RUN)} == {"succeeded"}


async def test_attempts_are_bounded(store: Store):
    well = ending_well(store)

    async def never(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        if rollout.id == "r3":
            raise BackendError("down")
        return await well(rollout, attempt, final, leave)

    await scheduler(store, never).run()
    assert len(store.runs.attempts("r3")) == MAX_ATTEMPTS
    assert store.runs.rollout("r3").status == "failed"


async def test_failures_in_a_row_stop_the_run_and_leave_the_rest_queued(store: Store):
    async def down(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        raise BackendError("connection refused")

    with pytest.raises(BackendError, match=r"in a row failed at the backend.*connection refused"):
        await scheduler(store, down, concurrency=1).run()
    statuses = [rollout.status for rollout in store.runs.rollouts(RUN)]
    assert (statuses.count("failed"), statuses.count("requeuing"), statuses.count("queuing")) == (1, 1, 6)


async def test_drain_lets_the_running_ones_finish(store: Store):
    started = asyncio.Event()
    go_on = asyncio.Event()
    well = ending_well(store)

    async def run_until_released(
        rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]
    ) -> Verdict:
        started.set()
        await go_on.wait()
        return await well(rollout, attempt, final, leave)

    running = scheduler(store, run_until_released)
    task = asyncio.create_task(running.run())
    await started.wait()
    running.drain()
    go_on.set()
    await task
    statuses = [rollout.status for rollout in store.runs.rollouts(RUN)]
    assert statuses.count("succeeded") == 2
    assert statuses.count("queuing") == 6


async def test_a_store_that_fails_stops_everything(store: Store):
    async def full(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        raise StoreError("the disk is full")

    with pytest.raises(StoreError, match="full"):
        await scheduler(store, full).run()


async def test_recover_queues_what_was_under_way_and_what_failed(store: Store):
    store.runs.start_attempt("r0").result()
    attempt = store.runs.start_attempt("r1").result()
    store.runs.mark_running(attempt.id).result()
    assert store.runs.recover(RUN).result() == 2
    assert {store.runs.rollout("r0").status, store.runs.rollout("r1").status} == {"requeuing"}
    assert store.runs.attempts("r1")[0].status == "unresponsive"
    await scheduler(store, ending_well(store)).run()
    assert store.runs.rollout("r1").status == "succeeded"
    assert [each.number for each in store.runs.attempts("r1")] == [1, 2]


async def test_an_agent_that_is_done_gives_its_place_to_the_next_while_it_is_graded(store: Store):
    well = ending_well(store)
    agents = most_agents = 0
    graded, all_began = 0, asyncio.Event()

    async def execute(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        nonlocal agents, most_agents, graded
        agents += 1
        most_agents = max(most_agents, agents)
        await asyncio.sleep(0)
        agents -= 1
        leave()
        graded += 1
        if graded == 4:  # two are graded while two others, which need their places, have worked
            all_began.set()
        async with asyncio.timeout(20):
            await all_began.wait()
        return await well(rollout, attempt, final, leave)

    running = scheduler(store, execute)
    await running.run()
    assert most_agents <= 2
    assert (running.progress.done, running.progress.running) == (8, 0)


async def test_what_waits_for_a_place_is_made_ready(store: Store):
    ready: list[str] = []

    async def ahead(rollout: Rollout) -> None:
        ready.append(rollout.id)

    running = scheduler(store, ending_well(store))
    running.prepare = ahead
    await running.run()
    assert set(ready[:2]) == {"r2", "r3"}  # both are read in threads, so either may be first


async def test_a_place_is_free_again_after_its_cooldown(store: Store):
    well, starts = ending_well(store), list[float]()

    async def execute(rollout: Rollout, attempt: Attempt, final: bool, leave: Callable[[], None]) -> Verdict:
        starts.append(asyncio.get_running_loop().time())
        return await well(rollout, attempt, final, leave)

    running = scheduler(store, execute, concurrency=1)
    running.cooldown_s = 0.05
    await running.run()
    assert all(later - earlier >= 0.049 for earlier, later in pairwise(starts))
