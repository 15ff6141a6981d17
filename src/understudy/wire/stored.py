"""Stored calls: their conversations and responses, and the chat messages that a model was shown.

A stored request was written by an agent in a sandbox, a stored response by a model: a body that cannot be read
is an empty conversation, or None, never an exception.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.types import Call
from understudy.wire.decoding import UNREADABLE, canonical
from understudy.wire.dialect import Dialect
from understudy.wire.dialects import DIALECTS
from understudy.wire.layout import lay_out
from understudy.wire.model import Block, Conversation, Message, Part, ReadingState, ToolCall, image_url

_TOGETHER = 64
"""From how many blocks on the next message begins a part of a conversation of its own."""
NOT_SAMPLED: Mapping[str, ToolCall] = MappingProxyType({})
_CUT_IMAGE = "cut_image"
"""The type of a part that no request has: an image without its data."""


def read_request(call: Call) -> Conversation:
    """The conversation that a call sent; empty when its body is not one of its dialect."""
    dialect = DIALECTS.get(call.dialect)
    try:
        if dialect is not None:
            return dialect.read_request(call.request)
    except UNREADABLE:
        pass
    return Conversation(setting=blake2b(call.request, digest_size=16).digest())


class CutText(Struct, frozen=True):
    """What a text was that is cut: how many characters it has, and a digest of it."""

    size: int
    digest: bytes


def cut_block(block: Block, most: int) -> Block:
    """A block whose text, if it is a tool's result, has at most `most` characters, and whose images have no data.

    Blocks that are cut alike are equal where whole ones are; see `CutText`.
    """
    if block.images:
        block = msgspec.structs.replace(block, images=tuple(map(_cut_image, block.images)))
    if block.kind != "tool_result" or block.source is not None or len(block.text) <= most:
        return block
    digest = blake2b(block.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return msgspec.structs.replace(block, text=block.text[:most], source=CutText(len(block.text), digest))


def _cut_image(image: Part) -> Part:
    media_type, size = image_data(image)
    digest = blake2b(canonical(image), digest_size=16).hexdigest()
    return {"type": _CUT_IMAGE, "media_type": media_type, "size": size, "digest": digest}


def image_data(image: Part) -> tuple[str, int]:
    """The media type of an image, whole or cut, and how many characters its data has; "" and 0 for an address."""
    if image["type"] == _CUT_IMAGE:
        return image["media_type"], image["size"]
    head, comma, data = image_url(image).partition(",")
    if not comma or not head.startswith("data:"):
        return "", 0
    return head.removeprefix("data:").partition(";")[0][:100], len(data)


class _Prefix(Struct, frozen=True, gc=False):
    """A message in conversations that begin alike, with the state of reading after it.

    `blocks` are the last up to there, which go on from the message at node `before`; a place has few of them, so
    that a conversation takes its length in memory, not its square.
    """

    state: ReadingState = ReadingState()
    before: int = 0
    blocks: tuple[Block, ...] = ()

    def then(self, node: int, blocks: Sequence[Block], state: ReadingState) -> _Prefix:
        """The place of the next message, `node` being the one of this."""
        goes_on = len(self.blocks) < _TOGETHER
        return _Prefix(state, self.before if goes_on else node, (*(self.blocks if goes_on else ()), *blocks))


class RequestReader:
    """Reads the requests of one attempt, which are stored as a tree of messages: each is read once.

    What conversations have in common at their beginning, is the same objects in them. With `most`, blocks are cut
    (`cut_block`).

    `characters` is about how many it holds.
    """

    def __init__(self, steps: Mapping[int, tuple[int, int]], most: int | None = None) -> None:
        self._steps = steps
        self._most = most
        self._outers: dict[Hashable, Conversation] = {}
        self._places: dict[tuple[str, int], _Prefix] = {}
        self._instructions: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.characters = 0

    def read(
        self, dialect: str, node: int, outer_key: Hashable, outer: bytes, contents: Mapping[int, bytes]
    ) -> Conversation:
        """The conversation of a call, whose last message is at `node`.

        Of two requests whose `outer_key` is equal `outer` must be, too. `contents` has the messages of nodes that
        were in no conversation before, by the numbers that `steps` has for them.

        Raises what UNREADABLE lists, also where a request can only be read whole.
        """
        if dialect not in DIALECTS:
            raise ValueError(f"the dialect {dialect!r} is unknown")
        reads = DIALECTS[dialect]
        new: list[tuple[int, int]] = []
        at = node
        while at and (dialect, at) not in self._places:
            before, blob = self._steps[at]
            if before >= at:
                raise ValueError("the messages before this one are damaged")
            new.append((at, blob))
            at = before
        prefix = self._places[dialect, at] if at else _Prefix()
        blocks = self._blocks(dialect, at)
        start = len(blocks)
        places: dict[tuple[str, int], _Prefix] = {}
        for at, blob in reversed(new):
            if blob not in contents:
                raise ValueError("this request has a message that could not be read before")
            added, state = reads.read_next(prefix.state, contents[blob])
            own = added if self._most is None else [cut_block(block, self._most) for block in added]
            prefix = places[dialect, at] = prefix.then(self._steps[at][0], own, state)
            blocks += own
        conversation = self._outer(reads, outer_key, outer, prefix.state.instructions)
        self._places.update(places)
        self.characters += characters(blocks[start:])
        return msgspec.structs.replace(
            conversation,
            blocks=tuple(blocks),
            aside=prefix.state.aside,
            unsupported=(*conversation.unsupported, *prefix.state.unsupported),
        )

    def _outer(
        self, dialect: Dialect, outer_key: Hashable, outer: bytes, instructions: tuple[str, ...]
    ) -> Conversation:
        key = (dialect.name, outer_key, instructions)
        if key not in self._outers:
            self._outers[key] = self._with_one_prompt(dialect.read_outer(outer, instructions))
        return self._outers[key]

    def _blocks(self, dialect: str, node: int) -> list[Block]:
        """The blocks up to the end of a message that was read."""
        parts: list[tuple[Block, ...]] = []
        while node:
            prefix = self._places[dialect, node]
            parts.append(prefix.blocks)
            node = prefix.before
        return list(chain.from_iterable(reversed(parts)))

    def whole(self, call: Call) -> Conversation:
        """The conversation of a call with its request."""
        conversation = self._with_one_prompt(read_request(call))
        if self._most is None:
            return conversation
        blocks = tuple(cut_block(block, self._most) for block in conversation.blocks)
        return msgspec.structs.replace(conversation, blocks=blocks)

    def _with_one_prompt(self, conversation: Conversation) -> Conversation:
        """The conversation with the system prompt of those before it, if it is equal."""
        instructions = conversation.instructions
        if instructions not in self._instructions:
            self._instructions[instructions] = instructions
            self.characters += sum(300 + len(text) for text in instructions)
        return msgspec.structs.replace(conversation, instructions=self._instructions[instructions])


def characters(blocks: Iterable[Block]) -> int:
    """About how many characters blocks hold; a short one counts as some hundreds."""
    return sum(300 + len(block.text) + len(block.arguments) + len(block.fingerprint) for block in blocks)


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
