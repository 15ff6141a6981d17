"""The gateway's HTTP side: bare ASGI, a table of routes, and the waiting for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.gateway.backends.base import Backend
from understudy.gateway.capture import Asked, CallSink, Capture
from understudy.gateway.dialects.anthropic import Anthropic
from understudy.gateway.dialects.base import Dialect, Incoming
from understudy.gateway.faults import Fault, InvalidRequest, fault_of, too_deep
from understudy.gateway.keys import Branch, Keys, Session
from understudy.gateway.listen import Listener, tcp_socket, unix_socket

BODY_LIMIT = 64 << 20
DRAIN_S = 10.0
PING_EVERY_S = 5.0
HEADERS_AFTER_S = 20.0
"""How long the status line of a stream is held back, in seconds.

While it is, a failure can still be told by its status, which Claude Code waits out (529), honours (429) or
takes as final (400). After it, a failure is an error event, upon which Claude Code asks again at once without
streaming: one more generation. It has been seen to wait this long without a byte, and waits ten minutes by its
own settings.
"""

_JSON = (b"content-type", b"application/json")
_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]

Receive = Callable[[], Awaitable[Mapping[str, Any]]]
Send = Callable[[Mapping[str, Any]], Awaitable[None]]


class Gateway:
    """Answers agents that hold a key, through one backend, keeping every call in `sink` before it is answered.

    An ASGI application; `start_unix` and `start_tcp` serve it in the running event loop.
    """

    def __init__(
        self,
        backend: Backend,
        sink: CallSink,
        keys: Keys,
        *,
        headers_after_s: float = HEADERS_AFTER_S,
        ping_every_s: float = PING_EVERY_S,
        drain_s: float = DRAIN_S,
    ) -> None:
        self._headers_after_s = headers_after_s
        self._ping_every_s = ping_every_s
        self._drain_s = drain_s
        self._backend = backend
        self._keys = keys
        self._capture = Capture(backend, sink)
        self._listeners: list[Listener] = []
        self._stopping = False
        anthropic = Anthropic()
        self._routes: dict[tuple[str, str], tuple[Dialect, _Handler]] = {
            ("POST", "/v1/messages"): (anthropic, self._answer),
            ("POST", "/v1/messages/count_tokens"): (anthropic, self._count),
            ("HEAD", "/"): (anthropic, _alive),
            ("GET", "/healthz"): (anthropic, _alive),
        }

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket at `path`, of any length, mode 0666. Raises ConfigError."""
        await self._listen(Listener(self, unix_socket(path), path))

    async def start_tcp(self, host: str, port: int) -> str:
        """Listen on `host`, at a free port when `port` is 0; returns the base URL. Raises ConfigError."""
        listener, url = tcp_socket(host, port)
        await self._listen(Listener(self, listener))
        return url

    async def stop(self) -> None:
        """Let what is under way end for up to `drain_s` seconds, abandon the rest, commit all of it, close."""
        self._stopping = True
        await self._capture.drain(self._drain_s)
        for listener in self._listeners:
            await listener.stop()
        self._listeners.clear()

    async def _listen(self, listener: Listener) -> None:
        await listener.start()
        self._listeners.append(listener)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = _Request(scope, receive, send)
        dialect, handler = self._routes.get((scope["method"], scope["path"]), (Anthropic(), _unknown))
        try:
            await handler(request, dialect)
        except _ClientGone:
            return

    # --- handlers ---------------------------------------------------------------------------------------

    async def _answer(self, request: _Request, dialect: Dialect) -> None:
        opened = await self._open(request)
        if isinstance(opened, Fault):
            return await request.fail(dialect, opened)
        session, body = opened
        asked = Asked(session=session, branch=_branch(request.headers), dialect=dialect, body=body)
        try:
            incoming = dialect.parse(body, session)
        except InvalidRequest as error:
            return await request.fail(dialect, await self._capture.refuse(asked, error))
        await self._wait(request, asked, incoming)

    async def _wait(self, request: _Request, asked: Asked, incoming: Incoming) -> None:
        dialect = asked.dialect
        exchange = self._capture.join(asked, incoming)
        gone = asyncio.ensure_future(request.gone())
        pause = self._headers_after_s if incoming.stream else None
        try:
            while True:
                await asyncio.wait({exchange.task, gone}, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if exchange.task.done():
                    break
                if gone.done():
                    return
                if not request.started:
                    await request.start(200, _STREAM)
                await request.write(dialect.ping())
                pause = self._ping_every_s
        finally:
            gone.cancel()
            self._capture.leave(exchange)
        answer = exchange.task.result()
        if isinstance(answer, Fault):
            await request.fail(dialect, answer)
        elif incoming.stream:
            if not request.started:
                await request.start(200, _STREAM)
            await request.write(dialect.events(answer), last=True)
        else:
            await request.reply(200, answer)

    async def _count(self, request: _Request, dialect: Dialect) -> None:
        opened = await self._open(request)
        if isinstance(opened, Fault):
            return await request.fail(dialect, opened)
        session, body = opened
        try:
            tokens = await self._backend.count_tokens(dialect.parse(body, session).chat)
        except UnderstudyError as error:
            return await request.fail(dialect, fault_of(error))
        except RecursionError:
            return await request.fail(dialect, fault_of(too_deep()))
        await request.reply(200, dialect.token_count(tokens))

    async def _open(self, request: _Request) -> tuple[Session, bytes] | Fault:
        """The session and the body of a request on a model path, or why there is none."""
        session = self._keys.find(request.key())
        if session is None:
            return _no_key()
        body = await request.body()
        if body is None:
            return Fault(kind="too_large", message=f"the request body has more than {BODY_LIMIT} bytes")
        # Both asked last: nothing may begin for an attempt that ended while the body was on its way, nor once
        # `stop` has waited for what was under way.
        if self._keys.find(request.key()) is None:
            return _no_key()
        if self._stopping:
            return Fault(kind="overloaded", message="the gateway is stopping; try again when it is back")
        return session, body


def _no_key() -> Fault:
    return Fault(kind="permission", message="this key opens nothing: it is wrong, or its attempt is over")


async def _alive(request: _Request, dialect: Dialect) -> None:
    await request.reply(200, b'{"status":"ok"}')


async def _unknown(request: _Request, dialect: Dialect) -> None:
    message = f"{request.scope['method']} {request.scope['path'][:200]}: there is nothing at this path"
    await request.fail(dialect, Fault(kind="not_found", message=message))


def _branch(headers: Mapping[bytes, bytes]) -> Branch:
    def read(name: bytes) -> str | None:
        value = headers.get(name)
        return value.decode("latin-1") if value else None

    return Branch(session_id=read(b"x-claude-code-session-id"), agent_id=read(b"x-claude-code-agent-id"))


class _ClientGone(Exception):
    """The client left before its request was read; there is nobody to answer and nothing to keep."""


class _Request:
    """One HTTP request, and the answer to it."""

    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.scope = scope
        pairs: Iterable[tuple[bytes, bytes]] = scope["headers"]
        self.headers = dict(pairs)
        self.started = False
        self._receive = receive
        self._send = send

    def key(self) -> str:
        """The key that the request carries in either of the two places for it, or nothing."""
        scheme, _, token = self.headers.get(b"authorization", b"").partition(b" ")
        key = token.strip() if scheme.lower() == b"bearer" else self.headers.get(b"x-api-key", b"")
        return key.decode("latin-1")

    async def body(self) -> bytes | None:
        """The whole body, or None when it is larger than the limit. Raises _ClientGone."""
        chunks: list[bytes] = []
        size = int(self.headers.get(b"content-length", b"0"))
        while size <= BODY_LIMIT:
            event = await self._receive()
            if event["type"] == "http.disconnect":
                raise _ClientGone
            chunks.append(event.get("body", b""))
            if not event.get("more_body"):
                return b"".join(chunks)
            size = max(size, sum(map(len, chunks)))
        return None

    async def gone(self) -> None:
        """Returns when the client has closed the connection; to be called after the body was read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """Send the status line and the headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})

    async def reply(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Send a whole JSON answer."""
        length = (b"content-length", str(len(body)).encode())
        await self.start(status, [_JSON, length, *headers])
        await self.write(body, last=True)

    async def fail(self, dialect: Dialect, fault: Fault) -> None:
        """Tell a fault: by its status, or by an event in a stream that has begun."""
        if self.started:
            return await self.write(dialect.error_event(fault), last=True)
        error = dialect.error(fault)
        await self.reply(error.status, error.body, error.headers)


_Handler = Callable[[_Request, Dialect], Awaitable[None]]
