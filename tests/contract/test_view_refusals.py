"""Stores and requests that are not as they should be: fields of any length, locks, damage, cursors and votes."""

from __future__ import annotations

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.types import ErrorInfo

from support.export import put_rollouts, put_sessions, session
from support.report import End, put_loop, put_run, solved
from support.view import ViewClient, ids, pages, viewing

LONG = "\x1b\u202e\u6f22\U0001f600" * 25_000
"""More JSON than one answer may have."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("view") / "runs"
    put_rollouts(runs / "first", tasks=2, samples=2)
    put_sessions(runs / "logs", [session("s0"), session("s1", project="/srv/p1")])
    put_loop(runs / "loop", [solved({"a": (1, 2)}), solved({"a": (2, 2)})], [solved({"b": (1, 2)})])
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs", symlinks=True)


@contextmanager
def changing(directory: Path) -> Iterator[sqlite3.Connection]:
    """The store's file, for changes that no repository makes."""
    with closing(sqlite3.connect(directory / "store.db")) as database, database:
        yield database


# --- fields of any length --------------------------------------------------------------------------------

PLAIN = {
    "runs": ("release",),
    "rollouts": ("agent", "agent_version"),
    "attempts": ("worker",),
    "rewards": ("reason", "review"),
    "calls": (
        "dialect", "requested_model", "backend", "backend_model", "session_id", "agent_id", "policy_version",
        "finish_reason",
    ),
    "votes": ("voter", "label", "note"),
    "traces": ("session_id", "source", "project", "agent", "version"),
    "turns": ("message_id", "branch", "model", "family", "timestamp", "feedback"),
}  # fmt: skip
"""Columns whose texts have no other use."""
KEYS = (
    ("tasks", "id"), ("rollouts", "task_id"), ("rollouts", "id"), ("attempts", "rollout_id"),
    ("attempts", "id"), ("calls", "attempt_id"), ("rewards", "attempt_id"), ("calls", "id"), ("runs", "id"),
    ("tasks", "run_id"), ("rollouts", "run_id"), ("traces", "id"), ("turns", "state_id"), ("votes", "subject_id"),
)  # fmt: skip
"""Columns with ids, and those that refer to them."""


def lengthen(directory: Path, columns: tuple[tuple[str, str], ...]) -> None:
    with changing(directory) as database:
        for table, column in columns:
            database.execute(f"UPDATE {table} SET {column} = coalesce({column}, '') || ?", (LONG,))


async def read_everything(client: ViewClient, names: tuple[str, ...]) -> tuple[set[str], dict[str, str]]:
    """Ask for all pages of whatever the lists lead to; `ViewClient.get` looks at the size of each answer.

    Returns the routes by their last words, and the stores' ids by name."""
    routes: set[str] = set()

    async def get(path: str, **query: Any) -> Any:
        routes.add(path.rpartition("/")[2])
        pages = [await client.get(path, **query)]
        while isinstance(pages[-1].get("next"), str):
            pages.append(await client.get(path, **query, cursor=pages[-1]["next"]))
        return pages

    listed = {each["name"]: each["id"] for page in await get("/api/stores") for each in page["stores"]}
    for name in names:
        key, store = listed[name], f"/api/stores/{listed[name]}"
        await client.get(store)
        await get("/api/report", stores=key)
        if name == "loop":
            await get(f"{store}/loop")
            continue
        for part in (
            "health",
            "rollouts",
            "tasks",
            "sessions",
            "states",
            "pairs",
            "gateway",
            "votes",
            "redaction",
        ):
            await get(f"{store}/{part}")
        await get(f"{store}/rollouts", q="Done", sort="task", limit=1)
        await get(f"{store}/tasks", limit=1)
        await get("/api/compare", before=key, after=key)
        for row in (await client.get(f"{store}/rollouts"))["rollouts"][:1]:
            if len(row["id"]) > 500:
                continue
            rollout = f"{store}/rollouts/{row['id']}"
            for part in ("turns", "calls", "patch"):
                await get(f"{rollout}/{part}")
            await get(rollout)
            await get(f"{store}/group", task=row["task_id"])
            for turn in (await client.get(f"{rollout}/turns"))["turns"]:
                await get(f"{rollout}/tokens", call=turn["call_id"])
        for row in (await client.get(f"{store}/states"))["states"][:2]:
            if len(row["state_id"]) <= 500:
                await get(f"{store}/states/{row['state_id']}")
    return routes, listed


@pytest.mark.services
async def test_a_text_of_any_length_in_any_column_fits_into_the_answers(runs: Path):
    with Store.open(runs / "first") as store:
        store.votes.put("rollout", "calc-0-0", "ann", "exclude").result()
    for table, columns in PLAIN.items():
        for name in ("first", "logs"):
            lengthen(runs / name, tuple((table, column) for column in columns))
    with changing(runs / "first") as database:
        config = dict.fromkeys(("purpose", "agent", "policy", "sandbox", "samples"), LONG)
        database.execute("UPDATE runs SET config = ?", (json.dumps({**config, "tasks": {LONG: LONG}}).encode(),))
        error = msgspec.json.encode(ErrorInfo("sandbox", LONG, LONG))
        database.execute("UPDATE attempts SET error = ?, timings = ?", (error, json.dumps({LONG: 1.0}).encode()))
        database.execute("UPDATE rollouts SET error = ?", (error,))
    async with viewing(runs) as client:
        routes, _ = await read_everything(client, ("first", "logs"))
    assert routes >= {"stores", "report", "health", "turns", "calls", "tokens", "group", "states", "sessions"}


@pytest.mark.services
async def test_an_id_of_any_length_fits_into_the_answers_and_lists_go_on_after_it(runs: Path):
    for name in ("first", "logs"):
        lengthen(runs / name, KEYS)
    async with viewing(runs) as client:
        _, listed = await read_everything(client, ("first", "logs"))
        store = f"/api/stores/{listed['first']}"
        page = await client.get(f"{store}/rollouts", limit=1, sort="task")
        ids = [page["rollouts"][0]["id"][:8]]
        while page["next"] is not None:
            page = await client.get(f"{store}/rollouts", limit=1, sort="task", cursor=page["next"])
            ids.append(page["rollouts"][0]["id"][:8])
        assert ids == ["calc-0-0", "calc-0-1", "calc-1-0", "calc-1-1"]
        grid = await pages(client, f"{store}/tasks", "tasks", limit=1)
        assert list(dict.fromkeys(row["task_id"][:6] for page in grid for row in page)) == ["calc-0", "calc-1"]
        assert sum(len(row["samples"]) for page in grid for row in page) == 4


async def test_a_report_of_a_loop_with_long_texts_everywhere_is_an_answer(runs: Path):
    loop = json.loads((runs / "loop/loop.json").read_bytes())
    loop["model"] = loop["backend"] = loop["sandbox"] = LONG
    (runs / "loop/loop.json").write_text(json.dumps(loop))
    state = json.loads((runs / "loop/state.json").read_bytes())
    state["refused"] = {f"{n} {LONG}": LONG for n in range(3)}
    for step in state["steps"]:
        step.update(version=LONG, sampled_by=LONG, skipped={LONG: 1, f"other {LONG}": 2})
    for evaluation in state["evaluations"]:
        evaluation["version"] = LONG
    (runs / "loop/state.json").write_text(json.dumps(state))
    line = {"step": 1, "version": LONG, LONG: 1.0, f"a {LONG}": 2.0, "skipped": {LONG: 3}}
    (runs / "loop/metrics.jsonl").write_text(json.dumps(line) + "\n")
    async with viewing(runs) as client:
        routes, _ = await read_everything(client, ("loop",))
    assert routes == {"stores", "report", "loop"}


# --- cursors -----------------------------------------------------------------------------------------------


async def test_a_cursor_of_another_list_is_refused(runs: Path):
    async with viewing(runs) as client:
        store, logs = await client.store("first"), await client.store("logs")
        rollouts = f"{store}/rollouts"
        cursor = (await client.get(rollouts, sort="reward", limit=1))["next"]
        assert (await client.get(rollouts, sort="reward", limit=3, cursor=cursor))["rollouts"]
        for path, query in (
            (rollouts, {}),
            (rollouts, {"sort": "task"}),
            (rollouts, {"sort": "reward", "descending": "true"}),
            (rollouts, {"sort": "reward", "outcome": "solved"}),
            (f"{logs}/rollouts", {"sort": "reward"}),
            (f"{store}/tasks", {}),
            (f"{store}/votes", {}),
            (f"{store}/states", {}),
        ):
            error = (await client.get(path, **query, cursor=cursor, status=400))["error"]
            assert error["type"] == "cursor" and "same order" in error["message"]
            assert "first page" in error["remedy"]
        for cursor in ("", "x", "5"):
            assert (await client.get(f"{logs}/states", cursor=cursor, status=400))["error"]["type"] == "cursor"


# --- votes, and stores that are locked ---------------------------------------------------------------------


async def test_only_pairs_that_exist_are_voted_on_and_only_with_labels_of_pairs(runs: Path):
    with Store.open(runs / "first") as store:
        pair = next(rollout_pairs(store)).pair_id
    async with viewing(runs) as client:
        votes = f"{await client.store('first')}/votes"
        vote = {"subject": "pair", "subject_id": pair, "voter": "ann"}
        for voter in (" ", "ann ", ""):
            error = (await client.post(votes, {**vote, "voter": voter, "label": "skip"}, status=400))["error"]
            assert "voter" in error["message"]
        for label in ("exclude", "include", "better"):
            error = (await client.post(votes, {**vote, "label": label}, status=400))["error"]
            assert error["type"] == "label" and "chosen, rejected or skip" in error["message"]
        unknown = {**vote, "subject_id": "nothing", "label": "chosen"}
        error = (await client.post(votes, unknown, status=404))["error"]
        assert error["type"] == "not_found" and "no pair 'nothing'" in error["message"]
        assert (await client.get(votes))["votes"] == []
        for label in ("chosen", "rejected", "skip"):
            await client.post(votes, {**vote, "label": label})
        assert [each["label"] for each in (await client.get(votes))["votes"]] == ["skip"]
        await client.post(votes, {**vote, "label": None})
        assert (await client.get(votes))["votes"] == []


async def test_a_body_that_does_not_arrive_is_refused(runs: Path):
    async with viewing(runs, body_s=0.1) as client:
        store = await client.store("first")
        host, port = client.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {store}/votes HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: 100\r\n\r\n{")
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_list_of_many_stores_leaves_no_file_open(runs: Path, tmp_path: Path):
    for number in range(20):
        shutil.copytree(runs / "logs", tmp_path / "many" / str(number))
    async with viewing(tmp_path / "many") as client:
        await client.get("/api/stores")
        await client.get(f"{await client.store('7')}/sessions")
        files = [each.resolve() for each in Path("/proc/self/fd").iterdir()]  # noqa: ASYNC240 - memory, not disk
    assert {each.parent.name for each in files if each.parent.parent.name == "many"} == {"7"}


async def test_a_vote_on_a_locked_store_is_refused_in_words(runs: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        vote = {"subject": "rollout", "subject_id": "calc-0-0", "voter": "ann", "label": "exclude"}
        with closing(sqlite3.connect(runs / "first/store.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for path, body in (
                ("votes", vote),
                ("integrity", {"rollout_id": "calc-0-0", "status": "clean", "note": "read it"}),
            ):
                error = (await client.post(f"{store}/{path}", body, status=503))["error"]
                assert error["type"] == "locked" and "another process held the store's lock" in error["message"]
                assert "nothing was written" in error["remedy"]
            assert ids((await client.get(f"{store}/rollouts", limit=1))["rollouts"]) == ["calc-0-0"]
            other.execute("ROLLBACK")
        await client.post(f"{store}/votes", vote)
        assert len((await client.get(f"{store}/votes"))["votes"]) == 1


# --- directories -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "change", "path", "value"),
    [
        ("first", "UPDATE attempts SET timings = x'7b22'", "/rollouts/calc-0-0", "list of durations"),
        ("first", "UPDATE calls SET sampling = x'7b22'", "/rollouts/calc-0-0/turns", "sampling or audit"),
        ("first", "UPDATE runs SET config = x'7b22'", "/pairs", "a configuration"),
        ("logs", "UPDATE traces SET losses = x'7b22'", "/sessions", "list of losses"),
    ],
)
async def test_a_damaged_value_is_named_and_the_other_pages_are_there(
    runs: Path, store: str, change: str, path: str, value: str
):
    with changing(runs / store) as database:
        database.execute(change)
    async with viewing(runs / store) as client:
        error = (await client.get(f"{await client.store(store)}{path}", status=503))["error"]
        assert value in error["message"] and "damaged" in error["message"]
        other = "/rollouts" if store == "first" else "/states"
        assert await client.get(f"{await client.store(store)}{other}")


async def test_a_damaged_error_is_shown_as_the_error_of_its_rollout(runs: Path):
    with changing(runs / "first") as database:
        database.execute("UPDATE attempts SET error = x'7b22' WHERE rollout_id = 'calc-0-0'")
    async with viewing(runs / "first") as client:
        head = await client.get(f"{await client.store('first')}/rollouts/calc-0-0")
        assert "damaged" in json.dumps(head)


@pytest.mark.services  # takes seconds, because the filter runs to its limit
async def test_a_filter_that_would_run_for_days_is_refused_after_seconds(runs: Path):
    tables = ", ".join(f"turns t{number}" for number in range(40))
    async with viewing(runs / "logs") as client:
        path = f"{await client.store('logs')}/states"
        error = await client.get(path, status=400, where=f"(SELECT count(*) FROM {tables}) > 0")
        assert "takes longer than 5 s" in error["error"]["message"]


async def test_a_data_set_beside_a_store_is_no_loop(tmp_path: Path):
    put_run(tmp_path / "run", {"a": [End(1.0)]})
    (tmp_path / "run/dataset-a").mkdir()
    (tmp_path / "run/dataset-a/state.json").write_text('{"_data_files": [], "_fingerprint": "0"}')
    async with viewing(tmp_path) as client:
        store = await client.store("run")
        (tmp_path / "run/store.db").unlink()
        assert (await client.get("/api/stores"))["stores"] == []
        assert (await client.get(store))["state"] == "missing"


async def test_a_report_with_read_only_leaves_the_store_as_it_is(runs: Path):
    with changing(runs / "first") as database:
        database.execute("UPDATE alembic_version SET version_num = '0008'")
    before = (runs / "first/store.db").read_bytes()
    async with viewing(runs, may_write=False) as client:
        store = (await client.store("first")).rpartition("/")[2]
        assert (await client.get("/api/report", stores=store))["figures"]["points"]
    assert (runs / "first/store.db").read_bytes() == before


async def test_a_file_that_the_page_does_not_have_is_not_the_page(runs: Path, tmp_path: Path):
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/index.html").write_text("<!doctype html><title>t</title>")
    async with viewing(runs, assets=tmp_path / "assets") as client:
        for path, status in (
            ("/favicon.ico", 404),
            ("/robots.txt", 404),
            ("/s/x", 200),
            ("/report", 200),
            ("/", 200),
        ):
            async with client.session.get(client.url + path) as reply:
                assert reply.status == status, path
                assert (reply.content_type == "text/html") == (status == 200)
