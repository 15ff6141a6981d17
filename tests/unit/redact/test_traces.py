"""Traces without secrets."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.ingest.redaction import redact_trace
from understudy.ingest.trace import (
    PlainRenderer,
    RequestShape,
    Trace,
    TraceNode,
    TraceOutcome,
    TraceParent,
    TraceTurn,
    expand,
    tool_call,
)
from understudy.redact.redactor import Redactor

from support.ingest import DATA, LOGS, read
from support.secrets import KINDS, embed, parts

KEY = b"k" * 32
AWS = "AKIAQ3EGRIJ7XKXBKYTB"
PASSWORD = "Vt7!kq2Zp9wL"
Said = dict[str, Any]


def ours() -> Redactor:
    return Redactor(KEY, betterleaks=False)


def trace(messages: list[Said], **more: Any) -> Trace:
    """A conversation in which every answer is a turn."""
    nodes = [TraceNode(number - 1, message) for number, message in enumerate(messages)]
    turns = [
        TraceTurn(message_id=f"msg_{number}", context=number - 1, action=(number,), model="claude-opus-4-7")
        for number, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    return Trace(
        trace_id="t",
        session_id="s",
        format="chat",
        source="/home/alice/x.jsonl",
        renderer=PlainRenderer(),
        nodes=nodes,
        turns=turns,
        **more,
    )


def told(trace: Trace) -> bytes:
    """All that can be had of a trace."""
    return b"\n".join(
        [
            msgspec.json.encode([*expand(trace)]),
            msgspec.json.encode(
                [trace.source, trace.project, trace.shape, trace.parent, trace.outcome, trace.losses, trace.turns]
            ),
        ]
    )


def test_secrets_are_redacted_in_every_part_of_a_trace() -> None:
    call = tool_call("toolu_01AbC", "Bash", {"command": f"psql postgres://app:{PASSWORD}@db/x"})
    before = trace(
        [
            {"role": "user", "content": f"it prints {PASSWORD}"},
            {"role": "assistant", "content": AWS, "reasoning_content": f"so {PASSWORD}", "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": "toolu_01AbC",
                "content": [{"type": "text", "text": f"as alice: {PASSWORD}"}],
            },
            {"role": "assistant", "content": "done"},
        ],
        project="/home/alice/shop",
        shape=RequestShape(
            f"mail bob@acme.io {AWS}", [{"type": "function", "function": {"name": "x", "description": AWS}}]
        ),
        parent=TraceParent("s0", "toolu_01Xyz"),
        outcome=TraceOutcome(resolved=True, task=f"task {AWS}"),
    )
    before.turns[1].shape = RequestShape(f"now {PASSWORD}", None)
    after = redact_trace(before, ours())
    redacted = told(after)
    for secret in (AWS, PASSWORD, "alice/", "bob@acme.io"):
        assert secret.encode() not in redacted
    assert (len(after.nodes), len(after.turns)) == (len(before.nodes), len(before.turns))
    first, second = expand(after)
    assert first.source_model == "claude-opus-4-7" and first.student_action.tool_calls[0]["id"] == "toolu_01AbC"
    assert [state.state_id for state in expand(after)] == [state.state_id for state in expand(before)]
    assert second.messages[2]["tool_calls"] == first.student_action.tool_calls
    assert json.loads(second.messages[2]["tool_calls"][0]["function"]["arguments"])["command"].startswith(
        "psql postgres://app:["
    )
    assert AWS.encode() in told(before)


def test_a_redacted_state_does_not_depend_on_the_other_selected_states() -> None:
    messages: list[Said] = [
        {"role": "user", "content": f"what is {PASSWORD}?"},
        {"role": "assistant", "content": "a password"},
        {"role": "user", "content": f"DB_PASSWORD={PASSWORD}"},
        {"role": "assistant", "content": "indeed"},
    ]
    whole = list(expand(redact_trace(trace(messages), ours())))
    some = trace(messages)
    some.turns = some.turns[:1]
    assert list(expand(redact_trace(some, ours()))) == whole[:1]
    assert PASSWORD not in json.dumps(whole[0].messages)


def test_redacting_a_trace_twice_changes_and_reports_nothing_more() -> None:
    redactor = ours()
    before = trace([{"role": "user", "content": AWS}, {"role": "assistant", "content": f"{AWS} /home/alice"}])
    once = redact_trace(before, redactor)
    first = list(expand(once))
    count = redactor.report.counts
    assert list(expand(redact_trace(before, redactor))) == first and redactor.report.counts == count
    assert list(expand(redact_trace(once, ours()))) == first


@pytest.mark.parametrize("name", LOGS)
def test_logs_without_secrets_are_unchanged_except_for_paths_and_emails(name: str) -> None:
    for before in read(DATA / name):
        redactor = ours()
        after = redact_trace(before, redactor)
        assert len(list(expand(after))) == len(before.turns)
        assert set(redactor.report.counts) <= {"home-path", "email"}, redactor.report.to_json()
        if not redactor.report.total:
            assert [*expand(after)] == [*expand(before)]


@given(
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.integers(0, len(KINDS) - 1), st.integers(0, 40), st.integers(0, 4)), min_size=1, max_size=4
    ),
)
def test_no_planted_secret_is_in_any_state(seed: int, plants: list[tuple[int, int, int]]) -> None:
    dice = random.Random(seed)
    texts = ["look at it", "so I do", "ls\na.py", "ends here", "{}"]
    secrets: list[str] = []
    for number, at, where in plants:
        kind = KINDS[number]
        secret = kind.make(dice)
        texts[where] += "\n" + embed(kind, secret, kind.names[0], at)
        if kind.name not in ("password", "database url"):
            secrets += parts(kind, secret)
    call = tool_call("call_1", "Bash", {"command": texts[4], "more": [json.dumps(texts[4])]})
    before = trace(
        [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1], "reasoning_content": texts[3], "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": json.dumps({"stdout": texts[2]})},
            {"role": "assistant", "content": texts[3]},
        ]
    )
    after = redact_trace(before, ours())
    redacted = told(after).decode()
    for secret in secrets:
        for written in (secret, json.dumps(secret)[1:-1], json.dumps(json.dumps(secret))[3:-3]):
            assert written not in redacted
    assert list(expand(redact_trace(after, ours()))) == list(expand(after))


def test_claude_codes_own_log_is_redacted(tmp_path: Path) -> None:
    log = tmp_path / "s.jsonl"
    shared = {"sessionId": "s", "version": "2.1.150", "cwd": "/home/alice/shop"}
    call = {"command": f"echo {AWS}", "api_key": PASSWORD + "q8R3t7"}
    blocks = [
        {"type": "text", "text": f"I use {AWS}"},
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": call},
    ]
    answer = {"id": "msg_1", "model": "claude-opus-4-7", "role": "assistant", "content": blocks}
    request = {"role": "user", "content": f"use {AWS}"}
    rows = [
        {"type": "user", "uuid": "u1", "parentUuid": None, **shared, "message": request},
        {"type": "assistant", "uuid": "a1", "parentUuid": "u1", **shared, "message": answer},
    ]
    log.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (before,) = read(log)
    after = redact_trace(before, ours())
    redacted = told(after).decode()
    assert (
        AWS in told(before).decode()
        and AWS not in redacted
        and PASSWORD not in redacted
        and "alice" not in redacted
    )
    assert after.project is not None and after.project.startswith("/home/user_")
