"""Request and answer of a call, read into one flat shape; and the same in the shape of a chat completion.

Everything here was written by an agent in a sandbox or by a model: a body that cannot be read gives an empty
conversation, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw, Struct

from understudy.types import Call

Kind = Literal["text", "thinking", "tool_use", "tool_result", "other"]

_TEXT_FIELD: dict[str, tuple[Kind, str]] = {"text": ("text", "text"), "thinking": ("thinking", "thinking")}


_BILLING = "x-anthropic-billing-header:"  # a line that changes from call to call; no model sees it


class Block(Struct, frozen=True):
    """One block of a conversation. `turn` is the index of its message.

    `text` is the text, the thinking, the text of a tool result, or the JSON of a block of another kind (then
    `name` is its type). A tool call has `id`, `name` and `arguments`, which are JSON text; a tool result has `id`
    and `is_error`.
    """

    turn: int
    role: str
    kind: Kind
    text: str = ""
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_error: bool = False

    def inputs(self) -> dict[str, Any]:
        """The arguments of a tool call by name; empty when they are no JSON object."""
        try:
            value = msgspec.json.decode(self.arguments) if self.arguments else None
        except RecursionError:
            value = None
        return cast(dict[str, Any], value) if isinstance(value, dict) else {}


class Conversation(Struct, frozen=True):
    """A request: its system prompt, the blocks of all its messages, and a digest of its tools and system."""

    system: str = ""
    blocks: tuple[Block, ...] = ()
    setting: bytes = b""


class ToolFunction(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, frozen=True):
    """A tool call as a chat completion has it."""

    id: str
    function: ToolFunction
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    """A message as a chat completion has it. `content` is empty when a tool call is all there is."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class _Message(Struct):
    role: str
    content: Any


class _Request(Struct):
    messages: list[_Message]
    system: Any = None
    tools: Raw = Raw(b"")


_request_decoder = msgspec.json.Decoder(_Request)
_answer_decoder = msgspec.json.Decoder(_Message)
_encoder = msgspec.json.Encoder(order="deterministic")


def read_request(call: Call) -> Conversation:
    """The conversation that `call` sent; empty when its body is not one."""
    try:
        body = _request_decoder.decode(call.request)
        blocks = tuple(block for turn, message in enumerate(body.messages) for block in _blocks(turn, message))
        system = "\n\n".join(
            block.text
            for block in _blocks(0, _Message("system", body.system or ""))
            if not block.text.startswith(_BILLING)
        )
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return Conversation(setting=blake2b(call.request, digest_size=16).digest())
    setting = blake2b(system.encode(), digest_size=16)
    setting.update(b"\0" + bytes(body.tools))
    return Conversation(system, blocks, setting.digest())


def read_answer(call: Call) -> tuple[Block, ...] | None:
    """The blocks that `call` was answered with; None when it failed or its answer is not a message."""
    if call.status == "error":
        return None
    try:
        message = _answer_decoder.decode(call.response)
        return tuple(_blocks(0, message)) if message.role == "assistant" else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal values give equal bytes."""
    return _encoder.encode(value)


def chat_messages(conversation: Conversation, answer: tuple[Block, ...] | None = None) -> list[ChatMessage]:
    """`conversation`, then `answer` as one more assistant message, as chat-completion messages.

    Laid out as the gateway sends them to a model: tool results are messages of role `tool` in their place, a
    system message among the others is a user's. What is no text is its type in brackets, in place: the gateway
    sends the images of tool results to a model as a message behind them.
    """
    messages = [ChatMessage("system", conversation.system)] if conversation.system else []
    for _, turn in groupby(conversation.blocks, key=lambda block: block.turn):
        messages.extend(_chat_turn(list(turn)))
    if answer is not None:
        messages.extend(_chat_turn(list(answer)) if answer else [ChatMessage("assistant", "")])
    return messages


def render(messages: list[ChatMessage]) -> str:
    """`messages` as plain text for a person: a stand-in where the prompt's own text is not known."""
    parts: list[str] = []
    for message in messages:
        lines = [f"[{message.role}]", message.reasoning_content or "", message.content]
        lines += [f"{c.function.name}({c.function.arguments})" for c in message.tool_calls or ()]
        parts.append("\n".join(line for line in lines if line))
    return "\n\n".join(parts)


def _chat_turn(blocks: list[Block]) -> Iterator[ChatMessage]:
    """The messages of one turn: an assistant's is one; a user's is cut where its tool results stand."""
    if blocks and blocks[0].role == "assistant":
        calls = [ToolCall(b.id, ToolFunction(b.name, b.arguments)) for b in blocks if b.kind == "tool_use"]
        thinking = _joined([block for block in blocks if block.kind == "thinking"])
        said = [block for block in blocks if block.kind in ("text", "other")]
        yield ChatMessage("assistant", _joined(said), thinking or None, calls or None)
        return
    for is_result, part in groupby(blocks, key=lambda block: block.kind == "tool_result"):
        if not is_result:
            yield ChatMessage("user", _joined(list(part)))
            continue
        for block in part:
            text = f"Error: {block.text}" if block.is_error else block.text
            yield ChatMessage("tool", text, tool_call_id=block.id)


def _joined(blocks: list[Block]) -> str:
    return "\n".join(f"[{b.name}]" if b.kind == "other" else b.text for b in blocks)


def _blocks(turn: int, message: _Message) -> Iterator[Block]:
    role = message.role
    if isinstance(message.content, str):
        yield Block(turn, role, "text", message.content)
        return
    for item in _items(message.content):
        kind = _string(item.get("type"))
        if kind in _TEXT_FIELD:
            name, field = _TEXT_FIELD[kind]
            yield Block(turn, role, name, _string(item.get(field)))
        elif kind == "tool_use":
            yield Block(
                turn,
                role,
                "tool_use",
                id=_string(item.get("id")),
                name=_string(item.get("name")),
                arguments=msgspec.json.encode(item.get("input")).decode(),
            )
        elif kind == "tool_result":
            yield Block(
                turn,
                role,
                "tool_result",
                text=_result_text(item.get("content")),
                id=_string(item.get("tool_use_id")),
                is_error=item.get("is_error") is True,
            )
        else:
            bare = {key: value for key, value in item.items() if key != "cache_control"}
            yield Block(turn, role, "other", canonical(bare).decode(), name=kind)


def _items(content: Any) -> list[dict[str, Any]]:
    """The blocks of a message's content. Raises ValueError when it is no list of objects."""
    if not isinstance(content, list):
        raise ValueError("message content is neither a string nor a list")
    items = cast(list[Any], content)
    if not all(isinstance(item, dict) for item in items):
        raise ValueError("a content block is not an object")
    return cast(list[dict[str, Any]], items)


def _result_text(content: Any) -> str:
    """The text of a tool result; a part that is no text (an image) is its type in brackets, as in `_joined`."""
    if content is None or isinstance(content, str):
        return content or ""
    return _joined(list(_blocks(0, _Message("user", content))))


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
