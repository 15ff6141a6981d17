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

_PREFIX_BLOCKS = 64
"""How many blocks a prefix may hold before the next message begins a new one."""
NOT_SAMPLED: Mapping[str, ToolCall] = MappingProxyType({})
_CUT_IMAGE = "cut_image"
"""The type of a part that no request has: an image without its data."""


def read_request(call: Call) -> Conversation:
    """Return the conversation that a stored call sent; an empty one if its body cannot be read in its dialect."""
    dialect = DIALECTS.get(call.dialect)
    try:
        if dialect is not None:
            return dialect.read_request(call.request)
    except UNREADABLE:
        pass
    return Conversation(prompt_digest=blake2b(call.request, digest_size=16).digest())


class CutText(Struct, frozen=True):
    """Stands for a text that was cut: its full length in characters, and a digest of all of it."""

    size: int
    digest: bytes


def cut_block(block: Block, max_characters: int) -> Block:
    """Return a block with the text of a tool result cut to `max_characters`, and the data of images left out.

    Two cut blocks are equal only if the whole blocks were equal; see `CutText`.
    """
    if block.images:
        block = msgspec.structs.replace(block, images=tuple(map(_cut_image, block.images)))
    if block.kind != "tool_result" or block.source is not None or len(block.text) <= max_characters:
        return block
    digest = blake2b(block.text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return msgspec.structs.replace(
        block, text=block.text[:max_characters], source=CutText(len(block.text), digest)
    )


def _cut_image(image: Part) -> Part:
    media_type, size = image_data(image)
    digest = blake2b(canonical(image), digest_size=16).hexdigest()
    return {"type": _CUT_IMAGE, "media_type": media_type, "size": size, "digest": digest}


def image_data(image: Part) -> tuple[str, int]:
    """Return the media type of an image, whole or cut, and the length of its encoded data; "" and 0 for a mere
    address.
    """
    if image["type"] == _CUT_IMAGE:
        return image["media_type"], image["size"]
    head, comma, data = image_url(image).partition(",")
    if not comma or not head.startswith("data:"):
        return "", 0
    return head.removeprefix("data:").partition(";")[0][:100], len(data)


class _Prefix(Struct, frozen=True, gc=False):
    """A message that several conversations may share, with the reading state after it.

    `blocks` are the last blocks up to this message; those before them belong to the message at node `before`. A
    prefix holds only a few blocks, so that a conversation of n messages needs memory in proportion to n, not to n
    squared.
    """

    state: ReadingState = ReadingState()
    before: int = 0
    blocks: tuple[Block, ...] = ()

    def extended(self, node: int, blocks: Sequence[Block], state: ReadingState) -> _Prefix:
        """Return the prefix that ends with the next message, which is at `node`."""
        has_room = len(self.blocks) < _PREFIX_BLOCKS
        return _Prefix(state, self.before if has_room else node, (*(self.blocks if has_room else ()), *blocks))


class RequestReader:
    """Reads the requests of one attempt, which are stored as a tree of messages, and reads each message once.

    `steps` is the tree: node → (the node before it, 0 for none; the number of the blob with its message).
    Conversations that begin with the same messages share the objects of that beginning. With `max_characters`,
    blocks are cut (see `cut_block`). `characters` is an estimate of how many characters the reader holds.
    """

    def __init__(self, steps: Mapping[int, tuple[int, int]], max_characters: int | None = None) -> None:
        self._steps = steps
        self._max_characters = max_characters
        self._outers: dict[Hashable, Conversation] = {}
        self._prefixes: dict[tuple[str, int], _Prefix] = {}
        self._instructions: dict[tuple[str, ...], tuple[str, ...]] = {}
        self.characters = 0

    def read(
        self, dialect: str, node: int, outer_key: Hashable, outer: bytes, contents: Mapping[int, bytes]
    ) -> Conversation:
        """Return the conversation of a call whose last message is at `node`.

        Requests with an equal `outer_key` must have an equal `outer`. `contents` has the messages of all nodes
        that no earlier conversation contained, under the blob numbers that `steps` gives for them.

        Raises the exceptions in UNREADABLE, also for a request that can only be read as a whole.
        """
        if dialect not in DIALECTS:
            raise ValueError(
                f"the stored call has the unknown dialect {dialect!r}; expected one of {', '.join(DIALECTS)}; "
                "update understudy if a newer release wrote the store"
            )
        wire_dialect = DIALECTS[dialect]
        new: list[tuple[int, int]] = []
        node_id = node
        while node_id and (dialect, node_id) not in self._prefixes:
            before, blob = self._steps[node_id]
            if before >= node_id:
                raise ValueError(
                    f"the store is damaged: node {node_id} has no earlier node before it; restore it from a copy"
                )
            new.append((node_id, blob))
            node_id = before
        prefix = self._prefixes[dialect, node_id] if node_id else _Prefix()
        blocks = self._blocks(dialect, node_id)
        start = len(blocks)
        new_prefixes: dict[tuple[str, int], _Prefix] = {}
        for node_id, blob in reversed(new):
            if blob not in contents:
                raise ValueError(
                    "a message of this request could not be read in an earlier call; read the request as a whole"
                )
            added, state = wire_dialect.read_next(prefix.state, contents[blob])
            added_blocks = (
                added
                if self._max_characters is None
                else [cut_block(block, self._max_characters) for block in added]
            )
            prefix = new_prefixes[dialect, node_id] = prefix.extended(self._steps[node_id][0], added_blocks, state)
            blocks += added_blocks
        conversation = self._outer(wire_dialect, outer_key, outer, prefix.state.instructions)
        self._prefixes.update(new_prefixes)
        self.characters += estimated_characters(blocks[start:])
        return msgspec.structs.replace(
            conversation,
            blocks=tuple(blocks),
            cache_ends_early=prefix.state.cache_ends_early,
            unsupported=(*conversation.unsupported, *prefix.state.unsupported),
        )

    def _outer(
        self, dialect: Dialect, outer_key: Hashable, outer: bytes, instructions: tuple[str, ...]
    ) -> Conversation:
        key = (dialect.name, outer_key, instructions)
        if key not in self._outers:
            self._outers[key] = self._with_shared_instructions(dialect.read_outer(outer, instructions))
        return self._outers[key]

    def _blocks(self, dialect: str, node: int) -> list[Block]:
        """Return the blocks up to the end of a message that was read before."""
        parts: list[tuple[Block, ...]] = []
        while node:
            prefix = self._prefixes[dialect, node]
            parts.append(prefix.blocks)
            node = prefix.before
        return list(chain.from_iterable(reversed(parts)))

    def whole(self, call: Call) -> Conversation:
        """Return the conversation of a call from its complete request."""
        conversation = self._with_shared_instructions(read_request(call))
        if self._max_characters is None:
            return conversation
        blocks = tuple(cut_block(block, self._max_characters) for block in conversation.blocks)
        return msgspec.structs.replace(conversation, blocks=blocks)

    def _with_shared_instructions(self, conversation: Conversation) -> Conversation:
        """Return the conversation; a system prompt equal to that of an earlier conversation becomes the same
        object.
        """
        instructions = conversation.instructions
        if instructions not in self._instructions:
            self._instructions[instructions] = instructions
            self.characters += sum(300 + len(text) for text in instructions)
        return msgspec.structs.replace(conversation, instructions=self._instructions[instructions])


def estimated_characters(blocks: Iterable[Block]) -> int:
    """Estimate how many characters blocks hold; a short block counts as several hundred, for its object."""
    return sum(300 + len(block.text) + len(block.arguments) + len(block.fingerprint) for block in blocks)


def read_response(call: Call) -> tuple[Block, ...] | None:
    """Return the blocks of a call's response; None if the call failed or the response is no message of a model."""
    return None if call.status == "error" else response_blocks(call.dialect, call.response)


def response_blocks(dialect: str, body: bytes) -> tuple[Block, ...] | None:
    """Return the blocks of a response in a dialect; None if it is no message of a model."""
    try:
        return DIALECTS[dialect].read_response(body) if dialect in DIALECTS else None
    except UNREADABLE:
        return None


def sampled_calls(blocks: Iterable[Block] | None) -> dict[str, ToolCall]:
    """Return the tool calls of a response as the model wrote them, by the ids under which the agent knows them."""
    return {b.id: ToolCall(b.id, b.name, b.arguments) for b in blocks or () if b.kind == "tool_use"}


def shown_messages(conversation: Conversation, sampled: Mapping[str, ToolCall] = NOT_SAMPLED) -> list[Message]:
    """Return the chat messages that a model was shown for a conversation, as exports have them.

    `sampled` are the tool calls of earlier responses of the attempt, by id: a model is shown its own calls exactly
    as it wrote them. Thinking is under `reasoning_content`.
    """
    return [_exported(message) for message in lay_out(conversation.instructions, conversation.blocks, sampled.get)]


def response_message(blocks: Sequence[Block]) -> Message:
    """Return a response as an assistant's message, with tool calls as the model wrote them; `content` may be
    empty.
    """
    (message,) = lay_out((), blocks or (Block(0, "assistant", "text"),), NOT_SAMPLED.get)
    return _exported(message)


def _exported(message: Message) -> Message:
    """Return a message with the field names, and in the order of fields, that exports have."""
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
    """Return the content of a message as text: the texts of its parts, and `[image]` for each image."""
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
    """Return messages as plain text for a person, where the exact prompt is not known."""
    texts: list[str] = []
    for message in messages:
        lines = [f"[{message['role']}]", message.get("reasoning_content", ""), text_content(message["content"])]
        functions = [call["function"] for call in message.get("tool_calls", ())]
        lines += [f"{function['name']}({function['arguments']})" for function in functions]
        texts.append("\n".join(line for line in lines if line))
    return "\n\n".join(texts)
