"""The message that an Anthropic event stream says, put together as Claude Code does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, cast

import msgspec
from msgspec import Meta, Struct, field

from understudy.errors import BackendError
from understudy.wire.arguments import tool_input

ENDINGS = frozenset({b"content_block_stop", b"message_delta", b"message_stop"})
"""Events that complete something: an agent acts on a block when it is closed, whatever becomes of the rest."""

# Which delta adds to which field of which blocks. Others belong to block types that we need not understand.
_ADDS = {
    "text_delta": ("text", {"text"}),
    "thinking_delta": ("thinking", {"thinking"}),
    "input_json_delta": ("partial_json", {"tool_use", "server_tool_use", "mcp_tool_use"}),
}
_FROM_DELTAS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "partial_json",
    "server_tool_use": "partial_json",
}
_REPLACES = {"signature_delta": "thinking", "compaction_delta": "compaction"}

_Index = Annotated[int, Meta(ge=0, lt=100_000)]


class _MessageStart(Struct):
    message: dict[str, Any]


class _BlockStart(Struct):
    index: _Index
    content_block: dict[str, Any]


class _BlockDelta(Struct):
    index: _Index
    delta: dict[str, Any]


class _BlockStop(Struct):
    index: _Index


class _MessageDelta(Struct):
    delta: dict[str, Any] = field(default_factory=dict[str, Any])
    usage: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class _MessageStop(Struct):
    pass


class _Block:
    """A block while it is filled: what it began with, and the pieces of each field that deltas add to."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.type = str(start.get("type"))
        self.data = start
        self.pieces: dict[str, list[str]] = {}
        if begun := _FROM_DELTAS.get(self.type):
            self.pieces[begun] = []
        self.closed = False

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta.get("type")
        if kind in _ADDS:
            name, takes = _ADDS[kind]
            if self.type == "redacted_thinking" and kind == "thinking_delta":
                return
            piece = delta.get(name)
            if self.type not in takes or not isinstance(piece, str):
                raise BackendError(f"the provider sent a {kind} that does not fit a block of type {self.type!r}")
            self.pieces.setdefault(name, []).append(piece)
        elif kind == "citations_delta" and self.type == "text":
            self.data["citations"] = [*(self.data.get("citations") or ()), delta.get("citation")]
        elif kind in _REPLACES and self.type == _REPLACES[kind]:
            self.data |= {name: value for name, value in delta.items() if name != "type"}

    def close(self) -> None:
        self.closed = True
        for name, pieces in self.pieces.items():
            whole = "".join(pieces)
            if name == "partial_json":
                self.data["input"] = tool_input(whole)
            else:
                self.data[name] = whole


class Assembly:
    """A message in the making. `begun` when it has started, `complete` when its last event was there."""

    def __init__(self) -> None:
        self.complete = False
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, _Block] = {}

    @property
    def begun(self) -> bool:
        return self._message is not None

    def add(self, name: bytes, data: bytes) -> None:
        """Take an event in; what is not part of the message, or comes after its end, is passed over.

        Raises BackendError for what no client could make a message of.
        """
        known = self._EVENTS.get(name)
        if known is None or self.complete:
            return
        decoder, take = known
        try:
            event = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise BackendError(
                f"the provider sent a {name.decode()} event that makes no sense: {error}"
            ) from error
        take(self, event)

    def message(self) -> bytes:
        """The whole message as JSON. Raises BackendError when it is not whole."""
        if self._message is None or not self.complete:
            raise BackendError("the provider's stream ended before its message_stop; the answer is not whole")
        if not all(block.closed for block in self._blocks.values()):
            raise BackendError("the provider's stream ended with a block still open; the answer is not whole")
        content = [block.data for _, block in sorted(self._blocks.items())]
        return msgspec.json.encode(self._message | {"content": content})

    # --- events -----------------------------------------------------------------------------------------

    def _start(self, event: _MessageStart) -> None:
        if self._message is not None:
            raise BackendError("the provider began a message twice in one stream")
        self._message = event.message

    def _block_start(self, event: _BlockStart) -> None:
        if self._message is None or event.index in self._blocks:
            raise BackendError(f"the provider opened block {event.index} twice, or before the message")
        self._blocks[event.index] = _Block(event.content_block)

    def _block_delta(self, event: _BlockDelta) -> None:
        self._block(event.index).add(event.delta)

    def _block_stop(self, event: _BlockStop) -> None:
        self._block(event.index).close()

    def _delta(self, event: _MessageDelta) -> None:
        if self._message is None:
            raise BackendError("the provider ended a message that it had not begun")
        self._message |= event.delta
        if event.context_management is not None:
            self._message["context_management"] = event.context_management
        if event.usage is not None:
            told = {name: value for name, value in event.usage.items() if value is not None}
            begun = self._message.get("usage")
            self._message["usage"] = cast("dict[str, Any]", begun) | told if isinstance(begun, dict) else told

    def _stop(self, event: _MessageStop) -> None:
        self.complete = True

    def _block(self, index: int) -> _Block:
        block = self._blocks.get(index)
        if block is None or block.closed:
            raise BackendError(f"the provider went on with block {index}, which is not open")
        return block

    _EVENTS: ClassVar[dict[bytes, tuple[msgspec.json.Decoder[Any], Callable[[Assembly, Any], None]]]] = {
        b"message_start": (msgspec.json.Decoder(_MessageStart), _start),
        b"content_block_start": (msgspec.json.Decoder(_BlockStart), _block_start),
        b"content_block_delta": (msgspec.json.Decoder(_BlockDelta), _block_delta),
        b"content_block_stop": (msgspec.json.Decoder(_BlockStop), _block_stop),
        b"message_delta": (msgspec.json.Decoder(_MessageDelta), _delta),
        b"message_stop": (msgspec.json.Decoder(_MessageStop), _stop),
    }
