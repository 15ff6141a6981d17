"""A row of a dataset: untrusted keys and values, read with an expected type."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import msgspec

from understudy.errors import TaskError

_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "a boolean"),
    (str, "a string"),
    ((int, float), "a number"),
    (Mapping, "an object"),
    ((list, tuple), "a list"),
)


def json_type(value: object) -> str:
    """What a JSON value is, in words."""
    if value is None:
        return "nothing"
    return next((name for types, name in _KINDS if isinstance(value, types)), f"a {type(value).__name__}")


class DatasetRow:
    """One row. Its readers raise TaskError with key, what was expected and what was found, but not the place."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def has(self, key: str) -> bool:
        """Whether the key has a value; empty strings and lists count as absent."""
        return self.data.get(key) not in (None, "", [], {})

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not blank; `default` where the key is absent or null."""
        value = self.data.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise TaskError(f"{key}: expected a text, got {json_type(value)}")
        if not value.strip() and default is None:
            raise TaskError(f"{key}: is empty; expected a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, or the JSON text of one; empty where the key is absent or null."""
        value = self.data.get(key)
        if value is None or value == "":
            return ()
        if isinstance(value, str):
            try:
                return tuple(msgspec.json.decode(value, type=list[str]))
            except (msgspec.MsgspecError, RecursionError) as error:
                raise TaskError(
                    f"{key}: expected a list of texts, or one as JSON, got a text that is not"
                ) from error
        try:
            return tuple(msgspec.convert(value, list[str]))
        except (msgspec.ValidationError, RecursionError) as error:
            raise TaskError(f"{key}: expected a list of texts, got {json_type(value)}: {error}") from error

    def lines(self, key: str) -> tuple[str, ...]:
        """Commands: one string or a list of strings; empty where the key is absent or null."""
        value = self.data.get(key)
        return ((value,) if value.strip() else ()) if isinstance(value, str) else self.texts(key)

    def object(self, key: str) -> DatasetRow:
        """An object, or the JSON text of one; without keys where the key is absent or null."""
        value = self.data.get(key)
        if isinstance(value, str) and value:
            try:
                value = msgspec.json.decode(value)
            except (msgspec.MsgspecError, RecursionError) as error:
                raise TaskError(f"{key}: expected an object, or one as JSON, got neither") from error
        if value is None or value == "":
            return DatasetRow({})
        if not isinstance(value, Mapping):
            raise TaskError(f"{key}: expected an object, got {json_type(value)}")
        return DatasetRow({str(name): entry for name, entry in value.items()})  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]

    def metadata(self, *keys: str) -> dict[str, Any]:
        """Those of the keys that have a value, as what JSON can hold."""
        return {key: _plain(self.data[key]) for key in keys if self.has(key)}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, datetime.date | bytes) else value
