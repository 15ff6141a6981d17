"""The load client of bench/gateway.py, as a process: raw keep-alive connections, each with one request at a time.

    python -m gateway_parts.load < spec.json

Prints what it saw as JSON. Times are in milliseconds.
"""

from __future__ import annotations

import asyncio
import re
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import httptools
import msgspec
import uvloop
from msgspec import Struct, field

from gateway_parts.traffic import RECEIVED, TOLD, Requests

_ID = re.compile(rb'"id":\s*"([a-z]+[_-][\w-]+)"')
_ENDS = (b"message_stop", b"[DONE]")
_OVERLAP = 64


class Spec(Struct, frozen=True):
    """What to send: to `url`, with a key for each of so many connections, `calls` of them or for `seconds`.

    The connections begin one after the other within `pause_s`; with `grow` their conversations grow.
    """

    url: str
    keys: list[str]
    connections: int
    calls: int = 0
    seconds: float = 0.0
    grow: bool = False
    pause_s: float = 0.0


class Seen(Struct):
    """What came back; `chunk_ms` is what lay between the sending of a piece of an answer and its being here."""

    wall_s: float = 0.0
    calls: int = 0
    failed: int = 0
    failure: str = ""
    first_ms: dict[str, float] = field(default_factory=dict[str, float])
    whole_ms: dict[str, float] = field(default_factory=dict[str, float])
    request_ms: dict[str, float] = field(default_factory=dict[str, float])
    end_ms: dict[str, float] = field(default_factory=dict[str, float])
    added_ms: dict[str, float] = field(default_factory=dict[str, float])
    chunk_ms: dict[str, float] = field(default_factory=dict[str, float])
    ids: list[str] = field(default_factory=list[str])


class Times:
    """Nanoseconds of all answers, by what was measured."""

    def __init__(self) -> None:
        self.first: list[int] = []
        self.whole: list[int] = []
        self.request: list[int] = []
        self.end: list[int] = []
        self.added: list[int] = []
        self.chunk: list[int] = []


class Connection(asyncio.Protocol):
    """One connection, and the answer that it is reading."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._parser: Any = None
        self.transport: Any = None
        self._answer: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(f"the connection was closed: {exc}"))

    async def ask(self, request: bytes) -> bytes:
        """Send a request; the body of its answer. Raises ConnectionError."""
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._rest = b""
        self._told = 0
        self._answer = asyncio.get_running_loop().create_future()
        self._asked = time.monotonic_ns()
        self.transport.write(request)
        return await self._answer

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic_ns()
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        if not self._parts:
            self._times.first.append(self._now - self._asked)
        self._parts.append(body)
        text, end = self._rest + body, 0
        for match in TOLD.finditer(text):
            self._told, end = int(match[1]), match.end()
            self._times.chunk.append(self._now - self._told)
        self._rest = text[max(end, len(text) - _OVERLAP) :]

    def on_message_complete(self) -> None:
        answer, times = b"".join(self._parts), self._times
        assert self._answer is not None
        status = self._parser.get_status_code()
        received = RECEIVED.search(answer)
        if status != 200 or received is None or not any(end in answer[-200:] for end in _ENDS):
            self._answer.set_exception(ConnectionError(f"status {status}: {answer[-300:]!r}"))
            return
        request, end = int(received[1]) - self._asked, self._now - self._told
        times.whole.append(self._now - self._asked)
        times.request.append(request)
        times.end.append(end)
        times.added.append(request + end)
        self._answer.set_result(answer)


class Load:
    """All connections of a measurement."""

    def __init__(self, spec: Spec) -> None:
        self.seen = Seen()
        self.times = Times()
        self._spec = spec
        self._left = spec.calls
        self._until = time.monotonic() + spec.seconds

    async def run(self) -> None:
        """Make all the calls."""
        spec = self._spec
        started = time.monotonic()
        await asyncio.gather(*(self._agent(number) for number in range(spec.connections)))
        self.seen.wall_s = time.monotonic() - started

    def _more(self) -> bool:
        if self._spec.seconds:
            return time.monotonic() < self._until
        self._left -= 1
        return self._left >= 0

    async def _agent(self, number: int) -> None:
        spec, parts = self._spec, urlsplit(self._spec.url)
        host, port = parts.hostname or "", parts.port or 80
        requests = Requests(f"agent{number:05d}")
        head = (
            f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {spec.keys[number % len(spec.keys)]}\r\nanthropic-version: 2023-06-01\r\n"
            f"x-claude-code-session-id: session-{number}\r\ncontent-length: %d\r\n\r\n"
        ).encode()
        loop = asyncio.get_running_loop()
        connection: Connection | None = None
        step = spec.pause_s * (number + 1) / spec.connections
        while self._more():
            if step:
                await asyncio.sleep(step)
                step = 0.0
            body = requests.next(grow=spec.grow)
            try:
                if connection is None:
                    _, connection = await loop.create_connection(lambda: Connection(self.times), host, port)
                answer = await connection.ask(head % len(body) + body)
            except (OSError, httptools.HttpParserError) as error:
                connection = None
                self.seen.failed += 1
                self.seen.failure = str(error)
                continue
            self.seen.calls += 1
            match = _ID.search(answer)
            self.seen.ids.append(match[1].decode() if match else "")


def summary(values: Sequence[int]) -> dict[str, float]:
    """Median, 99th percentile and largest in milliseconds."""
    if not values:
        return {}
    ordered = sorted(values)
    figures = {"p50": statistics.median(ordered), "p99": ordered[len(ordered) * 99 // 100], "max": ordered[-1]}
    return {name: round(value / 1e6, 2) for name, value in figures.items()}


def main() -> None:
    """Do what stdin says."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    load = Load(msgspec.json.decode(sys.stdin.buffer.read(), type=Spec))
    uvloop.run(load.run())
    for name in ("first", "whole", "request", "end", "added", "chunk"):
        setattr(load.seen, f"{name}_ms", summary(getattr(load.times, name)))
    sys.stdout.buffer.write(msgspec.json.encode(load.seen))


if __name__ == "__main__":
    main()
