"""The viewer on stores in PostgreSQL: the same answers as on directories, live, and nothing written by reading."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.copying import copy_store
from understudy.view.catalog import Catalog

from support import calc_task
from support.export import put_rollouts, put_sessions, session, wait
from support.postgresql import PASSWORD, LosingProxy, PostgresqlServer
from support.view import ViewClient, viewing

pytestmark = pytest.mark.services


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def copied(directory: Path, server: PostgresqlServer) -> StoreUrl:
    """A database with all that the store in a directory has."""
    url = server.new_database()
    with Store.open(directory, create=False) as source, Store.open(url) as target:
        copy_store(source, target)
    return url


async def answers(client: ViewClient, store: str) -> dict[str, Any]:
    """What every list, page and search of a store answers, without the store's own id and place."""
    own = store.rpartition("/")[2]
    result = {path: await client.get(f"{store}{path}") for path in ("", "/health", "/tasks", "/pairs", "/votes")}
    result["/gateway"] = {**await client.get(f"{store}/gateway"), "note": ""}
    for name in ("path", "name", "changed_at"):
        del result[""][name]
    for query in ({}, {"sort": "reward", "descending": "true"}, {"outcome": "unsolved"}, {"q": "give up"}):
        result[f"rollouts {query}"] = await client.get(f"{store}/rollouts", **query)
    for row in result["rollouts {}"]["rollouts"]:
        rollout = f"/rollouts/{row['id']}"
        for part in ("", "/turns", "/calls", "/patch"):
            result[rollout + part] = await client.get(f"{store}{rollout}{part}")
        for turn in result[f"{rollout}/turns"]["turns"]:
            call = turn["call_id"]
            result[f"tokens {call}"] = await client.get(f"{store}{rollout}/tokens", call=call)
            for block in turn["answered"]:
                result[block["ref"]] = await client.get(f"{store}{rollout}/body", ref=block["ref"])
        result[f"group {row['task_id']}"] = await client.get(f"{store}/group", task=row["task_id"])
        result[f"redaction {row['id']}"] = await client.get(f"{store}/redaction", rollout=row["id"])
    result["compare"] = await client.get("/api/compare", before=own, after=own)
    result["/sessions"] = await client.get(f"{store}/sessions")
    result["/states"] = await client.get(f"{store}/states")
    result["/states where"] = await client.get(f"{store}/states", where="tool_errors = 0")
    for state in result["/states"]["states"]:
        result[state["state_id"]] = await client.get(f"{store}/states/{state['state_id']}")
    return json.loads(json.dumps(result).replace(own, "STORE"))


async def test_a_database_answers_as_the_directory_that_it_was_copied_from(
    tmp_path: Path, postgresql_server: PostgresqlServer
):
    put_rollouts(tmp_path / "runs/first", tasks=3, samples=3)
    put_sessions(tmp_path / "runs/first", [session("s0"), session("s1", project="/srv/p1")])
    url = copied(tmp_path / "runs/first", postgresql_server)
    async with viewing(tmp_path / "runs", url) as client:
        first, second = await client.store("first"), await client.store(url.database)
        expected, actual = await answers(client, first), await answers(client, second)
        report = await client.get("/api/report", stores=second.rpartition("/")[2])
        listed = await client.get("/api/stores")
    assert actual.keys() == expected.keys() and len(actual) > 60
    for name, answer in expected.items():
        assert actual[name] == answer, name
    assert report["figures"]["points"][0]["solved"] == 3
    assert str(url) in listed["directories"] and "not-a-secret" not in json.dumps(listed)


async def test_a_change_in_a_database_is_sent_and_votes_are_written(postgresql_store: StoreUrl):
    async with viewing(postgresql_store) as client:
        store = await client.store(postgresql_store.database)
        assert (await client.get(f"{store}/rollouts"))["total"] == 0
        async with client.session.get(f"{client.url}/api/events") as events:
            while await events.content.readline() != b"\n":
                pass
            await asyncio.sleep(0.5)  # what there is at first is no change
            await asyncio.to_thread(put_rollouts, postgresql_store, tasks=1, samples=2)
            while not (line := await events.content.readline()).startswith(b"data:"):
                pass
            assert json.loads(line[5:])["state"] == "ok"
        assert (await client.get(f"{store}/rollouts"))["total"] == 2
        vote = {"subject": "rollout", "subject_id": "calc-0-1", "voter": "ada", "label": "exclude"}
        await client.post(f"{store}/votes", vote)
        row = (await client.get(f"{store}/rollouts", label="exclude"))["rollouts"][0]
        assert (row["id"], row["labels"]) == ("calc-0-1", {"exclude": 1})
        refused = await client.session.post(f"{client.url}{store}/gateway/pause", json={"paused": True})
        assert refused.status == 400 and "is a database" in await refused.text()


def test_a_writer_that_ends_at_once_is_a_change_too(postgresql_store: StoreUrl):
    catalog = Catalog([postgresql_store])
    (viewed,) = catalog.scan()
    states = [viewed.state()]
    for run in ("one", "two"):
        with Store.open(postgresql_store) as store:
            wait(store.runs.create(run, {}))
        states.append(viewed.state())
    assert [state for state, _ in states] == ["ok"] * 3
    assert len({mark for _, mark in states}) == 3
    assert viewed.state() == states[-1]
    catalog.close()


def test_a_rollout_whose_machine_has_a_slow_clock_is_read_again(
    postgresql_store: StoreUrl, postgresql_server: PostgresqlServer
):
    import psycopg

    async def statuses(client: ViewClient, store: str) -> list[str]:
        return [row["status"] for row in (await client.get(f"{store}/rollouts", sort="task"))["rollouts"]]

    async def check() -> None:
        with Store.open(postgresql_store) as store:
            wait(store.runs.create("run1", {}))
            wait(store.runs.add_tasks("run1", [calc_task(0)]))
            wait(store.runs.create_rollouts("run1", [("r0", "calc-0", 0), ("r1", "calc-0", 1)]))
            attempt = wait(store.runs.start_attempt("r0"))
            wait(store.runs.mark_running(attempt.id))
            async with viewing(postgresql_store) as client:
                path = await client.store(postgresql_store.database)
                assert await statuses(client, path) == ["running", "queuing"]
                wait(store.runs.finish_attempt(attempt.id, "failed", "failed"))
                with psycopg.connect(postgresql_store.secret_url, autocommit=True) as raw:
                    raw.execute("UPDATE rollouts SET updated_at = updated_at - 3600 WHERE id = 'r0'")
                assert await statuses(client, path) == ["failed", "queuing"]

    asyncio.run(check())


def test_a_user_who_may_only_select_can_look(postgresql_store: StoreUrl, postgresql_server: PostgresqlServer):
    put_rollouts(postgresql_store, tasks=1, samples=2)
    postgresql_server.execute(f"CREATE ROLE looker LOGIN PASSWORD '{PASSWORD}'")
    postgresql_server.execute("GRANT SELECT ON ALL TABLES IN SCHEMA public TO looker", postgresql_store.database)
    catalog = Catalog([StoreUrl(postgresql_store.secret_url.replace("postgres:", "looker:"))])
    (viewed,) = catalog.scan()
    assert viewed.state()[0] == "ok" and len(viewed.reading().outcomes.of_run("run1")) == 2
    catalog.close()


def test_reading_can_write_nothing(postgresql_store: StoreUrl):
    with Store.open(postgresql_store, create=False, read_only=True) as store:
        with pytest.raises(StoreError, match="read-only transaction"):
            wait(store.runs.create("run1", {}))
        assert store.runs.all() == []


async def test_a_server_that_goes_away_is_said_and_comes_back(
    postgresql_store: StoreUrl, postgresql_server: PostgresqlServer
):
    with LosingProxy(postgresql_server) as proxy:
        async with viewing(proxy.url(postgresql_store)) as client:
            store = await client.store(postgresql_store.database)
            proxy.cut()
            (listed,) = (await client.get("/api/stores"))["stores"]
            assert listed["state"] == "unreadable" and "cannot be reached" in listed["error"]["message"]
            assert (await client.get(f"{store}/rollouts", status=503))["error"]["type"] == "store"
            proxy.mend()
            assert (await client.get("/api/stores"))["stores"][0]["state"] == "ok"
            assert (await client.get(f"{store}/rollouts"))["total"] == 0


async def test_a_server_that_does_not_respond_delays_one_request(
    postgresql_store: StoreUrl, postgresql_server: PostgresqlServer, tmp_path: Path
):
    with Store.open(tmp_path / "other"), LosingProxy(postgresql_server) as proxy:
        async with viewing(proxy.url(postgresql_store), tmp_path / "other") as client:
            store = await client.store(postgresql_store.database)
            proxy.freeze()
            try:
                refused = await client.get(f"{store}/rollouts", status=503)
                assert "has not responded for 3 s" in refused["error"]["message"]
                # Nothing waits for it again: 30 requests that each wait 3 s, four at a time, would take 24 s.
                requests = [client.get(f"{store}/rollouts", status=503) for _ in range(30)]
                async with asyncio.timeout(12):
                    await asyncio.gather(*requests)
                    states = {each["state"] for each in (await client.get("/api/stores"))["stores"]}
                assert states == {"ok", "unreadable"}
            finally:
                proxy.thaw()
            while (await client.get(store))["state"] != "ok":  # noqa: ASYNC110 - polls as a page does
                await asyncio.sleep(0.05)
            assert (await client.get(f"{store}/rollouts"))["total"] == 0


def test_a_database_that_cannot_be_read_ends_the_start(
    postgresql_url: StoreUrl, postgresql_server: PostgresqlServer
):
    with pytest.raises(StoreError, match="has no store"):
        Catalog([postgresql_url])
    with pytest.raises(StoreError, match="does not exist"):
        Catalog([StoreUrl(postgresql_server.url("absent"))])
    with pytest.raises(StoreError, match="refused the user"):
        Catalog([StoreUrl(postgresql_server.url("postgres", "wrong"))])
