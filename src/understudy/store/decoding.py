"""Decodes the values that a store holds. Damaged ones are errors of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from understudy.errors import StoreError

T = TypeVar("T")


def damaged(problem: str) -> StoreError:
    """Return the error for a store that does not hold what it should. Who reads the store adds its name."""
    return StoreError(f"the store is damaged: {problem}; restore it from a copy, or export what can still be read")


def decoder(kind: type[T], description: str, *, packed: bool = False) -> Callable[[bytes | memoryview], T]:
    """Return a function that decodes stored JSON, or MessagePack if `packed`.

    It raises StoreError, which names the value as `description`, if that is damaged.
    """
    decode = (msgspec.msgpack if packed else msgspec.json).Decoder(kind).decode

    def read(data: bytes | memoryview) -> T:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise damaged(f"{description} cannot be decoded ({error})") from error

    return read
