"""Sessions of Gemini CLI that were resumed: copied messages, results that are sent again, a second file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from understudy.ingest.iterate import ingest
from understudy.ingest.trace import TraceState

from support.ingest import only


def _log(tmp_path: Path, name: str, *records: dict[str, Any]) -> Path:
    meta = {"sessionId": "s1", "projectHash": "f", "startTime": "2026-11-28T20:00:00.000Z", "kind": "main"}
    path = tmp_path / name
    path.write_text("".join(json.dumps(record) + "\n" for record in (meta, *records)))
    return path


_RESULT = {"functionResponse": {"id": "read-1", "name": "read_file", "response": {"output": "x = 1"}}}
_CALL = {"functionCall": {"id": "read-1", "name": "read_file", "args": {"file_path": "a.py"}}}
_FIRST: list[dict[str, Any]] = [
    {"id": "u1", "type": "user", "content": [{"text": "Change it."}]},
    {
        "id": "g1",
        "type": "gemini",
        "content": "I look.",
        "model": "gemini-3-pro",
        "tokens": {"input": 10},
        "toolCalls": [{"id": "read-1", "name": "read_file", "args": {"file_path": "a.py"}, "result": [_RESULT]}],
    },
    {"id": "u2", "type": "user", "content": [_RESULT]},
    {"id": "g2", "type": "gemini", "content": "Done.", "model": "gemini-3-pro", "tokens": {"input": 20}},
]
_NEXT: list[dict[str, Any]] = [
    {"id": "u3", "type": "user", "content": [{"text": "And now?"}]},
    {"id": "g3", "type": "gemini", "content": "Now.", "model": "gemini-3-pro", "tokens": {"input": 30}},
]


def _texts(state: TraceState) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in state.messages if message["role"] != "system"]


def test_a_resumed_session_repeats_no_turn_and_shows_results_as_they_are_sent_again(tmp_path: Path) -> None:
    copies = [
        {"id": "h1", "type": "user", "content": [{"text": "Change it."}]},
        {"id": "h2", "type": "gemini", "content": [{"text": "I look."}, _CALL]},
        # The results of a copied response are a message with its id.
        {"id": "h2", "type": "user", "content": [_RESULT]},
        {"id": "u2", "type": "user", "content": [_RESULT]},
        {"id": "h3", "type": "gemini", "content": [{"text": "Done."}]},
    ]
    path = _log(tmp_path, "session-1.jsonl", *_FIRST, {"$set": {"messages": copies}}, *_NEXT)
    trace, states = only(path)
    assert [state.student_action.content for state in states] == ["I look.", "Done.", "Now."]
    assert _texts(states[-1]) == [
        ("user", "Change it."), ("assistant", "I look."), ("tool", "x = 1"),
        ("user", "x = 1"),  # the program sends the result twice, and a call can have one only
        ("assistant", "Done."), ("user", "And now?"),
    ]  # fmt: skip
    assert not trace.losses


def test_results_that_a_second_resume_adds_under_one_id_are_all_sent(tmp_path: Path) -> None:
    copies = [
        {"id": "h1", "type": "user", "content": [{"text": "Change it."}]},
        {"id": "h2", "type": "gemini", "content": [{"text": "I look."}, _CALL]},
        {"id": "h2", "type": "user", "content": [_RESULT]},
        {"id": "h2", "type": "user", "content": [_RESULT]},
    ]
    path = _log(tmp_path, "session-1.jsonl", *_FIRST, {"$set": {"messages": copies}}, *_NEXT)
    assert _texts(only(path)[1][-1])[2:] == [
        ("tool", "x = 1"),
        ("user", "x = 1"),
        ("assistant", "[The previous response was interrupted before it completed.]"),
        ("user", "And now?"),
    ]


def test_a_session_that_goes_on_in_another_file_repeats_no_turn(tmp_path: Path) -> None:
    copies: list[dict[str, Any]] = [
        {"id": "c1", "type": "user", "content": [{"text": "Change it."}]},
        {"id": "c2", "type": "gemini", "content": [{"text": "I look."}, _CALL], "thoughts": [], "tokens": None},
        {"id": "c3", "type": "user", "content": [_RESULT]},
        {"id": "c4", "type": "gemini", "content": [{"text": "Done."}], "thoughts": [], "tokens": None},
    ]
    _log(tmp_path, "session-1.jsonl", *_FIRST)
    _log(tmp_path, "session-2.jsonl", *copies, *_NEXT)
    states = list(ingest([tmp_path]))
    assert [state.student_action.content for state in states] == ["I look.", "Done.", "Now."]
    assert len({state.trace_id for state in states}) == 1
    assert _texts(states[-1]) == [
        ("user", "Change it."), ("assistant", "I look."), ("tool", "x = 1"), ("assistant", "Done."),
        ("user", "And now?"),
    ]  # fmt: skip


def test_a_prompt_after_results_without_a_response_follows_the_programs_words(tmp_path: Path) -> None:
    """As after an interruption, when the session goes on."""
    _, states = only(_log(tmp_path, "session-1.jsonl", *_FIRST[:3], *_NEXT))
    assert [state.student_action.content for state in states] == ["I look.", "Now."]
    assert _texts(states[-1]) == [
        ("user", "Change it."), ("assistant", "I look."), ("tool", "x = 1"),
        ("assistant", "[The previous response was interrupted before it completed.]"), ("user", "And now?"),
    ]  # fmt: skip
