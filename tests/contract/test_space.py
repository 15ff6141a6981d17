"""The room that a store takes: what is removed, what stays, and that nobody else works on it meanwhile."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import inspect

from understudy.errors import StoreError, StoreInUse
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.calls import RequestTree
from understudy.store.copying import copy_store
from understudy.store.runs import Lease
from understudy.store.schema import metadata
from understudy.store.training import TokenValues
from understudy.types import Verdict

from support.postgresql import LosingProxy, PostgresqlServer
from support.store import make_call, prepare, running


def fill(store: Store, run: str, log: bytes = b"log") -> None:
    """A run that has ended: one rollout of four calls, which share their first message with those of others."""
    prepare(store, 1, run=run)
    attempt = running(store, f"{run}-0")
    for turn in range(4):
        messages = ["shared" * 50, *(f"turn {k} of {run} " * 400 for k in range(turn + 1))]
        body = json.dumps({"system": "s" * 500, "tools": [{}], "messages": messages}).encode()
        ids = tuple(range(turn * 3 + 4))
        parent = f"{attempt.id}-{turn - 1}" if turn else None
        call = make_call(attempt.id, turn, request=body, parent_id=parent, prompt_token_ids=ids)
        store.calls.append(call).result()
    values = TokenValues(call_id=f"{attempt.id}-0", logprobs=(0.5,), ratios=(1.0,), advantages=(2.0,))
    step = max((each.step for each in store.training.steps()), default=0) + 1
    store.training.record(step, "v", [values], limit_bytes=1 << 20).result()
    store.runs.finish_attempt(
        attempt.id,
        "succeeded",
        "succeeded",
        patch=f"patch of {run}".encode(),
        verdict=Verdict(reward=1.0, reason=f"of {run}"),
        logs={"log": log},
    ).result()
    store.votes.put("rollout", f"{run}-0", "me", "exclude", "").result()


@pytest.fixture
def store(location: StoreLocation) -> Iterator[Store]:
    with Store.open(location) as store_of_test:
        for run in ("old", "new"):
            fill(store_of_test, run)
    with Store.open(location, exclusive=True) as store_of_test:
        yield store_of_test


def everything(store: Store, run: str) -> list[object]:
    attempt = f"{run}-0.1"
    return [
        list(store.calls.of_attempt(attempt)),
        store.runs.patch(attempt),
        store.runs.verdict(attempt),
        store.runs.logs(attempt),
        store.runs.task(run, "t"),
        store.training.of_call(f"{attempt}-0"),
    ]


def test_a_run_that_is_removed_leaves_the_others_whole_and_nothing_of_its_own(
    store: Store, tmp_path: Path
) -> None:
    remaining = everything(store, "new")
    expected = store.space.unused(without_runs=["old"])
    assert expected.contents > 0 and store.space.unused().contents == 0
    assert store.space.remove(["old"]) == expected
    assert everything(store, "new") == remaining
    assert [each.run_id for each in store.space.runs()] == [each.id for each in store.runs.all()] == ["new"]
    assert store.votes.all() and all(each.subject_id == "new-0" for each in store.votes.all())
    assert store.space.unused().contents == 0
    # The last one's numbers may be given again: what is written now is what is read.
    fill(store, "again")
    assert everything(store, "new") == remaining
    # A copy of it is made and compared.
    with Store.open(tmp_path / "copy") as copy:
        copy_store(store, copy)
        assert everything(copy, "new") == remaining


def test_bodies_that_are_removed_are_missed_with_the_date_and_the_rest_stays(store: Store) -> None:
    remaining, before = everything(store, "new"), everything(store, "old")
    expected = store.space.unused(without_bodies=["old"])
    removed = store.space.remove(bodies=["old"])
    # One content, the note that they were removed, is new.
    assert removed == expected
    for read in (
        lambda: list(store.calls.of_attempt("old-0.1")),
        lambda: store.calls.in_parts("old-0.1", RequestTree()),
        lambda: store.calls.get("old-0.1-2"),
    ):
        with pytest.raises(StoreError, match=r"removed by `understudy prune` on \d{4}-\d\d-\d\d"):
            read()
    tokens = store.calls.with_tokens([f"old-0.1-{n}" for n in range(4)])
    assert [tuple(each.prompt_token_ids or ()) for each in tokens] == [tuple(range(n * 3 + 4)) for n in range(4)]
    assert store.runs.patch("old-0.1") == b"patch of old" and store.runs.verdict("old-0.1") == before[2]
    assert store.runs.logs("old-0.1") == {} and store.training.of_call("old-0.1-0") == before[5]
    assert everything(store, "new") == remaining
    assert {each.run_id: (each.calls, each.pruned) for each in store.space.runs()} == {
        "old": (4, 4),
        "new": (4, 0),
    }
    assert store.space.remove(bodies=["old"]).contents == 0, "the same again finds nothing"


def test_values_of_trainers_go_alone(store: Store) -> None:
    sizes = {each.run_id: each.value_bytes for each in store.space.runs()}
    assert sizes["old"] == sizes["new"] > 0
    store.space.remove(values=["old"])
    assert store.training.of_call("old-0.1-0") == [] and len(store.training.of_call("new-0.1-0")) == 1
    assert len(list(store.calls.of_attempt("old-0.1"))) == 4
    assert store.training.steps()[0].calls == 1


def test_a_run_with_open_rollouts_has_not_ended(store: Store) -> None:
    prepare(store, 2, run="open")
    assert {each.run_id: each.ended for each in store.space.runs()} == {"old": True, "new": True, "open": False}


def test_the_room_is_given_back_and_the_tables_are_as_before(store: Store) -> None:
    fill(store, "large", log=random.Random(0).randbytes(3 << 20))
    before, _ = store.space.file_size()
    store.space.remove(["old", "large"])
    assert store.space.compact() == ""
    after, free = store.space.file_size()
    if store.bucket.setting is None:  # else the room is in the bucket
        assert after < before
    assert not free
    engine = store._database.engine  # pyright: ignore[reportPrivateUsage]
    with engine.connect() as connection:
        names = {each["name"] for table in metadata.tables for each in inspect(connection).get_indexes(table)}
    assert not any(str(name).startswith("prune") for name in names)


def test_nobody_else_has_the_store_open_meanwhile(location: StoreLocation) -> None:
    with Store.open(location) as other:
        prepare(other)
        with pytest.raises(StoreInUse, match="is in use"):
            Store.open(location, exclusive=True)
        assert len(other.runs.all()) == 1
    with Store.open(location, exclusive=True), pytest.raises(StoreInUse):
        Store.open(location, exclusive=True)
    Store.open(location).close()


@pytest.mark.services
def test_an_earlier_release_that_takes_no_lock_is_seen(postgresql_store: StoreUrl) -> None:
    psycopg = pytest.importorskip("psycopg")
    with Store.open(postgresql_store) as filled:
        fill(filled, "old")
    earlier = {"application_name": "understudy", "autocommit": True}
    with (
        psycopg.connect(postgresql_store.secret_url, **earlier),
        pytest.raises(StoreInUse, match="1 connections belong to an earlier release"),
    ):
        Store.open(postgresql_store, exclusive=True)
    with Store.open(postgresql_store, exclusive=True) as store:
        with (
            psycopg.connect(postgresql_store.secret_url, **earlier),
            pytest.raises(StoreInUse, match="belong to an earlier release"),
        ):
            store.space.remove(["old"])
        assert [each.run_id for each in store.space.runs()] == ["old"]


@pytest.mark.services
def test_who_holds_a_lease_keeps_the_store_without_a_connection(postgresql_store: StoreUrl) -> None:
    with Store.open(postgresql_store) as store:
        store.leases.serve_alone(Lease("gateway-1", 60.0), "0.1.0").result()
    with pytest.raises(StoreInUse, match="the leases of gateway-1 have not expired"):
        Store.open(postgresql_store, exclusive=True)
    with Store.open(postgresql_store) as store:
        store.leases.give_back(Lease("gateway-1", 60.0)).result()
    Store.open(postgresql_store, exclusive=True).close()


@pytest.mark.services
def test_a_removal_ends_with_its_connection(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl
) -> None:
    with Store.open(postgresql_store) as filled:
        fill(filled, "old")
    with LosingProxy(postgresql_server) as proxy, Store.open(proxy.url(postgresql_store), exclusive=True) as store:
        proxy.cut()
        proxy.mend()
        with pytest.raises(
            StoreError, match="the connection was lost, so other processes may have used the store since"
        ):
            store.space.remove(["old"])
        with pytest.raises(StoreError, match="the connection was lost"):
            store.space.runs()

    def interrupt(_: str) -> None:
        proxy.cut()
        raise KeyboardInterrupt

    with (
        LosingProxy(postgresql_server) as proxy,
        Store.open(proxy.url(postgresql_store), exclusive=True) as store,
        pytest.raises(KeyboardInterrupt),  # psycopg closes a connection whose query was interrupted
    ):
        store.space.remove(["old"], report=interrupt)
    with Store.open(postgresql_store, exclusive=True) as store:
        assert [each.run_id for each in store.space.runs()] == ["old"]
        store.space.remove(["old"])


@pytest.mark.services
def test_who_was_cut_off_meanwhile_remembers_no_contents_that_are_gone(
    postgresql_server: PostgresqlServer, postgresql_store: StoreUrl
) -> None:
    with LosingProxy(postgresql_server) as proxy, Store.open(proxy.url(postgresql_store)) as client:
        fill(client, "old")
        proxy.cut()
        with Store.open(postgresql_store, exclusive=True) as store:
            store.space.remove(["old"])
        proxy.mend()
        fill(client, "old")
        assert [each.sequence for each in client.calls.of_attempt("old-0.1")] == [0, 1, 2, 3]
    with Store.open(postgresql_store, exclusive=True) as store:
        assert store.space.unused().contents == 0
