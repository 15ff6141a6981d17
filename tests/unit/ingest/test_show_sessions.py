"""`understudy show` of sessions and states: what is in them, where it is from, and what an id may be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from understudy.store import Store

from support import understudy
from support.claude_log import Log, thinking

SECRET = "AKIAQ3EGRFTAV7WX5LSN"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("show")
    logs = root / "projects" / "-home-dev-proj"
    logs.mkdir(parents=True)
    log = Log("aaaa-1")
    log.user(f"add a test, with {SECRET}\x1b]0;pwned\x07")
    log.assistant("m0", thinking("I look first."), "I look.", ("t0", "Bash", {"command": "pytest -q"}))
    log.result("t0", "1 failed, 2 passed in 0.12s")
    log.assistant("m1", "all done", stop="end_turn")
    (logs / "aaaa-1.jsonl").write_bytes(log.data() + b"{broken\n")
    other = Log("aaaa-2")
    other.user("hello")
    other.assistant("n0", "good day", stop="end_turn")
    (logs / "aaaa-2.jsonl").write_bytes(other.data())
    done = understudy("ingest", str(root / "projects"), "--dir", str(root / "store"))
    assert done.returncode == 0, done.stderr
    return root / "store"


def show(*arguments: str | Path, code: int = 0) -> str:
    done = understudy("show", *map(str, arguments))
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def shown_json(*arguments: str | Path) -> Any:
    return json.loads(show(*arguments, "--json"))


def test_show_of_a_session_lists_its_source_turns_calls_and_signals(store: Path):
    page = show(store, "aaaa-1")
    assert "1 conversations, 2 states" in page and "aaaa-1.jsonl" in page and "1 bad-json" in page
    assert "I look.   → Bash" in page and "tests failed" in page
    record = shown_json(store, "aaaa-1")
    (conversation,) = record["conversations"]
    assert conversation["project"].endswith("/proj") and conversation["role"] == "main"
    assert [turn["tool_calls"] for turn in conversation["turns"]] == [["Bash"], []]
    assert conversation["turns"][0]["signals"]["tests"] == "failed"
    assert conversation["turns"][0]["state_id"][:12] in page


def test_show_of_a_state_has_its_context_and_the_action_taken(store: Path):
    first, second = (turn["state_id"] for turn in shown_json(store, "aaaa-1")["conversations"][0]["turns"])
    page = show(store, first[:10])
    parts = ["turn 1 of 2", "tools", "version", "0 system", "1 user", "add a test", "next action", "I look first."]
    at = [page.index(part) for part in parts]
    assert at == sorted(at)
    assert "→ Bash" in page and "command: pytest -q" in page
    state = shown_json(store, second[:10])
    assert [message["role"] for message in state["messages"]] == ["system", "user", "assistant", "tool"]
    assert state["tools_source"] == "version" and state["student_action"]["content"] == "all done"


def test_show_and_states_print_the_same_json_of_a_state(store: Path):
    for options in ((), ("--unredacted",)):
        listed = understudy("states", str(store), "--where", "session_id = 'aaaa-1'", "--json", *options)
        for line in listed.stdout.splitlines():
            state = json.loads(line)
            assert shown_json(store, state["state_id"], *options) == state


def test_show_redacts_secrets_by_default_and_never_prints_escapes(store: Path):
    state = shown_json(store, "aaaa-1")["conversations"][0]["turns"][0]["state_id"]
    for name in ("aaaa-1", state):
        assert SECRET not in show(store, name, "--full") and SECRET not in json.dumps(shown_json(store, name))
        assert "\x1b" not in show(store, name, "--full", "--unredacted")
    assert SECRET in show(store, state, "--full", "--unredacted")


def test_ambiguous_and_unknown_ids_are_refused_with_advice(store: Path):
    several = show(store, "aaaa-", code=2)
    assert "sessions aaaa-1, aaaa-2" in several and "give more characters" in several
    assert "no id of a session or state begins with 'zzz'" in show(store, "zzz", code=2)
    assert "give at most" in show(store, "aaaa-1", "more", code=2)
    assert "give at most" in show(store, "aaaa-1", "--dir", str(store), code=2)


def test_sessions_of_a_store_are_listed(store: Path):
    assert show("aaaa-1", "--dir", store) == show(store, "aaaa-1")
    page = show(store)
    assert "2 of 2 sessions" in page and "rollout" not in page
    listed = shown_json(store)
    assert {each["session_id"]: each["states"] for each in listed["sessions"]} == {"aaaa-1": 2, "aaaa-2": 1}


def test_subagents_belong_to_the_session_that_started_them(tmp_path: Path):
    from understudy.ingest.trace import PlainRenderer, Trace, TraceNode, TraceParent, TraceTurn
    from understudy.ingest.trace_store import store_trace

    def trace(name: str, session: str, parent: TraceParent | None) -> Trace:
        nodes = [
            TraceNode(-1, {"role": "user", "content": "go"}),
            TraceNode(0, {"role": "assistant", "content": "x"}),
        ]
        turns = [TraceTurn(message_id="m", context=0, action=(1,))]
        return Trace(
            trace_id=name, session_id=session, format="f", source="s", renderer=PlainRenderer(), nodes=nodes,
            turns=turns, parent=parent, role="main" if parent is None else "subagent",
        )  # fmt: skip

    with Store.open(tmp_path) as store:
        for each in (
            trace("one", "s1", None),
            trace("two", "s2", TraceParent("s1", "t1")),
            trace("three", "s3", None),
        ):
            store_trace(store.sessions, each).result()
        assert store.sessions.session("s1").turns == 2
        assert store.sessions.session("s3").turns == 1
        assert store.sessions.ids_that_begin("two") == ([], ["s2"])
