"""Errors of msgspec in full: it names the place of an invalid value, but not the value, nor what it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

_STEP = re.compile(r"\.([^.\[\]`]+)|\[([^\]]*)\]")
"""A step of msgspec's paths: a key, or an index, which is `...` for a key of a mapping with free keys."""
_SHOWN = 80  # characters of a value


def validation_text(error: Exception, kind: Any) -> str:
    """Return what an error of msgspec says of a value that should have been of the type `kind`; for a name that is
    not one of a fixed set, with the set.
    """
    text, separator, place = str(error).partition(" - at `$")
    if text.startswith("Invalid enum value") and (values := _values_at(kind, place)):
        text += f", expected one of {', '.join(values)}"
    return text + separator + place


def shown(value: object) -> str:
    """Return the beginning of a value's representation, for an error message."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def describe_invalid(error: msgspec.ValidationError | RecursionError, document: object, kind: Any = None) -> str:
    """Return the key that `error` is about, what the type `kind` expects there, and the value that
    `document` has there.

    A value of a mapping with free keys is not shown: msgspec does not say which one it was, and it may be secret.
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply; expected objects and lists in at most some hundreds of levels"
    key, text = invalid_key(error, document, kind)
    return f"{key}: {text}" if key else text


def invalid_key(error: msgspec.ValidationError, document: object, kind: Any = None) -> tuple[str, str]:
    """Return the key that `error` is about, such as `a[0].b` ("": the whole), and what `describe_invalid` says."""
    text, _, location = str(error).partition(" - at `")
    text = text[:1].lower() + text[1:]
    is_about_key = location.startswith("key` in `")
    path = location.removeprefix("key` in `").rstrip("`")
    if text.startswith("expected") and not is_about_key:
        value, is_there = _value_at(document, path)
        if is_there:
            text = f"{text.partition(', got ')[0]}, got {shown(value)}"
    elif (
        text.startswith("invalid")
        and kind is not None
        and (allowed := _values_at(kind, path) or _tags_at(kind, path))
    ):
        text = f"{text}, expected one of {', '.join(allowed)}"
    key = path.removeprefix("$").removeprefix(".")
    return (f"a key of {key or 'the object'}" if is_about_key else key), text


def _value_at(document: object, path: str) -> tuple[object, bool]:
    """Return the value at one of msgspec's paths, such as `$.a[0].b`, and whether the path names one."""
    position = 1  # after the $
    while position < len(path):
        part = _STEP.match(path, position)
        if part is None:
            return None, False
        name, index = part.groups()
        try:
            document = cast("dict[str, Any]", document)[name] if name else cast("list[Any]", document)[int(index)]
        except (LookupError, TypeError, ValueError):
            return None, False
        position = part.end()
    return document, True


def _values_at(kind: Any, place: str) -> list[str]:
    """Return the values of the enumeration at a place such as `.messages[0].role`."""
    kinds = _types_at(kind, [step[1] for step in _STEP.finditer(place)])
    return [str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]


def _tags_at(kind: Any, place: str) -> list[str]:
    """Return the tags of the structs that an object may be, at the place of its key for the tag."""
    *steps, key = [step[1] for step in _STEP.finditer(place)] or [""]
    structs = [
        member for member in _types_at(kind, steps) if isinstance(member, type) and issubclass(member, Struct)
    ]
    configs = [struct.__struct_config__ for struct in structs]
    return [str(config.tag) for config in configs if config.tag_field == key]


def _types_at(kind: Any, steps: list[str | None]) -> list[Any]:
    """Return the types, without unions, of a value some steps inside a type: a step is a name, or None for an
    item.
    """
    kinds = list(_union_members(kind))
    for step in steps:
        kinds = [
            member for kind in kinds for inner in _member_types(kind, step) for member in _union_members(inner)
        ]
    return kinds


def _union_members(kind: Any) -> Iterator[Any]:
    """Yield the types that a type is a union of, without annotations."""
    if get_origin(kind) is Annotated:
        yield from _union_members(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for member in get_args(kind):
            yield from _union_members(member)
    else:
        yield kind


def _member_types(kind: Any, name: str | None) -> Iterator[Any]:
    """Yield the type of a struct's field; without a name, that of the items of a list, or the values of a dict."""
    plain = get_origin(kind) or kind
    if name is not None and isinstance(plain, type) and issubclass(plain, Struct):
        yield from (field.type for field in msgspec.structs.fields(kind) if field.encode_name == name)
    elif name is None and (arguments := get_args(kind)):
        yield arguments[1] if get_origin(kind) is dict else arguments[0]
