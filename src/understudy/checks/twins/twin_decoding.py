"""Decodes the values that `twin_encoding` wrote in a sandbox. Nothing here runs in one."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

from msgspec import Struct


class Foreign(Struct, frozen=True):
    """A value of a type that is not builtin, by its text. It equals only another one with the same text."""

    text: str


class Structure(Struct, frozen=True):
    """An object that is compared by its fields."""

    name: str
    fields: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.name, frozenset(self.fields)))


def decode(encoded: Any) -> Any:
    """Return the value that `twin_encoding.encode` encoded. Raises ValueError for anything else, and for opaque
    values.
    """
    try:
        return _decode(encoded)
    except (
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        RecursionError,
        OverflowError,
        ZeroDivisionError,
    ) as error:
        raise ValueError(f"expected a value as twin_encoding.encode writes it: {error}") from error


def _decode(encoded: Any) -> Any:  # one case per encoded type
    match encoded:
        case ["n"]:
            return None
        case ["b", content]:
            return bool(content)
        case ["i", content]:
            return int(content, 16)
        case ["f", content]:
            return float.fromhex(content)
        case ["c", real, imaginary]:
            return complex(float.fromhex(real), float.fromhex(imaginary))
        case ["q", top, bottom]:
            return Fraction(int(top, 16), int(bottom, 16))
        case ["s", str(content)]:
            return content
        case ["y", content]:
            return bytes.fromhex(content)
        case ["l", items]:
            return [_decode(item) for item in items]
        case ["a", inner]:
            return _decode(inner)
        case ["t", items]:
            return tuple(_decode(item) for item in items)
        case ["e", items]:
            return frozenset(map(hashable, map(_decode, items)))
        case ["d", pairs]:
            return {_decode(key): _decode(value) for key, value in pairs}
        case ["r", start, stop, step]:
            return range(int(start, 16), int(stop, 16), int(step, 16))
        case ["k", str(name), fields]:
            return Structure(name, {str(field): _decode(value) for field, value in fields.items()})
        case ["o", inner]:
            return _decode(inner)
        case ["z", str(text)]:
            return Foreign(text)
        case _:
            raise ValueError("the tested process could not encode the value; expected one that can be compared")


def hashable(value: Any) -> Any:
    """Return the value if it is hashable; otherwise a hashable one that is the same for equal values (dicts as
    items).
    """
    try:
        hash(value)
    except TypeError:
        if isinstance(value, dict):
            return frozenset((key, hashable(item)) for key, item in cast("dict[Any, Any]", value).items())
        return tuple(map(hashable, cast("list[Any]", value)))
    return value


def has_own_equality(encoded: Any) -> bool:
    """Return whether an encoded value contains an object with its own comparison, which may differ from its
    encoding's.
    """
    if isinstance(encoded, dict):
        return any(map(has_own_equality, cast("dict[str, Any]", encoded).values()))
    if not isinstance(encoded, list):
        return False
    parts = cast("list[Any]", encoded)
    return parts[:1] == ["o"] or any(map(has_own_equality, parts))


def equals_anything(encoded: Any) -> bool:
    """Return whether an encoded value is an object that equals whatever it is compared with."""
    return encoded == ["!"]
