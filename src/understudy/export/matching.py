"""Where an answer stands in a conversation that went on from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from understudy.ingest.trace import Message
from understudy.wire.arguments import UNPARSED_INPUT
from understudy.wire.stored import text_content

INVALID_CALLS = "tool calls whose arguments are no JSON object"
"""Why an answer is left out: learned, it would teach the model to write calls that no tool can run."""

_value = msgspec.json.Decoder().decode


def place(messages: Sequence[Message], answer: Message, start: int) -> int | None:
    """The index of the first message from `start` on that is `answer` as it came back; None where none is.

    An agent may rewrite what it sends back (arguments in another order, white space): calls are compared by id,
    text without white space.
    """
    wanted = _marks(answer)
    for index in range(start, len(messages)):
        if messages[index]["role"] == "assistant" and _marks(messages[index]) == wanted:
            return index
    return None


def same(message: Message, answer: Message) -> bool:
    """Whether a message is `answer` as it came back, its arguments equal: then it can stand in its place."""
    if _marks(message) != _marks(answer):
        return False
    calls = zip(message.get("tool_calls") or (), answer.get("tool_calls") or (), strict=True)
    return all(one == other or arguments_of(one) == arguments_of(other) for one, other in calls)


def flaw(answer: Message) -> str | None:
    """Why an answer is nothing to learn from; None when it is."""
    calls = answer.get("tool_calls") or ()
    if not calls and not (answer.get("content") or "").strip():
        return "empty answers"
    if any(not is_valid_call(call) for call in calls):
        return INVALID_CALLS
    return None


def is_valid_call(call: dict[str, Any]) -> bool:
    """Whether the model wrote the arguments of a tool call as a JSON object, which a tool could be run with.

    Claude Code keeps the text of any others under a key of its own.
    """
    arguments = arguments_of(call)
    return arguments is not None and UNPARSED_INPUT not in arguments


def arguments_of(call: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a tool call; None when they are no JSON object."""
    try:
        value = _value(call["function"]["arguments"])
    except (msgspec.MsgspecError, KeyError, TypeError, RecursionError, UnicodeEncodeError):
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


def textual(message: Message) -> Message:
    """The message with its content as text, in which `[image]` stands for an image."""
    content = message.get("content")
    return message if isinstance(content, str) else {**message, "content": text_content(content)}


def _marks(message: Message) -> tuple[tuple[str, ...], str]:
    calls = tuple(str(call.get("id")) for call in message.get("tool_calls") or ())
    return calls, "".join((message.get("content") or "").split())
