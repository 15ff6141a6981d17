"""Decodes the values that a store holds. Damaged ones are errors of the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from understudy.errors import StoreError

T = TypeVar("T")


def decoder(kind: type[T], what: str, *, packed: bool = False) -> Callable[[bytes | memoryview], T]:
    """Return a function that decodes stored JSON, or MessagePack if `packed`.

    It raises StoreError, which names the value as `what`, if that is damaged.
    """
    decode = (msgspec.msgpack if packed else msgspec.json).Decoder(kind).decode

    def read(data: bytes | memoryview) -> T:
        try:
            return decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise StoreError(
                f"{what} in the store is damaged: {error}; what does not need it can still be read: restore the "
                "store from a copy, or export the rest"
            ) from error

    return read
