"""The viewer's API on real stores: every route, paging, who may ask, what is written, what a change does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.export.corpus import Corpus, ExportSelection
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.types import Evidence, Integrity, Verdict
from understudy.view.routes import ROUTES

from support.export import put_attempt, put_rollouts, put_sessions, session
from support.report import End, put_loop, put_run, solved
from support.trajectory import Session, assistant, text, tool_result, tool_use, user
from support.view import ViewClient, ids, pages, viewing

HOSTILE = (
    "<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "\u202egnp.exe\u202c",
    "\x1b]0;owned\x07", "\u2028\u2029", "a\x00b", "🏳️‍🌈" * 20, "javascript:alert(1)", "x" * 9_000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("view") / "runs"
    put_rollouts(runs / "first", tasks=3, samples=3)
    put_sessions(runs / "logs", [session("s0"), session("s1", project="/srv/p1")])
    put_loop(runs / "loop", [solved({"a": (1, 2)}), solved({"a": (2, 2)})], [solved({"b": (1, 2)})])
    return runs


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs", symlinks=True)


async def test_stores_are_listed_with_what_they_hold(runs: Path):
    async with viewing(runs) as client:
        answer = await client.get("/api/stores")
    stores = {each["name"]: each for each in answer["stores"]}
    assert stores["first"]["kind"] == "run"
    assert (stores["first"]["solved"], stores["first"]["graded"]) == (3, 9)
    assert 0.1 < stores["first"]["solve_rate"]["low"] < 1 / 3 < stores["first"]["solve_rate"]["high"]
    assert stores["logs"]["kind"] == "sessions"
    assert stores["logs"]["conversations"] == 2
    assert stores["loop"]["kind"] == "loop"
    wave = stores["loop/steps/step-0001/run"]
    assert wave["parent_id"] == stores["loop"]["id"]
    assert answer["may_write"] is True


async def test_every_reading_route_answers(runs: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        row = (await client.get(f"{store}/rollouts"))["rollouts"][0]
        rollout = f"{store}/rollouts/{row['id']}"
        turns = (await client.get(f"{rollout}/turns"))["turns"]
        call = next(turn["call_id"] for turn in turns if turn["has_tokens"])
        ref = turns[0]["answered"][0]["ref"]
        logs = await client.store("logs")
        state = (await client.get(f"{logs}/states"))["states"][0]["state_id"]
        answers = {
            "list_stores": await client.get("/api/stores"),
            "read_store": await client.get(store),
            "read_health": await client.get(f"{store}/health"),
            "list_rollouts": await client.get(f"{store}/rollouts"),
            "list_tasks": await client.get(f"{store}/tasks"),
            "read_group": await client.get(f"{store}/group", task=row["task_id"]),
            "read_rollout": await client.get(rollout),
            "list_turns": await client.get(f"{rollout}/turns"),
            "list_calls": await client.get(f"{rollout}/calls"),
            "read_body": await client.get(f"{rollout}/body", ref=ref),
            "list_tokens": await client.get(f"{rollout}/tokens", call=call),
            "read_patch": await client.get(f"{rollout}/patch"),
            "read_log": await client.get(f"{rollout}/log", name="none", status=404),
            "compare_stores": await client.get(
                "/api/compare", before=store.split("/")[-1], after=store.split("/")[-1]
            ),
            "read_report": await client.get("/api/report", stores=store.split("/")[-1]),
            "read_loop": await client.get(f"{await client.store('loop')}/loop"),
            "list_sessions": await client.get(f"{logs}/sessions"),
            "list_states": await client.get(f"{logs}/states"),
            "read_state": await client.get(f"{logs}/states/{state}"),
            "list_pairs": await client.get(f"{store}/pairs"),
            "read_gateway": await client.get(f"{store}/gateway"),
            "list_votes": await client.get(f"{store}/votes"),
            "preview_redaction": await client.get(f"{store}/redaction", rollout=row["id"]),
        }
    routes = {route.name: route for route in ROUTES if route.body is None and route.media == "json"}
    assert answers.keys() == routes.keys()
    for name, answer in answers.items():
        if "error" not in answer:
            msgspec.convert(answer, routes[name].response)  # what is sent is what the schema says


async def test_a_rollout_is_shown_down_to_its_tokens(runs: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        rollout = f"{store}/rollouts/calc-0-0"
        head = await client.get(rollout)
        assert head["verdict"]["reward"] == 1.0
        assert head["row"]["reason"] == "x"
        assert [branch["role"] for branch in head["branches"]].count("main") >= 1
        assert (await client.get(f"{rollout}/patch"))["patch"]["text"] == "+x\n"
        segment = head["segments"][0]
        call = head["segment_calls"][segment["calls"] - 1]
        page = await client.get(f"{rollout}/tokens", call=call)
        sampled = page["ids"][page["call_start"] - page["start"] : page["call_end"] - page["start"]]
        assert sampled == [110, 111]
        assert sum(page["mask"]) == 2
        whole = await client.get(f"{rollout}/tokens", call=call, scope="segment", limit=5_000)
        assert whole["start"] == 0
        assert len(whole["ids"]) == segment["tokens"]
        async with client.session.get(f"{client.url}{store}/calls/{call}/raw", params={"length": "10"}) as reply:
            assert reply.headers["content-disposition"] == "attachment"
            assert len(await reply.read()) == 10
            assert int(reply.headers["x-size"]) > 10


async def test_tokens_of_a_scripted_model_have_texts(tmp_path: Path):
    ids = scripted_tokenizer().encode("I read `calc.py`.")
    talk = Session("ignored")
    talk.ask([user(text("Mend it."))], [text("x")], prompt=[1, 2], completion=ids, logprobs=[0.0] * len(ids))
    models = {"high": {"backend": "embedded", "model": "understudy-embedded"}}
    with Store.open(tmp_path / "run") as store:
        put_attempt(store, talk.calls, config={"gateway": {"models": models}, "policy": "wrong", "weights": None})
    async with viewing(tmp_path) as client:
        rollout = f"{await client.store('run')}/rollouts/r0"
        call = (await client.get(f"{rollout}/turns"))["turns"][0]["call_id"]
        page = await client.get(f"{rollout}/tokens", call=call)
    assert "".join(page["texts"]).endswith("I read `calc.py`.")
    assert page["tokenizer"] == "the scripted models' tokenizer"


async def test_rollouts_are_filtered_sorted_and_searched(runs: Path):
    async with viewing(runs) as client:
        rollouts = f"{await client.store('first')}/rollouts"
        best = await client.get(rollouts, sort="reward", descending="true", limit=3)
        assert [row["reward"] for row in best["rollouts"]] == [1.0, 1.0, 1.0]
        unsolved = await client.get(rollouts, outcome="unsolved", task="calc-1")
        assert unsolved["total"] == 2
        assert {row["task_id"] for row in unsolved["rollouts"]} == {"calc-1"}
        hits = await client.get(rollouts, q='"give up 2"')
        assert sorted(ids(hits["rollouts"])) == ["calc-0-2", "calc-1-2", "calc-2-2"]
        assert all("give up 2" in hits["matches"][each] for each in ids(hits["rollouts"]))
        assert hits["unsearched"] == 0
        assert (await client.get(rollouts, q='nowhere"to OR be'))["total"] == 0
        assert (await client.get(rollouts, q="tool_use_id"))["total"] == 0  # a key of the stored JSON
        error = await client.get(rollouts, sort="beauty", status=400)
        assert error["error"]["type"] == "parameter"
        assert "sort" in error["error"]["message"]
        assert (await client.get(rollouts, cursor="???", status=400))["error"]["type"] == "cursor"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limit=st.integers(1, 12),
    sort=st.sampled_from(["created", "reward", "task", "turns", "seconds"]),
    down=st.booleans(),
)
async def test_pages_together_are_the_whole_list(runs: Path, limit: int, sort: str, down: bool):
    async with viewing(runs) as client:
        path = f"{await client.store('first')}/rollouts"
        query = {"sort": sort, "descending": str(down).lower()}
        whole = (await client.get(path, limit=1_000, **query))["rollouts"]
        split = await pages(client, path, "rollouts", limit=limit, **query)
    assert [row for page in split for row in page] == whole
    assert len(whole) == 9
    assert all(len(page) == limit for page in split[:-1])


async def test_tasks_states_and_sessions_come_in_pages_too(runs: Path):
    async with viewing(runs) as client:
        store, logs = await client.store("first"), await client.store("logs")
        tasks = await pages(client, f"{store}/tasks", "tasks", limit=2)
        assert [[row["task_id"] for row in page] for page in tasks] == [["calc-0", "calc-1"], ["calc-2"]]
        assert [cell["reward"] for cell in tasks[0][0]["samples"]] == [1.0, 0.0, 0.0]
        states = await pages(client, f"{logs}/states", "states", limit=3)
        whole = (await client.get(f"{logs}/states"))["states"]
        assert [row for page in states for row in page] == whole
        assert [len(page) for page in await pages(client, f"{logs}/sessions", "sessions", limit=1)] == [1, 1]
        only = await client.get(f"{logs}/sessions", project="/srv/p1")
        assert only["total"] == 1
        assert only["sessions"][0]["tests"] == {"passed": 1}
        wrong = await client.get(f"{logs}/states", where="nothing = 1", status=400)
        assert "cannot select states" in wrong["error"]["message"]


async def test_a_loop_says_why_nothing_trained(runs: Path):
    async with viewing(runs) as client:
        loop = await client.get(f"{await client.store('loop')}/loop")
    step = loop["steps"][0]
    stages = {stage["stage"]: stage for stage in step["funnel"]}
    assert stages["rollouts"]["count"] == 2
    assert stages["groups with signal"]["count"] == 1
    assert [each["solved"] for each in loop["evaluations"]] == [1, 2]


async def test_what_a_model_wrote_comes_through_as_text(tmp_path: Path):
    calls = Session("a")
    messages = [user(text("Mend it."))]
    for number, word in enumerate(HOSTILE):
        answer = assistant(text(word), tool_use(f"c{number}", "Bash", command=word))
        calls.ask(messages, answer["content"])
        messages = [*messages, answer, user(tool_result(f"c{number}", word))]
    with Store.open(tmp_path / "run") as store:
        put_attempt(store, calls.calls)
    async with viewing(tmp_path) as client:
        rollout = f"{await client.store('run')}/rollouts/r0"
        turns = (await client.get(f"{rollout}/turns"))["turns"]
        for word, turn in zip(HOSTILE, turns, strict=True):
            first = turn["answered"][0]
            assert first["text"] == word[:4_000]
            assert first["text_size"] == len(word)
            rest = await client.get(f"{rollout}/body", ref=first["ref"], offset=max(0, len(word) - 3))
            assert rest["text"] == word[-3:]
        async with client.session.get(f"{client.url}{rollout}/turns") as reply:
            assert reply.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'self'" in reply.headers["content-security-policy"]


async def test_a_long_turn_fits_into_a_page(tmp_path: Path):
    calls = Session("a")
    calls.ask([user(*(text(f"{number} " + "ü" * 3_000) for number in range(400)))], [text("Done.")])
    with Store.open(tmp_path / "run") as store:
        put_attempt(store, calls.calls)
    async with viewing(tmp_path) as client:
        rollout = f"{await client.store('run')}/rollouts/r0"
        (turn,) = (await client.get(f"{rollout}/turns"))["turns"]
    assert turn["left_out"] > 0
    assert turn["asked"][-1]["text"].startswith("399 ")
    assert turn["asked"][-1]["text_size"] == 3_004


# --- who may ask ---------------------------------------------------------------------------------------


async def status_of(client: ViewClient, path: str, **headers: str) -> int:
    async with client.session.get(f"{client.url}{path}", headers=headers) as reply:
        await reply.read()
        return reply.status


async def test_another_host_or_origin_is_refused(runs: Path):
    async with viewing(runs) as client:
        port = client.url.rpartition(":")[2]
        assert await status_of(client, "/api/stores") == 200
        assert await status_of(client, "/api/stores", host=f"localhost:{port}") == 200
        assert await status_of(client, "/api/stores", host=f"evil.example:{port}") == 421
        assert await status_of(client, "/api/stores", host="127.0.0.1:1") == 421
        assert await status_of(client, "/api/stores", host=f"127.0.0.1.evil.example:{port}") == 421
        assert await status_of(client, "/api/stores", origin=client.url) == 200
        assert await status_of(client, "/api/stores", origin="http://evil.example") == 403
        assert await status_of(client, "/api/stores", origin="null") == 403
        elsewhere = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}
        assert await status_of(client, "/api/stores", **elsewhere) == 403
        async with client.session.post(f"{client.url}/api/stores/x/votes", data="{}") as reply:
            assert reply.status == 415


async def test_an_address_that_others_reach_needs_the_token(runs: Path):
    async with viewing(runs, host="0.0.0.0") as client:
        token = client.rules.token or ""
        assert len(token) >= 24
        assert await status_of(client, "/api/stores") == 401
        assert await status_of(client, "/api/stores?token=wrong") == 401
        assert await status_of(client, f"/api/stores?token={token}") == 200
        assert await status_of(client, "/api/stores", authorization=f"Bearer {token}") == 200
        port = client.url.rpartition(":")[2]
        assert await status_of(client, f"/api/stores?token={token}", host=f"evil.example:{port}") == 421


async def test_no_path_leaves_the_directories(runs: Path, tmp_path: Path):
    put_rollouts(tmp_path / "secret", tasks=1, samples=1)
    (runs / "link").symlink_to(tmp_path / "secret")
    async with viewing(runs) as client:
        names = {each["name"] for each in (await client.get("/api/stores"))["stores"]}
        assert "link" not in names
        for path in ("/api/stores/..%2f..%2fsecret", "/api/stores/%2e%2e", "/api/..%2f..%2f..%2fetc%2fpasswd"):
            assert await status_of(client, path) == 404
        store = await client.store("first")
        assert (await client.get(f"{store}/rollouts/..%2f..", status=404))["error"]["type"] == "not_found"
        # A store that was replaced by a link to elsewhere is not followed either.
        shutil.move(runs / "first", tmp_path / "moved")
        (runs / "first").symlink_to(tmp_path / "secret")
        assert (await client.get(f"{store}/rollouts", status=403))["error"]["type"] == "outside"


async def test_a_request_that_no_page_makes_is_refused_in_words(runs: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        assert (await client.get(f"{store}/rollouts", q="a\0b"))["total"] == 0
        for path, query in (
            (f"{store}/pairs", {"start": 10**20}),
            (f"{store}/rollouts/a%00b/turns", {"start": -1}),
        ):
            assert (await client.get(path, **query, status=400))["error"]["type"] == "parameter"
        host, _, port = client.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"OPTIONS * HTTP/1.1\r\nhost: {host}:{port}\r\nconnection: close\r\n\r\n".encode())
        assert b" 405 " in await reader.readline()
        writer.close()
        # Another site's page can neither follow the changes nor send an order, whatever it names itself.
        for origin in ("http://evil.example", "null", f"https://{host}:{port}", f"{client.url}.evil.example"):
            assert await status_of(client, "/api/events", origin=origin) == 403
            headers = {"origin": origin, "content-type": "application/json"}
            async with client.session.post(f"{client.url}{store}/votes", data="{}", headers=headers) as reply:
                assert reply.status == 403


# --- what is written -----------------------------------------------------------------------------------


async def test_votes_reach_exports_and_pairs(runs: Path):
    with Store.open(runs / "first") as store:
        pair = next(rollout_pairs(store)).pair_id
    async with viewing(runs) as client:
        store_path = await client.store("first")
        for voter, label in (("ann", "exclude"), ("bob", "exclude"), ("cy", "include")):
            vote = {"subject": "rollout", "subject_id": "calc-2-0", "voter": voter, "label": label}
            await client.post(f"{store_path}/votes", vote)
        await client.post(
            f"{store_path}/votes", {"subject": "pair", "subject_id": pair, "voter": "ann", "label": "rejected"}
        )
        listed = await client.get(f"{store_path}/rollouts", label="exclude")
        assert ids(listed["rollouts"]) == ["calc-2-0"]
        assert listed["rollouts"][0]["labels"] == {"exclude": 2, "include": 1}
        votes = await client.get(f"{store_path}/votes", subject="rollout")
        assert votes["agreement"] == pytest.approx(1 / 3)
        assert pair in ids((await client.get(f"{store_path}/pairs"))["pairs"])
        votes = (await client.get(f"{store_path}/votes", subject="pair"))["votes"]
        assert [(vote["subject_id"], vote["label"]) for vote in votes] == [(pair, "rejected")]
        unknown = {"subject": "rollout", "subject_id": "nobody", "voter": "ann", "label": "exclude"}
        assert (await client.post(f"{store_path}/votes", unknown, status=404))["error"]["type"] == "not_found"
    with Store.open(runs / "first") as store:
        exported = Corpus(store, ExportSelection(origins=("rollouts",)), unredacted=True)
        assert not [one for one in exported.examples() if "calc-2-0" in one.example_id]
        assert pair not in {each.pair_id for each in rollout_pairs(store)}
        # Two of the three are taken back: what the third says does not exclude.
        store.votes.remove("rollout", "calc-2-0", "ann").result()
        assert store.votes.excluded_rollouts() == frozenset()


async def test_a_word_on_integrity_goes_through_the_store(runs: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        order = {"rollout_id": "calc-0-0", "status": "suspicious", "note": "it reads the tests"}
        await client.post(f"{store}/integrity", order)
        head = await client.get(f"{store}/rollouts/calc-0-0")
        assert head["verdict"]["integrity"]["status"] == "suspicious"
        assert head["verdict"]["integrity"]["reviewed"] is True
        listed = await client.get(f"{store}/rollouts", integrity="suspicious")
        assert ids(listed["rollouts"]) == ["calc-0-0"]
    with Store.open(runs / "first") as first_store:
        assert first_store.outcomes.select_graded("run1").suspicious == {"calc-0": 1}


def contents(runs: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(runs.rglob("store.db"))}


async def test_read_only_writes_nothing(runs: Path):
    before = contents(runs)
    async with viewing(runs, may_write=False) as client:
        store = await client.store("first")
        vote = {"subject": "rollout", "subject_id": "calc-0-0", "voter": "ann", "label": "exclude"}
        for path, body in (
            (f"{store}/votes", vote),
            (f"{store}/integrity", {"rollout_id": "calc-0-0", "status": "clean", "note": "n"}),
            (f"{store}/gateway/pause", {"paused": True}),
        ):
            answer = await client.post(path, body, status=403)
            assert answer["error"]["type"] == "read_only" and "--read-only" in answer["error"]["message"]
        await client.get(f"{store}/rollouts", q="Done")
        assert (await client.get("/api/stores"))["may_write"] is False
    assert contents(runs) == before


# --- changes, and stores that are not as they should be ------------------------------------------------


async def next_change(reply: Any) -> dict[str, Any]:
    async with asyncio.timeout(60):
        async for line in reply.content:
            if line.startswith(b"data: "):
                return json.loads(line[6:])
    raise AssertionError("the stream ended without a change")


async def test_a_change_is_sent_and_is_in_the_next_list(tmp_path: Path):
    put_run(tmp_path / "run", {"a": [End(1.0)]})
    async with viewing(tmp_path) as client:
        store = await client.store("run")
        assert (await client.get(f"{store}/rollouts"))["total"] == 1
        async with client.session.get(f"{client.url}/api/events", params={"store": store.split("/")[-1]}) as reply:
            assert reply.content_type == "text/event-stream"
            async with asyncio.timeout(60):
                await reply.content.readuntil(b": connected\n\n")
            writing = asyncio.create_task(
                asyncio.to_thread(put_run, tmp_path / "run", {"b": [End(0.0)]}, run_id="two")
            )
            change = await next_change(reply)
            assert change == {"store_id": store.split("/")[-1], "counter": 1, "state": "ok"}
            await writing
        listed = await client.get(f"{store}/rollouts")
        assert listed["total"] == 2
        assert {row["reward"] for row in listed["rollouts"]} == {0.0, 1.0}


async def test_a_store_that_vanishes_or_is_damaged_is_said_so(runs: Path):
    async with viewing(runs) as client:
        store, logs = await client.store("first"), await client.store("logs")
        await client.get(f"{store}/rollouts")
        shutil.rmtree(runs / "first")
        error = (await client.get(f"{store}/rollouts", status=404))["error"]
        assert error["type"] == "not_found"
        assert "no store any more" in error["message"]
        for name in ("store.db", "store.db-wal"):
            (runs / "logs" / name).unlink(missing_ok=True)
        (runs / "logs" / "store.db").write_bytes(b"this is no database, and long enough to be read as one" * 100)
        damaged = (await client.get(f"{logs}/sessions", status=503))["error"]
        assert damaged["type"] == "store"
        assert "not an SQLite file" in damaged["message"]
        stores = {each["id"]: each for each in (await client.get("/api/stores"))["stores"]}
        assert stores[logs.split("/")[-1]]["state"] == "unreadable"
        (runs / "logs" / "store.db").unlink()
        os.mkfifo(runs / "logs" / "store.db")  # opening it would wait for a writer without end
        error = (await client.get(f"{logs}/sessions", status=404))["error"]
        assert "not a regular file" in error["message"]
        put_rollouts(runs / "first", tasks=1, samples=1)
        assert (await client.get(f"{store}/rollouts"))["total"] == 1


async def test_an_index_that_is_damaged_is_made_anew(runs: Path, cache: Path):
    async with viewing(runs) as client:
        store = await client.store("first")
        assert (await client.get(f"{store}/rollouts"))["total"] == 9
    (index,) = (cache / "view").glob("*.db")
    index.write_bytes(b"broken" * 1_000)
    async with viewing(runs) as client:
        assert (await client.get(f"{store}/rollouts"))["total"] == 9


async def test_evidence_and_a_forged_verdict_are_shown(tmp_path: Path):
    put_rollouts(tmp_path / "run", tasks=1, samples=1)
    with Store.open(tmp_path / "run") as store:
        forged = Integrity(
            "forged", "<b>passed whatever it expected</b>", (Evidence("exit", "a.py", 3, "exit(0)"),)
        )
        store.runs.replace_verdict("calc-0-0.1", Verdict(reward=0.0, reason="forged", integrity=forged)).result()
    async with viewing(tmp_path) as client:
        head = await client.get(f"{await client.store('run')}/rollouts/calc-0-0")
    assert head["verdict"]["integrity"]["evidence"] == [
        {"rule": "exit", "path": "a.py", "line": 3, "text": "exit(0)"}
    ]
    assert head["row"]["integrity"] == "forged"


async def test_a_reused_verdict_names_the_rollout_that_was_graded(tmp_path: Path):
    put_rollouts(tmp_path / "run", tasks=1, samples=2)
    tests = {"test_calc.py::test_shift": "failed", "test_calc.py::test_same": "passed", "other": "passed"}
    with Store.open(tmp_path / "run") as store:
        for source, rollout in (("calc-0-0.1", "calc-0-1"), ("lost.1", "calc-0-0")):
            verdict = Verdict(reward=0.0, reason="it fails", tests=tests, reused_from=source)
            store.runs.replace_verdict(f"{rollout}.1", verdict).result()
    async with viewing(tmp_path) as client:
        rollouts = f"{await client.store('run')}/rollouts"
        verdict = (await client.get(f"{rollouts}/calc-0-1"))["verdict"]
        lost = (await client.get(f"{rollouts}/calc-0-0"))["verdict"]["reused_from"]
    assert verdict["reused_from"] == {"attempt_id": "calc-0-0.1", "rollout_id": "calc-0-0", "sample_index": 0}
    assert lost == {"attempt_id": "lost.1", "rollout_id": None, "sample_index": None}
    # What validation found without the patch, and what the verdict said that this one took the place of.
    assert [(test["unpatched"], test["outcome"]) for test in verdict["tests"]] == [
        ("failed", "failed"),
        ("passed", "passed"),
        (None, "passed"),
    ]
    assert {test["regraded"] for test in verdict["tests"]} == {None}


async def test_a_run_on_its_way_says_what_waits(tmp_path: Path):
    put_rollouts(tmp_path / "run", tasks=1, samples=1)
    with Store.open(tmp_path / "run") as store:
        more = [(f"more-{number}", "calc-0", number) for number in (1, 2, 3)]
        store.runs.create_rollouts("run1", more).result()
        attempt = store.runs.start_attempt("more-2").result()
        store.runs.mark_running(attempt.id).result()
    async with viewing(tmp_path) as client:
        health = await client.get(f"{await client.store('run')}/health")
    assert [(each["status"], each["rollouts"], each["oldest_id"]) for each in health["open"]] == [
        ("queuing", 2, "more-1"),
        ("running", 1, "more-2"),
    ]
    assert all(each["oldest_s"] >= 0 for each in health["open"])


# --- the page ------------------------------------------------------------------------------------------


async def test_the_page_is_served_with_types_and_caching(runs: Path, tmp_path: Path):
    assets = tmp_path / "assets"
    (assets / "assets").mkdir(parents=True)
    (assets / "index.html").write_text("<!doctype html><title>t</title>")
    (assets / "assets" / "index-a1b2c3d4.js").write_text("export const one = 1;\n" * 100)
    async with viewing(runs, assets=assets) as client:
        for path in ("/", "/s/x/r/y?turn=3"):
            async with client.session.get(client.url + path) as reply:
                assert reply.status == 200
                assert reply.content_type == "text/html"
                assert reply.headers["cache-control"] == "no-cache"
                assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        async with client.session.get(f"{client.url}/assets/index-a1b2c3d4.js") as reply:
            assert reply.content_type == "text/javascript"
            assert "immutable" in reply.headers["cache-control"]
            assert reply.headers["content-encoding"] == "gzip"
            assert (await reply.text()).startswith("export const one")
        assert await status_of(client, "/assets/none.js") == 404
        assert await status_of(client, "/assets/..%2f..%2fsecret") == 404


async def test_without_a_page_it_says_so(runs: Path):
    async with viewing(runs) as client, client.session.get(client.url) as reply:
        assert reply.status == 503
        assert "not built" in await reply.text()


async def test_reasons_of_a_run_s_health_lead_to_its_rollouts(tmp_path: Path):
    # The first is as release 0.1 worded it.
    reasons = ("3 tests to mend still fail", "3 tests to fix still fail", "none of the tests ran")
    put_run(tmp_path / "run", {f"t{n}": [End(0.0, reason=reason)] for n, reason in enumerate(reasons)})
    async with viewing(tmp_path) as client:
        store = await client.store("run")
        unsolved = (await client.get(f"{store}/health"))["unsolved"]
        assert sum(unsolved.values()) == 3 and len(unsolved) == 2
        for reason, count in unsolved.items():
            page = await client.get(f"{store}/rollouts", reason=reason, outcome="unsolved")
            assert page["total"] == count, reason
