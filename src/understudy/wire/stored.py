"""Request and answer of a call, read by its dialect; and the same in the shape of a chat completion.

Everything here was written by an agent in a sandbox or by a model: a body that cannot be read gives an empty
conversation, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import groupby

import msgspec
from msgspec import Struct

from understudy.types import Call
from understudy.wire import read_anthropic, read_chat, read_responses
from understudy.wire.blocks import Block, Conversation, joined

_READERS: dict[str, tuple[Callable[[bytes], Conversation], Callable[[bytes], tuple[Block, ...] | None]]] = {
    "anthropic": (read_anthropic.request, read_anthropic.answer),
    "openai-chat": (read_chat.request, read_chat.answer),
    "openai-responses": (read_responses.request, read_responses.answer),
}


class ToolFunction(Struct, frozen=True):
    """The function of a tool call; `arguments` is JSON text."""

    name: str
    arguments: str


class ChatToolCall(Struct, frozen=True):
    """A tool call as a chat completion has it."""

    id: str
    function: ToolFunction
    type: str = "function"


class ChatMessage(Struct, frozen=True):
    """A message as a chat completion has it. `content` is empty when a tool call is all there is."""

    role: str
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None


def read_request(call: Call) -> Conversation:
    """The conversation that `call` sent; empty when its body is not one of its dialect."""
    try:
        return _READERS[call.dialect][0](call.request)
    except (KeyError, msgspec.MsgspecError, ValueError, RecursionError):
        return Conversation(setting=blake2b(call.request, digest_size=16).digest())


def read_answer(call: Call) -> tuple[Block, ...] | None:
    """The blocks that `call` was answered with; None when it failed or its answer is not a message."""
    if call.status == "error":
        return None
    try:
        return _READERS[call.dialect][1](call.response)
    except (KeyError, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def chat_messages(conversation: Conversation, answer: tuple[Block, ...] | None = None) -> list[ChatMessage]:
    """`conversation`, then `answer` as one more assistant message, as chat-completion messages.

    Laid out as the gateway sends them to a model: tool results are messages of role `tool` in the order of their
    calls, a system message among the others is a user's. What is no text is its type in brackets, in place: the
    gateway shows the images of tool results to a model behind them, in a user's message.
    """
    messages = [ChatMessage("system", conversation.system)] if conversation.system else []
    for _, turn in groupby(_in_call_order(conversation.blocks), key=lambda block: block.turn):
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


def _in_call_order(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks, the tool results between two assistant's turns in the order of the calls that they answer."""
    place: dict[str, int] = {}
    for (answering, _), some in groupby(blocks, key=_speaker):
        said = list(some)
        if answering:
            place = {id_: number for number, id_ in enumerate(b.id for b in said if b.kind == "tool_use")}
            yield from said
            continue
        results = [block for block in said if block.kind == "tool_result"]
        ordered = iter(sorted(results, key=lambda block: place.get(block.id, len(place))))
        for block in said:
            if block.kind == "tool_result":
                yield msgspec.structs.replace(next(ordered), turn=block.turn)
            else:
                yield block


def _speaker(block: Block) -> tuple[bool, int | None]:
    """Whether a block is the assistant's, and of which of its turns."""
    return (True, block.turn) if block.role == "assistant" else (False, None)


def _chat_turn(blocks: list[Block]) -> Iterator[ChatMessage]:
    """The messages of one turn: an assistant's is one; a user's is cut where its tool results stand."""
    if blocks and blocks[0].role == "assistant":
        calls = [ChatToolCall(b.id, ToolFunction(b.name, b.arguments)) for b in blocks if b.kind == "tool_use"]
        thinking = joined([block for block in blocks if block.kind == "thinking"])
        said = [block for block in blocks if block.kind in ("text", "other")]
        yield ChatMessage("assistant", joined(said), thinking or None, calls or None)
        return
    for is_result, part in groupby(blocks, key=lambda block: block.kind == "tool_result"):
        if not is_result:
            yield ChatMessage("user", joined(list(part)))
            continue
        for block in part:
            text = f"Error: {block.text}" if block.is_error else block.text
            yield ChatMessage("tool", text, tool_call_id=block.id)
