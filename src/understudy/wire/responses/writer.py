"""An OpenAI response said while it is being generated."""

from __future__ import annotations

import time

from understudy.wire.dialect import DialectResponse, WireSession
from understudy.wire.model import Delta, Generation, ToolCall
from understudy.wire.responses.request import ResponsesDialectRequest
from understudy.wire.responses.response import (
    Events,
    Item,
    Part,
    frame,
    item_of,
    text_of,
    to_response,
)


class ResponsesWriter:
    """See Writer. Items are opened and filled as they come, and all of them closed at the end.

    Codex runs a tool as soon as its item is done. The text for a custom tool is told at the end: until the model
    has closed the string it stands in, nobody knows what it says.
    """

    def __init__(self, incoming: ResponsesDialectRequest, session: WireSession, message_id: str) -> None:
        self._incoming = incoming
        self._session = session
        self._message_id = message_id
        self._created = int(time.time())
        self._events = Events()
        self._begun = False
        self._items: dict[Part, Item] = {}
        self._said: dict[Part, int] = {}
        self._calls: list[ToolCall] = []
        self._ids: list[str] = []

    def feed(self, delta: Delta) -> bytes:
        """See Writer."""
        said = self._begin()
        part: Part = delta.kind if delta.kind == "reasoning" or delta.kind == "text" else delta.index
        if delta.kind == "tool":
            self._calls.append(ToolCall(delta.id, delta.name, ""))
            self._ids.append(self._session.tool_id(delta.id))
        if part not in self._items and (delta.text or delta.kind == "tool"):
            said += self._open(part)
        if delta.text and self._items[part]["type"] != "custom_tool_call":
            said += self._events.add(self._index(part), self._items[part], delta.text)
            self._said[part] += len(delta.text)
        return said

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        """See Writer."""
        self._ids += [self._session.tool_id(call.id) for call in generation.tool_calls[len(self._ids) :]]
        message, response = to_response(
            generation, self._incoming, self._message_id, self._created, self._ids, list(self._items)
        )
        tail = self._begin()
        said = list(self._said.values())
        for index, item in enumerate(response["output"]):
            if index >= len(said):
                tail += self._events.open(index, item)
            if rest := text_of(item)[said[index] if index < len(said) else 0 :]:
                tail += self._events.add(index, item, rest)
        for index, item in enumerate(response["output"]):
            tail += self._events.close(index, item)
        return message, tail + self._events.end(response)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        return self._events.begin(frame(self._incoming, self._message_id, self._created))

    def _open(self, part: Part) -> bytes:
        so_far = Generation(model="", text="", finish_reason="", tool_calls=tuple(self._calls))
        item = item_of(part, so_far, self._incoming, self._message_id, self._ids, "in_progress")
        self._items[part] = item
        self._said[part] = 0
        return self._events.open(self._index(part), item)

    def _index(self, part: Part) -> int:
        return list(self._items).index(part)
