"""OpenAI Responses, read into blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from msgspec import Raw, Struct

from understudy.wire.blocks import (
    Block,
    Conversation,
    canonical,
    decoded,
    items,
    joined,
    new_conversation,
    string,
)

_INSTRUCTING = ("system", "developer")
_TEXT_FIELD = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}


class _Request(Struct):
    input: Any
    instructions: Any = None
    tools: Raw = Raw(b"")
    tool_choice: Any = None


class _Answer(Struct):
    output: Any


_request = msgspec.json.Decoder(_Request).decode
_answer = msgspec.json.Decoder(_Answer).decode


def request(body: bytes) -> Conversation:
    """The conversation that a request sends. Raises MsgspecError or ValueError when it is none.

    The system prompt is `instructions` and what the input begins with of that kind. What a model said in one
    answer is one turn, whatever the number of its items.
    """
    read = decoded(_request, body)
    given = [{"role": "user", "content": read.input}] if isinstance(read.input, str) else items(read.input)
    told = 0
    while told < len(given) and _role(given[told]) in _INSTRUCTING:
        told += 1
    system = [string(read.instructions), *(joined(_item(0, item)) for item in given[:told])]
    return new_conversation(
        "\n\n".join(text for text in system if text),
        _turns(given[told:]),
        bytes(read.tools),
        forced=isinstance(read.tool_choice, dict),
    )


def answer(body: bytes) -> tuple[Block, ...] | None:
    """The blocks of an answer. Raises MsgspecError or ValueError when it is none."""
    return tuple(block for item in items(decoded(_answer, body).output) for block in _item(0, item))


def _turns(given: Iterable[dict[str, Any]]) -> Iterator[Block]:
    turn, before = -1, ""
    for item in given:
        role = _role(item)
        if role != "assistant" or before != "assistant":
            turn += 1
        before = role
        yield from _item(turn, item)


def _role(item: dict[str, Any]) -> str:
    """Whose an item is: a message says so; of the others, the outputs of tools are the user's."""
    kind = string(item.get("type")) or "message"
    if kind == "message":
        return string(item.get("role"))
    return "user" if kind.endswith("_output") else "assistant"


def _item(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    kind = string(item.get("type")) or "message"
    if read := _ITEMS.get(kind):
        yield from read(turn, item)
    else:
        yield Block(turn, _role(item), "other", canonical(item).decode(), id=string(item.get("id")), name=kind)


def _message(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    yield from _parts(turn, string(item.get("role")), item.get("content"))


def _reasoning(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    """The reasoning itself where there is any, else its summary; what is encrypted alone is nothing to read."""
    for field in ("content", "summary"):
        if item.get(field) and (text := joined(_parts(turn, "assistant", item[field]))):
            yield Block(turn, "assistant", "thinking", text)
            return


def _function_call(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    yield _tool_use(turn, item, string(item.get("name")), string(item.get("arguments")))


def _custom_call(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    """A tool that takes free text: as if it were the one argument of a function."""
    yield _tool_use(turn, item, string(item.get("name")), canonical({"input": string(item.get("input"))}).decode())


def _shell_call(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    yield _tool_use(turn, item, string(item.get("type")), canonical(item.get("action")).decode())


def _output(turn: int, item: dict[str, Any]) -> Iterator[Block]:
    text = joined(_parts(turn, "user", item.get("output")))
    yield Block(turn, "user", "tool_result", text, id=string(item.get("call_id")) or string(item.get("id")))


_ITEMS: dict[str, Callable[[int, dict[str, Any]], Iterator[Block]]] = {
    "message": _message,
    "reasoning": _reasoning,
    "function_call": _function_call,
    "custom_tool_call": _custom_call,
    "local_shell_call": _shell_call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "local_shell_call_output": _output,
}


def _tool_use(turn: int, item: dict[str, Any], name: str, arguments: str) -> Block:
    return Block(turn, "assistant", "tool_use", id=string(item.get("call_id")), name=name, arguments=arguments)


def _parts(turn: int, role: str, content: Any) -> Iterator[Block]:
    if content is None or isinstance(content, str):
        if content:
            yield Block(turn, role, "text", content)
        return
    for part in items(content):
        kind = string(part.get("type"))
        if kind in _TEXT_FIELD:
            yield Block(turn, role, "text", string(part.get(_TEXT_FIELD[kind])))
        else:
            yield Block(turn, role, "other", canonical(part).decode(), name=kind)
