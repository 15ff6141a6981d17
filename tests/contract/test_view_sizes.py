"""No JSON answer of the viewer is larger than a page, whatever is in a store, and its pages have everything."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.store import Store
from understudy.store.leases import Lease
from understudy.store.training import TokenValues
from understudy.train.loop.state import LoopConfig, LoopDirectory, LoopState, StepState
from understudy.types import (
    Call,
    ErrorInfo,
    Evidence,
    Files,
    Finding,
    Integrity,
    ScriptChecks,
    Task,
    Verdict,
)
from understudy.view.routes import ROUTES

from support.export import Log
from support.report import put_many
from support.view import viewing

WIDE = "\x1b\u202e\u6f22\U0001f600\ud83d\x00"
"""Characters that take up to six bytes each in JSON, one of which UTF-8 cannot encode."""
MANY = 300
"""So many rows of about a kilobyte are more than a page."""
CALLS = 5_000
LOGS = 80
LOOPS = 120
"""As many loops that have not begun, in a directory with a path of over a thousand characters."""
TURNS = 25
STEPS = 200
TASKS = 700
SAMPLES = 700


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(directory / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(directory / "data"))


def answer_of(uses: int, text: str) -> bytes:
    blocks = [{"type": "text", "text": text}]
    blocks += [
        {"type": "tool_use", "id": f"t{n}", "name": "Bash", "input": {"command": f"{n} {text[:200]}"}}
        for n in range(uses)
    ]
    return json.dumps({"id": "m", "type": "message", "role": "assistant", "content": blocks}).encode()


def call(
    attempt_id: str, number: int, *, asks: int = 1, uses: int = 0, text: str = "said", name: str = "", **more: Any
) -> Call:
    """A call that begins a conversation of its own, with so many blocks in its request and its answer."""
    content = [{"type": "text", "text": f"{number} {n} {text}"} for n in range(asks)]
    return Call(
        id=f"{attempt_id}-{number}{name}",
        attempt_id=attempt_id,
        sequence=number,
        dialect="anthropic",
        requested_model="m",
        backend="b",
        backend_model="m",
        request=json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode(),
        response=answer_of(uses, f"{number} {text}"),
        status="ok",
        started_at=1000.0 + number,
        ended_at=1000.5 + number,
        session_id=f"s{number}",
        **more,
    )


def put_large_run(directory: Path) -> None:
    """A run whose first rollout has very much of everything, and others like it in its group."""
    with Store.open(directory) as store:
        store.runs.create("run1", {"backend": "openai"}).result()
        checks = ScriptChecks(source=Files({"test.sh": "true"}))
        text = WIDE[:4] * 20_000
        task = Task(
            instance_id="calc-0",
            repo="r",
            instruction=text,
            source=Files({"a.py": ""}),
            checks=checks,
            gold_patch=text,
        )
        store.runs.add_tasks("run1", [task]).result()
        names = [f"r{n}" for n in range(12)]
        store.runs.create_rollouts("run1", [(name, "calc-0", n) for n, name in enumerate(names)]).result()
        for number, name in enumerate(names):
            for _ in range(40 if number == 0 else 0):
                lost = store.runs.start_attempt(name).result()
                error = ErrorInfo("sandbox", "SandboxError", "lost " * 3_000)
                store.runs.finish_attempt(lost.id, "failed", "requeuing", error=error).result()
            attempt = store.runs.start_attempt(name).result()
            store.runs.mark_running(attempt.id).result()
            size = {"asks": 400, "uses": 400, "text": "x" * 1_000} if number == 0 else {"text": text[:3_000]}
            written = [store.calls.append(call(attempt.id, n, **(size if n == 1 else {}))) for n in range(TURNS)]
            if number == 0:
                more = {"prompt_token_ids": (1,) * 10, "policy_version": "v" * 200}
                tokens = {"completion_token_ids": (70_000,) * CALLS, "logprobs": (-0.123456789,) * CALLS}
                written.append(store.calls.append(call(attempt.id, TURNS, **tokens, **more)))
                written += [
                    store.calls.append(
                        call(
                            attempt.id, TURNS + 1 + n, name="k" * 900, completion_token_ids=(7,), logprobs=(-0.1,),
                            prompt_token_ids=(n,), policy_version=f"version-{n}-{'v' * 900}",
                        )
                    )
                    for n in range(MANY)
                ]  # fmt: skip
            for future in written:
                future.result()
            rows = MANY if number == 0 else 1
            evidence = tuple(Evidence("exit", f"a{n}.py", n, "os._exit(0)" * 90) for n in range(MANY))
            verdict = Verdict(
                reward=float(number % 2),
                reason=text,
                tests={f"tests/test_{n}.py::test_{'long_' * 90}{n}": "passed" for n in range(rows)},
                log=text,
                integrity=Integrity("suspicious", text, evidence) if number == 0 else Integrity(),
                commands=("pytest " * 150,) * rows,
            )
            large = {
                "logs": {f"log-{n}-{'x' * 400}": b"x" for n in range(MANY)},
                "findings": [Finding(kind="budget", message="used " * 20)] * MANY,
                "timings": {f"phase {n}": 1.0 for n in range(20)},
            }
            store.runs.finish_attempt(
                attempt.id, "succeeded", "succeeded", patch=text.encode(), verdict=verdict,
                **(large if number == 0 else {}),
            ).result()  # fmt: skip
        values = TokenValues(
            call_id=f"{store.runs.attempts('r0')[-1].id}-{TURNS}",
            logprobs=[-0.123456789] * CALLS,
            ratios=[1.0123456] * CALLS,
            advantages=[0.5123456] * CALLS,
        )
        for step in range(3):
            store.training.record(step, f"v{step}", [values], limit_bytes=10**9).result()
        writes = [store.votes.put("rollout", "r0", f"{n} {'v' * 900}", f"label-{n}") for n in range(MANY)]
        writes += [store.votes.put("pair", "p0", f"{n} {'v' * 900}", "chosen") for n in range(MANY)]
        writes += [store.leases.announce(Lease(f"worker-{n}-{'w' * 900}", 60.0), "1", 4, {}) for n in range(MANY)]
        for future in writes:
            future.result()


def put_with_long_ids(directory: Path, *, tasks: int, samples: int) -> None:
    put_many(directory, tasks=tasks, samples=samples, turns=1)
    with closing(sqlite3.connect(directory / "store.db")) as database, database:
        for table, column in (
            ("tasks", "id"),
            ("rollouts", "task_id"),
            ("rollouts", "id"),
            ("attempts", "rollout_id"),
        ):
            database.execute(f"UPDATE {table} SET {column} = ? || {column}", ("i" * 400 + "-",))


def put_large_gateway(directory: Path) -> None:
    with Store.open(directory) as store:
        for future in [store.keys.add_client(f"client {n} {WIDE[2] * 180}") for n in range(MANY)]:
            future.result()


def put_large_sessions(directory: Path) -> None:
    from understudy.ingest import trace_store

    with Store.open(directory) as store:
        for number in range(LOGS):
            log = Log(f"s{number:03}", project="/home/ann/" + "deep/" * 800)
            node = log.user(-1, f"Mend {number}. {WIDE[:4] * 30}")
            if number == 0:
                for _ in range(TURNS):
                    node = log.answer(
                        node,
                        WIDE[:4] * 2_000,
                        [(f"c{n}", "Bash", {"command": "x" * 3_000}) for n in range(20)],
                        model="m" * 3_000,
                    )
                    node = log.result(node, "c0", "y" * 9_000)
            log.answer(node, f"Write to ann{number}@initech-mail.com.", model="m" * 3_000)
            trace_store.store_trace(store.sessions, log.trace).result()


def put_large_loop(directory: Path) -> None:
    loop = LoopDirectory(directory)
    steps = tuple(
        StepState(
            step=number, phase="published", run=f"steps/step-{number:04}/run", sampled_by="v0", tasks=("a",),
            version=f"v{number}", collected=4, solved=2, skipped={f"reason {n} {'r' * 60}": n for n in range(20)},
        )
        for number in range(1, STEPS)
    )  # fmt: skip
    loop.enter(
        LoopConfig(
            model="tiny", model_digest="0", tasks={}, steps=2_000, groups=2, samples=4,
        )
    )  # fmt: skip
    loop.save(
        LoopState(version="v999", weights="w", steps=steps, refused={f"v{n}": "x" * 900 for n in range(MANY)})
    )
    lines = [{"step": n, **{f"value{m}": n + m / 7 for m in range(8)}} for n in range(1, STEPS)]
    (directory / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    put_large_run(root / "run")
    put_with_long_ids(root / "many", tasks=TASKS, samples=1)
    put_with_long_ids(root / "wide", tasks=2, samples=SAMPLES)
    put_large_gateway(root / "gateway")
    put_large_sessions(root / "logs")
    put_large_loop(root / "loop")
    deep = root.joinpath(*("c" * 250 for _ in range(5)))
    for number in range(LOOPS):
        shutil.copytree(
            root / "loop", deep / str(number), ignore=shutil.ignore_patterns("state.json", "metrics.*")
        )
    return root


Rows = Callable[[Any], list[Any]]


@pytest.mark.services
async def test_no_answer_is_larger_than_a_page_and_the_pages_have_everything(stores: Path):
    page_counts: dict[str, int] = {}
    async with viewing(stores) as client:

        async def pages(route: str, path: str, cursor: str = "cursor", **query: Any) -> list[Any]:
            """All pages of an answer; `ViewClient.get` looks at the size of each."""
            answers = [await client.get(path, **query)]
            while (next_cursor := answers[-1]["next"]) is not None:
                answers.append(await client.get(path, **query, **{cursor: next_cursor}))
            page_counts[route] = max(page_counts.get(route, 0), len(answers))
            return answers

        async def joined(route: str, path: str, rows: Rows, cursor: str = "cursor", **query: Any) -> list[Any]:
            return [row for page in await pages(route, path, cursor, **query) for row in rows(page)]

        def field(name: str) -> Rows:
            return lambda page: page[name]

        listed = await joined("list_stores", "/api/stores", field("stores"))
        assert len({each["id"] for each in listed}) == len(listed) == LOOPS + 6
        store = {each["name"]: f"/api/stores/{each['id']}" for each in listed}
        run, many, wide, logs, loop = (store[name] for name in ("run", "many", "wide", "logs", "loop"))

        page_counts["read_store"] = 1 if await client.get(run) else 0
        health = await joined("read_health", f"{run}/health", lambda page: [*page["workers"], *page["versions"]])
        assert len(health) == 2 * MANY + 2  # two versions more: of the call with many tokens, and unknown
        rollouts = await joined("list_rollouts", f"{many}/rollouts", field("rollouts"), limit=1_000)
        assert len({each["id"] for each in rollouts}) == len(rollouts) == TASKS
        matching = await joined("list_rollouts", f"{run}/rollouts", lambda page: [*page["matches"]], q="said")
        assert len(matching) == 12

        samples = await joined(
            "list_tasks", f"{wide}/tasks", lambda page: [s for t in page["tasks"] for s in t["samples"]]
        )
        assert len({each["rollout_id"] for each in samples}) == len(samples) == 2 * SAMPLES
        tasks = await joined("list_tasks", f"{many}/tasks", lambda page: [t["task_id"] for t in page["tasks"]])
        assert len(set(tasks)) == len(tasks) == TASKS

        members = await joined("read_group", f"{run}/group", field("members"), task="calc-0")
        assert [member["row"]["id"] for member in members] == [f"r{n}" for n in range(12)]

        rollout = f"{run}/rollouts/r0"
        while (await client.get(rollout))["unread"]:
            pass
        heads = await pages("read_rollout", rollout)
        lengths = {
            name: sum(len(page[name]) for page in heads) for name in ("attempts", "logs", "branches", "segments")
        }
        assert lengths == {"attempts": 41, "logs": MANY, "branches": TURNS + 1 + MANY, "segments": MANY + 1}
        for name in ("votes", "segment_calls"):
            rows = [json.dumps(each) for page in heads for each in page[name]]
            assert len(set(rows)) == len(rows) >= MANY
        verdicts = [page["verdict"] for page in heads]
        assert len({test["id"] for verdict in verdicts for test in verdict["tests"]}) == MANY
        assert sum(len(verdict["commands"]) for verdict in verdicts) == MANY
        evidence = [each for verdict in verdicts for each in verdict["integrity"]["evidence"]]
        assert [each["line"] for each in evidence] == list(range(MANY))

        turns = await joined("list_turns", f"{rollout}/turns", field("turns"), "start", limit=1_000)
        assert [turn["index"] for turn in turns] == list(range(TURNS + 1 + MANY))
        assert turns[1]["left_out"] > 0 and "left out" in turns[1]["answered"][-1]["text"]
        calls = await joined("list_calls", f"{rollout}/calls", field("calls"), "start", limit=1_000)
        assert [each["index"] for each in calls] == list(range(TURNS + 1 + MANY))
        big = turns[TURNS]["call_id"]
        ids = await joined("list_tokens", f"{rollout}/tokens", field("ids"), "start", call=big, limit=5_000)
        assert len(ids) == 10 + CALLS
        body = {"ref": turns[2]["answered"][0]["ref"], "length": 200_000}
        await joined("read_body", f"{rollout}/body", lambda page: [page["text"]], "offset", **body)
        patch = ""
        while True:
            page = (await client.get(f"{rollout}/patch", offset=len(patch), length=200_000))["patch"]
            patch += page["text"]
            page_counts["read_patch"] = page_counts.get("read_patch", 0) + 1
            if page["next"] is None:
                break
        assert len(patch) == 80_000
        name = f"log-7-{'x' * 400}"
        assert await joined("read_log", f"{rollout}/log", lambda page: [page["text"]], "offset", name=name) == [
            "x"
        ]
        assert len((await client.get(f"{rollout}/log", status=404, name="n" * 500))["error"]["remedy"]) <= 2_000

        before, after = (path.rpartition("/")[2] for path in (wide, many))
        compared = await joined("compare_stores", "/api/compare", field("tasks"), before=before, after=after)
        assert len({each["task_id"] for each in compared}) == len(compared) == TASKS
        report = await joined(
            "read_report", "/api/report", lambda page: page["figures"]["tasks"], stores=f"{before},{after}"
        )
        assert len(report) == TASKS
        charts = await joined("read_report", "/api/report", field("training"), stores=loop.rpartition("/")[2])
        assert charts
        steps = await joined("read_loop", f"{loop}/loop", field("steps"))
        assert [step["step"] for step in steps] == list(range(1, STEPS))
        assert len(await joined("read_loop", f"{loop}/loop", lambda page: [*page["refused"]])) == MANY

        sessions = await joined("list_sessions", f"{logs}/sessions", field("sessions"), limit=1_000)
        assert len({each["trace_id"] for each in sessions}) == len(sessions) == LOGS
        states = await joined("list_states", f"{logs}/states", field("states"), limit=1_000)
        assert len({each["state_id"] for each in states}) == len(states) == LOGS + TURNS
        last = next(each["state_id"] for each in reversed(states) if each["trace_id"] == "s000")
        first = [0]
        while first[-1] is not None:
            first.append((await client.get(f"{logs}/states/{last}", start=first[-1], limit=200))["next"])
        page_counts["read_state"] = len(first) - 1
        pairs = await joined("list_pairs", f"{run}/pairs", field("pairs"), "start", limit=100)
        assert len({each["id"] for each in pairs}) == len(pairs)
        clients = await joined("read_gateway", f"{store['gateway']}/gateway", field("clients"))
        assert len({each["name"] for each in clients}) == len(clients) == MANY
        votes = await joined("list_votes", f"{run}/votes", field("votes"))
        assert len({(each["subject"], each["voter"]) for each in votes}) == len(votes) == 2 * MANY

        while not (answer := await client.get(f"{logs}/redaction"))["complete"]:
            pass
        assert answer["conversations"] == LOGS and sum(answer["values"].values()) >= LOGS
        page_counts["preview_redaction"] = 1

    json_routes = {route.name for route in ROUTES if route.media == "json" and route.body is None}
    assert page_counts.keys() == json_routes
    several = {
        "list_stores", "read_health", "list_rollouts", "list_tasks", "read_group", "read_rollout", "list_turns",
        "list_calls", "list_tokens", "read_patch", "compare_stores", "read_report", "read_loop", "list_sessions",
        "list_states", "read_state", "read_gateway", "list_votes",
    }  # fmt: skip
    assert several - {name for name, pages in page_counts.items() if pages > 1} == set()
