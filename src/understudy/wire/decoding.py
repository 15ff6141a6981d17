"""Request bodies: from the bytes that an agent sent to the fields that are understood."""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec import Struct

from understudy.wire.blocks import decoded
from understudy.wire.errors import InvalidRequest

_T = TypeVar("_T")


class _Head(Struct):
    model: str
    stream: bool | None = None


_HEAD = msgspec.json.Decoder(_Head)


def peek(body: bytes, what: str) -> tuple[str, bool]:
    """The model that a request asks for, and whether it wants a stream. Raises as `decode` does."""
    head = decode(body, _HEAD, what)
    return head.model, bool(head.stream)


def decode(body: bytes, decoder: msgspec.json.Decoder[_T], what: str) -> _T:
    """A request from its bytes; `what` names the format. Raises InvalidRequest naming what is wrong, and where.

    Halves of surrogate pairs, which no UTF-8 can carry on to a model, are replaced.
    """
    try:
        return decoded(decoder.decode, body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is not {what}: {error}") from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
