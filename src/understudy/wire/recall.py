"""The tool calls of an answer that was stored: what a gateway that starts again knows of those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import UNPARSED_INPUT
from understudy.wire.model import ToolCall
from understudy.wire.responses.tools import custom_arguments


class _Unparsed(Struct):
    raw: str


class _Block(Struct):
    type: str
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")


class _Message(Struct):
    content: list[_Block] = []


class _Function(Struct):
    name: str
    arguments: str = ""


class _Call(Struct):
    id: str
    function: _Function


class _Said(Struct):
    tool_calls: list[_Call] = []


class _Choice(Struct):
    message: _Said


class _Completion(Struct):
    choices: list[_Choice] = []


class _Item(Struct):
    type: str
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""


class _Response(Struct):
    output: list[_Item] = field(default_factory=list[_Item])


def _anthropic(body: bytes) -> Iterator[ToolCall]:
    for block in msgspec.json.decode(body, type=_Message).content:
        if block.type == "tool_use":
            yield ToolCall(block.id, block.name, _sampled(bytes(block.input)))


def _sampled(raw: bytes) -> str:
    """The argument string that an input was made from: its own bytes, or what it says could not be parsed."""
    if UNPARSED_INPUT.encode() in raw:
        try:
            return msgspec.json.decode(raw, type=dict[str, _Unparsed])[UNPARSED_INPUT].raw
        except (msgspec.ValidationError, KeyError):
            pass  # The model wrote the word itself.
    return raw.decode()


def _chat(body: bytes) -> Iterator[ToolCall]:
    for choice in msgspec.json.decode(body, type=_Completion).choices:
        for call in choice.message.tool_calls:
            yield ToolCall(call.id, call.function.name, call.function.arguments)


def _responses(body: bytes) -> Iterator[ToolCall]:
    for item in msgspec.json.decode(body, type=_Response).output:
        if item.type == "function_call":
            yield ToolCall(item.call_id, item.name, item.arguments)
        elif item.type == "custom_tool_call":
            yield ToolCall(item.call_id, item.name, custom_arguments(None, item.input))


_READERS: dict[str, Callable[[bytes], Iterator[ToolCall]]] = {
    "anthropic": _anthropic,
    "openai-chat": _chat,
    "openai-responses": _responses,
}


def recall(dialect: str, response: bytes) -> dict[str, ToolCall]:
    """The tool calls of an answer in a dialect, by the ids that the agent was given.

    None of them where it makes no sense: a relayed answer is kept as the provider gave it.
    """
    try:
        return {call.id: call for call in _READERS[dialect](response)}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
