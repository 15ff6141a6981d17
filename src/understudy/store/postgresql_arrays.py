"""Columns of many rows as PostgreSQL's arrays, in its binary format.

psycopg's lists take several times the CPU here and in the server: it finds a type for each list by its values, so
that a statement has another set of types each time and is planned anew.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from understudy.store.escaping import escape_text
from understudy.store.statements import ElementKind

if TYPE_CHECKING:
    import psycopg

_ELEMENTS: Final[dict[ElementKind, int]] = {"bigint": 20, "float": 701, "bytea": 17, "text": 25}
_ARRAYS: Final[dict[ElementKind, int]] = {"bigint": 1016, "float": 1022, "bytea": 1001, "text": 1009}
_NULL: Final = b"\xff\xff\xff\xff"
_header = struct.Struct(">iiIii").pack
_size = struct.Struct(">i").pack
_integer = struct.Struct(">iq").pack
_number = struct.Struct(">id").pack


class _Integers(bytes):
    pass


class _Numbers(bytes):
    pass


class _Contents(bytes):
    pass


class _Texts(bytes):
    pass


_CLASSES: Final[dict[ElementKind, type[bytes]]] = {
    "bigint": _Integers,
    "float": _Numbers,
    "bytea": _Contents,
    "text": _Texts,
}


def array_of(kind: ElementKind, values: Sequence[Any]) -> bytes:
    """Return values as an array for a connection with `register_arrays`.

    Raises struct.error for a number that does not fit, and UnicodeEncodeError for a text that should be bytes.
    """
    if kind == "bigint":
        elements = [_NULL if value is None else _integer(8, value) for value in values]
    elif kind == "float":
        elements = [_NULL if value is None else _number(8, value) for value in values]
    elif kind == "text":
        elements = [_NULL if value is None else _sized(escape_text(value).encode()) for value in values]
    else:
        elements = [_NULL if value is None else _sized(value) for value in values]
    header = _header(1, int(None in values), _ELEMENTS[kind], len(values), 1)
    return _CLASSES[kind](header + b"".join(elements))


def _sized(data: bytes) -> bytes:
    return _size(len(data)) + data


def register_arrays(connection: psycopg.Connection[Any]) -> None:
    """Have a connection send what `array_of` returns as it is."""
    from psycopg.adapt import Dumper
    from psycopg.pq import Format

    class ArrayDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: bytes) -> bytes:
            return obj

    for kind, array in _CLASSES.items():
        connection.adapters.register_dumper(
            array, type(ArrayDumper.__name__, (ArrayDumper,), {"oid": _ARRAYS[kind]})
        )
