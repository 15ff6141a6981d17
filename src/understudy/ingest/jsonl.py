"""States as lines of JSON, and the files that they are written to."""

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
    """What is written of a state: all the keys, always."""
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
        # The name of a file may be no UTF-8, and an id may come from it.
        text = json.dumps(msgspec.to_builtins(value), ensure_ascii=False, separators=(",", ":"))
        return text.encode(errors="replace") + b"\n"


def with_turns(trace: Trace, wanted: Sequence[int]) -> Trace:
    """The trace with the wanted of its turns."""
    if len(wanted) == len(trace.turns):
        return trace
    return msgspec.structs.replace(trace, turns=[trace.turns[index] for index in wanted])


def unwritable_error(path: Path, error: OSError) -> ConfigError:
    """What to raise when a file cannot be written."""
    return ConfigError(f"{path} cannot be written: {error.strerror}; make room, or write elsewhere.")


class PrivateFile:
    """A new file that nobody else may read; its errors are ConfigErrors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise unwritable_error(path, error) from error
        self._stream = open(descriptor, "wb", buffering=1 << 20)  # noqa: PTH123, SIM115

    def tell(self) -> int:
        """How much was written."""
        return self._at

    def write(self, line: bytes) -> None:
        """Write a line. Raises ConfigError."""
        try:
            self._at += self._stream.write(line)
        except OSError as error:
            raise unwritable_error(self.path, error) from error

    def roll_back(self, position: int) -> None:
        """Cut the file. Raises ConfigError."""
        try:
            self._stream.seek(position)
            self._stream.truncate()
        except OSError as error:
            raise unwritable_error(self.path, error) from error
        self._at = position

    def copy(self, source: Path, at: int, size: int, without: Set[int] = frozenset()) -> int:
        """Write a part of another file, but for the lines `without`; how much it was. Raises ConfigError."""
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
        """Write what is still held. Raises ConfigError."""
        try:
            self._stream.close()
        except OSError as error:
            raise unwritable_error(self.path, error) from error


class JsonlSink(PrivateFile):
    """States, a line each."""

    def write_turns(self, trace: Trace, wanted: Sequence[int], tick: Callable[[], None]) -> None:
        """Write some of a trace's turns. Raises ConfigError."""
        for state in expand(with_turns(trace, wanted)):
            self.write(state_line(state, trace))
            tick()


def _lines(stream: BinaryIO, size: int) -> Iterator[bytes]:
    """The lines of the next `size` bytes."""
    while size > 0 and (line := stream.readline()):
        size -= len(line)
        yield line
