"""How large prompts are, so that their tokens can be bounded and estimated without building a request.

The sizes of a turn are stored with it: what a replay would cost is then a sum over a table, and no conversation is
read for it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.ingest.tool_lists import ToolsSource
from understudy.ingest.trace import (
    SYSTEM_PROMPT,
    Message,
    OfferedTools,
    RequestShape,
    Trace,
    TurnAction,
    text_of,
)

MESSAGE_TOKENS, REQUEST_TOKENS, IMAGE_TOKENS = 32, 4096, 50_000
"""What is added to the bytes of a request to bound its prompt's tokens: what a chat template, or a provider, puts
around each message and around all of them, and what one image is counted as at the most (a large one by OpenAI's
small models; others stay below 5,000)."""

TOKEN_BYTES = 3.5
"""Bytes of a request in a token, as it is estimated: code and JSON have three to four."""

_BEYOND_ASCII = bytes(range(128, 256))


class PromptSize(Struct, frozen=True):
    """The size of a prompt: its bytes as JSON, and its bytes with all characters beyond ASCII escaped.

    URLs of images count in neither, because no tokenizer sees them. `messages` and `images` are their numbers.
    """

    plain: int = 0
    escaped: int = 0
    messages: int = 0
    images: int = 0

    def plus(self, other: PromptSize) -> PromptSize:
        """Return the sum of both sizes."""
        return PromptSize(
            self.plain + other.plain,
            self.escaped + other.escaped,
            self.messages + other.messages,
            self.images + other.images,
        )

    @property
    def most_tokens(self) -> int:
        """The maximum number of tokens in the prompt."""
        overhead = MESSAGE_TOKENS * self.messages + REQUEST_TOKENS + IMAGE_TOKENS * self.images
        return max(self.escaped, 0) + overhead

    @property
    def likely_tokens(self) -> int:
        """The estimated number of tokens in the prompt."""
        return math.ceil(self.plain / TOKEN_BYTES) + 1500 * self.images


class UnloggedTools(Struct, frozen=True):
    """The tools of turns whose log has none: where they come from (None: there are none), and their size."""

    source: ToolsSource | None = None
    size: PromptSize = PromptSize()

    @classmethod
    def of(cls, trace: Trace, offered: OfferedTools) -> UnloggedTools:
        """Return the tools of a trace, which `offered` derives."""
        if all((turn.shape or trace.shape).tools is not None for turn in trace.turns):
            return cls()
        tools = offered.inferred_tools
        return cls(tools.source, _json_size(tools.tools))


class TurnSize(Struct, frozen=True):
    """The size of a turn's prompt with its tools, and the number of characters of its answer."""

    prompt: PromptSize
    answer_chars: int
    tools_source: ToolsSource | None


def json_bytes(value: Any) -> bytes:
    """Encode a value as JSON, also if its strings have unpaired surrogates."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value)).encode()


def _json_size(value: Any) -> PromptSize:
    data = json_bytes(value)
    return PromptSize(len(data), escaped_bytes(data))


def shape_size(shape: RequestShape) -> PromptSize:
    """Return the size of a prompt's system message (ours, if none was logged) and of its logged tools."""
    system = _json_size(SYSTEM_PROMPT if shape.system is None else shape.system).plus(PromptSize(messages=1))
    return system if shape.tools is None else system.plus(_json_size(shape.tools))


def answer_chars(action: TurnAction) -> int:
    """Return the number of characters of an answer: its text, its thinking, and its calls."""
    functions: list[dict[str, Any]] = [call.get("function") or {} for call in action.tool_calls]
    calls = sum(len(str(function.get("name"))) + len(str(function.get("arguments"))) for function in functions)
    return len(text_of(action.content)) + len(action.thinking or "") + calls


def turn_sizes(trace: Trace) -> list[TurnSize]:
    """Return the sizes of all turns of a trace, for stores whose turns were stored without them."""
    offered = OfferedTools(trace)
    tools = UnloggedTools.of(trace, offered)
    sizes: dict[int, PromptSize] = {-1: PromptSize()}  # by node: of the messages up to it
    trace_shape_size = shape_size(trace.shape)
    turns: list[TurnSize] = []
    for turn in trace.turns:
        unvisited: list[int] = []
        tip = turn.context
        while tip not in sizes:
            unvisited.append(tip)
            tip = trace.nodes[tip].parent
        for node in reversed(unvisited):
            messages = trace.renderer.history(trace.nodes[node].body)
            added = messages_size(messages, json_bytes(messages)) if messages else PromptSize()
            sizes[node] = sizes[tip].plus(added)
            tip = node
        is_logged = (turn.shape or trace.shape).tools is not None
        size = (trace_shape_size if turn.shape is None else shape_size(turn.shape)).plus(sizes[turn.context])
        turns.append(
            TurnSize(
                size if is_logged else size.plus(tools.size),
                answer_chars(offered.action_of(turn)),
                "logged" if is_logged else tools.source,
            )
        )
    return turns


def messages_size(messages: Sequence[Message], data: bytes) -> PromptSize:
    """Return the size of messages whose JSON is `data`.

    A tool call counts as a message, and its result as none: a request has a result for each call, whether the log
    has it or not.
    """
    count = images = url_characters = 0
    for message in messages:
        count += (message["role"] != "tool") + len(message.get("tool_calls") or ())
        content = message.get("content")
        for part in cast(list[Any], content) if isinstance(content, list) else ():
            if isinstance(part, dict) and cast(dict[str, Any], part).get("type") == "image_url":
                image: Any = cast(dict[str, Any], part).get("image_url")
                url = cast(dict[str, Any], image).get("url") if isinstance(image, dict) else image
                images += 1
                url_characters += len(url) if isinstance(url, str) else 0
    return PromptSize(len(data) - url_characters, escaped_bytes(data) - url_characters, count, images)


def escaped_bytes(data: bytes) -> int:
    """Return the size of JSON with all non-ASCII characters as \\uXXXX, because some chat templates write it like
    that.
    """
    if data.isascii():
        return len(data)
    ascii_bytes = len(data.translate(None, delete=_BEYOND_ASCII))
    return ascii_bytes + 6 * (len(data.decode().encode("utf-16-le")) // 2 - ascii_bytes)
