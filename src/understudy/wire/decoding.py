"""Requests as JSON: from the bytes that an agent sent to the fields that are understood."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import Raw, Struct

from understudy.util.validation import validation_text
from understudy.wire.errors import InvalidRequest

UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)
"""The exceptions for a body that is not of its dialect: invalid JSON or UTF-8, other types, too deep nesting."""

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)", re.DOTALL
)
_encoder = msgspec.json.Encoder(order="deterministic")
_T = TypeVar("_T")
_Tools = TypeVar("_Tools", bound="RequestTools")


class _Head(Struct):
    model: str
    stream: bool | None = None


_HEAD = msgspec.json.Decoder(_Head)


def peek(body: bytes, expected: str) -> tuple[str, bool]:
    """Return the requested model, and whether a stream is requested. Raises as `decode` does."""
    head = decode(body, _HEAD, expected)
    return head.model, bool(head.stream)


def decode(body: bytes, decoder: msgspec.json.Decoder[_T], expected: str) -> _T:
    """Decode a request; `expected` names the format. Raises InvalidRequest, which says what is wrong and where.

    Unpaired surrogates, which cannot be encoded in UTF-8 for a model, are replaced.
    """
    try:
        return decoded(decoder.decode, body)
    except msgspec.ValidationError as error:
        reason = validation_text(error, decoder.type)
        raise InvalidRequest(f"the request is not {expected}: {reason}; correct this field") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(
            f"the request body is not valid JSON: {error}; expected {expected}: correct it"
        ) from error


def decoded(decode: Callable[[bytes], _T], body: bytes) -> _T:
    """Decode a JSON body, with halves of surrogate pairs replaced: JavaScript writes them, and decoders refuse
    them.

    Raises the exceptions in UNREADABLE.
    """
    try:
        return decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        return decode(
            _ESCAPE.sub(lambda match: rb"\ufffd" if _is_unpaired_surrogate(match[0]) else match[0], body)
        )


def _is_unpaired_surrogate(escape: bytes) -> bool:
    return len(escape) == len(rb"\ud800") and escape[2:3] in b"dD" and escape[3:4] in b"89abcdefABCDEF"


def canonical(value: Any) -> bytes:
    """Return JSON with sorted keys, so that equal values give equal bytes."""
    return _encoder.encode(value)


# --- tools ----------------------------------------------------------------------------------------------

CACHED_LISTS, CACHED_LIST_BYTES = 64, 256 << 10
"""How many lists of tools are cached for a dialect, and of how many bytes each at most."""


class RequestTools(Struct, frozen=True):
    """The tools of a request: as functions of chat completions, as JSON, and what of them is unsupported."""

    functions: list[dict[str, Any]]
    json: Raw
    unsupported: tuple[str, ...] = ()


class _ToolsBody(Struct, Generic[_T]):
    """Only this field, so that an error message has the right path in the request."""

    tools: list[_T] | None = None


class ToolCache(Generic[_T, _Tools]):
    """Caches what `read` returns for the tools of requests, which are large and the same during a whole session.

    Lists are looked up by their length, which costs less than a hash; lists of equal length replace each other.
    """

    def __init__(self, kind: type[_T], expected: str, read: Callable[[Sequence[_T]], _Tools]) -> None:
        self._decoder = msgspec.json.Decoder(_ToolsBody[kind])
        self._expected = expected
        self._read = read
        self._none = read(())
        self._lists: dict[int, tuple[bytes, _Tools]] = {}

    def read(self, sent: bytes) -> _Tools:
        """Return the tools of a request; if they cannot be read, none, with an error in `unsupported`."""
        cached = self._lists.get(len(sent))
        if cached is not None and cached[0] == sent:
            return cached[1]
        if not sent:
            return self._none
        try:
            tools = self._read(decode(b'{"tools":%b}' % sent, self._decoder, self._expected).tools or ())
        except InvalidRequest as error:
            return msgspec.structs.replace(self._none, unsupported=(str(error),))
        if len(sent) <= CACHED_LIST_BYTES:
            self._lists[len(sent)] = sent, tools
            if len(self._lists) > CACHED_LISTS:
                del self._lists[next(iter(self._lists))]
        return tools


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """Return a tool as models are shown it: the function of a chat completion, without fields that are None."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}
