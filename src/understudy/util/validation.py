"""Errors of msgspec in full: it names the place of an invalid value, but not the values that are allowed there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Struct

_STEP = re.compile(r"\.([^.\[`]+)|\[[^\]]*\]")


def validation_text(error: Exception, kind: Any) -> str:
    """Return what an error of msgspec says of a value that should have been of the type `kind`; for a name that is
    not one of a fixed set, with the set.
    """
    text, at, place = str(error).partition(" - at `$")
    if text.startswith("Invalid enum value") and (values := _values_at(kind, place)):
        text += f", expected one of {', '.join(values)}"
    return text + at + place


def _values_at(kind: Any, place: str) -> list[str]:
    """Return the values of the enumeration at a place such as `.messages[0].role`."""
    kinds = list(_members(kind))
    for step in _STEP.finditer(place):
        kinds = [member for kind in kinds for inner in _inner(kind, step[1]) for member in _members(inner)]
    return [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _members(kind: Any) -> Iterator[Any]:
    """Yield the types that a type is a union of, without annotations."""
    if get_origin(kind) is Annotated:
        yield from _members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    else:
        yield kind


def _inner(kind: Any, name: str | None) -> Iterator[Any]:
    """Yield the type of a struct's field; without a name, that of the items of a list, or the values of a dict."""
    plain = get_origin(kind) or kind
    if name is not None and isinstance(plain, type) and issubclass(plain, Struct):
        yield from (field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
    elif name is None and (arguments := get_args(kind)):
        yield arguments[1] if get_origin(kind) is dict else arguments[0]
