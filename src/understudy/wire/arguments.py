"""Tool arguments: what the model wrote, what the agent makes of it, and when the two are the same.

Claude Code rewrites the inputs of its own turns before it sends them back: defaults come in, keys change
places, `5000.0` becomes `5000`. Rendered again from that, a conversation would no longer have the tokens that
were sampled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import msgspec
from msgspec import Struct

UNPARSED_INPUT = "__unparsedToolInput"
"""The key under which Claude Code keeps the text of a tool call that is no JSON object."""

_FREEFORM_PARAMETER = "input"


class _Unparsed(Struct):
    raw: str


_UNPARSED = msgspec.json.Decoder(dict[str, _Unparsed])


def parse_object(raw: str) -> dict[str, Any] | None:
    """Return the JSON object in a raw argument string, `{}` for an empty one; None for anything else."""
    if not raw.strip():
        return {}
    try:
        value: Any = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def wrapped(raw: str) -> str:
    """Return arguments as JSON of an object, whatever the model wrote.

    That is the model's own text if it is an object, `{}` if it is empty, and otherwise the form that Claude Code
    itself gives to input that it cannot parse, so that its tools refuse it with the usual message, streamed or
    not. Model servers refuse a conversation with arguments that are not JSON, so the calls of other agents get the
    same form.
    """
    if parse_object(raw) is not None:
        return raw if raw.strip() else "{}"
    return msgspec.json.encode({UNPARSED_INPUT: {"raw": raw, "len": len(raw)}}).decode()


def unwrapped(arguments: str) -> str:
    """Return the text that the model wrote, from arguments that may be `wrapped`."""
    if UNPARSED_INPUT in arguments:
        try:
            return _UNPARSED.decode(arguments)[UNPARSED_INPUT].raw
        except (msgspec.MsgspecError, KeyError, UnicodeError):
            pass  # The model itself wrote this key, so these are ordinary arguments.
    return arguments


def comparable_arguments(arguments: str) -> str:
    """Return a form that is equal for argument strings that differ only in white space and in being `wrapped`."""
    raw = unwrapped(arguments)
    try:
        return msgspec.json.encode(msgspec.json.decode(raw)).decode()
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return raw


def tool_input(raw: str) -> msgspec.Raw:
    """Return the `input` of a tool use block: the model's arguments, `wrapped`."""
    return msgspec.Raw(wrapped(raw).encode())


def upstream_arguments(sampled: str | None, echoed: str) -> str:
    """Return the arguments to send to the model: those it sampled if the agent's echo means the same, otherwise
    the echo.
    """
    if sampled is not None and sampled != echoed:
        ours, theirs = parse_object(sampled), parse_object(echoed)
        try:
            if ours is not None and theirs is not None and same_input(ours, theirs):
                return sampled
        except RecursionError:
            pass  # Too deeply nested to compare, so return what the agent sent back.
    return echoed


def same_input(sampled: object, echoed: object) -> bool:
    """Return whether an echo means the same as the sampled arguments: keys may be added or reordered, numbers
    reformatted.
    """
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


def with_doubles(value: Any) -> Any:
    """Return a JSON value with all its numbers as JavaScript represents them; zero has no sign."""
    if isinstance(value, dict):
        return {key: with_doubles(item) for key, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [with_doubles(item) for item in cast("list[Any]", value)]
    number = _double(value)
    return value if number is None else number + 0.0


def _double(value: object) -> float | None:
    """Return a number as JavaScript represents it, which rounds long integers; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


# --- tools that take plain text -------------------------------------------------------------------------

FREEFORM_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        _FREEFORM_PARAMETER: {"type": "string", "description": "The whole input of the tool, as plain text."}
    },
    "required": [_FREEFORM_PARAMETER],
    "additionalProperties": False,
}
"""The parameters of the function that represents a tool which takes plain text."""


def freeform_input(arguments: str) -> str:
    """Return the plain text that a model passed to such a tool: its only parameter, or the whole text."""
    text = (parse_object(arguments) or {}).get(_FREEFORM_PARAMETER)
    return text if isinstance(text, str) else arguments


def freeform_arguments(text: str) -> str:
    """Return plain text as JSON arguments: servers refuse a call whose arguments are not JSON."""
    return msgspec.json.encode({_FREEFORM_PARAMETER: text}).decode()


def upstream_freeform(sampled: str | None, echoed: str) -> str:
    """As `upstream_arguments`, for a call of such a tool: the sampled arguments if both contain the same text."""
    if sampled is None or parse_object(sampled) is None:
        return echoed
    return sampled if freeform_input(sampled) == freeform_input(echoed) else echoed
