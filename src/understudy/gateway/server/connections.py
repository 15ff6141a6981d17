"""Limits on what clients may hold of a gateway before their requests are handled: connections, heads, pipelines,
memory.

Nothing here depends on a key, so anybody who can connect, from the network or from inside a sandbox, can attack
it.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CONNECTIONS = 8192
"""How many connections a process keeps, if it may open twice as many files.

Otherwise one client could use them all up.

Above this number, each new connection closes another one on which nobody with a valid key waits for a response.
"""
HELD_LIMIT = 64 << 20
"""How many bytes all connections of a process may hold together: heads and bodies that no handler has read yet,
and responses that no client has read yet.

Near the limit, the connections that hold most are closed until half of it is left.
"""
HEAD_LIMIT = 64 << 10
HEADERS_LIMIT = 128
"""The maximum size in bytes, and number of headers, of a request before its body. An agent sends 4 KiB and 30."""
PIPELINE_LIMIT = 4
"""How many requests of a connection may wait for the response to an earlier one.

Ordinary HTTP clients send none.
"""
UNREAD_S = 120.0
"""A connection is closed after its client has not read its response for this many seconds."""
CLOSE_S = 5.0
"""How many seconds a closing connection may take to send what is left."""

_REFUSALS = {
    b"400 Bad Request": "expected an HTTP/1.1 request, and at most "
    f"{PIPELINE_LIMIT} more before its response; check the client and its proxy",
    b"408 Request Timeout": "the request line and headers did not arrive in time; send the request again",
    b"431 Request Header Fields Too Large": f"the headers are too large: expected at most {HEADERS_LIMIT} "
    f"with {HEAD_LIMIT} bytes in all; send fewer",
}
"""What a client is told in plain text, by status, before a request has a dialect."""

_REQUEST_BYTES = 4 << 10  # the objects of a request that waits: measured, and rounded up
_HEADER_BYTES = 160  # bytes for the objects of a waiting request, measured and rounded up


class ConnectionTable:
    """The connections of all listeners of one process, and the memory that they hold."""

    def __init__(self) -> None:
        self._held_limit = HELD_LIMIT
        self._most = min(CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        # In the order in which they came. Connections that have shown a valid key are closed last.
        self._anonymous: dict[BoundedProtocol, None] = {}
        self._authenticated: dict[BoundedProtocol, None] = {}
        self._estimate = 0

    def add(self, connection: BoundedProtocol) -> None:
        """Add a new connection. If there are too many, another one is closed, or else this one."""
        self._anonymous[connection] = None
        if len(self._anonymous) + len(self._authenticated) <= self._most:
            return
        oldest = next(iter(self._anonymous))
        if oldest is connection:
            oldest = next(
                (authenticated for authenticated in self._authenticated if authenticated.idle), connection
            )
        oldest.drop()

    def remove(self, connection: BoundedProtocol) -> None:
        """Remove a closed connection."""
        self._anonymous.pop(connection, None)
        self._authenticated.pop(connection, None)

    def authenticated(self, connection: BoundedProtocol) -> None:
        """Record that a request of this connection had a valid key."""
        if connection in self._anonymous:
            del self._anonymous[connection]
            self._authenticated[connection] = None

    def grew(self, size: int) -> None:
        """Add bytes that a connection may hold from now on, and close the largest holders if the total is too
        much.

        The count only grows, because nothing reports when bytes are released; at the limit all connections are
        asked.
        """
        self._estimate += size
        if self._estimate <= self._held_limit:
            return
        every_connection = (*self._anonymous, *self._authenticated)
        bytes_held = {connection: connection.held_bytes() for connection in every_connection}
        self._estimate = sum(bytes_held.values())
        if self._estimate > self._held_limit * 3 // 4:  # otherwise all connections would be asked again soon
            for connection in sorted(bytes_held, key=bytes_held.__getitem__, reverse=True):
                connection.drop()
                self._estimate -= bytes_held[connection]
                if self._estimate <= self._held_limit // 2:
                    break


class _HeldHead:
    """Stands for the transport of a response between its head and the first part of its body.

    Both are sent together, as each write wakes up the client, which takes longer than all else about it.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._transport = cycle.transport
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        if self._head is None:
            self._head = data
        else:
            self._release()
            self._transport.write(self._head + data)

    def close(self) -> None:
        self._release()
        self._transport.close()

    def _release(self) -> None:
        self._cycle.transport = self._transport


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol, with limits on what it waits for and on what it holds."""

    def __init__(self, table: ConnectionTable, head_s: float, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._table = table
        self._head_s = head_s
        self._head_size = 0
        self._between = 0
        self._got_on = False
        self._refusal = b"400 Bad Request"
        self._state: dict[str, Any] = {}
        self._head_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request of this connection is being answered."""
        return self._latest is None or self._latest.response_complete

    @property
    def _latest(self) -> RequestResponseCycle | None:
        """The latest request, or None before the first, a case that uvicorn's types leave out."""
        return cast(RequestResponseCycle | None, self.cycle)

    def held_bytes(self) -> int:
        """Return about how many bytes are held for this connection."""
        # The parser holds what came of an incomplete header.
        size = self._head_size + self._between + self.transport.get_write_buffer_size()
        if self._latest is not None:
            size += len(self._latest.body)
        for waiting, _ in self.pipeline:
            size += _REQUEST_BYTES + len(waiting.body) + _HEADER_BYTES * HEADERS_LIMIT
        return size

    def authenticate(self) -> None:
        """Record that the application found the key of a request valid."""
        self._table.authenticated(self)

    def write_now(self, data: bytes) -> bool:
        """Send a piece of the body of the current stream. Returns False if that is not possible at once.

        It does what ASGI's `send` does, without waking a task.
        """
        cycle = self.cycle
        if not cycle.chunked_encoding or cycle.response_complete or self.pipeline:
            return False  # with pipelining, the latest request is not the one being answered
        if self.flow.write_paused or self.transport.is_closing():
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    def hold_head(self) -> None:
        """Send the head of the current response, which is written next, with the first part of its body."""
        if not self.pipeline:  # with pipelining, the latest request is not the one being answered
            self.cycle.transport = _HeldHead(self.cycle)  # pyright: ignore[reportAttributeAccessIssue]

    def drop(self) -> None:
        """Close at once, dropping what was still to be sent."""
        self._table.remove(self)
        self.transport.abort()

    # --- callbacks of the event loop --------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        self._expect_head()
        self._table.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        self._cancel_write_deadline()
        self._table.remove(self)
        self.pipeline.clear()
        self._state.clear()  # this reference cycle would otherwise live until the garbage collector runs
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._got_on = False
        super().data_received(data)
        self._between = 0 if self._got_on else self._between + len(data)
        if self._between > HEAD_LIMIT:
            self._refuse(b"431 Request Header Fields Too Large")
        self._table.grew(len(data) + _HEADER_BYTES)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_write_deadline()
        self._write_deadline = self.loop.call_later(UNREAD_S, self.drop)
        self._table.grew(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._cancel_write_deadline()
        super().resume_writing()

    # --- callbacks of the parser ------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._state = {
            "authenticate": self.authenticate,
            "write_now": self.write_now,
            "hold_head": self.hold_head,
        }
        self.scope["state"] = self._state
        self._expect_head()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head_deadline is None:
            return  # trailing headers, which follow a body and are never read
        self._count_head(len(name) + len(value) + _HEADER_BYTES)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._got_on = True
        self._have_head()
        if len(self.pipeline) >= PIPELINE_LIMIT:
            self._stop(b"400 Bad Request")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._got_on = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        if self.idle:
            self.cycle.body = bytearray()  # the rest of a body that the handler did not read is dropped
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for everything that the parser rejects, and for what `_stop` does."""
        self._refuse(self._refusal)

    # --- bounds -----------------------------------------------------------------------------------------

    def _expect_head(self) -> None:
        self._have_head()
        self._head_size = 0
        self._head_deadline = self.loop.call_later(self._head_s, self._refuse, b"408 Request Timeout")

    def _have_head(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None

    def _count_head(self, size: int) -> None:
        self._head_size += size
        if self._head_size > HEAD_LIMIT + HEADERS_LIMIT * _HEADER_BYTES or len(self.headers) >= HEADERS_LIMIT:
            self._stop(b"431 Request Header Fields Too Large")

    def _stop(self, status: bytes) -> None:
        """Stop parsing the received data. The parser only stops if a callback raises."""
        self._refusal = status
        raise ValueError(status)

    def _refuse(self, status: bytes) -> None:
        """Reject the connection. Without a request there is no dialect for the error.

        While an earlier response is being sent, nothing is written, because the client would take the status for a
        part of it.
        """
        self._have_head()
        if self.pipeline or (not self.idle and self.cycle.response_started):
            self.drop()
        elif not self.transport.is_closing():
            body = _REFUSALS[status].encode() + b"\n"
            head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
            self.transport.write(head % (status, len(body)) + body)
            self.transport.close()
            self._cancel_write_deadline()
            self._write_deadline = self.loop.call_later(CLOSE_S, self.drop)

    def _cancel_write_deadline(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
