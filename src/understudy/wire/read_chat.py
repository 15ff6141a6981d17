"""OpenAI chat completions, read into blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from understudy.wire.blocks import (
    Block,
    Conversation,
    canonical,
    decoded,
    items,
    joined,
    new_conversation,
    string,
)

_INSTRUCTING = ("system", "developer")
_TEXT_FIELD = {"text": "text", "refusal": "refusal"}


class _Function(Struct):
    name: str = ""
    arguments: str = ""


class _ToolCall(Struct):
    id: str = ""
    type: str = "function"
    function: _Function | None = None
    custom: Any = None


class _Message(Struct):
    role: str
    content: Any = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: Any = None
    reasoning_content: Any = None
    reasoning: Any = None


class _Request(Struct):
    messages: list[_Message]
    tools: Raw = Raw(b"")
    tool_choice: Any = None


class _Choice(Struct):
    message: _Message


class _Answer(Struct):
    choices: list[_Choice]


_request = msgspec.json.Decoder(_Request).decode
_answer = msgspec.json.Decoder(_Answer).decode


def request(body: bytes) -> Conversation:
    """The conversation that a request sends. Raises MsgspecError or ValueError when it is none.

    The system prompt is what the messages begin with of it.
    """
    read = decoded(_request, body)
    told = 0
    while told < len(read.messages) and read.messages[told].role in _INSTRUCTING:
        told += 1
    return new_conversation(
        "\n\n".join(joined(_blocks(0, message)) for message in read.messages[:told]),
        (block for turn, message in enumerate(read.messages[told:]) for block in _blocks(turn, message)),
        bytes(read.tools),
        forced=isinstance(read.tool_choice, dict),
    )


def answer(body: bytes) -> tuple[Block, ...] | None:
    """The blocks of the first choice of an answer, None when it has none. Raises MsgspecError or ValueError."""
    choices = decoded(_answer, body).choices
    return tuple(_blocks(0, choices[0].message)) if choices and choices[0].message.role == "assistant" else None


def _blocks(turn: int, message: _Message) -> Iterator[Block]:
    role = message.role
    if role == "tool":
        text = joined(_parts(turn, "user", message.content))
        yield Block(turn, "user", "tool_result", text, id=string(message.tool_call_id))
        return
    if thinking := string(message.reasoning_content) or string(message.reasoning):
        yield Block(turn, role, "thinking", thinking)
    yield from _parts(turn, role, message.content)
    for call in message.tool_calls or ():
        if call.function is None:
            custom = msgspec.to_builtins(call.custom)
            yield Block(turn, role, "other", canonical(custom).decode(), id=call.id, name=call.type)
        else:
            yield Block(
                turn, role, "tool_use", id=call.id, name=call.function.name, arguments=call.function.arguments
            )


def _parts(turn: int, role: str, content: Any) -> Iterator[Block]:
    if content is None or isinstance(content, str):
        if content:
            yield Block(turn, role, "text", content)
        return
    for item in items(content):
        kind = string(item.get("type"))
        if kind in _TEXT_FIELD:
            yield Block(turn, role, "text", string(item.get(_TEXT_FIELD[kind])))
        else:
            yield Block(turn, role, "other", canonical(item).decode(), name=kind)
