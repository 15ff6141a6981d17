"""Messages and tools as TRL and chat templates want them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from understudy.export.matching import arguments_of
from understudy.ingest.trace import Message

MESSAGES = ["json"]
"""The column type of messages: JSON values, so that a message has the keys it has and no others. In a column of
structs every message would have every key of any, None where it had none, and every tool call every argument: a
template would render them."""


def templated(message: Message) -> Message:
    """The message with the arguments of its tool calls as objects, which templates expect.

    Arguments that are no JSON object, which only messages that are not learned can have, are given as the text
    under the key "arguments".
    """
    calls: list[dict[str, Any]] | None = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return {**message, "tool_calls": [_call(call) for call in calls]}


def templated_all(messages: Sequence[Message]) -> list[Message]:
    """`templated` of each."""
    return [templated(message) for message in messages]


def tools_text(tools: Sequence[dict[str, Any]] | None) -> str | None:
    """Tools as JSON text: TRL decodes it. None where there are none."""
    return json.dumps(tools, ensure_ascii=False) if tools else None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = call["function"]
    arguments = arguments_of(call)
    if arguments is None:
        arguments = {"arguments": function.get("arguments")}
    return {**call, "function": {**function, "arguments": arguments}}
