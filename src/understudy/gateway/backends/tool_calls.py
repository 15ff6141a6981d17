"""Tool calls put together from the pieces of a stream, which every provider cuts in a way of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.wire.model import Delta, Emit, ToolCall

CALLS_LIMIT = 1024
"""How many tool calls an answer may have; a model that loops is cut off long before."""


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ToolPiece(Struct, gc=False):
    """A piece of a tool call, or a whole one, as it comes."""

    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Building:
    """A tool call in the making. Once it is opened, its id and its name are said and no longer change."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.id = ""
        self.name = ""
        self.arguments: list[str] = []
        self.opened = False


class ToolCalls:
    """The tool calls of one answer, in the order in which they began."""

    def __init__(self, emit: Emit | None) -> None:
        self._emit = emit
        self._all: list[_Building] = []
        self._at: dict[int, _Building] = {}
        self._opened = 0

    def add(self, pieces: Iterable[ToolPiece], *, whole: bool) -> None:
        """Take in what one chunk carries; `whole` says that each piece is a call of its own.

        Raises BackendError above CALLS_LIMIT.
        """
        for position, piece in enumerate(pieces):
            function = piece.function or _Function()
            arguments = _text(function.arguments)
            # Without an index, the place in the chunk says which of several calls is meant.
            index = position if piece.index is None else piece.index
            call = self._at.get(index)
            if call is None or whole or _another(call, piece.id, function.name, arguments):
                call = self._at[index] = _Building(len(self._all))
                self._all.append(call)
                if len(self._all) > CALLS_LIMIT:
                    raise BackendError(f"the backend gave more than {CALLS_LIMIT} tool calls", status=200)
            if not call.opened:
                call.id = _longer(call.id, piece.id or "")
                call.name = _longer(call.name, function.name or "")
            if arguments:
                call.arguments.append(arguments)
                if call.opened:
                    self._pass_on(Delta("arguments", arguments, call.number))
            self._open_ready()

    def whole(self) -> tuple[ToolCall, ...]:
        """All of them, complete. Raises BackendError when one has no name."""
        self._open_ready(ended=True)
        if len(self._all) != self._opened:
            raise BackendError("the backend gave a tool call without a name", status=200)
        return tuple(ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._all)

    def _open_ready(self, *, ended: bool = False) -> None:
        """Open, in their order, the calls whose id and name are known to be complete."""
        for call in self._all[self._opened :]:
            # As long as a call has no arguments and is the last one, its name and its id may still grow.
            complete = call.name and (call.arguments or ended or call is not self._all[-1])
            if not complete:
                return
            call.opened = True
            self._opened += 1
            self._pass_on(Delta("tool", index=call.number, id=call.id, name=call.name))
            if call.arguments:
                self._pass_on(Delta("arguments", "".join(call.arguments), call.number))

    def _pass_on(self, delta: Delta) -> None:
        if self._emit is not None:
            self._emit(delta)


def _another(call: _Building, id_: str | None, name: str | None, arguments: str) -> bool:
    """Whether a piece begins another call, though its index is that of one that has begun.

    Some providers give every call the index 0; others repeat id and name with every piece.
    """
    if not name or not call.name:
        return False
    if id_ and call.id:
        return id_ != call.id
    # What never has ids and indices comes whole, each call in one piece.
    return bool(arguments.strip()) and len(call.arguments) == 1 and _is_json(call.arguments[0])


def _longer(known: str, piece: str) -> str:
    """An id or a name with what a piece adds; some providers say the whole again each time."""
    return piece if piece.startswith(known) else known + piece


def _text(arguments: str | dict[str, Any] | None) -> str:
    if isinstance(arguments, dict):
        return msgspec.json.encode(arguments).decode()
    return arguments or ""


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
