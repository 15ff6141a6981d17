"""OpenAI Responses: a generation as one JSON response, and the blocks of any such response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from understudy.types import Usage
from understudy.wire.decoding import decoded
from understudy.wire.dialect import DialectRequest, DialectResponse
from understudy.wire.model import Block, Generation, ToolCall, ending
from understudy.wire.responses.request import Item, read_items
from understudy.wire.responses.tools import ToolOrigin, call_item

Part = Literal["reasoning", "text"] | int
"""A part of an answer: its reasoning, its text, or its tool call of that number."""

OutputItem = dict[str, Any]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesDialectRequest(DialectRequest, frozen=True):
    """A Responses request, with what only its response needs to know. `echo` are fields that it repeats."""

    origins: dict[str, ToolOrigin]
    echo: dict[str, Any]


class _ReadResponse(Struct):
    output: list[Item]


_READ = msgspec.json.Decoder(_ReadResponse)


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """The blocks of a response, tool calls as the model wrote them. Raises what UNREADABLE lists."""
    return tuple(read_items(decoded(_READ.decode, body).output))


def response_id(message_id: str) -> str:
    """The id of the response that the call's message is."""
    return f"resp_{_bare(message_id)}"


def _bare(message_id: str) -> str:
    return message_id.removeprefix("msg_")


def frame(incoming: ResponsesDialectRequest, message_id: str, created: int) -> dict[str, Any]:
    """A response that has only started.

    Instructions and tools are not repeated: they would be the greater part of an answer, three times in a stream.
    """
    unsaid: dict[str, Any] = {
        "id": response_id(message_id),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "model": incoming.model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": None,
        "tool_choice": "auto",
        "tools": [],
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
    }
    return unsaid | incoming.echo


def to_response(
    generation: Generation,
    incoming: ResponsesDialectRequest,
    message_id: str,
    created: int,
    ids: Sequence[str],
    parts: Sequence[Part] = (),
) -> tuple[DialectResponse, dict[str, Any]]:
    """The response under the requested model name, and the same as a value.

    `ids` are those of its tool calls; `parts` are those that were streamed already, in their order. Raises
    BackendError when the generation did not end in a way that a response can end.
    """
    incomplete = _INCOMPLETE.get(ending(generation))
    status = "incomplete" if incomplete else "completed"
    order: list[Part] = [*parts, *(part for part in parts_of(generation) if part not in parts)]
    output = [item_of(part, generation, incoming, message_id, ids, "completed") for part in order]
    if output and incomplete:
        output[-1]["status"] = status
    body = frame(incoming, message_id, created) | {
        "status": status,
        "incomplete_details": {"reason": incomplete} if incomplete else None,
        "output": output,
        "usage": _usage(generation.usage),
    }
    sampled = dict(zip(ids, generation.tool_calls, strict=True))
    return DialectResponse(msgspec.json.encode(body), sampled), body


def parts_of(generation: Generation) -> list[Part]:
    """The parts that an answer has."""
    parts: list[Part] = []
    if generation.reasoning:
        parts.append("reasoning")
    if generation.text:
        parts.append("text")
    return [*parts, *range(len(generation.tool_calls))]


def item_of(
    part: Part,
    generation: Generation,
    incoming: ResponsesDialectRequest,
    message_id: str,
    ids: Sequence[str],
    status: str,
) -> OutputItem:
    """The output item that a part of an answer is."""
    bare = _bare(message_id)
    match part:
        case "reasoning":
            text = generation.reasoning or ""
            item: OutputItem = {"id": f"rs_{bare}", "type": "reasoning", "summary": []}
            item["content"] = [{"type": "reasoning_text", "text": text}]
            return item | {"status": status}
        case "text":
            content: dict[str, Any] = {
                "type": "output_text",
                "text": generation.text,
                "annotations": [],
                "logprobs": [],
            }
            item = {"id": f"msg_{bare}", "type": "message", "role": "assistant", "status": status}
            return item | {"content": [content]}
        case index:
            call: ToolCall = generation.tool_calls[index]
            return call_item(incoming.origins, call, item_id=f"{bare}_{index}", call_id=ids[index], status=status)


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts. No backend reports how many were reasoning, and clients require a number: 0."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
