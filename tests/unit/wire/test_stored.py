"""Requests that are stored as a tree of messages are read message by message as they are read whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from understudy.store.contents import join_body, split_body
from understudy.types import Call
from understudy.wire.decoding import UNREADABLE
from understudy.wire.dialects import DIALECTS
from understudy.wire.model import Conversation
from understudy.wire.stored import RequestReader, read_request

from support.golden import DATA
from support.trajectory import Session, text, user

Item = dict[str, Any]
_CALL = Session("ignored").ask([user(text("go"))], [text("done")])


def as_call(dialect: str, body: bytes) -> Call:
    return msgspec.structs.replace(_CALL, dialect=dialect, request=body)


class Tree:
    """Requests as a store has them: messages as nodes of one tree, and bodies without messages."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[int, int]] = {}
        self.contents: list[bytes] = []
        self.nodes: dict[tuple[int, bytes], int] = {}
        self.reader = RequestReader(self.steps)

    def read(self, dialect: str, body: bytes) -> Conversation | None:
        """The conversation of a request read message by message; None where that cannot be done."""
        parts = split_body(body)
        outer = join_body(parts.skeleton, parts.system, parts.tools, [])
        last = 0
        for message in map(bytes, parts.messages):
            node = self.nodes.setdefault((last, message), len(self.nodes) + 1)
            if node not in self.steps:
                self.steps[node] = (last, len(self.contents))
                self.contents.append(message)
            last = node
        try:
            return self.reader.read(dialect, last, outer, outer, dict(enumerate(self.contents)))
        except UNREADABLE:
            return None


def golden(dialect: str) -> dict[str, bytes]:
    cases = json.loads((DATA / "wire" / f"requests/{dialect}.json").read_text())
    return {
        name: value.encode() if isinstance(value, str) else json.dumps(value).encode()
        for name, value in cases.items()
    }


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_request_read_incrementally_equals_one_parsed_whole(dialect: str):
    read = 0
    for name, body in golden(dialect).items():
        conversation = Tree().read(dialect, body)
        if conversation is not None:
            assert conversation == read_request(as_call(dialect, body)), name
            read += len(conversation.blocks) > 1
    assert read > 10


CHAT: Item = {
    "model": "m",
    "tools": [{"type": "function", "function": {"name": "bash", "parameters": {}}}],
    "messages": [
        {"role": "system", "content": "You work."},
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "input_audio", "input_audio": {}}]},
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls'}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a.py"},
        {"role": "system", "content": "One turn is left."},
        {"role": "assistant", "content": "done"},
    ],
}  # fmt: skip
RESPONSES: Item = {
    "model": "m",
    "instructions": "You work.",
    "tools": [{"type": "function", "name": "bash", "parameters": {}}],
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "I look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
        {"type": "function_call", "call_id": "c1", "name": "bash", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "bash", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "function_call_output", "call_id": "c2", "output": "b.py"},
        {"type": "message", "role": "developer", "content": "One turn is left."},
        {"type": "computer_call", "call_id": "c3"},
        {"type": "message", "role": "assistant", "content": "done"},
    ],
}
GEMINI: Item = {
    "systemInstruction": {"parts": [{"text": "You work."}]},
    "tools": [{"functionDeclarations": [{"name": "bash"}]}],
    "contents": [
        {"role": "user", "parts": [{"text": "go"}]},
        {"role": "model", "parts": [
            {"text": "I "}, {"text": "look."},
            {"functionCall": {"name": "bash", "args": {}}}, {"functionCall": {"name": "bash", "args": {}}}]},
        {"role": "user", "parts": [
            {"functionResponse": {"name": "bash", "response": {"output": "a.py"}}},
            {"functionResponse": {"name": "bash", "response": {"output": "b.py"}}}]},
        {"role": "user", "parts": [{"executableCode": {}}]},
        {"role": "model", "parts": [{"text": "done"}]},
    ],
}  # fmt: skip
LONG = {
    "openai-chat": (CHAT, "messages"),
    "openai-responses": (RESPONSES, "input"),
    "gemini": (GEMINI, "contents"),
}


@pytest.mark.parametrize("dialect", sorted(LONG))
def test_a_growing_conversation_is_read_incrementally_with_the_same_result(dialect: str):
    request, key = LONG[dialect]
    tree = Tree()
    for count in range(1, len(request[key]) + 1):
        body = json.dumps(request | {key: request[key][:count]}).encode()
        assert split_body(body).messages and len(split_body(body).messages) == count
        assert tree.read(dialect, body) == read_request(as_call(dialect, body)), count


@pytest.mark.parametrize("dialect", sorted(LONG))
def test_conversations_with_a_common_prefix_are_read_separately(dialect: str):
    """Two ends of one beginning, which share the reader's memory of it."""
    request, key = LONG[dialect]
    tree = Tree()
    whole = json.dumps(request).encode()
    assert tree.read(dialect, whole) == read_request(as_call(dialect, whole))
    shorter = request | {key: [*request[key][:3], request[key][-1]]}
    body = json.dumps(shorter).encode()
    assert tree.read(dialect, body) == read_request(as_call(dialect, body))


def test_requests_that_cannot_be_read_incrementally_return_none():
    added: Item = {"type": "additional_tools", "tools": [{"type": "function", "name": "more", "parameters": {}}]}
    body = json.dumps(RESPONSES | {"input": [*RESPONSES["input"], added]}).encode()
    assert Tree().read("openai-responses", body) is None
    continued = json.dumps(GEMINI | {"contents": [*GEMINI["contents"], GEMINI["contents"][-1]]}).encode()
    assert Tree().read("gemini", continued) is None
    assert Tree().read("unknown", b"{}") is None
