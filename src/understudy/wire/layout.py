"""What a model is shown, in the making: all dialects put it together here, so that it is the same from each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from understudy.wire.dialect import WireSession

SYSTEM_SEPARATOR = "\n\n"
TEXT_SEPARATOR = "\n"
"""Frozen: another separator gives other tokens, and every conversation that was begun with this one is split."""

Part = dict[str, Any]


def text_part(text: str) -> Part:
    """A part of a message's content that is text."""
    return {"type": "text", "text": text}


def plain(parts: Sequence[Part]) -> str:
    """The texts of a content."""
    return TEXT_SEPARATOR.join(part["text"] for part in parts if part["type"] == "text")


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """A tool as models are shown it; what says nothing is left out."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}


class _Result(Struct, gc=False):
    """What a tool gave to a call; `call_id` is the one that the agent knows."""

    call_id: str
    text: str
    images: list[Part]


class _Words(Struct, gc=False):
    """What the user said, or the system did in the user's place."""

    parts: Sequence[Part]
    from_user: bool


class Transcript:
    """The messages of one request, added in their order. `messages` is what a model is shown."""

    def __init__(self, session: WireSession) -> None:
        self._session = session
        self._system: list[str] = []
        self._messages: list[dict[str, Any]] = []
        self._called: list[str] = []
        """The calls of the last assistant message, in their order."""
        self._heard: list[_Result | _Words] = []
        """What came since then."""

    def instruct(self, text: str) -> None:
        """What the system or the developer says: first of all one message, later on a user's.

        Most chat templates know only a first system message, some refuse any other.
        """
        if self._messages or self._heard:
            self._heard.append(_Words([text_part(text)], from_user=False))
        else:
            self._system.append(text)

    def user(self, parts: Sequence[Part]) -> None:
        """What the user says."""
        self._heard.append(_Words(parts, from_user=True))

    def result(self, call_id: str, parts: Sequence[Part], *, is_error: bool = False) -> None:
        """What a tool gave; images follow the last of several results, and begin what the user says then.

        Results are shown in the order of their calls. Agents send them as their tools end, many chat templates
        render them without ids, and some servers give two calls the same one: to a model it is the order that says
        which result is whose.
        """
        text = TEXT_SEPARATOR.join(part["text"] if part["type"] == "text" else "[image]" for part in parts)
        images = [part for part in parts if part["type"] != "text"]
        self._heard.append(_Result(call_id, f"Error: {text}" if is_error else text, images))

    def assistant(self, text: str, reasoning: str | None = None) -> None:
        """What the model said; its tool calls follow by `call`."""
        self._settle()
        self._called.clear()
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reasoning:
            message["reasoning"] = reasoning
        self._messages.append(message)

    def call(self, call_id: str, name: str, arguments: Callable[[str | None], str]) -> None:
        """A tool call of the assistant message that was added last.

        `arguments` makes the argument string, given the one that was sampled, where this session sampled it.
        """
        sampled = self._session.sampled(call_id)
        function = {"name": name, "arguments": arguments(sampled.arguments if sampled else None)}
        call = {"id": self._backend_id(call_id), "type": "function", "function": function}
        self._messages[-1].setdefault("tool_calls", []).append(call)
        self._called.append(call_id)

    def messages(self) -> list[dict[str, Any]]:
        """All of them."""
        self._settle()
        if not self._system:
            return self._messages
        return [{"role": "system", "content": SYSTEM_SEPARATOR.join(self._system)}, *self._messages]

    def _settle(self) -> None:
        """Lay out what came since the last assistant message: now its tool results are all there."""
        place = {id_: number for number, id_ in enumerate(self._called)}
        results = [heard for heard in self._heard if isinstance(heard, _Result)]
        ordered = iter(sorted(results, key=lambda result: place.get(result.call_id, len(place))))
        images: list[Part] = []
        for heard in self._heard:
            if isinstance(heard, _Result):
                result = next(ordered)
                call_id = self._backend_id(result.call_id)
                self._messages.append({"role": "tool", "tool_call_id": call_id, "content": result.text})
                images += result.images
                continue
            if images and not heard.from_user:
                self._say(images)
                images = []
            self._say([*images, *heard.parts])
            images = []
        if images:
            self._say(images)
        self._heard.clear()

    def _say(self, parts: Sequence[Part]) -> None:
        only_text = all(part["type"] == "text" for part in parts)
        self._messages.append({"role": "user", "content": plain(parts) if only_text else list(parts)})

    def _backend_id(self, call_id: str) -> str:
        """The id that the model's server gave, where there was one: some templates render it."""
        sampled = self._session.sampled(call_id)
        return sampled.id if sampled and sampled.id else call_id
