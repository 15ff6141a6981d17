"""A loop whose waves are in a database: the same figures as in directories, and what it refuses."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.errors import ConfigError, StoreError
from understudy.report.figures import Point
from understudy.report.read import read_figures
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.train.loop.loop import Loop, Watcher
from understudy.train.loop.state import LoopDirectory, StepState
from understudy.view.loops import loop_view

from fakes.loop_program import Order, run, small_loop
from fakes.policy import FakePolicy
from support.postgresql import PostgresqlServer

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
async def policy(tmp_path: Path) -> AsyncIterator[FakePolicy]:
    small_loop(tmp_path)
    async with FakePolicy(tmp_path / "model", "first") as policy:
        yield policy


@pytest.fixture
def order(tmp_path: Path, policy: FakePolicy) -> Order:
    return replace(small_loop(tmp_path), url=f"{policy.url}/v1", steps=2)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"store": "runs/here"}, "--store runs/here: expected the URL of a database"),
        ({"engine": "workers"}, "--engine workers needs the database .* --store"),
        ({"engine": "ray"}, "--engine ray needs the database .* --store"),
        (
            {"engine": "workers", "store": "postgresql:///x", "url": ""},
            "--engine workers needs a model server .* --base-url",
        ),
        ({"engine": "workers", "store": "postgresql:///x", "asynchronous": True}, "unsupported with --async"),
    ],
)
async def test_what_cannot_go_together_is_refused_before_anything_is_written(
    order: Order, more: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(replace(order, **more))
    assert LoopDirectory(Path(order.root)).load() is None


def comparable(point: Point) -> Point:
    return replace(point, directory="", seconds=None)


@pytest.mark.services
async def test_reports_and_views_of_a_loop_in_a_database_are_those_of_one_in_directories(
    order: Order, policy: FakePolicy, tmp_path: Path, postgresql_server: PostgresqlServer
) -> None:
    # The database is found without a password in the state, as from ~/.pgpass.
    url = postgresql_server.new_store()
    there = replace(order, root=str(tmp_path / "there"), store=url.secret_url)
    weights: list[str] = []
    for each in (order, there):
        policy.weights, policy.version, policy.cached = "first", "default", None
        await run(each)
        weights.append(policy.weights)
    assert weights[0] == weights[1]
    os.environ["PGPASSWORD"] = "not-a-secret-5f1c"
    try:
        one, other = [await asyncio.to_thread(read_figures, [Path(each.root)]) for each in (order, there)]
    finally:
        del os.environ["PGPASSWORD"]
    for name in ("points", "collected"):
        first, second = (list(map(comparable, getattr(each, name))) for each in (one, other))
        assert first == second and all(point.from_store for point in second)
    versions = [[(use.version, use.calls, use.mixed) for use in each.versions] for each in (one, other)]
    assert one.tasks == other.tasks and versions[0] == versions[1]
    with Store.open(url) as store:
        view = loop_view("x", Path(there.root), lambda location: ("waves", store) if location == url else None)
        assert [[stage.count for stage in step.funnel][:2] for step in view.steps] == [[6, 6], [6, 6]]
        assert {each.store_id for each in (*view.steps, *view.evaluations)} == {"waves"}
        reasons = {run.wave for run in store.space.runs()}
        assert len(reasons) == 4 and None not in reasons


class _Once(Watcher):
    """Does something after the first step."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def began(self, loop: Loop) -> None:
        pass

    def stepped(self, step: StepState) -> None:
        if step.step == 1:
            self._work()


@pytest.mark.services
async def test_a_server_that_goes_away_is_waited_for(order: Order, policy: FakePolicy) -> None:
    from support.postgresql import running_server

    with running_server() as server:
        url = server.new_store()

        def restart() -> None:
            server.stop()
            threading.Timer(2.0, server.start).start()

        summary = await run(replace(order, store=url.secret_url, eval_every=0), _Once(restart))
        assert (summary.steps, summary.stopped) == (2, False)
        with Store.open(url) as store:
            assert {rollout.status for rollout in store.runs.rollouts()} == {"succeeded"}


@pytest.mark.services
async def test_wrong_databases_are_refused_and_nothing_is_asked(
    order: Order, policy: FakePolicy, tmp_path: Path, postgresql_server: PostgresqlServer
) -> None:
    newer = postgresql_server.new_store()
    postgresql_server.execute("UPDATE alembic_version SET version_num = '9999'", newer.database)
    wrong = postgresql_server.url("nothing-there")
    password = newer.secret_url.replace("not-a-secret", "wrong-password")
    for url, message in (
        (newer.secret_url, "newer"),
        (wrong, "check the names of the database"),
        (password, "refused the user"),
    ):
        with pytest.raises(StoreError, match=message) as refused:
            await run(replace(order, store=url))
        assert "a-secret" not in str(refused.value) and "wrong-password" not in str(refused.value)
    assert policy.requests.total() == 0
    store = postgresql_server.new_store()
    here = replace(order, store=store.secret_url, steps=1)
    await run(here)
    with pytest.raises(
        ConfigError, match="keeps its rollouts in a database; give --store 'postgresql://postgres@"
    ):
        await run(replace(here, store=None))
    with pytest.raises(ConfigError, match="has no rollouts of the loop in"):
        await run(replace(here, store=postgresql_server.new_store().secret_url))
    await run(inside := replace(order, root=str(tmp_path / "inside"), steps=1))
    with pytest.raises(ConfigError, match="keeps its rollouts in that directory; leave out --store"):
        await run(replace(inside, store=store.secret_url))
    state = LoopDirectory(Path(inside.root)).load()
    assert state is not None and state.database is None


@pytest.mark.services
async def test_one_loop_is_executed_once_also_where_file_locks_do_not_reach(
    order: Order, policy: FakePolicy, postgresql_store: StoreUrl
) -> None:
    order = replace(order, store=postgresql_store.secret_url, steps=1)
    await run(order)
    state = LoopDirectory(Path(order.root)).load()
    assert state is not None and state.database is not None
    with (
        Store.open(postgresql_store) as store,
        store.hold(f"loop {state.database.loop}", busy=""),
        pytest.raises(ConfigError, match="another process executes the loop"),
    ):
        await run(replace(order, steps=2))
