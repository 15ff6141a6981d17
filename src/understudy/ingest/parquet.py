"""States as Parquet, through pyarrow: nested columns, and JSON text where a type cannot hold what a log may have.

`messages` and `student_action` are nested. Of a message, `content` is a text or null; content in parts (images) is
in `content_parts` as JSON, and keys beside the usual ones in `more`. `tools` is JSON: no type holds all schemas.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from understudy.errors import ConfigError
from understudy.ingest.jsonl import state_record, unwritable_error, with_turns
from understudy.ingest.trace import Message, Trace, TraceOutcome, TraceParent, TraceState, TurnSignals, expand

_HELD = 8 << 20  # bytes of text that are buffered before they become a table
_GROUP = 64 << 20  # bytes of a row group
_USUAL = frozenset({"role", "content", "tool_calls", "tool_call_id"})


def require_pyarrow(path: str | Path) -> None:
    """Raise ConfigError when pyarrow, which writing `path` needs, is not installed."""
    _frugal()
    try:
        import_module("pyarrow.parquet")
    except ImportError as missing:
        raise ConfigError(
            f"{path}: writing Parquet needs pyarrow, which is not installed. "
            'Install it: pip install "understudy[hf]"'
        ) from missing


def _frugal() -> None:
    """Let pyarrow use the system's allocator: its own holds on to 150 MB of freed memory."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def schema() -> Any:
    """The columns, as an Arrow schema."""
    arrow: Any = import_module("pyarrow")
    text, integer, flag = arrow.string(), arrow.int64(), arrow.bool_()
    calls = arrow.list_(
        arrow.struct(
            [
                ("id", text),
                ("type", text),
                ("function", arrow.struct([("name", text), ("arguments", text)])),
            ]
        )
    )
    messages = arrow.struct(
        [
            ("role", text),
            ("content", text),
            ("tool_calls", calls),
            ("tool_call_id", text),
            ("content_parts", text),
            ("more", text),
        ]
    )
    action = [("content", text), ("thinking", text), ("thinking_hidden", flag), ("tool_calls", calls)]
    types = {"tests": text, "feedback": text, "interrupted": flag}
    signals = [(name, types.get(name, integer)) for name in TurnSignals.__struct_fields__]
    outcome = [("resolved", flag), ("reward", arrow.float64()), ("task", text), ("exit_status", text)]
    parent = [("session_id", text), ("tool_use_id", text), ("depth", integer)]
    nested = {
        "messages": arrow.list_(messages),
        "student_action": arrow.struct(action),
        "notes": arrow.list_(text),
        "parent": arrow.struct(parent),
        "signals": arrow.struct(signals),
        "outcome": arrow.struct(outcome),
    }
    return arrow.schema([(name, nested.get(name, text)) for name in _COLUMNS])


def row(state: TraceState, trace: Trace) -> dict[str, Any]:
    """A state as a row of `schema`."""
    value = state_record(state, trace)
    value["messages"] = [_message(message) for message in state.messages]
    value["tools"] = None if state.tools is None else msgspec.json.encode(state.tools).decode()
    value["notes"] = list(state.notes)
    for name in ("parent", "signals", "outcome"):
        struct: TraceParent | TurnSignals | TraceOutcome | None = value[name]
        value[name] = None if struct is None else msgspec.structs.asdict(struct)
    return value


def _message(message: Message) -> dict[str, Any]:
    content = message.get("content")
    parts = isinstance(content, list)
    more = {key: value for key, value in message.items() if key not in _USUAL}
    return {
        "role": message["role"],
        "content": None if parts else content,
        "tool_calls": message.get("tool_calls"),
        "tool_call_id": message.get("tool_call_id"),
        "content_parts": msgspec.json.encode(content).decode() if parts else None,
        "more": msgspec.json.encode(more).decode() if more else None,
    }


_COLUMNS = (
    "state_id", "trace_id", "session_id", "message_id", "messages", "student_action", "tools", "source_model",
    "source_family", "fidelity", "notes", "timestamp", "project", "branch", "role", "parent", "format", "source",
    "signals", "outcome",
)  # fmt: skip


class ParquetWriter:
    """A new Parquet file of states that only its owner may read; row groups are written as they fill."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _frugal()
        self._arrow: Any = import_module("pyarrow")
        self._schema = schema()
        try:
            parquet: Any = import_module("pyarrow.parquet")
            # pyarrow cannot open paths that are not valid Unicode.
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._sink = os.fdopen(descriptor, "wb")
            self._writer = parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        except OSError as error:
            raise unwritable_error(path, error) from error
        self._tables: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._held = 0

    def add(self, state: TraceState, trace: Trace) -> None:
        """Write a state. Raises ConfigError."""
        self._rows.append(row(state, trace))
        self._held += 500 + sum(_size(message) for message in state.messages)
        if self._held > _HELD:
            self._flush()

    def copy(self, source: Path, without: Set[int]) -> None:
        """Copy the rows of another such file, without some of them. Raises ConfigError."""
        parquet: Any = import_module("pyarrow.parquet")
        first = 0
        with source.open("rb") as file, parquet.ParquetFile(file) as read:
            for group in range(read.num_row_groups):
                table = read.read_row_group(group)
                if without:
                    rows = [at for at in range(table.num_rows) if first + at not in without]
                    first += table.num_rows
                    table = table.take(rows)
                self._tables.append(table)
                self._held += table.nbytes
                if self._held > _GROUP:
                    self._write()

    def close(self) -> None:
        """Write what is buffered, and close the file. Raises ConfigError."""
        self._flush()
        self._write()
        try:
            self._writer.close()
            self._sink.close()
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            table = self._arrow.Table.from_pylist(rows, schema=self._schema)
        except UnicodeEncodeError:
            table = self._arrow.Table.from_pylist(cast("list[Any]", _unicode(rows)), schema=self._schema)
        self._tables.append(table)
        self._write()

    def _write(self) -> None:
        tables, self._tables, self._held = self._tables, [], 0
        if not tables:
            return
        try:
            self._writer.write_table(self._arrow.concat_tables(tables))
        except OSError as error:
            raise unwritable_error(self.path, error) from error


class ParquetSink:
    """A directory with one file for each batch that has states, so that a batch can be rolled back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        self._file: ParquetWriter | None = None
        try:
            path.mkdir(mode=0o700)
        except OSError as error:
            raise unwritable_error(path, error) from error

    def tell(self) -> int:
        """The number of the next file. Completes the current one."""
        self.close()
        return self._number

    def write_turns(self, trace: Trace, wanted: Sequence[int], tick: Callable[[], None]) -> None:
        """Write the turns at some indexes. Raises ConfigError."""
        if self._file is None:
            self._file = ParquetWriter(part_path(self.path, self._number))
            self._number += 1
        for state in expand(with_turns(trace, wanted)):
            self._file.add(state, trace)
            tick()

    def roll_back(self, position: int) -> None:
        """Remove the files from a number on."""
        self.close()
        for number in range(position, self._number):
            part_path(self.path, number).unlink()
        self._number = position

    def close(self) -> None:
        """Complete the current file. Raises ConfigError."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()


def part_path(directory: Path, number: int) -> Path:
    """The path of the file with a number in a directory of parts."""
    return directory / f"{number}.parquet"


def _size(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    return 100 + (len(content) if isinstance(content, str) else 10_000) + 500 * len(calls)


def _unicode(value: Any) -> Any:
    """The value with invalid Unicode in its strings replaced."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_unicode(one) for one in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _unicode(one) for key, one in cast("dict[str, Any]", value).items()}
    return value
