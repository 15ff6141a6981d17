"""The one flat shape that every dialect is read into."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Literal, TypeVar, cast

import msgspec
from msgspec import Struct

Kind = Literal["text", "thinking", "tool_use", "tool_result", "other"]
T = TypeVar("T")
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL
)
_encoder = msgspec.json.Encoder(order="deterministic")


class Block(Struct, frozen=True):
    """One block of a conversation. `turn` is the index of its message.

    `text` is the text, the thinking, the text of a tool result, or the JSON of a block of another kind (then
    `name` is its type). A tool call has `id`, `name` and `arguments`, which are JSON text; a tool result has `id`
    and `is_error`, and is a user's in every dialect.
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
        except (msgspec.MsgspecError, RecursionError):
            value = None
        return cast(dict[str, Any], value) if isinstance(value, dict) else {}


class Conversation(Struct, frozen=True):
    """A request: its system prompt, the blocks of all its messages, and a digest of its tools and system.

    What it lets the model do: `tools` when there are any that the agent itself runs, `forced` when it must call a
    certain one, `formatted` when the answer must fit a JSON schema. `aside`: the cache is told to end before the
    last message, as for a question that the conversation will not go on from.
    """

    system: str = ""
    blocks: tuple[Block, ...] = ()
    setting: bytes = b""
    tools: bool = False
    forced: bool = False
    formatted: bool = False
    aside: bool = False


def new_conversation(
    system: str,
    blocks: Iterable[Block],
    tools: bytes,
    *,
    served: bool = False,
    forced: bool = False,
    formatted: bool = False,
    aside: bool = False,
) -> Conversation:
    """A conversation from its parts. `tools` are JSON as sent, or nothing; `served` if the provider runs them."""
    setting = blake2b(system.encode("utf-8", "surrogatepass"), digest_size=16)
    setting.update(b"\0" + tools)
    return Conversation(
        system,
        tuple(blocks),
        setting.digest(),
        tools=not served and tools not in (b"", b"[]", b"null"),
        forced=forced,
        formatted=formatted,
        aside=aside,
    )


def decoded(decode: Callable[[bytes], T], body: bytes) -> T:
    """A JSON body, with halves of surrogate pairs replaced: JavaScript writes such, and no decoder takes them.

    Raises MsgspecError.
    """
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return decode(_ESCAPE.sub(lambda found: rb"\ufffd" if _is_half(found[0]) else found[0], body))


def _is_half(escape: bytes) -> bool:
    return len(escape) == len(rb"\ud800") and escape[2:3] in b"dD" and escape[3:4] in b"89abcdefABCDEF"


def canonical(value: Any) -> bytes:
    """JSON with sorted keys: equal values give equal bytes."""
    return _encoder.encode(value)


def items(content: Any) -> list[dict[str, Any]]:
    """The parts of a content, or the items of an input. Raises ValueError when it is no list of objects."""
    if not isinstance(content, list):
        raise ValueError("content is neither a string nor a list")
    found = cast(list[Any], content)
    if not all(isinstance(item, dict) for item in found):
        raise ValueError("a part of a content is not an object")
    return cast(list[dict[str, Any]], found)


def string(value: Any) -> str:
    """The value if it is a string, else nothing."""
    return value if isinstance(value, str) else ""


def joined(blocks: Iterable[Block]) -> str:
    """The texts of blocks; one that is no text is its type in brackets."""
    return "\n".join(f"[{b.name}]" if b.kind == "other" else b.text for b in blocks)
