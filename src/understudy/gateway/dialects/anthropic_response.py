"""Anthropic Messages answers: a generation as one JSON message, and that message as an event stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from understudy.errors import BackendError
from understudy.gateway.backends.base import Generation, ToolCall
from understudy.gateway.dialects.arguments import tool_input
from understudy.gateway.dialects.base import Message
from understudy.gateway.keys import Session
from understudy.types import Usage

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}


def to_message(generation: Generation, model: str, session: Session, message_id: str) -> Message:
    """The answer under the model name that was asked for.

    Raises BackendError when the generation did not end in a way that an answer can end: an aborted one must not
    pass for a short one.
    """
    content: list[dict[str, Any]] = []
    sampled: dict[str, ToolCall] = {}
    if generation.reasoning:
        content.append({"type": "thinking", "thinking": generation.reasoning, "signature": ""})
    if generation.text:
        content.append({"type": "text", "text": generation.text})
    for call in generation.tool_calls:
        tool_id = session.tool_id(call.id)
        sampled[tool_id] = call
        content.append({"type": "tool_use", "id": tool_id, "name": call.name, "input": tool_input(call.arguments)})
    body = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": _stop_reason(generation),
        "stop_sequence": generation.stop,
        "usage": _usage(generation.usage),
    }
    return Message(msgspec.json.encode(body), sampled)


def _stop_reason(generation: Generation) -> str:
    reason = _STOP_REASONS.get(generation.finish_reason)
    if reason is None:
        raise BackendError(
            f"the backend ended its answer with finish_reason {generation.finish_reason!r}, expected one of "
            f"{', '.join(_STOP_REASONS)}; the answer is not whole"
        )
    if reason == "end_turn" and generation.tool_calls:
        return "tool_use"
    if reason == "end_turn" and generation.stop is not None:
        return "stop_sequence"
    return reason


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens, 0),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# --- the event stream ----------------------------------------------------------------------------------


class _Block(Struct):
    type: str
    text: str = ""
    thinking: str = ""
    signature: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")


class _Message(Struct):
    id: str
    type: str
    role: str
    model: str
    content: list[_Block]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, int]


_MESSAGE = msgspec.json.Decoder(_Message)


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def to_events(body: bytes) -> bytes:
    """The stream that says exactly what a message made by `to_message` says."""
    message = _MESSAGE.decode(body)
    return b"".join(map(event, _events(message)))


def _events(message: _Message) -> Iterator[dict[str, Any]]:
    opening: dict[str, Any] = {
        "id": message.id,
        "type": message.type,
        "role": message.role,
        "model": message.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": message.usage | {"output_tokens": 0},
    }
    yield {"type": "message_start", "message": opening}
    for index, block in enumerate(message.content):
        start, deltas = _opened(block)
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
    yield {"type": "message_delta", "delta": ending, "usage": message.usage}
    yield {"type": "message_stop"}


def _opened(block: _Block) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it starts, empty, and the deltas that fill it."""
    match block.type:
        case "thinking":
            return {"type": "thinking", "thinking": "", "signature": ""}, [
                {"type": "thinking_delta", "thinking": block.thinking},
                {"type": "signature_delta", "signature": block.signature},
            ]
        case "tool_use":
            # The model's own bytes: whatever the agent's parser does, it does to what was sampled.
            partial = bytes(block.input).decode()
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}, [
                {"type": "input_json_delta", "partial_json": partial}
            ]
        case _:
            return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block.text}]
