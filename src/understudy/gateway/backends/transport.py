"""Reusable HTTP/1.1 connections to model servers, which pass a body on in the callback that parses its bytes.

aiohttp's client wakes a task for each piece of a stream, which costs several times as much as handling the piece.
Here a task wakes twice: for the head of a response and at its end. Redirects are not followed, cookies are not
kept, and proxies are not used.
"""

from __future__ import annotations

import asyncio
import functools
import re
import socket
import ssl
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, suppress
from itertools import chain
from typing import Any, cast

import aiohappyeyeballs
import httptools
from msgspec import Struct
from yarl import URL

from understudy.util.http import ResponseTooLarge

KEEP_ALIVE_S = 15.0
"""How many seconds an idle connection is kept. Servers close idle connections too."""
RESOLVE_S = 15.0
"""How many seconds to wait for a host's addresses; resolvers ask the next name server only after 5 s."""
ADDRESSES_S = 10.0
"""How many seconds the addresses of a host are cached."""
ATTEMPT_DELAY_S = 0.25
"""How many seconds one address is tried alone before the next one is tried in parallel (RFC 8305)."""
HEAD_LIMIT = 64 << 10
"""The most bytes that may come without a byte of a body: the head of a response, or what is between chunks."""
VANISHED_S = 60
"""After how many seconds without a sign of life from its kernel a server's machine is given up. A server that is
busy is not: its kernel answers.
"""
UPLOAD_PIECE = 1 << 20
"""Larger request bodies are sent in pieces of this size, so that the event loop can serve other requests
meanwhile.
"""
INFLATED_PIECE = 1 << 20
"""How many bytes of a compressed body are decompressed at once."""

Take = Callable[[bytes], object]
"""Receives a piece of a decompressed body. Raising an error or returning True ends the response."""

_HEAD, _BODY, _DONE = range(3)
_DETECT_VANISHED = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, VANISHED_S // 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, VANISHED_S // 6),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED_S),
)
"""Socket options. Probes answer for connections that wait, the last option for those with unacknowledged data."""
_NOT_IN_PATHS = re.compile(r"[^\x21-\x7e]")
_NOT_IN_HEADERS = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
_DEFAULTS = {"accept": "*/*", "accept-encoding": "gzip, deflate", "user-agent": "understudy"}


class ConnectionFailed(OSError):
    """The request got no response, or only part of one."""


class NotConnected(ConnectionFailed):
    """There was no connection, so the server cannot have seen any of the request."""


class ConnectTimeout(NotConnected, TimeoutError):
    """Connecting took too long (see NotConnected)."""


class UnsendableRequest(NotConnected):
    """The URL or a header is invalid, so the request cannot be sent (see NotConnected)."""


class Disconnected(ConnectionFailed):
    """The server closed the connection, or it was lost."""


class InvalidResponse(ConnectionFailed):
    """The server's answer is not an HTTP/1.1 response, or is unreadable."""


class _Target(Struct, frozen=True):
    """Where a URL leads: the host and port to connect to, and the first lines of a request."""

    secure: bool
    host: str
    port: int
    lines: str

    @property
    def server(self) -> tuple[bool, str, int]:
        """The key under which connections are kept."""
        return self.secure, self.host, self.port


@functools.lru_cache(maxsize=256)
def _target(method: str, url: str) -> _Target:
    """Parse a URL. Raises UnsendableRequest."""
    try:
        parsed = URL(url, encoded=True)
        host, port = parsed.raw_host, parsed.port
        (host or "").encode("idna")  # as the resolver does: fails if a label of the name is empty or too long
    except ValueError as error:
        raise UnsendableRequest(
            f"{url!r} is not a valid URL: {error}; expected http(s)://HOST[:PORT]/PATH: correct the base URL"
        ) from error
    path = parsed.raw_path_qs.partition("#")[0]
    if parsed.scheme not in ("http", "https") or not host or not port or _NOT_IN_PATHS.search(path):
        raise UnsendableRequest(
            f"{url!r} is not a valid URL of a server; expected http(s)://HOST[:PORT]/PATH in printable ASCII; "
            "correct the server's base URL"
        )
    lines = f"{method} {path} HTTP/1.1\r\nhost: {parsed.host_port_subcomponent}\r\n"
    return _Target(parsed.scheme == "https", host, port, lines)


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return a TLS context that checks certificates, with the system's authorities, and host names."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _head(target: _Target, headers: Mapping[str, str], size: int | None) -> bytes:
    """Return the head of a request. Raises UnsendableRequest for a header that could break out of its line."""
    fields = _DEFAULTS | {name.lower(): value for name, value in headers.items()}
    if size is not None:
        fields["content-length"] = str(size)
    for name, value in fields.items():
        if wrong := _NOT_IN_HEADERS.search(name + value):
            raise UnsendableRequest(
                f"the header {name!a} contains the character {wrong[0]!a}, which is not allowed in headers; "
                "expected printable characters: check the API key"
            )
    lines = [f"{name}: {value}\r\n" for name, value in fields.items()]
    return f"{target.lines}{''.join(lines)}\r\n".encode("latin-1")


class ServerConnection(asyncio.Protocol):
    """A connection, with the response to its latest request."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        """By names in lower case; of several with one name, the first."""
        self.used = False
        """Whether the connection has had a request before the latest."""
        self.idle_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._parser: Any = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._phase = _DONE
        self._interim = False
        self._keep = True
        self._between = 0
        self._until_eof = False
        self._inflate: _Inflater | None = None
        self._take: Take | None = None
        self._limit = self._left = 0
        self._early: list[bytes] = []
        """What came of the body before it is read, as it came: packed, it is small."""
        self._bodies: list[bytes] = []  # of the data that is being parsed, to be passed on together
        self._stopped = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._total_s, self._ends_at, self._stall_s, self._heard = 0.0, 0.0, 0.0, 0.0
        self._writable: asyncio.Future[None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether reading the body was stopped before its end."""
        return self._stopped

    @property
    def reusable(self) -> bool:
        """Whether the response is complete and the connection can be reused."""
        return self._phase == _DONE and self._keep and self._transport is not None

    async def request(self, head: bytes, body: bytes | None, *, total_s: float, stall_s: float | None) -> None:
        """Send a request. Returns when the head of the response has arrived. Raises OSError."""
        assert self._transport is not None
        self.status, self.headers, self._phase, self._between = 0, {}, _HEAD, 0
        self._inflate, self._take, self._early, self._stopped, self._error = None, None, [], False, None
        self._heard = now = self._loop.time()
        self._total_s, self._ends_at, self._stall_s = total_s, now + total_s, stall_s or total_s
        self._timer = self._loop.call_later(min(total_s, self._stall_s), self._check_time)
        if body is None or len(body) <= UPLOAD_PIECE:
            self._transport.writelines((head, body or b""))
        else:
            await self._upload(head, body)
        while self._phase == _HEAD:
            await self._wait()
        # otherwise it is raised after the part of the body that arrived
        if self._error is not None and self.status < 200:
            raise self._error

    async def read(self, take: Take, limit: int) -> None:
        """Pass the body to `take` piece by piece. Returns at its end, or when `take` returns True.

        Raises OSError if the body is incomplete, ResponseTooLarge above `limit` bytes, and whatever `take` raises.
        """
        self._take, self._limit, self._left = take, limit, limit
        self._bodies = self._take_early()
        self._pass_bodies()
        while not self._stopped and self._phase != _DONE:
            await self._wait()
        if self._error is not None:
            raise self._error
        if self._inflate is not None and not self._stopped and not self._inflate.complete:
            raise InvalidResponse("the compressed body of the response is incomplete; send the request again")

    def end(self) -> None:
        """Give up the response. The connection is closed unless it can be reused."""
        self._take = None
        self._stop_timer()
        if not self.reusable:
            self.end_badly()
        self._take_early()

    # --- callbacks of the event loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # otherwise a request to a machine that vanished without a word would wait until its time limit, an hour
        with suppress(OSError):
            for level, option, value in _DETECT_VANISHED:
                transport.get_extra_info("socket").setsockopt(level, option, value)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._phase == _BODY and self._until_eof and exc is None:
            self._complete()
        else:
            self._fail(
                Disconnected(
                    f"the connection was lost before the response was complete: {exc}; check that the server "
                    "is running"
                    if exc
                    else "the server closed the connection before its response was complete; see its log"
                )
            )
        self._parser = None  # this reference cycle would otherwise live until the garbage collector runs

    def data_received(self, data: bytes) -> None:
        if self._phase == _DONE:  # data that answers no request
            return self.end_badly()
        self._heard = self._loop.time()
        self._between += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._pass_bodies()
            wrong = f"{str(error) or type(error).__name__}; check that the address is that of an HTTP server"
            return self._fail(InvalidResponse(f"invalid HTTP response: {wrong}"))
        self._pass_bodies()
        if self._between > HEAD_LIMIT:
            wrong = f"more than {HEAD_LIMIT} bytes of headers, the maximum; check the address"
            self._fail(InvalidResponse(f"invalid HTTP response: {wrong}"))

    def pause_writing(self) -> None:
        self._writable = self._writable or self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    # --- callbacks of the parser ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._keep = self._keep and self._phase == _HEAD  # otherwise it is a response that was not requested

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase == _HEAD:
            self.headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        if self._phase != _HEAD:
            return
        self.status = self._parser.get_status_code()
        self._interim = self.status < 200
        if self._interim:
            self.headers.clear()
            return
        self._between = 0
        chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        self._until_eof = not chunked and "content-length" not in self.headers and self.status not in (204, 304)
        coding = self.headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("identity", ""):
            if coding not in ("gzip", "x-gzip", "deflate"):
                return self._fail(
                    InvalidResponse(
                        f"unsupported content-encoding {coding[:40]!r} of the response; expected identity, gzip "
                        "or deflate: check the proxy in front of the server"
                    )
                )
            self._inflate = _Inflater()
        self._phase = _BODY
        self._wake()

    def on_body(self, body: bytes) -> None:
        self._between = 0
        if self._phase != _BODY or self._stopped:
            return
        if self._take is None:
            self._early.append(body)
            if self._transport is not None:  # a body that is not read yet waits in the socket
                self._transport.pause_reading()
        else:
            self._bodies.append(body)

    def on_message_complete(self) -> None:
        self._pass_bodies()
        if self._phase == _BODY:
            unsent = self._transport is None or self._transport.get_write_buffer_size() > 0
            self._keep = self._keep and not unsent and self._parser.should_keep_alive()
            self._complete()

    # --- the response -----------------------------------------------------------------------------------

    def end_badly(self) -> None:
        """Close the connection at once."""
        self._keep = False
        if self._transport is not None:
            self._transport.abort()

    def _take_early(self) -> list[bytes]:
        """Deliver what arrived before reading began; from now on pieces are delivered as they arrive."""
        early, self._early = self._early, []
        if early and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return early

    def _pass_bodies(self) -> None:
        bodies, self._bodies = self._bodies, []
        if bodies and self._take is not None and not self._stopped:
            (self._pass_on if self._inflate is None else self._unpack)(b"".join(bodies))

    def _unpack(self, data: bytes) -> None:
        assert self._inflate is not None
        try:
            for piece in self._inflate.feed(data):
                self._pass_on(piece)
                if self._stopped:
                    return
        except zlib.error as error:
            self._end_reading(
                InvalidResponse(f"the compressed body of the response is invalid: {error}; send the request again")
            )

    def _pass_on(self, piece: bytes) -> None:
        assert self._take is not None
        try:
            self._left -= len(piece)
            if self._left < 0:
                raise ResponseTooLarge(self._limit)
            if self._take(piece):
                self._stopped, self._error = True, None  # errors in the rest do not matter
                self._wake()
        except Exception as error:  # noqa: BLE001 - raised where the response is read
            self._end_reading(error)

    def _end_reading(self, error: Exception) -> None:
        self._stopped, self._error = True, error
        self._fail(error)

    def _complete(self) -> None:
        self._phase = _DONE
        self._stop_timer()
        self._wake()

    def _fail(self, error: Exception) -> None:
        if self._phase != _DONE:
            if not self._stopped:
                self._error = error
            self._complete()
        self.end_badly()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        self.resume_writing()  # once there is a response, or none can come, the rest of the request is not sent
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _check_time(self) -> None:
        """Check both time limits with one timer, which on expiry looks whether anything arrived meanwhile."""
        now = self._loop.time()
        seconds_left = min(self._ends_at, self._heard + self._stall_s) - now
        if seconds_left > 0:
            self._timer = self._loop.call_later(seconds_left, self._check_time)
        else:
            late = (
                f"the response was not complete within {self._total_s:g} s"
                if now >= self._ends_at
                else f"the server sent nothing for {self._stall_s:g} s"
            )
            self._fail(TimeoutError(f"timeout: {late}, the time limit; check the load of the server, and its log"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _upload(self, head: bytes, body: bytes) -> None:
        transport = self._transport
        assert transport is not None
        transport.write(head)
        for start in range(0, len(body), UPLOAD_PIECE):
            if self._phase != _HEAD:
                self._keep = False  # it was answered or closed before all was sent, so it is not used again
                return
            transport.write(body[start : start + UPLOAD_PIECE])
            if self._writable is not None:
                await self._writable
            await asyncio.sleep(0)


class _Inflater:
    """Decompresses gzip and deflate, the latter with or without zlib's header."""

    def __init__(self) -> None:
        self._decoder: Any = None

    @property
    def complete(self) -> bool:
        """Whether the data so far is complete. An empty body is."""
        return self._decoder is None or self._decoder.eof

    def feed(self, data: bytes) -> Generator[bytes]:
        """Yield the decompressed data of a piece, in pieces of bounded size. Raises zlib.error."""
        more = bool(data)
        while more:
            if self._decoder is None or self._decoder.eof:  # a gzip stream may consist of several members
                has_header = data[0] == 0x1F or data[0] & 0xF == 8
                self._decoder = zlib.decompressobj(47 if has_header else -15)
            if piece := self._decoder.decompress(data, INFLATED_PIECE):
                yield piece
            data = self._decoder.unused_data if self._decoder.eof else self._decoder.unconsumed_tail
            more = bool(data) or (len(piece) == INFLATED_PIECE and not self._decoder.eof)


class ConnectionPool:
    """Connections to servers, as many as there are requests at once. None is opened before the first use."""

    def __init__(self) -> None:
        self._idle: dict[tuple[bool, str, int], list[ServerConnection]] = {}
        self._busy: set[ServerConnection] = set()
        self._addresses: dict[tuple[str, int], tuple[float, asyncio.Task[Any]]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: str,
        body: bytes | None,
        headers: Mapping[str, str],
        *,
        connect_s: float,
        total_s: float,
        stall_s: float | None = None,
    ) -> AsyncGenerator[ServerConnection]:
        """Send a request, and return the connection once the head of the response has arrived, whatever its
        status.

        The caller reads the body. In seconds, `connect_s` bounds connecting, `total_s` the whole exchange, and
        `stall_s` the time without any data. A GET on a connection that turns out to be closed is sent again.
        Raises ConnectionFailed and TimeoutError.
        """
        target = _target(method, url)
        head = _head(target, headers, None if body is None else len(body))
        while True:
            connection = self._take_idle(target.server) or await self._connect(target, connect_s, total_s)
            self._busy.add(connection)
            try:
                try:
                    await connection.request(head, body, total_s=total_s, stall_s=stall_s)
                except Disconnected:
                    if method == "GET" and connection.used:
                        continue
                    raise
                yield connection
                return
            finally:
                self._busy.discard(connection)
                connection.end()
                if connection.reusable:
                    self._keep(target.server, connection)

    def close(self) -> None:
        """Close all connections. May be called twice."""
        for connection in (*self._busy, *chain.from_iterable(self._idle.values())):
            connection.end_badly()
        self._idle.clear()
        for _, addresses in self._addresses.values():
            addresses.cancel()
        self._addresses.clear()
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def _take_idle(self, server: tuple[bool, str, int]) -> ServerConnection | None:
        idle = self._idle.get(server)
        while idle:
            connection = idle.pop()  # reuse the most recent one, so that the others expire
            if connection.reusable:
                connection.used = True
                return connection
        return None

    def _keep(self, server: tuple[bool, str, int], connection: ServerConnection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(server, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_old, loop)

    def _close_old(self, loop: asyncio.AbstractEventLoop) -> None:
        """Close connections that were idle for KEEP_ALIVE_S, and check again when the next one expires."""
        now = loop.time()
        for server, idle in list(self._idle.items()):
            for connection in idle:
                if now - connection.idle_since >= KEEP_ALIVE_S:
                    connection.end_badly()
            if reusable := [connection for connection in idle if connection.reusable]:
                self._idle[server] = reusable
            else:
                del self._idle[server]
        oldest = min((connection.idle_since for idle in self._idle.values() for connection in idle), default=None)
        wait_s = 0.0 if oldest is None else max(oldest + KEEP_ALIVE_S - now, 0.1)
        self._sweep = loop.call_later(wait_s, self._close_old, loop) if wait_s else None

    async def _connect(self, target: _Target, connect_s: float, total_s: float) -> ServerConnection:
        """Open a connection. Raises NotConnected."""
        loop = asyncio.get_running_loop()
        addresses = await self._resolve(target.host, target.port, min(RESOLVE_S, total_s))
        limit_s = min(connect_s, total_s)
        where = f"{target.host}:{target.port}"
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(limit_s):
                sock = await aiohappyeyeballs.start_connection(  # pyright: ignore[reportUnknownMemberType]
                    addresses, happy_eyeballs_delay=ATTEMPT_DELAY_S, interleave=1
                )
                tls: dict[str, Any] = {"ssl": _tls(), "server_hostname": target.host} if target.secure else {}
                _, connection = await loop.create_connection(ServerConnection, sock=sock, **tls)
                sock = None
                return connection
        except TimeoutError as error:
            raise ConnectTimeout(
                f"cannot connect to {where} within {limit_s:g} s; check the address, and that the server is "
                "running"
            ) from error
        except OSError as error:  # TLS errors are among these
            raise NotConnected(
                f"cannot connect to {where}: {error.strerror or error}; check the address, and that the server "
                "is running"
            ) from error
        finally:
            if sock is not None:
                sock.close()

    async def _resolve(self, host: str, port: int, limit_s: float) -> list[Any]:
        """Return the addresses of a host. Concurrent callers share one query. Raises NotConnected."""
        loop = asyncio.get_running_loop()
        until, task = self._addresses.get((host, port), (0.0, None))
        if task is None or loop.time() > until:
            task = loop.create_task(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
            self._addresses[host, port] = (loop.time() + ADDRESSES_S, task)
        await asyncio.wait([task], timeout=limit_s)  # other callers may wait for it even if this one is cancelled
        if not task.done():
            raise ConnectTimeout(
                f"cannot resolve {host} within {limit_s:g} s; check the host name and the name servers"
            )
        if task.cancelled():
            raise NotConnected(
                "the connections were closed, because the gateway is stopping; send the request again when it runs"
            )
        try:
            return task.result()
        except OSError as error:
            self._addresses.pop((host, port), None)
            raise NotConnected(f"cannot resolve {host}: {error.strerror or error}; check the host name") from error
