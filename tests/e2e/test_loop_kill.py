"""A loop that is killed goes on, and comes to the state of one that was not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from understudy.store import Store
from understudy.store.address import StoreUrl, parse_location
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout, read_groups
from understudy.train.loop.runtime import LoopSummary
from understudy.train.loop.state import LoopDirectory, LoopState, StepState

from fakes.control import weights_in
from fakes.loop_program import Order, small_loop
from fakes.policy import AGENT, FakePolicy
from support import UNDERSTUDY, kills, understudy
from support.postgresql import PostgresqlServer
from support.tiny_model import make_model
from support.workers import worker

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(900),
]

KILLS = kills(5)

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def order(tmp_path_factory: pytest.TempPathFactory) -> Order:
    """A loop over small tasks that is not begun yet, without the address of its server."""
    return small_loop(tmp_path_factory.mktemp("small"))


@asynccontextmanager
async def served(order: Order, root: str) -> AsyncIterator[tuple[Order, FakePolicy]]:
    """The loop in another directory, with a server of its own that outlives its kills."""
    async with FakePolicy(Path(order.model), "first") as policy:
        yield replace(order, root=root, url=f"{policy.url}/v1"), policy


async def start(order: Order) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fakes.loop_program", msgspec.json.encode(order).decode()),
        stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe,
        cwd=TESTS, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


async def to_its_end(order: Order) -> LoopSummary:
    process = await start(order)
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return msgspec.json.decode(out, type=LoopSummary)


def groups_in(path: Path, *, with_logprobs: bool = True) -> tuple[list[RolloutGroup], list[float]]:
    """The groups in a file without the ids of their calls, which are random, and their logprobs."""
    groups, logprobs = read_groups(path), list[float]()

    def bare(sequence: TokenSequence) -> TokenSequence:
        logprobs.extend(sequence.logprobs or ())
        spans = tuple(("", start, end) for _, start, end in sequence.calls)
        return replace(sequence, calls=spans, logprobs=sequence.logprobs if with_logprobs else None)

    def stripped(rollout: TrainingRollout) -> TrainingRollout:
        return replace(rollout, sequences=tuple(map(bare, rollout.sequences)))

    return [replace(group, rollouts=tuple(map(stripped, group.rollouts))) for group in groups], logprobs


def history(root: str) -> dict[str, Any]:
    """All of a loop's state but what a clock says, with what its updates learned from and came to."""
    directory = LoopDirectory(Path(root))
    state = replace(state_of(Path(root)), database=None)
    groups = {step.step: groups_in(directory.groups(step.step))[0] for step in state.steps}
    return {
        "state": msgspec.to_builtins(without_clock(state)),
        "groups": groups,
        "weights": weights_in(directory.absolute(state.weights)),
        "kept": sorted(path.parent.name for path in directory.root.glob("steps/*/weights")),
    }


def without_ids(history: dict[str, Any]) -> dict[str, Any]:
    """A history without the ids of rollouts, of which those in a database have others."""

    def nameless(group: RolloutGroup) -> RolloutGroup:
        return replace(group, rollouts=tuple(replace(each, rollout_id="") for each in group.rollouts))

    return history | {"groups": {step: list(map(nameless, groups)) for step, groups in history["groups"].items()}}


def state_of(root: Path) -> LoopState:
    state = LoopDirectory(root).load()
    assert state is not None
    return state


def without_clock(state: LoopState) -> LoopState:
    def timeless(step: StepState) -> StepState:
        return replace(step, seconds={}, report=step.report | {"seconds": 0.0})

    return replace(
        state,
        steps=tuple(map(timeless, state.steps)),
        evaluations=tuple(replace(each, seconds=0.0) for each in state.evaluations),
    )


def assert_sound(root: str, order: Order) -> None:
    """No group is learned from twice or lost, no rollout that had ended was repeated."""
    directory, state = LoopDirectory(Path(root)), state_of(Path(root))
    assert [step.phase for step in state.steps] == ["published"] * order.steps
    assert state.pending() == ()
    refs = [ref for step in state.steps for ref in (*step.used, *step.dropped)]
    # What was carried over took the place of new ones.
    expected = order.steps * order.groups
    assert len(set(refs)) == len(refs) <= expected if order.asynchronous else len(refs) == expected
    runs = [each.run for each in (*state.steps, *state.evaluations)]
    for wave in [directory.wave(state, run) for run in runs]:
        with Store.open(parse_location(order.store or wave.store), create=False) as store:
            run = store.runs.all()[0] if wave.wave is None else store.runs.of_wave(wave.wave)
            assert run is not None
            for rollout in store.runs.rollouts(run.id):
                statuses = [attempt.status for attempt in store.runs.attempts(rollout.id)]
                assert statuses.count("succeeded") == 1
                assert set(statuses) <= {"succeeded", "unresponsive"}


@pytest.fixture(scope="module")
def unbroken(order: Order, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The history of the loop that nobody kills."""

    async def to_the_end() -> dict[str, Any]:
        async with served(order, str(tmp_path_factory.mktemp("whole") / "loop")) as (whole, _):
            summary = await to_its_end(whole)
        assert (summary.steps, summary.stopped) == (order.steps, False)
        return history(whole.root)

    return asyncio.run(to_the_end())


async def test_killed_at_random_moments_it_comes_to_the_same_state(
    order: Order, unbroken: dict[str, Any], tmp_path: Path
):
    draw, killed_so_far, number = random.Random(7), 0, 0
    while killed_so_far < KILLS:
        number += 1
        async with served(order, str(tmp_path / f"killed {number}")) as (killed, policy):
            while killed_so_far < KILLS:
                process = await start(killed)
                try:
                    await asyncio.wait_for(process.wait(), draw.uniform(0.5, 4.0))
                    break
                except TimeoutError:
                    process.kill()
                    killed_so_far += 1
                await process.communicate()
            await to_its_end(killed)
            assert policy.weights == unbroken["weights"]
            assert not policy.paused
        assert history(killed.root) == unbroken
        assert_sound(killed.root, order)


MOMENTS = [
    "after evaluation 0",
    "before update 1",
    "during update 1",
    "after update 1",
    "while publishing step-0001",
    "after step 1",
    "after evaluation 2",
    "during update 3",
    "after update 3",
    "while publishing step-0003",
    "after step 3",
]
"""In the order in which they come."""


def _kill_at(process: asyncio.subprocess.Process, version: str, path: str) -> None:
    """Kill a loop when it has the server load this version, which is in a directory of that name."""
    if Path(path).parent.name == version:
        process.kill()


async def test_killed_between_any_two_things_it_does_neither_twice(
    order: Order, unbroken: dict[str, Any], tmp_path: Path
):
    async with served(order, str(tmp_path / "killed")) as (killed, policy):
        for moment in MOMENTS:
            process = await start(replace(killed, die=moment))
            policy.loading = partial(_kill_at, process, moment.rpartition(" publishing ")[2])
            _, err = await process.communicate()
            assert process.returncode == -9, (moment, err.decode())
        await to_its_end(killed)
        assert policy.weights == unbroken["weights"]
    assert history(killed.root) == unbroken
    assert_sound(killed.root, order)


async def test_an_asynchronous_loop_loses_and_repeats_nothing(order: Order, tmp_path: Path):
    order = replace(order, asynchronous=True, steps=4, slow_s=0.3)
    draw = random.Random(11)
    async with served(order, str(tmp_path / "loop")) as (killed, _):
        for _kill in range(max(2, KILLS // 3)):
            process = await start(killed)
            try:
                await asyncio.wait_for(process.wait(), draw.uniform(1.0, 4.0))
            except TimeoutError:
                process.kill()
            await process.communicate()
        summary = await to_its_end(killed)
    assert summary.steps == 4
    assert_sound(killed.root, order)


async def test_in_a_database_it_comes_to_the_same_state(
    order: Order,
    unbroken: dict[str, Any],
    tmp_path: Path,
    postgresql_server: PostgresqlServer,
    postgresql_url: StoreUrl,
):
    order = replace(order, store=postgresql_url.secret_url)
    roots = [str(tmp_path / name) for name in ("here", "there")]
    draw = random.Random(13)
    async with served(order, roots[0]) as (killed, policy):
        for moment in ("during the wave", "before update 1", "after update 1", "after evaluation 2"):
            process = await start(replace(killed, die=moment))
            if moment == "during the wave":
                await policy.begun.wait()
                await asyncio.sleep(draw.uniform(0.0, 0.5))
                process.kill()
            _, err = await process.communicate()
            assert process.returncode == -9, (moment, err.decode())
            if moment == "during the wave":
                # As if its lease had ended.
                for table in ("workers", "attempts"):
                    change = f"UPDATE {table} SET lease_until = 0 WHERE lease_until IS NOT NULL"
                    postgresql_server.execute(change, postgresql_url.database)
            # Another machine may have the directory elsewhere.
            await asyncio.to_thread(Path(killed.root).rename, roots[1])
            killed = replace(killed, root=roots[1])
            roots.reverse()
        await to_its_end(killed)
        assert policy.weights == unbroken["weights"]
    assert without_ids(history(killed.root)) == without_ids(unbroken)
    assert_sound(killed.root, order)
    names = [name for _, _, files in os.walk(killed.root) for name in files]
    assert "state.json" in names and "store.db" not in names
    assert "not-a-secret" not in msgspec.json.encode(state_of(Path(killed.root))).decode()


async def test_workers_execute_its_waves_whoever_is_killed(
    order: Order, unbroken: dict[str, Any], tmp_path: Path, postgresql_store: StoreUrl
):
    order = replace(order, store=postgresql_store.secret_url, engine="workers")
    async with served(order, str(tmp_path / "loop")) as (killed, policy):
        policy.slow_s = 0.2
        with worker(postgresql_store) as first:
            process = await start(killed)
            await policy.begun.wait()
            os.killpg(first.pid, signal.SIGKILL)
            process.kill()
            await process.communicate()
        with worker(postgresql_store):
            summary = await to_its_end(killed)
        assert policy.weights == unbroken["weights"]
    assert (summary.steps, summary.stopped) == (order.steps, False)
    assert without_ids(history(killed.root)) == without_ids(unbroken)
    assert_sound(killed.root, order)
    with Store.open(postgresql_store) as store:
        assert len(store.runs.all()) == order.steps + len(unbroken["state"]["evaluations"])


def command(order: Order, model: Path, root: Path) -> list[str | Path]:
    return [
        *("train", "loop", model, "-t", order.tasks, "-e", order.eval_tasks, "-o", root, "--json", "-j", "1"),
        *("--steps", "2", "--groups", "2", "-n", "3", "--learning-rate", "0.001", "--answer-tokens", "8"),
        *("--agent", "shell", "--agent-command", f"python3 {order.agent}", "--sandbox", "unsafe-local"),
    ]


def test_the_real_server_and_trainer_come_to_the_same_weights(tmp_path: Path):
    pytest.importorskip("torch")
    import numpy as np
    from safetensors.numpy import load_file

    order = small_loop(tmp_path)
    # A random model says nothing that one could read.
    Path(order.agent).write_text(AGENT.replace('if "yes" in answer:', "if len(set(answer)) % 2:"))
    model = make_model(tmp_path / "random")
    env = {"OMP_NUM_THREADS": "1"}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = understudy(*command(order, model, whole), env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    draw = random.Random(5)
    for _ in range(max(2, KILLS // 5)):
        process = subprocess.Popen(
            [UNDERSTUDY, *map(str, command(order, model, killed))],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=os.environ | env,
        )  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(4.0, 9.0))
        process.kill()
        process.wait()
    done = understudy(*command(order, model, killed), env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    summary = msgspec.json.decode(done.stdout, type=LoopSummary)
    assert summary.updates > 0, "nothing was learned, so nothing is shown"
    # But for rounding: a server that begins in the middle of a wave has nothing that it remembers of its prompts.
    one, other = ((root / "steps" / "step-0001") for root in (whole, killed))
    (groups, logprobs), (other_groups, other_logprobs) = (
        groups_in(step / "groups.msgpack", with_logprobs=False) for step in (one, other)
    )
    assert groups == other_groups and logprobs == pytest.approx(other_logprobs, abs=1e-4)
    weights = [step / "weights" / "model.safetensors" for step in (one, other)]
    assert weights[0].exists() == weights[1].exists()
    if weights[0].exists():
        files = [load_file(path) for path in weights]
        flat = [np.concatenate([file[name].ravel() for name in sorted(file)]) for file in files]
        # Adam makes much of a gradient that is nearly nothing.
        assert (abs(flat[0] - flat[1]) > 1e-4).mean() < 1e-3
    steps = [[(step.tasks, step.phase) for step in state.steps] for state in map(state_of, (whole, killed))]
    assert steps[0][:1] == steps[1][:1] and [len(each) for each in steps] == [2, 2]
