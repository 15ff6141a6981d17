"""Keeps every JSON response within `PAGE_BYTES`: pages of rows with cursors, and large responses whose lists are
split over pages.

A response about one thing, such as the head of a rollout, has lists of any length. If it does not fit on a page,
the first page has all plain values and the beginnings of the lists; the page of its `next` cursor has the
following rows. A client joins the lists (and dicts) of all pages.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar, cast

import msgspec
from msgspec import Struct

from understudy.view.faults import ViewRefused, encode
from understudy.view.schema import PAGE_BYTES

MAX_ROW_BYTES: Final = PAGE_BYTES - 4_000
"""How many bytes of rows a page may have; the rest is for the plain values around them."""
_CUT_LIMITS: Final = ((4_000, 1_000), (1_000, 300), (300, 100), (100, 30), (100, 5), (40, 1))
"""The most characters of a text, and the most items of a list, in a row that does not fit on a page: the first
pair that is small enough is used. No text of a fixed set of values, such as a status, has more than 40 characters.
"""
_MAX_DEPTH: Final = 20
"""How deep lists and dicts in a shortened row may be nested; the schemas have far fewer levels, other JSON any."""
_CURSOR_REMEDY: Final = "begin with the first page, without `cursor`, and take `next` of the page before"
_PAGE_PARAMETERS: Final = ("cursor", "limit")
"""Parameters that may differ between the pages of one list."""
_MAX_CACHED: Final = 8
"""How many responses are kept while a client reads their pages."""

_S = TypeVar("_S", bound=Struct)
_T = TypeVar("_T")


def size_of(value: object) -> int:
    """Return how many bytes of JSON a value takes."""
    return len(encode(value))


def rows_that_fit(rows: Sequence[_S], room: int = MAX_ROW_BYTES) -> tuple[_S, ...]:
    """Return the first rows, as many as fit on a page. A first row that is too long alone is shortened."""
    size = 0
    for number, row in enumerate(rows):
        size += size_of(row) + 1
        if size > room:
            return tuple(rows[:number]) if number else (shortened(row, room),)
    return tuple(rows)


def shortened(row: _T, room: int) -> _T:
    """Return a row with its long texts and lists cut so that it takes at most `room` bytes, unless it does
    already. Of a struct the last cut leaves at most some 300 bytes for each of its fields.
    """
    if size_of(row) <= room:
        return row
    for characters, items in _CUT_LIMITS:
        cut: _T = _cut(row, characters, items, _MAX_DEPTH)
        if size_of(cut) <= room:
            return cut
    raise AssertionError(
        f"internal error: a {type(row).__name__} takes more than {room} bytes, however short its strings are; "
        "please report it"
    )


def _cut(value: Any, characters: int, items: int, depth: int) -> Any:
    match value:
        case str():
            return value if len(value) <= characters else value[:characters] + "…"
        case Struct():
            fields = {
                name: _cut(getattr(value, name), characters, items, depth) for name in value.__struct_fields__
            }
            return type(value)(**fields)
        case list() | tuple() | dict() if depth == 0:
            return "…"
        case list() | tuple():
            rows: list[Any] = [
                _cut(item, characters, items, depth - 1) for item in cast("Sequence[Any]", value)[:items]
            ]
            return rows if isinstance(value, list) else tuple(rows)
        case dict():
            entries = islice(cast("dict[Any, Any]", value).items(), items)
            return {
                _cut(key, characters, items, depth): _cut(item, characters, items, depth - 1)
                for key, item in entries
            }
        case _:
            return value


# --- cursors -------------------------------------------------------------------------------------------


def encode_cursor(value: Any, key: str | int) -> str:
    """Return the cursor of the page that begins after a row, which a value and a key identify. Both are short."""
    return base64.urlsafe_b64encode(msgspec.json.encode([value, key])).decode().rstrip("=")


def decode_cursor(text: str) -> tuple[Any, str | int]:
    """Return the value and the key of a cursor. Raises ViewRefused for anything else."""
    try:
        data = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        value, key = msgspec.json.decode(data, type=tuple[str | float | int, str | int])
    except (binascii.Error, ValueError, msgspec.MsgspecError) as error:
        raise invalid_cursor(text) from error
    if any(isinstance(number, int) and not -(2**63) <= number < 2**63 for number in (value, key)):
        raise invalid_cursor(text)  # SQLite has no such integers
    return value, key


def invalid_cursor(text: str) -> ViewRefused:
    """Return the error for a cursor that no page had."""
    return ViewRefused(
        400, "cursor", f"cursor: invalid value {text[:50]!r}; expected the `next` of a page", _CURSOR_REMEDY
    )


class CursorScope:
    """Binds the cursors of a list to its request: a cursor of another store, filter or order is refused.

    `parts` are the variable parts of the request's path.
    """

    def __init__(self, route: str, parts: Mapping[str, str], query: Struct) -> None:
        filters = {
            name: value for name, value in msgspec.structs.asdict(query).items() if name not in _PAGE_PARAMETERS
        }
        digest = hashlib.sha256(msgspec.json.encode([route, parts, filters], order="sorted")).hexdigest()
        self._prefix = f"{digest[:8]}."

    def without_prefix(self, query: _S) -> _S:
        """Return a query without the list's prefix in its cursor. Raises ViewRefused if the cursor came from
        another list: another path, filter or order.
        """
        cursor: str | None = getattr(query, "cursor", None)
        if cursor is None:
            return query
        if not cursor.startswith(self._prefix):
            raise ViewRefused(
                400,
                "cursor",
                f"cursor: {cursor[:50]!r} is not of this list: expected the `next` of a page of the same path, "
                "with the same filters and the same order",
                _CURSOR_REMEDY,
            )
        return msgspec.structs.replace(query, cursor=cursor.removeprefix(self._prefix))

    def with_prefix(self, response: _T) -> _T:
        """Return a response whose `next` can be used with this request only."""
        after = getattr(response, "next", None)
        if not isinstance(response, Struct) or not isinstance(after, str):
            return response
        return msgspec.structs.replace(response, next=self._prefix + after)


# --- paged responses -----------------------------------------------------------------------------------


class PagedResponses:
    """The responses that clients are reading page by page. Safe to use from many threads.

    All pages are of one response, also if the store changes meanwhile. If too many are read at once, or the viewer
    was restarted, the response is computed again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._responses: OrderedDict[str, Struct] = OrderedDict()

    def page(self, cursor: str | None, lists: Sequence[str], make: Callable[[], Struct]) -> Struct:
        """Return a page of the response that `make` returns, which has a field `next`.

        `lists` are the paths of its lists and dicts, such as "verdict.tests", in the order in which they are sent.
        """
        if cursor is None:
            response = make()
            page, after = page_of(response, lists, 0, 0)
            response_id = secrets.token_hex(8)
        else:
            response_id, position = decode_cursor(cursor)
            number, _, offset = str(position).partition(":")
            if (
                not isinstance(response_id, str)
                or not (number.isdecimal() and offset.isdecimal())
                or len(str(position)) > 30
            ):
                raise invalid_cursor(cursor)
            if int(number) >= len(lists):
                raise invalid_cursor(cursor)
            with self._lock:
                response = self._responses.get(response_id)
            response = response or make()
            page, after = page_of(response, lists, int(number), int(offset))
        with self._lock:
            if after is None:
                self._responses.pop(response_id, None)
                return page
            self._responses[response_id] = response
            self._responses.move_to_end(response_id)
            while len(self._responses) > _MAX_CACHED:
                self._responses.popitem(last=False)
        return msgspec.structs.replace(page, next=encode_cursor(response_id, f"{after[0]}:{after[1]}"))


def page_of(response: _S, lists: Sequence[str], number: int, offset: int) -> tuple[_S, tuple[int, int] | None]:
    """Return a response with the rows that fit on a page: those of list `number` from `offset` on, and of lists
    after it. The second value is where the next page begins, None if this is the last.
    """
    page = response
    rows = [_rows(response, path) for path in lists]
    for path, rows_of_list in zip(lists, rows, strict=True):
        if rows_of_list:
            page = _replaced(page, path, rows_of_list[:0])
    if (size := size_of(page)) > MAX_ROW_BYTES // 2:
        page = shortened(page, MAX_ROW_BYTES // 2)
        size = size_of(page)
    room = MAX_ROW_BYTES - size
    is_empty = True
    for index in range(number, len(lists)):
        start = offset if index == number else 0
        chosen: list[Any] = []
        for row in rows[index][start:]:
            size_of_row = size_of(row) + 1
            if size_of_row > room and is_empty:
                row = shortened(row, room - 1)
                size_of_row = size_of(row) + 1
            if size_of_row > room:
                break
            chosen.append(row)
            room -= size_of_row
            is_empty = False
        if chosen:
            page = _replaced(page, lists[index], chosen)
        if (end := start + len(chosen)) < len(rows[index]):
            return page, (index, end)
    return page, None


def _rows(response: Struct, path: str) -> Sequence[Any]:
    """Return the rows of a list, or the entries of a dict; of a list in a struct that is None, nothing."""
    value: Any = response
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    if isinstance(value, Mapping):
        return tuple(cast("Mapping[Any, Any]", value).items())
    return value or ()


def _replaced(response: _S, path: str, rows: Sequence[Any]) -> _S:
    name, _, inner_path = path.partition(".")
    value = getattr(response, name)
    if inner_path:
        return msgspec.structs.replace(response, **{name: _replaced(value, inner_path, rows)})
    return msgspec.structs.replace(response, **{name: dict(rows) if isinstance(value, Mapping) else tuple(rows)})
