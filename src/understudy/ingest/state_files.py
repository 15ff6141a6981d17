"""Files of states: JSON lines, Parquet (through pyarrow), and spool files, from which a store is filled.

In Parquet, `messages` and `student_action` are nested. A message's `content` is a string or null; content in parts
(images) is JSON in `content_parts`, and unusual keys are JSON in `more`. `tools` is JSON text, since no column
type fits all schemas.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import msgspec
from msgspec.structs import asdict, replace

from understudy.errors import ConfigError
from understudy.ingest.redaction import redact_trace
from understudy.ingest.trace import Message, Trace, TraceState, TurnSignals, expand
from understudy.ingest.trace_store import TraceSource, trace_rows, traces
from understudy.store.contents import Packer
from understudy.store.sessions import LogSource, PackedTrace, SessionRepository, TraceChanges, TurnSelection
from understudy.types import SCHEMA
from understudy.util.arrow import Columns, column_table, column_type
from understudy.util.files import atomic_path, write_remedy

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor

_COPIED_BYTES = 1 << 20
_ADDED_KEYS = ("signals", "outcome", "tools_source", "tools_version", "tools_inferred")
"""Keys that we add to a state, written after those that come from the log."""


def state_record(state: TraceState, trace: Trace) -> dict[str, Any]:
    """Return a state as a JSON object. All keys are always present."""
    record = asdict(state)
    added = {name: record.pop(name) for name in _ADDED_KEYS}
    record["student_action"] = asdict(state.student_action)
    return {**record, "format": trace.format, "source": trace.source, **added, "schema": SCHEMA}


def state_line(state: TraceState, trace: Trace, extra: Mapping[str, Any] = MappingProxyType({})) -> bytes:
    """Return a state as a line of JSON, with the keys of `extra` after its own."""
    value = {**state_record(state, trace), **extra}
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        # Ids may come from file names, which need not be valid Unicode.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace") + b"\n"


def _selected_states(trace: Trace, turns: Sequence[int]) -> Iterator[TraceState]:
    """Yield the states of the turns at these indexes."""
    if len(turns) < len(trace.turns):
        trace = replace(trace, turns=[trace.turns[index] for index in turns])
    return expand(trace)


def not_a_file(output: Path) -> ConfigError:
    """Return the error for an output that exists and is not a regular file."""
    return ConfigError(f"--output: {output} exists and is not a regular file; choose another output file")


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Turn an OSError in the block into a ConfigError saying that `path` cannot be written."""
    try:
        yield
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path} cannot be written: there is no directory {path.parent}; create it first"
        ) from error
    except OSError as error:
        remedy = write_remedy(error, "check its permissions")
        raise ConfigError(f"{path} cannot be written: {error.strerror}; {remedy}, or write elsewhere") from error


def _create(path: Path) -> BinaryIO:
    """Open a new file that only its owner may read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    return open(descriptor, "wb", buffering=1 << 20)  # noqa: PTH123


class PrivateFile:
    """A new file that only its owner may read. Methods raise ConfigError if they cannot write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written_bytes = 0
        with writing(path):
            self._stream = _create(path)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._written_bytes

    def write(self, line: bytes) -> None:
        """Write a line. Raises ConfigError."""
        with writing(self.path):
            self._written_bytes += self._stream.write(line)

    def roll_back(self, position: int) -> None:
        """Truncate the file at a position that `tell` returned. Raises ConfigError."""
        with writing(self.path):
            self._stream.seek(position)
            self._stream.truncate()
        self._written_bytes = position

    def copy(self, source: Path, offset: int, size: int, without: Set[int] = frozenset()) -> int:
        """Copy a part of another file, leaving out the lines with the numbers `without`.

        Returns the number of bytes written. Raises ConfigError.
        """
        bytes_before = self._written_bytes
        with writing(self.path), source.open("rb") as stream:
            stream.seek(offset)
            if not without:
                while size and (data := stream.read(min(size, _COPIED_BYTES))):
                    self._written_bytes += self._stream.write(data)
                    size -= len(data)
            number = 0
            while without and size > 0 and (line := stream.readline()):
                if number not in without:
                    self._written_bytes += self._stream.write(line)
                number += 1
                size -= len(line)
        return self._written_bytes - bytes_before

    def close(self) -> None:
        """Flush and close the file. Raises ConfigError."""
        with writing(self.path):
            self._stream.close()


class JsonlSink(PrivateFile):
    """Writes states to a file, one JSON line each."""

    def add(self, state: TraceState, trace: Trace) -> None:
        """Write a state. Raises ConfigError."""
        self.write(state_line(state, trace))

    def write_turns(self, trace: Trace, indexes: Sequence[int], tick: Callable[[], None]) -> None:
        """Write the states of the turns at these indexes. Raises ConfigError."""
        for state in _selected_states(trace, indexes):
            self.add(state, trace)
            tick()


_BUFFER_BYTES = 8 << 20  # bytes of text that are buffered before they become a table
_GROUP = 64 << 20  # bytes in a row group
_CALLS = [{"id": "string", "type": "string", "function": {"name": "string", "arguments": "string"}}]
_MESSAGE = {
    "role": "string",
    "content": "string",
    "tool_calls": _CALLS,
    "tool_call_id": "string",
    "content_parts": "string",
    "more": "string",
}
_MESSAGE_KEYS = tuple(_MESSAGE)[:4]
_NESTED: Columns = {
    "schema": "int64",
    "messages": [_MESSAGE],
    "student_action": {
        "content": "string",
        "thinking": "string",
        "thinking_hidden": "bool",
        "tool_calls": _CALLS,
    },
    "notes": ["string"],
    "tools_inferred": ["string"],
    "parent": {"session_id": "string", "tool_use_id": "string", "depth": "int64"},
    "signals": {
        **dict.fromkeys(TurnSignals.__struct_fields__, "int64"),
        "tests": "string",
        "feedback": "string",
        "interrupted": "bool",
    },
    "outcome": {"resolved": "bool", "reward": "float64", "task": "string", "exit_status": "string"},
}
_COLUMNS: Columns = {
    name: _NESTED.get(name, "string")
    for name in (
        "state_id", "trace_id", "session_id", "message_id", "messages", "student_action", "tools", "source_model",
        "source_family", "fidelity", "notes", "timestamp", "project", "branch", "role", "parent", "format",
        "source", *_ADDED_KEYS, "schema",
    )
}  # fmt: skip


def require_pyarrow(path: str | Path) -> None:
    """Raise ConfigError if pyarrow, which is needed to write `path`, is not installed."""
    _use_system_allocator()
    try:
        import_module("pyarrow.parquet")
    except ImportError as missing:
        raise ConfigError(
            f"{path}: writing Parquet needs pyarrow, which is not installed. "
            'Install it: pip install "understudy[hf]"'
        ) from missing


def _use_system_allocator() -> None:
    """Make pyarrow use the system's allocator, since its own keeps 150 MB of freed memory."""
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def schema() -> Any:
    """Return the columns as an Arrow schema."""
    arrow: Any = import_module("pyarrow")
    return arrow.schema([(name, column_type(arrow, kind)) for name, kind in _COLUMNS.items()])


def row(state: TraceState, trace: Trace) -> dict[str, Any]:
    """Return a state as a row of `schema()`."""
    value = state_record(state, trace)
    value["messages"] = [_message(message) for message in state.messages]
    value["tools"] = None if state.tools is None else msgspec.json.encode(state.tools).decode()
    value["notes"], value["tools_inferred"] = list(state.notes), list(state.tools_inferred)
    for name in ("parent", "signals", "outcome"):
        value[name] = None if value[name] is None else asdict(value[name])
    return value


def _message(message: Message) -> dict[str, Any]:
    content = message.get("content")
    has_parts = isinstance(content, list)
    unusual = {key: value for key, value in message.items() if key not in _MESSAGE_KEYS}
    return {
        **{key: message.get(key) for key in _MESSAGE_KEYS},
        "content": None if has_parts else content,
        "content_parts": msgspec.json.encode(content).decode() if has_parts else None,
        "more": msgspec.json.encode(unusual).decode() if unusual else None,
    }


class ParquetWriter:
    """A new Parquet file of states that only its owner may read. Row groups are written as they fill up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _use_system_allocator()
        self._arrow: Any = import_module("pyarrow")
        self._schema = schema()
        parquet: Any = import_module("pyarrow.parquet")
        with writing(path):
            self._sink = _create(path)  # opened here because pyarrow cannot open paths that are not valid Unicode
            self._writer = parquet.ParquetWriter(self._sink, self._schema, compression="zstd")
        self._tables: list[Any] = []
        self._rows: list[dict[str, Any]] = []
        self._buffered_bytes = 0

    def add(self, state: TraceState, trace: Trace) -> None:
        """Add a state. Raises ConfigError."""
        self._rows.append(row(state, trace))
        self._buffered_bytes += 500 + sum(_size(message) for message in state.messages)
        if self._buffered_bytes > _BUFFER_BYTES:
            self._flush()

    def copy(self, source: Path, without: Set[int]) -> None:
        """Copy the rows of another such file, leaving out the rows with the numbers `without`.

        Raises ConfigError.
        """
        parquet: Any = import_module("pyarrow.parquet")
        first_row = 0
        with source.open("rb") as file, parquet.ParquetFile(file) as part_file:
            for group in range(part_file.num_row_groups):
                table = part_file.read_row_group(group)
                if without:
                    rows = [index for index in range(table.num_rows) if first_row + index not in without]
                    first_row += table.num_rows
                    table = table.take(rows)
                self._tables.append(table)
                self._buffered_bytes += table.nbytes
                if self._buffered_bytes > _GROUP:
                    self._write()

    def close(self) -> None:
        """Write what is buffered and close the file. Raises ConfigError."""
        self._flush()
        self._write()
        with writing(self.path):
            self._writer.close()
            self._sink.close()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        if not rows:
            return
        try:
            table = self._table(rows)
        except UnicodeEncodeError:
            table = self._table(cast("list[Any]", _unicode(rows)))
        self._tables.append(table)
        self._write()

    def _table(self, rows: list[dict[str, Any]]) -> Any:
        return column_table(self._arrow, rows, _COLUMNS, self._schema)

    def _write(self) -> None:
        tables, self._tables, self._buffered_bytes = self._tables, [], 0
        if tables:
            with writing(self.path):
                self._writer.write_table(self._arrow.concat_tables(tables))


class ParquetSink:
    """A directory with one Parquet file for each batch that has states, so that a batch can be rolled back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._number = 0
        self._file: ParquetWriter | None = None
        with writing(path):
            path.mkdir(mode=0o700)

    def tell(self) -> int:
        """Complete the current file, and return the number of the next one."""
        self.close()
        return self._number

    def write_turns(self, trace: Trace, indexes: Sequence[int], tick: Callable[[], None]) -> None:
        """Write the states of the turns at these indexes. Raises ConfigError."""
        if self._file is None:
            self._file = ParquetWriter(part_path(self.path, self._number))
            self._number += 1
        for state in _selected_states(trace, indexes):
            self._file.add(state, trace)
            tick()

    def roll_back(self, position: int) -> None:
        """Remove the files from this number on."""
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
    """Return the path of the part file with this number."""
    return directory / f"{number}.parquet"


def _size(message: Mapping[str, Any]) -> int:
    content = message.get("content")
    calls = message.get("tool_calls") or ()
    return 100 + (len(content) if isinstance(content, str) else 10_000) + 500 * len(calls)


def _unicode(value: Any) -> Any:
    """Return the value with invalid Unicode in its strings replaced."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, list):
        return [_unicode(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _unicode(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


_CHUNK = 4 << 20  # bytes that are stored in one write
_LENGTH = 8  # size in bytes of the length field before each trace

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PackedTrace).decode


class SpoolSink(PrivateFile):
    """Writes rows and contents of traces for a store. Contents that the file already has are only referenced."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._packer = Packer()

    def write_turns(self, trace: Trace, indexes: Sequence[int], tick: Callable[[], None]) -> None:
        """Write the turns at these indexes. Raises ConfigError."""
        data = _encode(trace_rows(trace, self._packer, indexes))
        self.write(len(data).to_bytes(_LENGTH, "little"))
        self.write(data)
        tick()

    def roll_back(self, position: int) -> None:
        """Truncate the file. Raises ConfigError."""
        super().roll_back(position)
        self._packer = Packer()


def load_spool(
    sessions: SessionRepository,
    spool_file: Path,
    offset: int,
    size: int,
    without: Set[int],
    sources: Sequence[LogSource],
) -> Iterator[TraceChanges]:
    """Store a part of a file that `SpoolSink` wrote, without some of its turns.

    `without` holds turn numbers, counted from 0 over all traces of the part. Yields the changes of each write; the
    last write also records that the logs `sources` were read. Each write is awaited, because preparing the next
    one meanwhile would only compete for the interpreter lock. Raises StoreError.
    """
    traces: list[PackedTrace] = []
    buffered_bytes = turn_count = 0
    with spool_file.open("rb") as stream:
        stream.seek(offset)
        while stream.tell() < offset + size:
            data = stream.read(int.from_bytes(stream.read(_LENGTH), "little"))
            row, contents = _decode(data)
            turns = row.turns
            row.turns = [turn for number, turn in enumerate(turns, turn_count) if number not in without]
            turn_count += len(turns)
            traces.append((row, contents))
            buffered_bytes += len(data)
            if buffered_bytes > _CHUNK:
                yield sessions.add(traces, ()).result()
                traces, buffered_bytes = [], 0
    if traces or sources:
        yield sessions.add(traces, sources).result()


def stored_states(
    library: TraceSource,
    where: str | TurnSelection | None,
    limit: int | None,
    seed: int | None,
    redactor: Redactor | None,
) -> Iterator[tuple[TraceState, Trace]]:
    """Yield the states that `trace_store.traces` selects, each with its trace, redacted if a redactor is given."""
    for trace in traces(library, where, limit=limit, seed=seed):
        redacted = redact_trace(trace, redactor) if redactor else trace
        for state in expand(redacted):
            yield state, redacted


def extract_states(
    library: TraceSource,
    output: Path,
    where: str | TurnSelection | None,
    limit: int | None,
    seed: int | None,
    redactor: Redactor | None,
) -> int:
    """Write states to a file that only its owner can read: Parquet if its name ends in `.parquet`, else JSON
    lines.

    Returns the number of states. An existing file is replaced once the new one is complete. Raises ConfigError if
    the file cannot be written.
    """
    parquet = output.suffix == ".parquet"
    if parquet:
        require_pyarrow(output)
    if output.exists() and not output.is_file():
        raise not_a_file(output)
    if not output.parent.is_dir():
        raise ConfigError(
            f"--output: {output} cannot be written: there is no directory {output.parent}; create it first"
        )
    count = 0
    with (
        writing(output),
        atomic_path(output) as path,
        closing(ParquetWriter(path) if parquet else JsonlSink(path)) as file,
    ):
        for state, trace in stored_states(library, where, limit, seed, redactor):
            file.add(state, trace)
            count += 1
    return count
