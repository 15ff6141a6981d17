"""Reads decoded JSON of unknown shape: a value of an unexpected type counts as missing."""

from __future__ import annotations

from typing import Any, cast


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a JSON object, else an empty dict."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def items(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list."""
    return cast("list[Any]", value) if isinstance(value, list) else []


def string(value: Any) -> str | None:
    """Return the value if it is a non-empty string, else None."""
    return value if isinstance(value, str) and value else None


def first_string(record: dict[str, Any], *keys: str) -> str | None:
    """Return the first non-empty string under one of the keys, or None."""
    return next((text for key in keys if (text := string(record.get(key)))), None)


def value_at(value: Any, *keys: str) -> Any:
    """Return the value at a path of keys through nested objects, or None if a key is missing."""
    for key in keys:
        value = mapping(value).get(key)
    return value
