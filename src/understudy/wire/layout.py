"""How a conversation is laid out for a model: the only place where blocks become chat messages.

The gateway sends the result to the model's server, and exports write the same messages. Before that, each dialect
has read its own fields into blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from understudy.wire.arguments import upstream_arguments, upstream_freeform
from understudy.wire.model import SYSTEM_SEPARATOR, TEXT_SEPARATOR, Block, Message, Part, ToolCall

IMAGE = "[image]"
"""Replaces an image where only text is possible."""

SampledCalls = Callable[[str], ToolCall | None]
"""Looks a tool call up as the model wrote it, by the id that the agent has for it; None for an unknown id."""


def lay_out(instructions: Sequence[str], blocks: Iterable[Block], sampled: SampledCalls) -> list[Message]:
    """Return the chat messages that a model is shown.

    The instructions become one system message. A later system block becomes a user's message, since most chat
    templates accept a system message only at the beginning.

    Tool results are put in the order of their calls. Agents send them in the order in which the tools finish, many
    templates render them without ids, and some servers give two calls the same id, so the order is all that tells
    a model which result belongs to which call. Images of tool results go to the beginning of the next user's
    message, after the last of several results.

    Tool calls in `sampled` are shown with the ids and arguments that the model wrote, unless the agent changed
    what they mean. Thinking is under `reasoning`.
    """
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": SYSTEM_SEPARATOR.join(instructions)})
    called: list[str] = []
    for answering, run in groupby(blocks, key=_is_assistants):
        if not answering:
            messages += _between(list(run), called, sampled)
            continue
        for _, turn in groupby(run, key=_turn):
            message, called = _assistant(turn, sampled)
            messages.append(message)
    return messages


def content_parts(blocks: Iterable[Block]) -> list[Part]:
    """Return the content of a user's message: its texts and images in their order."""
    parts: list[Part] = []
    for block in blocks:
        if block.images:
            parts += block.images
        elif not block.hidden:
            parts.append({"type": "text", "text": block.text})
    return parts


def result_text(text: str, *, is_error: bool) -> str:
    """Return what a model is shown of a tool's result; `is_error` if the agent marks it as failed in its request.

    Chat messages have no such mark, so a failed result begins with `Error: `. States of session logs use this
    function too.
    """
    return f"Error: {text}" if is_error else text


def _is_assistants(block: Block) -> bool:
    return block.role == "assistant"


def _turn(block: Block) -> int:
    return block.turn


def _assistant(blocks: Iterable[Block], sampled: SampledCalls) -> tuple[Message, list[str]]:
    """Return an assistant's message, and the ids of its tool calls."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, object]] = []
    ids: list[str] = []
    for block in blocks:
        if block.kind == "tool_use":
            ids.append(block.id)
            calls.append(_call(block, sampled(block.id)))
        elif block.kind == "thinking":
            thoughts.append(block.text)
        elif not block.hidden:
            texts.append(block.text)
    message: Message = {"role": "assistant", "content": TEXT_SEPARATOR.join(texts)}
    if reasoning := TEXT_SEPARATOR.join(thoughts):
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message, ids


def _call(block: Block, sampled: ToolCall | None) -> dict[str, object]:
    arguments = block.arguments
    if sampled is not None:
        upstream = upstream_freeform if block.freeform else upstream_arguments
        arguments = upstream(sampled.arguments, arguments)
    function = {"name": block.name, "arguments": arguments}
    return {"id": _backend_id(block.id, sampled), "type": "function", "function": function}


def _backend_id(call_id: str, sampled: ToolCall | None) -> str:
    """Return the id that the model's server gave a call, if it did: some templates render it."""
    return sampled.id if sampled and sampled.id else call_id


def _between(blocks: Sequence[Block], called: Sequence[str], sampled: SampledCalls) -> list[Message]:
    """Return the messages between two assistant's messages; `called` are the ids of the calls in the first."""
    order = {id_: number for number, id_ in enumerate(called)}
    results = [block for block in blocks if block.kind == "tool_result"]
    if len(results) > 1:
        results.sort(key=lambda block: order.get(block.id, len(order)))
    ordered = iter(results)
    messages: list[Message] = []
    images: list[Part] = []
    for (is_result, _, role), group in groupby(blocks, key=_message_key):
        if is_result:
            for _ in group:
                result = next(ordered)
                images += result.images
                messages.append(_result(result, sampled))
            continue
        if images and role != "user":
            messages.append(_user(images))
            images = []
        parts = content_parts(group)
        if role != "user":
            # System messages consist of text only.
            parts = [part for part in parts if part["type"] == "text"]
        messages.append(_user([*images, *parts]))
        images = []
    if images:
        messages.append(_user(images))
    return messages


def _message_key(block: Block) -> tuple[bool, int, str]:
    return block.kind == "tool_result", block.turn, block.role


def _result(block: Block, sampled: SampledCalls) -> Message:
    text = result_text(block.text, is_error=block.is_error)
    return {"role": "tool", "tool_call_id": _backend_id(block.id, sampled(block.id)), "content": text}


def _user(parts: list[Part]) -> Message:
    if all(part["type"] == "text" for part in parts):
        return {"role": "user", "content": TEXT_SEPARATOR.join(part["text"] for part in parts)}
    return {"role": "user", "content": parts}
