"""Columns of Arrow tables: their types, and arrays made of Python's values without pandas."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, cast

Columns = Mapping[str, Any]
"""Names of columns to their types.

A type is the name of a scalar, `[type]` for a list, `{name: type}` for a struct, or "json": any JSON value, read
back as it was written
"""

_ARROW_FUNCTIONS = {"bool": "bool_", "json": "json_"}
_TYPE_CODES = {"int8": "b", "int32": "i", "int64": "q", "float64": "d"}


def column_table(arrow: Any, rows: Sequence[Mapping[str, Any]], columns: Columns, schema: Any) -> Any:
    """Return a table of rows, which must have all columns. Raises UnicodeEncodeError as `_array` does."""
    arrays = [_array(arrow, [row[name] for row in rows], kind) for name, kind in columns.items()]
    return arrow.Table.from_arrays(arrays, schema=schema)


def _array(arrow: Any, values: list[Any], kind: Any) -> Any:
    """Return an array of values of type `kind`, null for None. A JSON list that is absent becomes an empty one.

    Its buffers are made here, because `pyarrow.array` imports pandas, which would cost half a second of each run.
    Raises UnicodeEncodeError for a text with unpaired surrogates.
    """
    if kind == "json":
        return arrow.ExtensionArray.from_storage(arrow.json_(), _array(arrow, values, "string"))
    if kind == ["json"]:
        values = [value or [] for value in values]
    present = [value is not None for value in values]
    buffers = [None if all(present) else _bits(arrow, present)]
    children: list[Any] = []
    if isinstance(kind, list):
        buffers.append(_offsets(arrow, [len(value or ()) for value in values]))
        items = [item for value in values if value is not None for item in value]
        children.append(_array(arrow, items, cast(list[Any], kind)[0]))
        if kind == ["json"]:
            offsets = arrow.Array.from_buffers(arrow.int32(), len(values) + 1, [None, buffers[1]])
            return arrow.ListArray.from_arrays(offsets, children[0], type=column_type(arrow, kind))
    elif isinstance(kind, dict):
        for name, part in cast(dict[str, Any], kind).items():
            children.append(_array(arrow, [None if value is None else value.get(name) for value in values], part))
    elif kind == "string":
        texts = [(value or "").encode() for value in values]
        buffers += [_offsets(arrow, [len(text) for text in texts]), arrow.py_buffer(b"".join(texts))]
    elif kind == "bool":
        buffers.append(_bits(arrow, [bool(value) for value in values]))
    else:
        buffers.append(arrow.py_buffer(array(_TYPE_CODES[kind], [value or 0 for value in values])))
    return arrow.Array.from_buffers(column_type(arrow, kind), len(values), buffers, children=children)


def _bits(arrow: Any, flags: list[bool]) -> Any:
    """Return a bitmap with one bit for each flag, the first one in the lowest bit of the first byte."""
    bits = "".join("01"[flag] for flag in reversed(flags))
    return arrow.py_buffer(int(bits or "0", 2).to_bytes(len(flags) // 8 + 1, "little"))


def _offsets(arrow: Any, lengths: list[int]) -> Any:
    """Return where each of several consecutive items begins, and where the last one ends."""
    return arrow.py_buffer(array("i", accumulate(lengths, initial=0)))


def column_type(arrow: Any, kind: Any) -> Any:
    """Return the Arrow type of a column of type `kind`; `arrow` is the package pyarrow."""
    if isinstance(kind, list):
        return arrow.list_(column_type(arrow, cast(list[Any], kind)[0]))
    if isinstance(kind, dict):
        parts = cast(dict[str, Any], kind)
        return arrow.struct([(name, column_type(arrow, part)) for name, part in parts.items()])
    return getattr(arrow, _ARROW_FUNCTIONS.get(str(kind), str(kind)))()
