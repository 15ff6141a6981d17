"""The loop with real runs, a real gateway and real gradings, before a fake server and a trainer that hashes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import json
import random
import re
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from msgspec.structs import replace

from understudy.errors import BackendError, ConfigError, TaskError
from understudy.run.collector import RolloutCollector, RolloutSettings, TrainedModelServer
from understudy.sandbox.base import load_sandboxes
from understudy.store import Store
from understudy.tasks.records import dump
from understudy.train.algorithms.batch import with_signal
from understudy.train.groups import read_groups
from understudy.train.loop.batches import STALE, draw_tasks
from understudy.train.loop.loop import Loop, Watcher
from understudy.train.loop.state import GroupRef, LoopDirectory, LoopState, StepState
from understudy.types import Call

from fakes.control import weights_in
from fakes.loop_program import Order, quick_task, run, small_loop
from fakes.policy import FakePolicy
from support import calc_task

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def order(tmp_path: Path) -> Order:
    return small_loop(tmp_path)


@pytest.fixture
async def policy(order: Order) -> AsyncIterator[FakePolicy]:
    async with FakePolicy(Path(order.model), "first") as policy:
        yield policy


def at(order: Order, policy: FakePolicy, **more: Any) -> Order:
    return replace(order, url=f"{policy.url}/v1", **more)


def state_of(order: Order) -> LoopState:
    state = LoopDirectory(Path(order.root)).load()
    assert state is not None
    return state


def calls_of(run: Path) -> list[Call]:
    with Store.open(run, create=False) as store:
        attempts = [attempt for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)]
        return [call for attempt in attempts for call in store.calls.of_attempt(attempt.id)]


def attempts_of(run: Path) -> set[str]:
    with Store.open(run, create=False) as store:
        return {attempt.status for rollout in store.runs.rollouts() for attempt in store.runs.attempts(rollout.id)}


async def run_for(order: Order, seconds: float) -> None:
    """Carry on with the loop, and call it off when it has not ended by then."""
    task = asyncio.ensure_future(run(order))
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def processes_of(program: str) -> list[Path]:
    processes: list[Path] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if program.encode() in path.read_bytes():
                processes.append(path)
    return processes


class Noting(Watcher):
    """Does something when a step is over."""

    def __init__(self, stepped: Callable[[StepState], None] = lambda _: None) -> None:
        self._stepped = stepped
        self.lines: list[str] = []
        self._loop: Loop | None = None

    def began(self, loop: Loop) -> None:
        self._loop = loop

    def stepped(self, step: StepState) -> None:
        assert self._loop is not None
        self.lines.append(self._loop.line())
        self._stepped(step)


async def test_each_wave_is_sampled_by_the_version_before_it(order: Order, policy: FakePolicy):
    watcher = Noting()
    summary = await run(order := at(order, policy), watcher)
    directory, state = LoopDirectory(Path(order.root)), state_of(order)
    assert (summary.steps, summary.updates, summary.version) == (3, 3, "step-0003")
    for step in state.steps:
        calls = calls_of(directory.run(step.step))
        assert {call.policy_version for call in calls} == {f"step-{step.step - 1:04}"}
        assert len(calls) == order.groups * order.samples
        assert all(call.logprobs and call.completion_token_ids for call in calls)
        assert step.staleness == 0
        with Store.open(directory.run(step.step), create=False) as store:
            rewards = [
                store.runs.verdict(a.id).reward for r in store.runs.rollouts() for a in store.runs.attempts(r.id)
            ]  # type: ignore[union-attr]
        assert (step.collected, step.solved) == (len(rewards), sum(rewards))
    assert [(each.step, each.version, each.total) for each in state.evaluations] == [
        (0, "step-0000", 2), (2, "step-0002", 2), (3, "step-0003", 2)
    ]  # fmt: skip
    assert policy.cut == 0, "calls were in flight when the weights were changed"
    assert policy.weights == weights_in(Path(summary.weights))
    assert policy.version == "step-0003"
    assert len(list(directory.root.glob("steps/*/weights"))) <= order.keep
    metrics = [json.loads(line) for line in (directory.root / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert watcher.lines[-1].startswith("step 3/3")


async def test_what_an_update_computed_for_tokens_is_kept_beside_the_calls(order: Order, policy: FakePolicy):
    order = at(order, policy, steps=2, eval_every=0, token_values_mb=1)
    await run(order)
    directory, state = LoopDirectory(Path(order.root)), state_of(order)
    updated = [step for step in state.steps if step.weights is not None]
    assert updated
    for step in updated:
        assert not directory.token_values(step.step).exists()
        learned = {call.id: len(call.completion_token_ids or ()) for call in calls_of(directory.run(step.step))}
        with Store.open(directory.run(step.step), create=False) as store:
            stored = store.training.of_step(step.step)
            assert stored and {each.version for each in stored} == {step.version}
            assert all(len(each.logprobs) == learned[each.call_id] for each in stored)


async def test_the_same_seed_is_the_same_loop_and_another_is_not(order: Order, policy: FakePolicy, tmp_path: Path):
    one = at(order, policy, steps=1, eval_every=0)
    await run(one)
    weights = policy.weights
    for seed, root in ((0, "again"), (1, "other")):
        policy.weights, policy.version, policy.cached = "first", "default", None
        await run(replace(one, root=str(tmp_path / root), seed=seed))
        assert (policy.weights == weights) == (seed == 0)


async def test_a_finished_loop_begins_nothing_and_can_be_made_longer(order: Order, policy: FakePolicy):
    order = at(order, policy, steps=1)
    first = await run(order)
    requests_before = policy.requests.total()
    again = await run(order)
    assert policy.requests.total() == requests_before
    assert (again.version, again.rollouts) == (first.version, first.rollouts)
    longer = await run(replace(order, steps=2))
    assert (longer.steps, longer.version) == (2, "step-0002")
    with pytest.raises(ConfigError, match="samples: 3 before, 4 now"):
        await run(replace(order, samples=4))


async def test_groups_without_a_signal_are_counted_and_make_no_version(order: Order, policy: FakePolicy):
    policy.answer = lambda _: "yes"
    summary = await run(order := at(order, policy, steps=2))
    assert (summary.updates, summary.version, summary.solved) == (0, "step-0000", 12)
    assert summary.skipped == {"groups whose rewards are all equal": 4}
    assert summary.weights == order.model
    assert [each.rate.estimate for each in summary.evaluations] == [1.0, 1.0]
    assert all(step.weights is None for step in state_of(order).steps)


async def test_an_update_waits_for_groups_that_differ(order: Order, policy: FakePolicy):
    order = at(order, policy, groups=2, samples=2, steps=4, min_groups=2, eval_every=0, concurrency=1)
    names = [f"calc-{number}" for number in range(5)]
    one, other = draw_tasks(names, {}, 2, seed=order.seed, step=1)
    turns, telling = itertools.cycle(("yes", "no")), {one}

    def answer(prompt: str) -> str:
        """Of the tasks that are telling every other rollout is solved, of the others each."""
        number = re.search(r"return x \+ (\d+),", prompt)
        assert number is not None
        return next(turns) if f"calc-{int(number[1]) - 1}" in telling else "yes"

    def stepped(step: StepState) -> None:
        telling.clear()
        telling.update({2: names}.get(step.step, ()))

    policy.answer = answer
    summary = await run(order, Noting(stepped))
    first, second, third, last = state_of(order).steps
    waiting = (GroupRef(1, one),)
    assert (first.used, first.dropped, first.held) == ((GroupRef(1, other),), (), waiting)
    assert (second.used, second.dropped, second.held) == ((GroupRef(2, second.tasks[0]),), (), waiting)
    figures = [(step.solved, step.collected, step.reward, step.groups) for step in (first, second, third)]
    assert figures == [(3, 4, 0.75, 0), (2, 2, 1.0, 0), (1, 2, 0.5, 2)], "a rollout is counted once"
    assert first.weights is second.weights is None
    assert first.skipped == second.skipped == {"groups whose rewards are all equal": 1}
    assert third.used == (GroupRef(1, one), GroupRef(3, third.tasks[0]))
    assert (third.version, third.groups, third.staleness, third.held, third.dropped) == ("step-0003", 2, 0, (), ())
    # At the end there is nothing to wait for.
    assert (len(last.tasks), len(last.used), last.held, last.weights) == (2, 2, (), None)
    assert (summary.updates, summary.version) == (1, "step-0003")
    tried = Counter(ref.task for step in state_of(order).steps for ref in (*step.used, *step.dropped))
    assert {task for task, rate in state_of(order).rates.items() if rate.tried == order.samples} == {
        task for task, times in tried.items() if times == 1
    }


async def test_asynchronously_no_group_that_waits_is_lost_or_learned_from_twice(order: Order, policy: FakePolicy):
    order = at(order, policy, asynchronous=True, groups=3, samples=2, steps=5, min_groups=2, eval_every=0)
    moments = random.Random(3)
    for _ in range(4):
        await run_for(order, moments.random())
    await run(order)
    state = state_of(order)
    assert (state.done, state.pending()) == (order.steps, ())
    over = Counter(ref for step in state.steps for ref in (*step.used, *step.dropped))
    assert over == Counter(GroupRef(step.step, task) for step in state.steps for task in step.tasks)
    for step in state.steps:
        telling = with_signal(read_groups(LoopDirectory(Path(order.root)).groups(step.step)))
        assert step.weights is None or step.step == order.steps or len(telling) >= order.min_groups
        assert not step.held or (step.weights is None and len(step.held) < order.min_groups)


async def test_a_task_that_is_refused_is_not_chosen_again(order: Order, policy: FakePolicy, tmp_path: Path):
    broken = msgspec.structs.replace(quick_task(0), gold_patch=quick_task(1).gold_patch)
    dump([broken, quick_task(1), quick_task(2)], tmp_path / "train.jsonl")
    summary = await run(order := at(order, policy, groups=3, steps=3))
    assert list(summary.refused_tasks) == ["calc-0"]
    first, *others = state_of(order).steps
    assert "calc-0" in first.tasks
    assert all("calc-0" not in step.tasks for step in others)
    assert summary.steps == 3


async def test_when_all_of_a_wave_is_refused_the_next_takes_others(
    order: Order, policy: FakePolicy, tmp_path: Path
):
    broken = [msgspec.structs.replace(calc_task(number), gold_patch=calc_task(9).gold_patch) for number in (0, 1)]
    dump([*broken, calc_task(2)], tmp_path / "train.jsonl")
    summary = await run(order := at(order, policy, groups=1, samples=2, steps=3, eval_every=0))
    assert summary.steps == 3
    assert state_of(order).steps[-1].tasks == ("calc-2",)
    dump(broken[:1], tmp_path / "train.jsonl")
    with pytest.raises(TaskError, match=r"none of the --tasks passed validation, [^:]*:\n  calc-0: "):
        await run(replace(order, steps=1, root=str(tmp_path / "other")))
    dump([calc_task(3)], tmp_path / "train.jsonl")
    dump(broken[:1], tmp_path / "eval.jsonl")
    with pytest.raises(TaskError, match="none of the --eval-tasks passed"):
        await run(replace(order, steps=1, root=str(tmp_path / "third")))


async def test_a_server_on_the_trainers_gpu_sleeps_during_each_update(order: Order, policy: FakePolicy):
    order = at(order, policy, steps=1, eval_every=0, way="sleep")
    summary = await run(order)
    asleep, awake = (policy.called.index(path) for path in ("/sleep", "/collective_rpc"))
    assert asleep < awake and "/inference/v1/generate" not in policy.called[asleep:awake]
    assert (policy.weights, policy.asleep) == (weights_in(Path(summary.weights)), set())
    # What has nothing to learn from makes no weights, and yet it has to wake.
    policy.answer = lambda _: "yes"
    longer = await run(replace(order, steps=2))
    assert (longer.steps, longer.version) == (2, "step-0001")
    assert (policy.weights, policy.version, policy.asleep) == (
        weights_in(Path(summary.weights)),
        "step-0001",
        set(),
    )


async def test_ways_that_would_fail_later_are_refused_at_once(order: Order, policy: FakePolicy):
    with pytest.raises(ConfigError, match="--lora"):
        await run(at(order, policy, way="lora"))
    with pytest.raises(ConfigError, match="--async"):
        await run(at(order, policy, way="sleep", asynchronous=True))
    assert LoopDirectory(Path(order.root)).load() is None


async def test_a_publishing_that_fails_is_made_good_by_the_same_command(
    order: Order, policy: FakePolicy, tmp_path: Path
):
    order = at(order, policy, steps=2)
    await run(replace(order, root=str(tmp_path / "whole")))
    expected = policy.weights
    policy.weights, policy.version, policy.cached = "first", "default", None
    policy.fails["/collective_rpc"] = web.Response(status=500, text="no memory")
    with pytest.raises(BackendError, match="no memory"):
        await run(order)
    assert policy.paused
    assert [step.phase for step in state_of(order).steps] == ["updated"]
    collected = policy.requests.total()
    summary = await run(order)
    assert (summary.steps, summary.version) == (2, "step-0002")
    assert policy.requests.total() == collected + 6 + 2, "the first wave was collected again"
    assert policy.weights == expected, "the update that waited to be published was forgotten"


async def test_a_loop_that_is_told_to_stop_ends_and_goes_on(order: Order, policy: FakePolicy, tmp_path: Path):
    whole = await run(at(order, policy))
    weights = policy.weights
    policy.weights, policy.version, policy.cached = "first", "default", None
    collectors: list[RolloutCollector] = []
    order = at(order, policy, root=str(tmp_path / "stopped"))
    watcher = Noting(lambda step: collectors[0].drain() if step.step == 1 else None)
    stopped = await run(order, watcher, collectors.append)
    assert (stopped.stopped, stopped.steps) == (True, 1)
    summary = await run(order)
    assert (summary.stopped, summary.steps, summary.solved) == (False, 3, whole.solved)
    assert policy.weights == weights


@pytest.mark.services
async def test_called_off_at_any_moment_it_leaves_nothing_open_and_comes_to_the_same_end(
    order: Order, policy: FakePolicy, tmp_path: Path
):
    order, moments = at(order, policy, min_groups=2, eval_every=0), random.Random(0)
    await run(whole := replace(order, root=str(tmp_path / "whole")))
    for _ in range(12):
        await run_for(order, moments.choice([0.1, 0.4, 0.8]) * moments.random())
        gc.collect()  # a file or socket left open warns, which is an error
    await run(order)
    outcomes = [
        [(step.used, step.dropped, step.held, step.version) for step in state_of(each).steps]
        for each in (whole, order)
    ]
    assert outcomes[0] == outcomes[1]
    assert policy.weights == weights_in(LoopDirectory(Path(whole.root)).absolute(state_of(whole).weights))


async def test_what_runs_in_any_wave_is_let_finish(order: Order, policy: FakePolicy, tmp_path: Path):
    order = at(order, policy, asynchronous=True, groups=5, samples=2, steps=2, eval_every=0, concurrency=3)
    hold = tmp_path / "hold 1"
    hold.touch()
    collectors: list[RolloutCollector] = []

    def stop(_: StepState) -> None:
        collectors[0].drain()
        asyncio.get_running_loop().call_later(1.0, hold.unlink)

    assert (await run(order, Noting(stop), collectors.append)).stopped
    directory = LoopDirectory(Path(order.root))
    for number in (1, 2):
        assert attempts_of(directory.run(number)) <= {"succeeded"}


def collector_of(order: Order, policy: FakePolicy, command: str) -> RolloutCollector:
    served = TrainedModelServer(backend="vllm", urls=(f"{policy.url}/v1",), model="m", tokenizer=order.model)
    rollout_settings = RolloutSettings(agent="shell", agent_options={"command": command})
    return RolloutCollector(
        served, rollout_settings, sandboxes=load_sandboxes("unsafe-local"), concurrency=2, version="step-0000"
    )


async def test_a_call_that_never_ends_holds_up_neither_a_change_of_weights_nor_the_end(
    order: Order, policy: FakePolicy, tmp_path: Path
):
    policy.slow_s = 3600.0
    collector = collector_of(order, policy, f"python3 {order.agent}")
    wave = collector.start([calc_task(0)], tmp_path / "run", samples=1, seed=0)
    await policy.begun.wait()
    versions: list[str] = []

    async def publish() -> None:
        versions.append(collector.version)

    swap = await collector.update_weights("step-0001", publish, drain_s=0.1)
    assert (swap.cut, versions, collector.version) == (1, ["step-0000"], "step-0001")
    await collector.close()
    assert wave.ended
    assert attempts_of(tmp_path / "run") == {"unresponsive"}
    assert not processes_of(order.agent)


async def test_what_failed_stays_so_when_a_wave_is_gone_on_with(order: Order, policy: FakePolicy, tmp_path: Path):
    for _ in range(2):
        collector = collector_of(order, policy, "exit 3")
        wave = collector.start([calc_task(0)], tmp_path / "run", samples=1, seed=0)
        assert (await wave.wait()).infrastructure_failures == 1
        assert (await wave.task_counts())["calc-0"].failed == 1
        assert (wave.progress.done, wave.progress.failed) == (1, 1)
    with Store.open(tmp_path / "run", create=False) as store:
        assert len(store.runs.attempts(store.runs.rollouts()[0].id)) == 3


async def test_asynchronously_the_next_wave_goes_on_while_the_policy_is_updated(
    order: Order, policy: FakePolicy, tmp_path: Path
):
    order = at(order, policy, asynchronous=True, quorum=1.0, steps=2, samples=2, eval_every=0)
    second_run = LoopDirectory(Path(order.root)).run(2)
    await run(order, waits=lambda: not ((second_run / "store.db").exists() and calls_of(second_run)))
    first = {call.policy_version for call in calls_of(LoopDirectory(Path(order.root)).run(1))}
    second = {call.policy_version for call in calls_of(second_run)}
    assert first == {"step-0000"}
    assert "step-0000" in second, "nothing of the second wave was collected during the first update"
    assert state_of(order).steps[1].staleness == 1


def hold_a_group(order: Order, tmp_path: Path) -> tuple[Watcher, list[str]]:
    """Agents of the first task, but its first, wait until the first step is over."""
    hold = tmp_path / "hold 1"
    hold.touch()
    return Noting(lambda step: hold.unlink(missing_ok=True)), ["calc-0"]


async def test_groups_that_are_not_finished_are_carried_over(order: Order, policy: FakePolicy, tmp_path: Path):
    order = at(order, policy, asynchronous=True, groups=5, samples=2, steps=2, eval_every=0, concurrency=3)
    watcher, unfinished = hold_a_group(order, tmp_path)
    await run(order, watcher)
    first, second = state_of(order).steps
    assert unfinished[0] in first.tasks
    assert GroupRef(1, unfinished[0]) not in first.used
    assert GroupRef(1, unfinished[0]) in second.used
    assert second.staleness == 1
    assert len(second.tasks) == order.groups - (len(first.tasks) - len(first.used))
    assert state_of(order).pending() == ()


async def test_groups_that_are_too_old_are_dropped_and_counted(order: Order, policy: FakePolicy, tmp_path: Path):
    order = at(
        order,
        policy,
        asynchronous=True,
        groups=5,
        samples=2,
        steps=2,
        eval_every=0,
        concurrency=3,
        max_staleness=0,
        quorum=0.0,
    )
    watcher, unfinished = hold_a_group(order, tmp_path)
    summary = await run(order, watcher)
    first, second = state_of(order).steps
    assert first.groups > 0, "an update waits for one group at least"
    assert GroupRef(1, unfinished[0]) in second.dropped
    assert summary.skipped[STALE] == len(second.dropped)
    assert second.staleness == 0


async def test_two_loops_do_not_share_a_directory(order: Order, policy: FakePolicy):
    order = at(order, policy, steps=1)

    class Second(Watcher):
        error = ""

        def began(self, loop: Loop) -> None:
            from understudy.util.files import locked

            try:
                with locked(LoopDirectory(Path(order.root)).lock, busy="busy"):
                    self.error = "not locked"
            except ConfigError as error:
                self.error = str(error)

    watcher = Second()
    await run(order, watcher)
    assert watcher.error == "busy"


async def test_weights_that_are_gone_are_told(order: Order, policy: FakePolicy):
    order = at(order, policy, steps=1)
    summary = await run(order)
    shutil.rmtree(summary.weights)
    with pytest.raises(ConfigError, match="the weights that the loop continues from, is missing"):
        await run(replace(order, steps=2))
