"""Reads decoded JSON whose shape nothing promises: what is not of the expected type counts as missing."""

from __future__ import annotations

from typing import Any, cast


def mapping(value: Any) -> dict[str, Any]:
    """The value where it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def string(value: Any) -> str | None:
    """The value where it is a string that is not empty, else None."""
    return value if isinstance(value, str) and value else None


def first_string(record: dict[str, Any], *keys: str) -> str | None:
    """The first value under one of the keys that is a string and not empty, else None."""
    return next((text for key in keys if (text := string(record.get(key)))), None)


def value_at(value: Any, *keys: str) -> Any:
    """The value under keys of objects that lie inside each other, None where one of them is missing."""
    for key in keys:
        value = mapping(value).get(key)
    return value
