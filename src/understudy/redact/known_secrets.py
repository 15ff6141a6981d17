"""Values that were found to be secrets, looked for wherever they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

_FEW = 24
_GRAM = 8


class KnownSecrets:
    """A set of values of eight characters or more, each with what the value is that it stands for."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lengths: dict[str, list[int]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: str, whole: str | None = None) -> None:
        """Know a value, also as JSON and URLs write it. `whole` is the secret where the value is a part of it."""
        once = json.dumps(value)[1:-1]
        forms = {value, once, json.dumps(once)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}
        forms.add(quote(value, safe="", errors="replace"))
        for form in forms:
            if len(form) >= _GRAM and form not in self._values:
                self._values[form] = whole or value
                lengths = self._lengths.setdefault(form[:_GRAM], [])
                if len(form) not in lengths:
                    lengths.append(len(form))
                    lengths.sort(reverse=True)

    def find(self, text: str) -> Iterator[tuple[int, int, str]]:
        """Where known values stand in the text, the longest at each place, and what they stand for."""
        values = self._values
        if not values or len(text) < _GRAM:
            return
        if len(values) <= _FEW:
            for value, whole in values.items():
                at = text.find(value)
                while at >= 0:
                    yield at, at + len(value), whole
                    at = text.find(value, at + len(value))
            return
        # Many: the time must not grow with their number.
        lengths, at, last = self._lengths, 0, len(text) - _GRAM
        while at <= last:
            for length in lengths.get(text[at : at + _GRAM], ()):
                whole = values.get(text[at : at + length])
                if whole is not None:
                    yield at, at + length, whole
                    at += length - 1
                    break
            at += 1
