"""Anthropic Messages answers: a generation as one JSON message, and any such message as an event stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from understudy.types import Usage
from understudy.wire.arguments import tool_input
from understudy.wire.dialect import DialectResponse, WireSession
from understudy.wire.ending import Ending, ending
from understudy.wire.model import Generation, ToolCall

Part = Literal["reasoning", "text"] | int
"""A part of a generation that makes a block of its own; a tool call goes by its number."""

_STOP_REASONS: dict[Ending, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


def to_message(generation: Generation, model: str, session: WireSession, message_id: str) -> DialectResponse:
    """The answer under the model name that was asked for: what was thought, what was said, then the tool calls.

    Raises BackendError when the generation did not end in a way that an answer can end: an aborted one must not
    pass for a short one.
    """
    ids = [session.tool_id(call.id) for call in generation.tool_calls]
    order: list[Part] = ["reasoning", "text", *range(len(ids))]
    return message_of(generation, model, message_id, ids, order)


def message_of(
    generation: Generation, model: str, message_id: str, ids: Sequence[str], order: Sequence[Part]
) -> DialectResponse:
    """The answer with its parts in `order` and its tool calls under `ids`. Raises as `to_message` does."""
    made: dict[Part, dict[str, Any]] = {}
    if generation.reasoning:
        made["reasoning"] = {"type": "thinking", "thinking": generation.reasoning, "signature": ""}
    if generation.text:
        made["text"] = {"type": "text", "text": generation.text}
    sampled: dict[str, ToolCall] = {}
    for number, (tool_id, call) in enumerate(zip(ids, generation.tool_calls, strict=True)):
        sampled[tool_id] = call
        made[number] = {"type": "tool_use", "id": tool_id, "name": call.name, "input": tool_input(call.arguments)}
    body = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [made[part] for part in order if part in made],
        "stop_reason": _stop_reason(generation),
        "stop_sequence": generation.stop,
        "usage": _usage(generation.usage),
    }
    return DialectResponse(msgspec.json.encode(body), sampled)


def _stop_reason(generation: Generation) -> str:
    ended = ending(generation)
    return "stop_sequence" if ended == "stop" and generation.stop is not None else _STOP_REASONS[ended]


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens, 0),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# --- the event stream ----------------------------------------------------------------------------------

# What a client builds from deltas, and so begins with nothing: block type → (field, its delta, the delta's field).
_DELTAS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "text": (("text", "text_delta", "text"),),
    "thinking": (("thinking", "thinking_delta", "thinking"), ("signature", "signature_delta", "signature")),
    "tool_use": (("input", "input_json_delta", "partial_json"),),
    "server_tool_use": (("input", "input_json_delta", "partial_json"),),
}
_MESSAGE = msgspec.json.Decoder(dict[str, Raw])
_BLOCKS = msgspec.json.Decoder(list[dict[str, Raw]])


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def to_events(body: bytes) -> bytes:
    """The stream that says exactly what a message says."""
    message = _MESSAGE.decode(body)
    usage: dict[str, Any] = msgspec.json.decode(message.get("usage", b"{}"))
    ending = {name: message.pop(name, None) for name in ("stop_reason", "stop_sequence")}
    blocks = _BLOCKS.decode(message["content"])
    opening = {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    events = [event({"type": "message_start", "message": message | {"content": []} | opening})]
    for index, block in enumerate(blocks):
        events += map(event, _whole_block(index, block))
    events.append(event({"type": "message_delta", "delta": ending, "usage": usage}))
    events.append(event({"type": "message_stop"}))
    return b"".join(events)


def _whole_block(index: int, block: dict[str, Raw]) -> Iterator[dict[str, Any]]:
    start: dict[str, Any] = dict(block)
    deltas: list[dict[str, Any]] = []
    for name, kind, holds in _DELTAS.get(msgspec.json.decode(block["type"], type=str), ()):
        value: Any = block.get(name)
        if value is None:
            continue
        if name == "input":
            # The model's own bytes: whatever the agent's parser does, it does to what was sampled.
            value = bytes(value).decode()
        start[name] = {} if name == "input" else ""
        deltas.append({"type": kind, holds: value})
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}
