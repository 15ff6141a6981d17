"""OpenAI Responses answers: a generation as one JSON response, and that as an event stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from understudy.types import Usage
from understudy.wire.dialect import DialectResponse
from understudy.wire.ending import ending
from understudy.wire.model import Generation, ToolCall
from understudy.wire.responses.request import ResponsesDialectRequest
from understudy.wire.responses.tools import called_item

Part = Literal["reasoning", "text"] | int
"""A part of an answer: its reasoning, its text, or its tool call of that number."""

Item = dict[str, Any]

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}


def response_id(message_id: str) -> str:
    """The id of the response that the call's message is."""
    return f"resp_{_bare(message_id)}"


def _bare(message_id: str) -> str:
    return message_id.removeprefix("msg_")


def frame(incoming: ResponsesDialectRequest, message_id: str, created: int) -> dict[str, Any]:
    """A response that was only begun.

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
    """The answer under the model name that was asked for, and the same as a value.

    `ids` are those of its tool calls; `parts` are those that were said already, in their order. Raises
    BackendError when the generation did not end as an answer can end.
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
) -> Item:
    """The output item that a part of an answer is."""
    bare = _bare(message_id)
    match part:
        case "reasoning":
            text = generation.reasoning or ""
            item: Item = {"id": f"rs_{bare}", "type": "reasoning", "summary": []}
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
            return called_item(
                incoming.origins, call, item_id=f"{bare}_{index}", call_id=ids[index], status=status
            )


def _usage(usage: Usage) -> dict[str, Any]:
    """Token counts; how many of them were thinking no backend says, and clients demand a number."""
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


# --- the event stream ----------------------------------------------------------------------------------


class Events:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = -1

    def say(self, type_: str, fields: Mapping[str, Any]) -> bytes:
        """One server-sent event, named by its type."""
        self._number += 1
        data = {"type": type_, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % (type_.encode(), msgspec.json.encode(data))

    def begin(self, frame: dict[str, Any]) -> bytes:
        """What opens a stream."""
        opening = {"response": frame}
        return self.say("response.created", opening) + self.say("response.in_progress", opening)

    def open(self, index: int, item: Item) -> bytes:
        """An item as it starts, empty."""
        nothing: dict[str, Any] = {"status": "in_progress", _FILLED[item["type"]]: [] if _part_of(item) else ""}
        empty = item | nothing
        said = self.say("response.output_item.added", {"output_index": index, "item": empty})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            said += self.say("response.content_part.added", at | {"part": part | {"text": ""}})
        return said

    def add(self, index: int, item: Item, text: str) -> bytes:
        """A piece of an item's text."""
        return self.say(f"{_NAMES[item['type']]}.delta", _place(index, item) | {"delta": text})

    def close(self, index: int, item: Item) -> bytes:
        """An item as it is, whole."""
        place, name = _place(index, item), _NAMES[item["type"]]
        if item["type"] == "function_call":
            place["name"] = item["name"]
        said = self.say(f"{name}.done", place | {_DONE[item["type"]]: text_of(item)})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            said += self.say("response.content_part.done", at | {"part": part})
        return said + self.say("response.output_item.done", {"output_index": index, "item": item})

    def end(self, response: dict[str, Any]) -> bytes:
        """What ends a stream."""
        return self.say(f"response.{response['status']}", {"response": response})


def to_events(body: bytes) -> bytes:
    """The stream that says exactly what a response made by `to_response` says."""
    return b"".join(_events(msgspec.json.decode(body)))


def _events(response: dict[str, Any]) -> Iterator[bytes]:
    events = Events()
    unfinished: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield events.begin(response | unfinished)
    for index, item in enumerate(response["output"]):
        yield events.open(index, item)
        if text := text_of(item):
            yield events.add(index, item, text)
        yield events.close(index, item)
    yield events.end(response)


# By the type of an item: the events of its text, the field that is empty at first, and the field of the whole text
# in the event that ends it.
_NAMES = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_FILLED = {
    "reasoning": "content",
    "message": "content",
    "function_call": "arguments",
    "custom_tool_call": "input",
}
_DONE = {"reasoning": "text", "message": "text", "function_call": "arguments", "custom_tool_call": "input"}


def _part_of(item: Item) -> dict[str, Any] | None:
    """The one content part of a message or of reasoning; None for a call."""
    content: list[dict[str, Any]] | None = item.get("content")
    return content[0] if content else None


def text_of(item: Item) -> str:
    """The text of an item: what it says, or what it passes to a tool."""
    part = _part_of(item)
    return part["text"] if part else item[_FILLED[item["type"]]]


def _place(index: int, item: Item) -> dict[str, Any]:
    place: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    if item["type"] in ("message", "reasoning"):
        place["content_index"] = 0
    if item["type"] == "message":
        place["logprobs"] = []
    return place
