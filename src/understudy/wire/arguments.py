"""Tool arguments: what the model wrote, what the agent makes of it, and when the two are the same.

Claude Code rewrites the inputs of its own turns before it sends them back: defaults come in, keys change
places, `5000.0` becomes `5000`. Rendered again from that, a conversation would no longer have the tokens that
were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec

UNPARSED_INPUT = "__unparsedToolInput"


def parse_object(raw: str) -> dict[str, Any] | None:
    """The JSON object that a raw argument string is, `{}` for an empty one; None when it is anything else."""
    if not raw.strip():
        return {}
    try:
        value: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def tool_input(raw: str) -> msgspec.Raw:
    """The `input` of a tool use block: the model's own bytes when they are an object.

    Else the form that Claude Code itself gives to what it cannot parse, so that its tools refuse it with the
    message they have for that, streamed or not.
    """
    if parse_object(raw) is not None:
        return msgspec.Raw(raw.encode() if raw.strip() else b"{}")
    return msgspec.Raw(msgspec.json.encode({UNPARSED_INPUT: {"raw": raw, "len": len(raw)}}))


def upstream_arguments(sampled: str | None, echoed: bytes) -> str:
    """The argument string to send to the model: as it was sampled when the echo is that, else the echo."""
    if sampled is not None:
        ours, theirs = parse_object(sampled), parse_object(echoed.decode())
        try:
            if ours is not None and theirs is not None and same_input(ours, theirs):
                return sampled
        except RecursionError:
            pass  # Nested hundreds deep: no tool takes that, and the echo will do.
    return echoed.decode()


def same_arguments(sampled: str | None, echoed: str) -> str:
    """As `upstream_arguments`, for an echo that is the argument string itself; the outcome is always an object.

    Servers refuse a conversation with a tool call that is not JSON; it gets the form that Claude Code gives it.
    """
    return upstream_arguments(sampled, bytes(tool_input(echoed)))


def same_input(sampled: object, echoed: object) -> bool:
    """Whether an echo says what was sampled: keys may have been added and reordered, numbers respelled."""
    same_type = type(sampled) is type(echoed)
    number = _double(sampled)
    if number is not None:
        return number == _double(echoed)
    if isinstance(sampled, Mapping) and isinstance(echoed, Mapping):
        ours, theirs = cast("Mapping[str, Any]", sampled), cast("Mapping[str, Any]", echoed)
        return all(key in theirs and same_input(value, theirs[key]) for key, value in ours.items())
    if isinstance(sampled, list) and isinstance(echoed, list):
        left, right = cast("list[Any]", sampled), cast("list[Any]", echoed)
        return len(left) == len(right) and all(map(same_input, left, right))
    return same_type and sampled == echoed


def _double(value: object) -> float | None:
    """A number as JavaScript has it, where a long integer is rounded; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
