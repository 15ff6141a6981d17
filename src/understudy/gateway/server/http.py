"""An HTTP request to the gateway: its size-limited body, and its response."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import zstandard
from msgspec import Struct

from understudy.gateway.session import GatewaySession
from understudy.wire.dialect import Dialect
from understudy.wire.errors import Fault

BODY_LIMIT = 32 << 20
"""The largest request body in bytes, the same as for Anthropic's own API."""
VALUES_LIMIT = 1 << 20
"""How many commas a body may have, because a JSON value of a few bytes becomes an object of a hundred in
memory.
"""
ATTEMPT_LIMIT = 64 << 20
"""The total size of one attempt's request bodies, from their first byte until they are answered."""
IN_FLIGHT_LIMIT = 512
"""How many requests of one attempt may be unanswered at once. An agent with its subagents has about ten."""

STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_JSON = b"application/json"

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class RequestLimits(Struct, frozen=True, kw_only=True):
    """How long a gateway waits, in seconds, and how much it holds.

    `head_s` and `body_s` bound the arrival of a request's headers and body, `unread_bytes` the size of all
    arriving bodies together, `drain_s` the time for calls in progress when the gateway stops. `headers_after_s` is
    how long the status line of a stream is delayed. Until then a failure can still be sent as a status, which
    Claude Code waits out (529), honours (429) or takes as final (400). Later, a failure is an error event, without
    a status and a retry-after; Claude Code still waits out an overload. Claude Code has been seen to wait this
    long without a byte, and by its own settings waits ten minutes. After the status line, pings are sent, one
    every `ping_every_s`.
    """

    head_s: float = 30.0
    body_s: float = 60.0
    unread_bytes: int = 128 << 20
    drain_s: float = 10.0
    headers_after_s: float = 20.0
    ping_every_s: float = 5.0


class ClientGone(Exception):
    """The client disconnected before its request was read, so there is nobody to answer and nothing to store."""


class RequestRefused(Exception):
    """A request that gets a fault instead of becoming a call. It is not stored."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.message)
        self.fault = fault


class UnreadBodies:
    """The memory of arriving bodies, over all requests of a gateway, with its limit and their timeout."""

    def __init__(self, limits: RequestLimits) -> None:
        self.limit_bytes = limits.unread_bytes
        self.timeout_s = limits.body_s
        self.total_bytes = 0


class HttpRequest:
    """One HTTP request, and the response to it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope["query_string"]
        pairs: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self.headers = dict(pairs)
        self.started = False
        self._receive = receive
        self._send = send
        self._state: Mapping[str, Any] = scope.get("state", {})
        self._session: GatewaySession | None = None
        self._size = 0

    @property
    def target(self) -> str:
        """The path with its query, as the client sent it."""
        return f"{self.path}?{self.query.decode('latin-1')}" if self.query else self.path

    def api_key(self) -> str:
        """Return the API key from one of the headers for it, or ""."""
        scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            return token.strip().decode("latin-1")
        key = self.headers.get(b"x-api-key") or self.headers.get(b"x-goog-api-key", b"")
        return key.decode("latin-1")

    def authenticate(self) -> None:
        """Tell the connection that its client has a valid key, so that it is closed after those without one."""
        if (authenticate := self._state.get("authenticate")) is not None:
            authenticate()

    async def read_body(self, unread: UnreadBodies, session: GatewaySession) -> bytes:
        """Return the whole body of a session's request. Raises ClientGone and RequestRefused.

        It counts towards the session's `body_bytes` until `release_body`.
        """
        if int(self.headers.get(b"content-length", b"0")) > BODY_LIMIT:
            raise RequestRefused(_TOO_LARGE)
        chunks: list[bytes] = []
        self._session = session
        try:
            async with asyncio.timeout(unread.timeout_s):
                async for chunk in self.body_chunks():
                    chunks.append(chunk)
                    self._size += len(chunk)
                    session.body_bytes += len(chunk)
                    unread.total_bytes += len(chunk)
                    if self._size > BODY_LIMIT:
                        raise RequestRefused(_TOO_LARGE)
                    if unread.total_bytes > unread.limit_bytes:
                        raise RequestRefused(
                            _overloaded("the request bodies that are arriving", unread.limit_bytes)
                        )
                    if session.body_bytes > ATTEMPT_LIMIT:
                        raise RequestRefused(_overloaded("the unanswered requests of this attempt", ATTEMPT_LIMIT))
            body = self._decoded(b"".join(chunks))
        except TimeoutError:
            message = f"timeout: the request body did not arrive within {unread.timeout_s:g} s; retry"
            raise RequestRefused(Fault(kind="timeout", message=message)) from None
        finally:
            unread.total_bytes -= self._size
        if len(body) > VALUES_LIMIT and body.count(b",") > VALUES_LIMIT:
            message = (
                f"request body too large: it has more than {VALUES_LIMIT} JSON values, the maximum; send fewer"
            )
            raise RequestRefused(Fault(kind="too_large", message=message))
        return body

    def _decoded(self, body: bytes) -> bytes:
        """Decode the content coding of a body. Raises RequestRefused if it is unsupported or broken."""
        coding = self.headers.get(b"content-encoding", b"identity").strip().lower()
        if coding in (b"", b"identity"):
            return body
        decode = _DECODERS.get(coding)
        if decode is None:
            expected = ", ".join(name.decode() for name in _DECODERS)
            message = (
                f"content-encoding: unsupported value {coding[:40].decode('latin-1')!r}, expected one of "
                f"{expected}; use one of them, or leave it out"
            )
            raise RequestRefused(Fault(kind="unsupported_media", message=message))
        try:
            decoded, complete = decode(body)
        except (zlib.error, zstandard.ZstdError) as error:
            message = (
                f"the request body is not valid {coding.decode()}, as its content-encoding says: {error}; encode "
                "it so, or leave content-encoding out"
            )
            raise RequestRefused(Fault(kind="invalid_request", message=message)) from error
        if len(decoded) > BODY_LIMIT:
            raise RequestRefused(_TOO_LARGE)
        if not complete:
            message = (
                f"the request body is not valid {coding.decode()}: it ends too early, or goes on after its end; "
                "send the whole body, and nothing after it"
            )
            raise RequestRefused(Fault(kind="invalid_request", message=message))
        return decoded

    def release_body(self) -> None:
        """Stop counting the body, because the request was answered."""
        if self._session is not None:
            self._session.body_bytes -= self._size

    async def body_chunks(self) -> AsyncGenerator[bytes]:
        """Yield the body as it arrives. Raises ClientGone."""
        more = True
        while more:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise ClientGone
            more = event.get("more_body", False)
            yield event.get("body", b"")

    async def wait_for_disconnect(self) -> None:
        """Return when the client has closed the connection. Call it after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status line and the headers. A server that can waits for the first part of the body."""
        self.started = True
        if (hold_head := self._state.get("hold_head")) is not None and self.method != "HEAD":
            hold_head()
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body; before the first part, the headers of a stream."""
        if not self.started:
            await self.start(200, STREAM)
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    @property
    def write_now(self) -> Callable[[bytes], bool] | None:
        """Return a function that sends a part of the body of the current stream, or returns False if that would
        have to wait.

        Returns None if no stream has begun, or the server does not support this.
        """
        return self._state.get("write_now") if self.started else None

    async def send_response(
        self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), *, content_type: bytes = _JSON
    ) -> None:
        """Send a whole response, by default as JSON."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [(b"content-type", content_type), length, *headers])
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_fault(self, dialect: Dialect, fault: Fault) -> None:
        """Send a fault: as a status, or as an event if a stream has begun."""
        if self.started:
            return await self.write(dialect.error_event(fault), last=True)
        error = dialect.error(fault)
        await self.send_response(error.status, error.body, error.headers)


def _overloaded(what: str, limit_bytes: int) -> Fault:
    message = f"overloaded: {what} have more than {limit_bytes} bytes together, the maximum; retry later"
    return Fault(kind="overloaded", message=message)


_TOO_LARGE = Fault(
    kind="too_large",
    message=f"request body too large: it has more than {BODY_LIMIT} bytes, the maximum; send less",
)


def _inflate(wbits: int) -> Callable[[bytes], tuple[bytes, bool]]:
    """Return a decoder of zlib's formats that stops beyond BODY_LIMIT."""

    def decode(body: bytes) -> tuple[bytes, bool]:
        decoder = zlib.decompressobj(wbits)
        return decoder.decompress(body, BODY_LIMIT + 1), decoder.eof and not decoder.unused_data

    return decode


def _unzstd(body: bytes) -> tuple[bytes, bool]:
    """Return a decoder of zstd that stops beyond BODY_LIMIT."""
    with zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).stream_reader(body) as reader:
        return reader.read(BODY_LIMIT + 1), True


_ZSTD_WINDOW = 8 << 20
_DECODERS = {
    b"gzip": _inflate(zlib.MAX_WBITS | 16),
    b"x-gzip": _inflate(zlib.MAX_WBITS | 16),
    b"deflate": _inflate(zlib.MAX_WBITS),
    b"zstd": _unzstd,
}
"""Content coding → a decoder, which returns the body and whether it is complete.

`br` would need another library.
"""


class Subscriber:
    """Lets a task wait for the first of several events, each of which calls `wake`. Cheaper than tasks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._woken = False
        self._future: asyncio.Future[None] | None = None

    def wake(self, *_: object) -> None:
        """End the current wait, or the next one."""
        self._woken = True
        if self._future is not None and not self._future.done():
            self._future.set_result(None)

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait for up to `timeout_s`. Returns whether something called `wake` since the last wait."""
        if not self._woken:
            self._future = self._loop.create_future()
            timer = None if timeout_s is None else self._loop.call_later(timeout_s, _end, self._future)
            try:
                await self._future
            finally:
                self._future = None
                if timer is not None:
                    timer.cancel()
        woken, self._woken = self._woken, False
        return woken


def _end(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
