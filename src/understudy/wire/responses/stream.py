"""OpenAI Responses as event streams: of a complete response, and of one that is being generated."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from understudy.wire.dialect import DialectResponse, WireSession
from understudy.wire.model import Delta, Generation, ToolCall
from understudy.wire.responses.response import (
    OutputItem,
    Part,
    ResponsesDialectRequest,
    frame,
    item_of,
    to_response,
)


class EventBuilder:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, type_: str, fields: Mapping[str, Any]) -> bytes:
        """One server-sent event, named by its type."""
        self._number += 1
        data = {"type": type_, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % (type_.encode(), msgspec.json.encode(data))

    def begin(self, frame: dict[str, Any]) -> bytes:
        """What opens a stream."""
        opening = {"response": frame}
        return self.event("response.created", opening) + self.event("response.in_progress", opening)

    def open(self, index: int, item: OutputItem) -> bytes:
        """An item as it starts, empty."""
        nothing: dict[str, Any] = {"status": "in_progress", _FILLED[item["type"]]: [] if _part_of(item) else ""}
        empty = item | nothing
        events = self.event("response.output_item.added", {"output_index": index, "item": empty})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events += self.event("response.content_part.added", at | {"part": part | {"text": ""}})
        return events

    def add(self, index: int, item: OutputItem, text: str) -> bytes:
        """A piece of an item's text."""
        return self.event(f"{_NAMES[item['type']]}.delta", _position(index, item) | {"delta": text})

    def close(self, index: int, item: OutputItem) -> bytes:
        """A complete item."""
        position, name = _position(index, item), _NAMES[item["type"]]
        if item["type"] == "function_call":
            position["name"] = item["name"]
        events = self.event(f"{name}.done", position | {_DONE[item["type"]]: text_of(item)})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events += self.event("response.content_part.done", at | {"part": part})
        return events + self.event("response.output_item.done", {"output_index": index, "item": item})

    def end(self, response: dict[str, Any]) -> bytes:
        """What ends a stream."""
        return self.event(f"response.{response['status']}", {"response": response})


def to_events(body: bytes) -> bytes:
    """A response made by `to_response` as the event stream that a client builds the same one from."""
    return b"".join(_events(msgspec.json.decode(body)))


def _events(response: dict[str, Any]) -> Iterator[bytes]:
    events = EventBuilder()
    unfinished: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield events.begin(response | unfinished)
    for index, item in enumerate(response["output"]):
        yield events.open(index, item)
        if text := text_of(item):
            yield events.add(index, item, text)
        yield events.close(index, item)
    yield events.end(response)


# By the type of an item: the events of its text, the field that is empty at first, and the field of all text
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


def _part_of(item: OutputItem) -> dict[str, Any] | None:
    """The one content part of a message or of reasoning; None for a call."""
    content: list[dict[str, Any]] | None = item.get("content")
    return content[0] if content else None


def text_of(item: OutputItem) -> str:
    """The text of an item: of a message or reasoning, or what a call passes to its tool."""
    part = _part_of(item)
    return part["text"] if part else item[_FILLED[item["type"]]]


def _position(index: int, item: OutputItem) -> dict[str, Any]:
    position: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    if item["type"] in ("message", "reasoning"):
        position["content_index"] = 0
    if item["type"] == "message":
        position["logprobs"] = []
    return position


class ResponsesWriter:
    """See StreamWriter. Items are opened and filled as they come, and all of them closed at the end.

    Codex runs a tool as soon as its item is done. The text for a custom tool is sent at the end: it is a
    JSON string, which cannot be decoded before the model has closed it.
    """

    def __init__(self, incoming: ResponsesDialectRequest, session: WireSession, message_id: str) -> None:
        self._incoming = incoming
        self._session = session
        self._message_id = message_id
        self._created = int(time.time())
        self._events = EventBuilder()
        self._started = False
        self._items: dict[Part, OutputItem] = {}
        self._sent: dict[Part, int] = {}
        self._calls: list[ToolCall] = []
        self._ids: list[str] = []

    def feed(self, delta: Delta) -> bytes:
        """See StreamWriter."""
        events = self._begin()
        part: Part = delta.kind if delta.kind == "reasoning" or delta.kind == "text" else delta.index
        if delta.kind == "tool":
            self._calls.append(ToolCall(delta.id, delta.name, ""))
            self._ids.append(self._session.tool_id(delta.id))
        if part not in self._items and (delta.text or delta.kind == "tool"):
            events += self._open(part)
        if delta.text and self._items[part]["type"] != "custom_tool_call":
            events += self._events.add(self._index(part), self._items[part], delta.text)
            self._sent[part] += len(delta.text)
        return events

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        """See StreamWriter."""
        self._ids += [self._session.tool_id(call.id) for call in generation.tool_calls[len(self._ids) :]]
        message, response = to_response(
            generation, self._incoming, self._message_id, self._created, self._ids, list(self._items)
        )
        tail = self._begin()
        sent = list(self._sent.values())
        for index, item in enumerate(response["output"]):
            if index >= len(sent):
                tail += self._events.open(index, item)
            if rest := text_of(item)[sent[index] if index < len(sent) else 0 :]:
                tail += self._events.add(index, item, rest)
        for index, item in enumerate(response["output"]):
            tail += self._events.close(index, item)
        return message, tail + self._events.end(response)

    def _begin(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._events.begin(frame(self._incoming, self._message_id, self._created))

    def _open(self, part: Part) -> bytes:
        so_far = Generation(model="", text="", finish_reason="", tool_calls=tuple(self._calls))
        item = item_of(part, so_far, self._incoming, self._message_id, self._ids, "in_progress")
        self._items[part] = item
        self._sent[part] = 0
        return self._events.open(self._index(part), item)

    def _index(self, part: Part) -> int:
        return list(self._items).index(part)
