"""The file formats for rows of exports: JSON lines, Parquet, and the format that `datasets` saves."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from understudy.errors import ConfigError
from understudy.util.arrow import Columns, column_table, column_type

CHAT_MESSAGE: dict[str, Any] = {
    "role": "string",
    "content": "string",
    "reasoning_content": "string",
    "tool_calls": [{"id": "string", "type": "string", "function": {"name": "string", "arguments": "string"}}],
    "tool_call_id": "string",
}
"""The columns of a chat message; the arguments of its tool calls are JSON text."""

_BATCH_BYTES = 8 << 20


class JsonLinesWriter:
    """Writes one row a line, as JSON."""

    suffix = ".jsonl"

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def write(self, row: Mapping[str, Any]) -> int:
        """Write a row.

        Unpaired surrogates, which UTF-8 cannot encode, become question marks. Returns its length in bytes.
        """
        return self._file.write(json_bytes(row) + b"\n")

    def close(self) -> None:
        """Finish the file."""
        self._file.close()


def json_bytes(value: Any) -> bytes:
    """Encode a value as JSON. Unpaired surrogates become question marks."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace")


class _BatchWriter:
    """Writes rows in batches to a file with typed columns.

    pyarrow writes to a Python file, `sink`, because it cannot open paths that are not valid Unicode.
    """

    def __init__(self, file: Any, sink: BinaryIO, columns: Columns, arrow_schema: Any) -> None:
        self._file = file
        self._sink = sink
        self._columns = columns
        self._schema = arrow_schema
        self._rows: list[Mapping[str, Any]] = []
        self._bytes = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a row to the current batch. Unpaired surrogates become question marks."""
        stored = {name: _column_value(row.get(name), kind) for name, kind in self._columns.items()}
        self._rows.append(stored)
        self._bytes += sum(map(_estimated_bytes, stored.values()))
        if self._bytes >= _BATCH_BYTES:
            self._flush()

    def close(self) -> None:
        """Finish the file. It is closed even if that fails."""
        try:
            self._flush()
            self._file.close()
        finally:
            self._sink.close()

    def _flush(self) -> None:
        if self._rows:
            table = column_table(require_pyarrow(), self._rows, self._columns, self._schema)
            self._file.write_table(table)
        self._rows, self._bytes = [], 0


class ExportParquetWriter(_BatchWriter):
    """Writes a Parquet file that `datasets` loads with the types of `columns`.

    Raises ConfigError without pyarrow.
    """

    suffix = ".parquet"

    def __init__(self, path: Path, columns: Columns) -> None:
        arrow_schema = schema(columns)
        import pyarrow.parquet

        sink = path.open("wb")
        super().__init__(
            pyarrow.parquet.ParquetWriter(sink, arrow_schema, compression="zstd"), sink, columns, arrow_schema
        )


class SavedDatasetWriter(_BatchWriter):
    """Writes a directory that `datasets.load_from_disk` loads, like `Dataset.save_to_disk` but in a third of the
    time.

    Raises ConfigError without pyarrow.
    """

    data = "data-00000-of-00001.arrow"
    files = (data, "dataset_info.json", "state.json")

    def __init__(self, path: Path, columns: Columns) -> None:
        arrow_schema = schema(columns)
        arrow = require_pyarrow()
        path.mkdir()
        info = dict.fromkeys(("citation", "description", "homepage", "license"), "")
        (path / "dataset_info.json").write_bytes(json_bytes({**info, "features": features(columns)}))
        state: dict[str, Any] = {
            "_data_files": [{"filename": self.data}],
            "_fingerprint": uuid.uuid4().hex[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": None,
        }
        (path / "state.json").write_bytes(json_bytes(state))
        sink = (path / self.data).open("wb")
        super().__init__(arrow.RecordBatchStreamWriter(sink, arrow_schema), sink, columns, arrow_schema)


def features(columns: Columns) -> dict[str, Any]:
    """Return the columns as `datasets` features, in the form that its files have."""
    return {name: _feature(kind) for name, kind in columns.items()}


def schema(columns: Columns) -> Any:
    """Return the Arrow schema of columns, from which `datasets` reads their types.

    Raises ConfigError without pyarrow.
    """
    arrow = require_pyarrow()
    metadata = json.dumps({"info": {"features": features(columns)}})
    fields: list[Any] = [arrow.field(name, column_type(arrow, kind)) for name, kind in columns.items()]
    return arrow.schema(fields, metadata={"huggingface": metadata})


def require_pyarrow() -> Any:
    """Return the package pyarrow. Raises ConfigError if it is missing."""
    try:
        import pyarrow
    except ImportError as error:
        raise ConfigError(
            f"this format needs the package pyarrow ({error}); install it: pip install 'understudy[hf]'"
        ) from error
    return pyarrow


def _feature(kind: Any) -> dict[str, Any]:
    if isinstance(kind, list):
        return {"feature": _feature(cast(list[Any], kind)[0]), "_type": "List"}
    if isinstance(kind, dict):
        return features(cast(dict[str, Any], kind))
    return {"_type": "Json"} if kind == "json" else {"dtype": kind, "_type": "Value"}


def _column_value(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    if kind == "json":
        return json_bytes(value).decode()
    if kind == ["json"]:
        return [json_bytes(item).decode() for item in value]
    return _without_lone_surrogates(value)


def _without_lone_surrogates(value: Any) -> Any:
    """Return a value whose texts can be written to any file."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="replace").decode()
    if isinstance(value, dict):
        return {key: _without_lone_surrogates(item) for key, item in cast(dict[str, Any], value).items()}
    if isinstance(value, list):
        items = cast(list[Any], value)
        return (
            items
            if items and isinstance(items[0], int | float)
            else [_without_lone_surrogates(item) for item in items]
        )
    return value


def _estimated_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_estimated_bytes, cast(dict[str, Any], value).values()))
    if isinstance(value, list):
        items = cast(list[Any], value)
        return (
            8 * len(items) if not items or isinstance(items[0], int | float) else sum(map(_estimated_bytes, items))
        )
    return 8
