"""Traces on their way into a store: written by the process that reads, stored by the one that asked for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path

import msgspec

from understudy.ingest.jsonl import PrivateFile
from understudy.ingest.trace import Trace
from understudy.ingest.trace_store import trace_rows
from understudy.store.blobs import Packer
from understudy.store.sessions import LogSource, PackedTrace, SessionRepository, TraceChanges

_CHUNK = 4 << 20  # bytes that are stored at once
_LENGTH = 8

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(PackedTrace).decode


class SpoolSink(PrivateFile):
    """The rows and contents of traces; a content that the file had before is only named."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._packer = Packer()

    def write_turns(self, trace: Trace, wanted: Sequence[int], tick: Callable[[], None]) -> None:
        """Write some of a trace's turns. Raises ConfigError."""
        data = _encode(trace_rows(trace, self._packer, wanted))
        self.write(len(data).to_bytes(_LENGTH, "little"))
        self.write(data)
        tick()

    def roll_back(self, position: int) -> None:
        """Cut the file. Raises ConfigError."""
        super().roll_back(position)
        self._packer = Packer()


class SpoolLoader:
    """Stores what `RowsFile` wrote. Logs are noted as read with the last that was in them."""

    def __init__(self, sessions: SessionRepository) -> None:
        self._sessions = sessions
        self.summary = TraceChanges()

    def load(self, part: Path, at: int, size: int, without: Set[int], sources: Sequence[LogSource]) -> None:
        """Store what a part of a file holds, but for the turns `without`, counted through. Raises StoreError.

        Each write is waited for: two threads that take turns at the interpreter would be slower than one.
        """
        items: list[PackedTrace] = []
        held = position = 0
        for item, length in _items(part, at, size):
            row = item[0]
            turns = row.turns
            row.turns = [turn for number, turn in enumerate(turns, position) if number not in without]
            position += len(turns)
            items.append(item)
            held += length
            if held > _CHUNK:
                self._store(items, ())
                items, held = [], 0
        self._store(items, sources)

    def _store(self, items: Sequence[PackedTrace], sources: Sequence[LogSource]) -> None:
        if not items and not sources:
            return
        put = self._sessions.add(items, sources).result()
        self.summary = TraceChanges(
            self.summary.new + put.new, self.summary.changed + put.changed, self.summary.same + put.same
        )


def _items(part: Path, at: int, size: int) -> Iterator[tuple[PackedTrace, int]]:
    with part.open("rb") as stream:
        stream.seek(at)
        while size > 0:
            length = int.from_bytes(stream.read(_LENGTH), "little")
            yield _decode(stream.read(length)), length
            size -= _LENGTH + length
