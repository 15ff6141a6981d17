"""The agent's own log beside the calls: what differs is found, what the CLI rewrites is not, nothing fails."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.agents.session_log import FINDINGS_LIMIT, compare_session_log
from understudy.trajectory.tree import build
from understudy.types import Call, Finding

from support.trajectory import Session, assistant, text, tool_result, tool_use, user

ASK = user(text("Mend it."))
EDIT: dict[str, Any] = {"file_path": "/a", "old_string": "x  \n", "new_string": "y", "limit": 5000.0}
SAID = [text(" I look.\n"), {"type": "thinking", "thinking": "hm"}, text("  "), tool_use("t1", "Edit", **EDIT)]
LOGGED = [text("I look."), tool_use("t1", "Edit", replace_all=False, **{**EDIT, "limit": 5000, "old_string": "x"})]


def answered() -> list[Call]:
    """Two calls that follow each other, then one that is asked twice, all with the ids that the gateway gives."""
    session = Session()
    session.ask([ASK], SAID)
    history = [ASK, assistant(*LOGGED), user(tool_result("t1"))]
    session.ask(history, [text("Once.")])
    session.ask(history, [text("Done.")])
    renamed: list[Call] = []
    for call in session.calls:
        message = json.loads(call.response) | {"id": f"msg_{call.sequence}"}
        body = json.dumps(message).encode()
        renamed.append(msgspec.structs.replace(call, id=f"call_{call.sequence}", response=body))
    return renamed


def line(id: str, block: dict[str, Any], uuid: str, **more: Any) -> bytes:
    message = {"id": id, "role": "assistant", "model": "m", "content": [block]}
    return json.dumps({"type": "assistant", "uuid": uuid, "message": message, **more}).encode()


def log(*turns: tuple[str, Sequence[dict[str, Any]]]) -> bytes:
    lines = [b'{"type":"user","uuid":"u","message":{"role":"user","content":"Mend it."}}', b""]
    lines += [line(id, block, f"{id}.{n}") for id, blocks in turns for n, block in enumerate(blocks)]
    return b"\n".join(lines) + b"\n"


WHOLE = log(("msg_0", LOGGED), ("msg_2", [text("Done.")]))


def found(content: bytes | None, *, cut_off: bool = False, calls: list[Call] | None = None) -> list[Finding]:
    logs = {"stream.jsonl": b"", **({} if content is None else {"session/s.jsonl": content})}
    return compare_session_log(logs, build(answered() if calls is None else calls), cut_off=cut_off)


def test_a_log_that_agrees_leaves_nothing_to_say():
    assert found(WHOLE) == []
    assert found(None, calls=[]) == []
    assert found(WHOLE + WHOLE) == []  # a fork copies lines, uuid and all
    extra = line("msg_x", text("API Error"), "e", isApiErrorMessage=True)
    synthetic = line("msg_y", text("No response requested."), "f").replace(b'"m"', b'"<synthetic>"')
    assert found(WHOLE + extra + b"\n" + synthetic) == []


@pytest.mark.parametrize(
    ("content", "expected_message", "call_id"),
    [
        (None, "left no session log of 3 answered calls", None),
        (log(("msg_0", LOGGED)), "the answer of call 2 is not in the log", "call_2"),
        (WHOLE + log(("msg_9", [text("x")])), "a response that no call has: message msg_9", None),
        (log(("msg_0", LOGGED), ("msg_2", [text("Dane.")])), "text otherwise: 'Dane.', not 'Done.'", "call_2"),
        (log(("msg_0", LOGGED[:1]), ("msg_2", [text("Done.")])), "other tool calls", "call_0"),
        (
            log(("msg_0", [LOGGED[0], tool_use("t1", "Edit")]), ("msg_2", [text("Done.")])),
            "other inputs",
            "call_0",
        ),
        (WHOLE + b'{"type": "assistant", "message": 3}\n{broken\n\xff\n', "3 lines cannot be read", None),
        (WHOLE + b"[" * 100_000, "1 lines cannot be read", None),
    ],
)
def test_what_differs_is_found(content: bytes | None, expected_message: str, call_id: str | None):
    (finding,) = found(content)
    assert expected_message in finding.message
    assert (finding.kind, finding.call_id) == ("session-log", call_id)


def test_the_end_of_a_log_that_was_cut_off_may_be_missing():
    torn = log(("msg_0", LOGGED)) + b'{"type":"assistant","mess'
    assert found(torn, cut_off=True) == []
    assert len(found(torn)) == 2


def test_what_the_cli_does_not_log_is_not_missed():
    session = Session()
    session.ask([ASK], [tool_use("t1")])
    summary_request = user(tool_result("t1"), text("CRITICAL: Respond with TEXT ONLY."))
    session.ask([ASK, assistant(tool_use("t1")), summary_request], [text("<summary>x</summary>")])
    session.ask([ASK, assistant(tool_use("t1")), user(tool_result("t1"))], [text(" ")])
    assert found(log(("msg_0", [tool_use("t1")])), calls=session.calls) == []


def test_the_logs_of_subagents_count_as_well():
    session = Session()
    session.ask([ASK], [tool_use("t1", "Agent", prompt="Find it.")])
    session.ask([user(text("Find it."))], [text("Found.")], agent="a1")
    main = log(("msg_0", [tool_use("t1", "Agent", prompt="Find it.")]))
    logs = {"session/s.jsonl": main, "session/s/subagents/agent-a1.jsonl": log(("msg_1", [text("Found.")]))}
    assert compare_session_log(logs, build(session.calls), cut_off=False) == []
    (finding,) = found(main, calls=session.calls)
    assert "call 1 is not in the log" in finding.message


def test_a_hostile_log_makes_a_bounded_number_of_findings():
    made_up = log(*((f"msg_x{n}", [text("x" * 10_000)]) for n in range(500)))
    findings = found(WHOLE + made_up)
    assert len(findings) == FINDINGS_LIMIT
    assert findings[-1].message == "and 481 more differences"
    assert all(len(finding.message) < 500 for finding in findings)


@given(st.binary(max_size=200) | st.text().map(str.encode), st.booleans())
def test_whatever_a_log_holds_it_is_compared(content: bytes, cut_off: bool):
    for text_ in (content, WHOLE + content, WHOLE[: len(content)]):
        assert len(found(text_, cut_off=cut_off)) <= FINDINGS_LIMIT


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_whatever_a_line_holds_it_is_compared(value: Any):
    message = {"type": "assistant", "message": {"id": "msg_0", "content": value}}
    more = {"type": "assistant", "message": {"id": "msg_0", "content": [tool_use("t1", "Edit"), {"input": value}]}}
    lines = b"\n".join(json.dumps(each).encode() for each in (message, more, value))
    assert len(found(WHOLE + lines)) <= 3
