"""Request bodies in parts: what repeats from turn to turn is cut out, so that it can be stored once.

`join(split(body))` is `body`, byte for byte, for any bytes at all: a body that cannot be cut (no JSON object, odd
spacing, more messages than any conversation has) is a skeleton without slots.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw, Struct

Buffer = bytes | Raw

MAX_MESSAGES = 10_000
MAX_KEYS = 100
_SLOTS = {
    "messages": "messages",
    "input": "messages",
    "system": "system",
    "instructions": "system",
    "tools": "tools",
}
"""The slot that a key of a body fills, in each dialect; of two keys for one slot, the first fills it."""
_KEY = re.compile(rb'[{,\s]*+"[^"\\]*+(?:\\.[^"\\]*+)*+"\s*+:\s*+')
_OPEN = re.compile(rb"\[\s*+")
_GLUE = re.compile(rb"[,\s]*+")
_fields = msgspec.json.Decoder(dict[str, Raw]).decode
_elements = msgspec.json.Decoder(list[Raw]).decode


class Skeleton(Struct, frozen=True, array_like=True):
    """What is left of a body: `pieces[i]` comes before slot `i`, the last piece after all of them.

    `glue` stands between two messages.
    """

    pieces: list[bytes]
    slots: list[str]
    glue: bytes = b","


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Skeleton).decode


class Parts(Struct, frozen=True):
    """A body in parts. `skeleton` is an encoded Skeleton; `system` and `tools` are JSON values, as sent."""

    skeleton: bytes
    system: Buffer | None = None
    tools: Buffer | None = None
    messages: Sequence[Buffer] = ()


def split(body: bytes) -> Parts:
    """Cut a request body into parts that `join` puts together again."""
    try:
        fields = _fields(body)
        filled = _filled(fields)
        messages = _elements(fields[filled["messages"]]) if "messages" in filled else []
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _whole(body)
    if len(fields) > MAX_KEYS or len(messages) > MAX_MESSAGES:
        return _whole(body)

    skeleton = Skeleton([], [], _glue(fields[filled["messages"]], messages) if messages else b",")
    body_parts: dict[str, Buffer] = {}
    cut = at = 0
    for name, value in fields.items():
        if (key := _KEY.match(body, at)) is None:
            return _whole(body)
        start, size = key.end(), len(memoryview(value))
        at = start + size
        slot = _SLOTS.get(name)
        if slot is None or filled.get(slot) != name:
            continue
        if slot != "messages":
            body_parts[slot] = value
        elif messages:
            start += _after_bracket(value)
            size = sum(len(memoryview(message)) for message in messages) + len(skeleton.glue) * (len(messages) - 1)
        else:
            continue
        skeleton.pieces.append(body[cut:start])
        skeleton.slots.append(slot)
        cut = start + size
    skeleton.pieces.append(body[cut:])

    parts = Parts(_encode(skeleton), body_parts.get("system"), body_parts.get("tools"), messages)
    # A key that comes twice, or spacing that is not the same everywhere, shows here.
    return parts if _fill(skeleton, body_parts, messages) == body else _whole(body)


def _filled(fields: Mapping[str, Raw]) -> dict[str, str]:
    """Slot → the key that fills it; messages are a list, not the one string that `input` may be."""
    filled: dict[str, str] = {}
    for name, value in fields.items():
        slot = _SLOTS.get(name)
        if slot is not None and not (slot == "messages" and bytes(memoryview(value)[:1]) != b"["):
            filled.setdefault(slot, name)
    return filled


def join(skeleton: bytes, system: Buffer | None, tools: Buffer | None, messages: Sequence[Buffer]) -> bytes:
    """The body that `split` cut into these parts. Raises ValueError when they do not fit together."""
    try:
        body_parts = {name: value for name, value in (("system", system), ("tools", tools)) if value is not None}
        return _fill(_decode(skeleton), body_parts, messages)
    except (msgspec.MsgspecError, KeyError) as error:
        raise ValueError(f"the parts of a request do not fit together: {error!r}") from error


def _fill(skeleton: Skeleton, body_parts: Mapping[str, Buffer], messages: Sequence[Buffer]) -> bytes:
    filled: list[Buffer] = []
    for piece, slot in zip(skeleton.pieces, skeleton.slots, strict=False):
        filled += (piece, skeleton.glue.join(messages) if slot == "messages" else body_parts[slot])
    filled.append(skeleton.pieces[-1])
    return b"".join(filled)


def _glue(value: Raw, messages: list[Raw]) -> bytes:
    if len(messages) == 1:
        return b","
    text = bytes(value)
    end = _after_bracket(value) + len(memoryview(messages[0]))
    return text[end : _end(_GLUE, text, end)]


def _after_bracket(value: Raw) -> int:
    return _end(_OPEN, value, 0)


def _end(pattern: re.Pattern[bytes], text: Buffer, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _whole(body: bytes) -> Parts:
    return Parts(_encode(Skeleton([body], [])))
