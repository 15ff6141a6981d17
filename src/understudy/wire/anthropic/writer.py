"""An Anthropic message said while it is being generated."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw

from understudy.wire.anthropic.response import Part, event, message_of, to_events, to_message
from understudy.wire.dialect import DialectResponse, WireSession
from understudy.wire.model import Delta, Generation

_OPENED: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
# Written out: it is what a stream consists of.
_DELTA = (
    b"event: content_block_delta\ndata: "
    b'{"type":"content_block_delta","index":%%d,"delta":{"type":"%b","%b":%%b}}\n\n'
)
_ADDED = {
    "reasoning": _DELTA % (b"thinking_delta", b"thinking"),
    "text": _DELTA % (b"text_delta", b"text"),
    "arguments": _DELTA % (b"input_json_delta", b"partial_json"),
}


class _Ending(msgspec.Struct):
    stop_reason: Raw
    stop_sequence: Raw
    usage: Raw


class AnthropicWriter:
    """See Writer. Blocks are opened and filled as they come, and all of them closed at the end.

    Claude Code acts on every block that was closed, whatever happens to the stream after it: a text is then its
    answer, a tool call is run. Blocks that lie over each other it takes in its stride.
    """

    def __init__(self, model: str, session: WireSession, message_id: str) -> None:
        self._model = model
        self._session = session
        self._message_id = message_id
        self._begun = False
        self._opened: dict[Part, int] = {}
        self._ids: list[str] = []

    def feed(self, delta: Delta) -> bytes:
        """See Writer."""
        said = b"" if self._begun else self._begin()
        part: Part = delta.kind if delta.kind == "reasoning" or delta.kind == "text" else delta.index
        if part not in self._opened and (delta.text or delta.kind == "tool"):
            said += self._open(part, delta)
        if delta.text:
            said += _ADDED[delta.kind] % (self._opened[part], msgspec.json.encode(delta.text))
        return said

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        """See Writer."""
        if not self._begun:
            message = to_message(generation, self._model, self._session, self._message_id)
            return message, to_events(message.body)
        message = message_of(generation, self._model, self._message_id, self._ids, list(self._opened))
        tail: list[dict[str, Any]] = []
        for part, index in self._opened.items():
            if part == "reasoning":
                signature = {"type": "signature_delta", "signature": ""}
                tail.append({"type": "content_block_delta", "index": index, "delta": signature})
            tail.append({"type": "content_block_stop", "index": index})
        end = msgspec.json.decode(message.body, type=_Ending)
        ending = {"stop_reason": end.stop_reason, "stop_sequence": end.stop_sequence}
        tail.append({"type": "message_delta", "delta": ending, "usage": end.usage})
        tail.append({"type": "message_stop"})
        return message, b"".join(map(event, tail))

    def _begin(self) -> bytes:
        self._begun = True
        opening: dict[str, Any] = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # Known at the end only; what is said there counts.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return event({"type": "message_start", "message": opening})

    def _open(self, part: Part, delta: Delta) -> bytes:
        index = self._opened[part] = len(self._opened)
        if isinstance(part, int):
            self._ids.append(self._session.tool_id(delta.id))
            block: dict[str, Any] = {"type": "tool_use", "id": self._ids[-1], "name": delta.name, "input": {}}
        else:
            block = _OPENED[part]
        return event({"type": "content_block_start", "index": index, "content_block": block})
