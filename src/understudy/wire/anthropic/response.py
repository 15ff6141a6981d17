"""Anthropic Messages responses: a generation as one JSON message, and the blocks of any such message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from understudy.types import Usage
from understudy.wire.anthropic.request import MessageParam, read_message
from understudy.wire.arguments import tool_input, unwrapped
from understudy.wire.decoding import decoded
from understudy.wire.dialect import DialectResponse, WireSession
from understudy.wire.model import Block, Ending, Generation, ToolCall, ending

Part = Literal["reasoning", "text"] | int
"""A part of a generation that makes a block of its own; a tool call goes by its number."""

_STOP_REASONS: dict[Ending, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_MESSAGE = msgspec.json.Decoder(MessageParam)


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """The blocks of a response, tool calls as the model wrote them; None when it is not an assistant's.

    Raises what UNREADABLE lists.
    """
    message = decoded(_MESSAGE.decode, body)
    if message.role != "assistant":
        return None
    return tuple(
        msgspec.structs.replace(block, arguments=unwrapped(block.arguments)) if block.kind == "tool_use" else block
        for block in read_message(0, message)
    )


def to_message(generation: Generation, model: str, session: WireSession, message_id: str) -> DialectResponse:
    """The response under the requested model name: thinking, text, then the tool calls.

    Raises BackendError when the generation did not end in a way that a response can end: an aborted one must not
    pass for a short one.
    """
    ids = [session.tool_id(call.id) for call in generation.tool_calls]
    order: list[Part] = ["reasoning", "text", *range(len(ids))]
    return message_of(generation, model, message_id, ids, order)


def message_of(
    generation: Generation, model: str, message_id: str, ids: Sequence[str], order: Sequence[Part]
) -> DialectResponse:
    """The response with its parts in `order` and its tool calls under `ids`. Raises as `to_message` does."""
    blocks: dict[Part, dict[str, Any]] = {}
    if generation.reasoning:
        blocks["reasoning"] = {"type": "thinking", "thinking": generation.reasoning, "signature": ""}
    if generation.text:
        blocks["text"] = {"type": "text", "text": generation.text}
    sampled: dict[str, ToolCall] = {}
    for number, (tool_id, call) in enumerate(zip(ids, generation.tool_calls, strict=True)):
        sampled[tool_id] = call
        blocks[number] = {
            "type": "tool_use",
            "id": tool_id,
            "name": call.name,
            "input": tool_input(call.arguments),
        }
    body = {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [blocks[part] for part in order if part in blocks],
        "stop_reason": _stop_reason(generation),
        "stop_sequence": generation.stop,
        "usage": _usage(generation.usage),
    }
    return DialectResponse(msgspec.json.encode(body), sampled)


def _stop_reason(generation: Generation) -> str:
    end = ending(generation)
    return "stop_sequence" if end == "stop" and generation.stop is not None else _STOP_REASONS[end]


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens, 0),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
