"""Stored calls: their conversations and responses, and the chat messages that a model was shown.

A stored request was written by an agent in a sandbox, a stored response by a model: a body that cannot be read
is an empty conversation, or None, never an exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, cast

from understudy.types import Call
from understudy.wire.decoding import UNREADABLE
from understudy.wire.dialects import DIALECTS
from understudy.wire.layout import lay_out
from understudy.wire.model import Block, Conversation, Message, ToolCall

NOT_SAMPLED: Mapping[str, ToolCall] = MappingProxyType({})


def read_request(call: Call) -> Conversation:
    """The conversation that a call sent; empty when its body is not one of its dialect."""
    dialect = DIALECTS.get(call.dialect)
    try:
        if dialect is not None:
            return dialect.read_request(call.request)
    except UNREADABLE:
        pass
    return Conversation(setting=blake2b(call.request, digest_size=16).digest())


def read_response(call: Call) -> tuple[Block, ...] | None:
    """The blocks that a call was answered with; None when it failed, or its response is no model's message."""
    return None if call.status == "error" else response_blocks(call.dialect, call.response)


def response_blocks(dialect: str, body: bytes) -> tuple[Block, ...] | None:
    """The blocks of a response in a dialect; None when it is no model's message."""
    try:
        return DIALECTS[dialect].read_response(body) if dialect in DIALECTS else None
    except UNREADABLE:
        return None


def sampled_calls(blocks: Iterable[Block] | None) -> dict[str, ToolCall]:
    """The tool calls of a response as the model wrote them, by the ids that the agent has for them."""
    return {b.id: ToolCall(b.id, b.name, b.arguments) for b in blocks or () if b.kind == "tool_use"}


def shown_messages(conversation: Conversation, sampled: Mapping[str, ToolCall] = NOT_SAMPLED) -> list[Message]:
    """The chat messages that a model was shown of a conversation, as exports have them.

    `sampled` are the tool calls of earlier responses of the attempt, by id: a model is shown its own calls as it
    wrote them. Thinking stands under `reasoning_content`.
    """
    return [_exported(message) for message in lay_out(conversation.instructions, conversation.blocks, sampled.get)]


def response_message(blocks: Sequence[Block]) -> Message:
    """A response as an assistant's message, tool calls as the model wrote them. `content` may be empty."""
    (message,) = lay_out((), blocks or (Block(0, "assistant", "text"),), NOT_SAMPLED.get)
    return _exported(message)


def _exported(message: Message) -> Message:
    """A message under the names, and in the order of fields, that exports have."""
    exported: Message = {"role": message["role"], "content": message["content"]}
    if "reasoning" in message:
        exported["reasoning_content"] = message["reasoning"]
    if calls := message.get("tool_calls"):
        exported["tool_calls"] = [
            {"id": call["id"], "function": call["function"], "type": call["type"]} for call in calls
        ]
    if "tool_call_id" in message:
        exported["tool_call_id"] = message["tool_call_id"]
    return exported


def text_content(content: Any) -> str:
    """A message's content as text: of parts the texts, and `[image]` for an image."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = cast(list[Any], content) if isinstance(content, list) else [content]
    return "\n".join(map(_part_text, parts))


def _part_text(part: Any) -> str:
    if not isinstance(part, dict):
        return str(part)
    fields = cast(dict[str, Any], part)
    if "text" in fields:
        return str(fields["text"] or "")
    return f"[{str(fields.get('type', 'other')).removesuffix('_url')}]"


def as_plain_text(messages: Iterable[Message]) -> str:
    """Messages as plain text for a person: a stand-in where the prompt's own text is not known."""
    texts: list[str] = []
    for message in messages:
        lines = [f"[{message['role']}]", message.get("reasoning_content", ""), text_content(message["content"])]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        lines += [f"{function['name']}({function['arguments']})" for function in functions]
        texts.append("\n".join(line for line in lines if line))
    return "\n\n".join(texts)
