"""Server-sent events as a client reads them: cut out of a byte stream whose pieces end anywhere."""

from __future__ import annotations

import re

from msgspec import Struct

from understudy.errors import BackendError

EVENT_LIMIT = 64 << 20
"""The largest single event: a first chunk that carries the token ids of a whole prompt is far smaller."""

_LINE_END = rb"(?:\r\n|\n|\r(?!\n))"
_BLANK_LINE = re.compile(_LINE_END + rb"{2}")
_LONGEST_BLANK_LINE = 4


class ServerSentEvent(Struct, frozen=True, gc=False):
    """One event: its name (empty where it has none), its data lines joined, and the bytes that said it.

    The `raw` of all events of a stream, one after the other, are the stream. An event without data is a comment,
    or a name alone.
    """

    name: bytes
    data: bytes
    raw: bytes


class EventSplitter:
    """Cuts a stream into its events, whatever the pieces it comes in."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._returns = False

    def feed(self, piece: bytes) -> list[ServerSentEvent]:
        """The events that a piece completes. Raises BackendError when one grows beyond EVENT_LIMIT."""
        searched = max(len(self._buffer) - _LONGEST_BLANK_LINE, 0)
        self._buffer += piece
        self._returns = self._returns or b"\r" in piece
        events = self._cut(searched) if self._returns else self._split(searched)
        if len(self._buffer) > EVENT_LIMIT:
            raise BackendError(f"invalid stream: one event has more than {EVENT_LIMIT} bytes")
        return events

    def rest(self) -> ServerSentEvent | None:
        """What came after the last blank line: some servers leave out the one that ends their last event."""
        return _event(bytes(self._buffer)) if self._buffer else None

    def _split(self, start: int) -> list[ServerSentEvent]:
        """The events of a stream without a carriage return; most servers never send one."""
        # Looking for one byte is several times as fast as looking for two.
        at = self._buffer.find(b"\n", start)
        while at >= 0 and not self._buffer.startswith(b"\n", at + 1):
            at = self._buffer.find(b"\n", at + 1)
        if at < 0:
            return []
        *lines, rest = bytes(self._buffer).split(b"\n")
        events: list[ServerSentEvent] = []
        some: list[bytes] = []
        for line in lines:
            if line or not some:
                some.append(line)
            else:
                events.append(_plain_event(some))
                some = []
        self._buffer = bytearray(b"\n".join((*some, rest)))
        return events

    def _cut(self, start: int) -> list[ServerSentEvent]:
        """The events of a stream whose lines may end in any way."""
        events: list[ServerSentEvent] = []
        done = 0
        while blank := _BLANK_LINE.search(self._buffer, max(start, done)):
            events.append(_event(bytes(self._buffer[done : blank.end()])))
            done = blank.end()
        del self._buffer[:done]
        return events


def _plain_event(lines: list[bytes]) -> ServerSentEvent:
    """An event from its lines, which hold no carriage return."""
    first, last = lines[0], lines[-1]
    if last.startswith(b"data: "):
        if len(lines) == 1:
            return ServerSentEvent(b"", last[6:], last + b"\n\n")
        if len(lines) == 2 and first.startswith(b"event: "):
            return ServerSentEvent(first[7:], last[6:], b"%b\n%b\n\n" % (first, last))
    return _event(b"\n".join((*lines, b"", b"")))


def _event(raw: bytes) -> ServerSentEvent:
    name, data = b"", list[bytes]()
    for line in raw.splitlines():
        field, _, value = line.partition(b":")
        if field == b"data":
            data.append(value.removeprefix(b" "))
        elif field == b"event":
            name = value.removeprefix(b" ")
    return ServerSentEvent(name, b"\n".join(data), raw)
