"""Keeps every JSON answer within `PAGE_BYTES`: pages of rows with cursors, and large answers whose lists come in
parts.

An answer about one thing, such as the head of a rollout, has lists of any length. If it does not fit on a page,
the first page has all plain values and the beginnings of the lists; the page of its `next` cursor has the
following rows. A client joins the lists (and dicts) of all pages.
"""

from __future__ import annotations

import base64
import binascii
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import Struct

from understudy.view.faults import ViewRefused, encode
from understudy.view.schema import PAGE_BYTES

ROOM: Final = PAGE_BYTES - 4_000
"""How many bytes of rows a page may have; the rest is for the plain values around them."""
_CUTS: Final = ((4_000, 1_000), (1_000, 300), (300, 100), (100, 30), (100, 5))
"""The most characters of a text, and the most items of a list, in a row that does not fit on a page: the first
pair that is small enough is used.
"""
_KEPT: Final = 8
"""How many answers are kept while a client reads their pages."""

_S = TypeVar("_S", bound=Struct)


def size_of(value: object) -> int:
    """Return how many bytes of JSON a value takes."""
    return len(encode(value))


def fit(rows: Sequence[_S], room: int = ROOM) -> tuple[_S, ...]:
    """Return the first rows, as many as fit on a page. A first row that is too long alone is shortened."""
    size = 0
    for number, row in enumerate(rows):
        size += size_of(row) + 1
        if size > room:
            return tuple(rows[:number]) if number else (shortened(row, room),)
    return tuple(rows)


def shortened(row: _S, room: int) -> _S:
    """Return a row with its long texts and lists cut so that it takes at most `room` bytes, unless it does
    already.
    """
    if size_of(row) <= room:
        return row
    plain = msgspec.to_builtins(row)
    for characters, items in _CUTS:
        cut = _cut(plain, characters, items)
        if size_of(cut) <= room:
            break
    else:
        raise AssertionError(f"a {type(row).__name__} takes more than {room} bytes, however short its texts are")
    return msgspec.convert(cut, type(row))


def _cut(value: Any, characters: int, items: int) -> Any:
    match value:
        case str() if len(value) > characters:
            return value[:characters] + "…"
        case list() | tuple():
            return [_cut(each, characters, items) for each in cast("Sequence[Any]", value)[:items]]
        case dict():
            entries = list(cast("dict[Any, Any]", value).items())
            # A struct is a dict here too, and must keep all its fields, of which none has as many as 60.
            return {key: _cut(each, characters, items) for key, each in entries[: max(items, 60)]}
        case _:
            return value


# --- cursors -------------------------------------------------------------------------------------------


def encode_cursor(value: Any, key: str) -> str:
    """Return the cursor of the page that begins after a row, which a value and a key identify."""
    return base64.urlsafe_b64encode(msgspec.json.encode([value, key])).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[Any, str]:
    """Return the value and the key of a cursor. Raises ViewRefused for anything else."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        value, key = msgspec.json.decode(data, type=tuple[str | float | int, str])
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise invalid_cursor(text) from error
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise invalid_cursor(text)  # SQLite has no such integers
    return value, key


def invalid_cursor(text: str) -> ViewRefused:
    """Return the error for a cursor that no page had."""
    return ViewRefused(400, "cursor", f"cursor: {text[:50]!r} is none of ours", "take `next` of the page before")


# --- answers in parts ----------------------------------------------------------------------------------


class AnswerParts:
    """The answers that clients are reading page by page. Safe to use from many threads.

    All pages are of one answer, also if the store changes meanwhile. If too many are read at once, or the viewer
    was restarted, the answer is made again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Struct] = OrderedDict()

    def page(self, cursor: str | None, lists: Sequence[str], make: Callable[[], Struct]) -> Struct:
        """Return a page of the answer that `make` returns, which has a field `next`.

        `lists` are the paths of its lists and dicts, such as "verdict.tests", in the order in which they are sent.
        """
        if cursor is None:
            answer = make()
            page, after = part_of(answer, lists, 0, 0)
            name = secrets.token_hex(8)
        else:
            name, place = decode_cursor(cursor)
            number, _, offset = place.partition(":")
            if not isinstance(name, str) or not (number.isdecimal() and offset.isdecimal()) or len(place) > 30:
                raise invalid_cursor(cursor)
            if int(number) >= len(lists):
                raise invalid_cursor(cursor)
            with self._lock:
                answer = self._answers.get(name)
            answer = answer or make()
            page, after = part_of(answer, lists, int(number), int(offset))
        with self._lock:
            if after is None:
                self._answers.pop(name, None)
                return page
            self._answers[name] = answer
            self._answers.move_to_end(name)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        return msgspec.structs.replace(page, next=encode_cursor(name, f"{after[0]}:{after[1]}"))


def part_of(answer: _S, lists: Sequence[str], number: int, offset: int) -> tuple[_S, tuple[int, int] | None]:
    """Return an answer with the rows that fit on a page: those of list `number` from `offset` on, and of the lists
    after it. The second value is where the next page begins, None if this is the last.
    """
    page = answer
    rows = [_rows(answer, path) for path in lists]
    for path, each in zip(lists, rows, strict=True):
        if each:
            page = _replaced(page, path, each[:0])
    if (size := size_of(page)) > ROOM // 2:
        page = shortened(page, ROOM // 2)
        size = size_of(page)
    room = ROOM - size
    is_empty = True
    for index in range(number, len(lists)):
        start = offset if index == number else 0
        chosen: list[Any] = []
        for row in rows[index][start:]:
            taken = size_of(row) + 1
            if taken > room and is_empty:
                row = shortened(row, room) if isinstance(row, Struct) else _cut(row, 4_000, 1_000)
                taken = size_of(row) + 1
            if taken > room:
                break
            chosen.append(row)
            room -= taken
            is_empty = False
        if chosen:
            page = _replaced(page, lists[index], chosen)
        if (end := start + len(chosen)) < len(rows[index]):
            return page, (index, end)
    return page, None


def _rows(answer: Struct, path: str) -> Sequence[Any]:
    """Return the rows of a list, or the entries of a dict; of a list in a struct that is None, nothing."""
    value: Any = answer
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    if isinstance(value, Mapping):
        return tuple(cast("Mapping[Any, Any]", value).items())
    return value or ()


def _replaced(answer: _S, path: str, rows: Sequence[Any]) -> _S:
    name, _, rest = path.partition(".")
    value = getattr(answer, name)
    if rest:
        return msgspec.structs.replace(answer, **{name: _replaced(value, rest, rows)})
    return msgspec.structs.replace(answer, **{name: dict(rows) if isinstance(value, Mapping) else tuple(rows)})
