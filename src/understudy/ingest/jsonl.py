"""States as JSON lines, and the files that they are written to."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from understudy.errors import ConfigError
from understudy.ingest.trace import Trace, TraceState, expand

_PIECE = 1 << 20


def state_record(state: TraceState, trace: Trace) -> dict[str, Any]:
    """A state as a JSON object. All keys are always there."""
    action = state.student_action
    return {
        "state_id": state.state_id,
        "trace_id": state.trace_id,
        "session_id": state.session_id,
        "message_id": state.message_id,
        "messages": state.messages,
        "student_action": {
            "content": action.content,
            "thinking": action.thinking,
            "thinking_hidden": action.thinking_hidden,
            "tool_calls": action.tool_calls,
        },
        "tools": state.tools,
        "source_model": state.source_model,
        "source_family": state.source_family,
        "fidelity": state.fidelity,
        "notes": state.notes,
        "timestamp": state.timestamp,
        "project": state.project,
        "branch": state.branch,
        "role": state.role,
        "parent": state.parent,
        "format": trace.format,
        "source": trace.source,
        "signals": state.signals,
        "outcome": state.outcome,
    }


def state_line(state: TraceState, trace: Trace) -> bytes:
    """A state as a line of JSON."""
    value = state_record(state, trace)
    try:
        return msgspec.json.encode(value) + b"\n"
    except UnicodeEncodeError:
        # Ids may come from file names, which need not be valid UTF-8.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace") + b"\n"


def with_turns(trace: Trace, wanted: Sequence[int]) -> Trace:
    """The trace with only the turns at the indexes `wanted`."""
    if len(wanted) == len(trace.turns):
        return trace
    return msgspec.structs.replace(trace, turns=[trace.turns[index] for index in wanted])


def unwritable_error(path: Path, error: OSError) -> ConfigError:
    """The error to raise when a file cannot be written."""
    return ConfigError(f"{path} cannot be written: {error.strerror}; free some space, or write elsewhere")


class PrivateFile:
    """A new file that only its owner may read. Its methods raise ConfigError when they cannot write."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unwritable_error(path, error) from error
        self._stream = open(descriptor, "wb", buffering=1 << 20)  # noqa: PTH123, SIM115

    def tell(self) -> int:
        """The number of bytes that were written."""
        return self._at

    def write(self, line: bytes) -> None:
        """Write a line. Raises ConfigError."""
        try:
            self._at += self._stream.write(line)
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def roll_back(self, position: int) -> None:
        """Cut the file at a position that `tell` returned. Raises ConfigError."""
        try:
            self._stream.seek(position)
            self._stream.truncate()
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        self._at = position

    def copy(self, source: Path, at: int, size: int, without: Set[int] = frozenset()) -> int:
        """Copy a part of another file without some of its lines. Returns the bytes written. Raises ConfigError."""
        before = self._at
        try:
            with source.open("rb") as stream:
                stream.seek(at)
                if without:
                    for number, line in enumerate(_lines(stream, size)):
                        if number not in without:
                            self._at += self._stream.write(line)
                    return self._at - before
                while size and (piece := stream.read(min(size, _PIECE))):
                    self._at += self._stream.write(piece)
                    size -= len(piece)
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        return self._at - before

    def close(self) -> None:
        """Write what is buffered, and close the file. Raises ConfigError."""
        try:
            self._stream.close()
        except OSError as error:
            raise unwritable_error(self.path, error) from error


class JsonlSink(PrivateFile):
    """A file of states, one JSON line each."""

    def write_turns(self, trace: Trace, wanted: Sequence[int], tick: Callable[[], None]) -> None:
        """Write the turns at some indexes. Raises ConfigError."""
        for state in expand(with_turns(trace, wanted)):
            self.write(state_line(state, trace))
            tick()


def _lines(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The lines of the next `size` bytes."""
    while size > 0 and (line := stream.readline()):
        size -= len(line)
        yield line
