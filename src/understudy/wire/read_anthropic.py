"""Anthropic Messages, read into blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from understudy.wire.blocks import (
    Block,
    Conversation,
    Kind,
    canonical,
    decoded,
    items,
    joined,
    new_conversation,
    string,
)

_TEXT_FIELD: dict[str, tuple[Kind, str]] = {"text": ("text", "text"), "thinking": ("thinking", "thinking")}
_SERVED = ("web_search_", "web_fetch_", "code_execution_")
_BILLING = "x-anthropic-billing-header:"  # a line that changes from call to call; no model sees it


class _Message(Struct):
    role: str
    content: Any


class _Tool(Struct):
    type: str | None = None


class _Request(Struct):
    messages: list[_Message]
    system: Any = None
    tools: Raw = Raw(b"")
    tool_choice: Any = None
    output_config: Any = None


_tools = msgspec.json.Decoder(list[_Tool]).decode
_request = msgspec.json.Decoder(_Request).decode
_answer = msgspec.json.Decoder(_Message).decode


def request(body: bytes) -> Conversation:
    """The conversation that a request sends. Raises MsgspecError or ValueError when it is none."""
    read = decoded(_request, body)
    system = "\n\n".join(
        block.text
        for block in _blocks(0, _Message("system", read.system or ""))
        if not block.text.startswith(_BILLING)
    )
    choice, output = _object(read.tool_choice), _object(read.output_config)
    return new_conversation(
        system,
        (block for turn, message in enumerate(read.messages) for block in _blocks(turn, message)),
        bytes(read.tools),
        served=_served(read.tools),
        forced=choice.get("type") == "tool",
        formatted=_object(output.get("format")).get("type") == "json_schema",
        aside=_aside(read.messages),
    )


def answer(body: bytes) -> tuple[Block, ...] | None:
    """The blocks of an answer, None when it is not an assistant's. Raises MsgspecError or ValueError."""
    message = decoded(_answer, body)
    return tuple(_blocks(0, message)) if message.role == "assistant" else None


def _served(tools: Raw) -> bool:
    """Whether all tools are such as the provider runs; the CLI asks for a search of the web with nothing else."""
    try:
        return all((tool.type or "").startswith(_SERVED) for tool in _tools(tools))
    except msgspec.MsgspecError:
        return False


def _aside(messages: Sequence[_Message]) -> bool:
    """Whether the last mark for the cache is on an assistant's turn; where the CLI goes on, it is on a user's."""
    for message in reversed(messages):
        content: Any = message.content
        parts = cast(list[Any], content) if isinstance(content, list) else []
        if any(isinstance(part, dict) and "cache_control" in part for part in parts):
            return message.role == "assistant"
    return False


def _blocks(turn: int, message: _Message) -> Iterator[Block]:
    role = message.role
    if isinstance(message.content, str):
        yield Block(turn, role, "text", message.content)
        return
    for item in items(message.content):
        kind = string(item.get("type"))
        if kind in _TEXT_FIELD:
            name, field = _TEXT_FIELD[kind]
            yield Block(turn, role, name, string(item.get(field)))
        elif kind == "tool_use":
            yield Block(
                turn,
                role,
                "tool_use",
                id=string(item.get("id")),
                name=string(item.get("name")),
                arguments=msgspec.json.encode(item.get("input")).decode(),
            )
        elif kind == "tool_result":
            yield Block(
                turn,
                role,
                "tool_result",
                text=_result_text(item.get("content")),
                id=string(item.get("tool_use_id")),
                is_error=item.get("is_error") is True,
            )
        else:
            bare = {key: value for key, value in item.items() if key != "cache_control"}
            yield Block(turn, role, "other", canonical(bare).decode(), name=kind)


def _result_text(content: Any) -> str:
    """The text of a tool result; a part that is no text (an image) is its type in brackets."""
    if content is None or isinstance(content, str):
        return content or ""
    return joined(_blocks(0, _Message("user", content)))


def _object(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}
