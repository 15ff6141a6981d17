"""The gateway's HTTP side: bare ASGI, a table of routes, and the waiting for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.gateway.control import GenerationControl
from understudy.gateway.errors import fault_of
from understudy.gateway.keys import KeyRing
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.capture import CallObserver, CallSink, Capture
from understudy.gateway.server.http import (
    ClientGone,
    HttpRequest,
    Receive,
    RequestLimits,
    Send,
    Subscriber,
    UnreadBodies,
)
from understudy.gateway.server.listen import Listener, tcp_socket, unix_socket
from understudy.gateway.server.request import AgentRequest, PreparedRequest
from understudy.gateway.telemetry.agent_exports import PATHS, AgentTelemetry
from understudy.wire.anthropic.dialect import Anthropic
from understudy.wire.chat.dialect import OpenAIChat
from understudy.wire.dialect import Dialect
from understudy.wire.dialects import DIALECTS
from understudy.wire.errors import Fault, InvalidRequest, too_deep
from understudy.wire.responses.dialect import OpenAIResponses

_LIMITS = RequestLimits()
_OPENAI_PATHS = ("/v1/chat", "/v1/responses", "/v1/models")


def dialects() -> dict[str, Dialect]:
    """The dialects that agents may speak, by name."""
    return DIALECTS


class Gateway:
    """Answers agents that hold a key, keeping every call in `sink` before it is answered.

    `models` says who answers for which name, `control` can pause it, `observers` are told each call that was kept,
    `agent_telemetry` takes what agents tell of themselves (dropped when it is None).
    With `streaming`, what is generated is passed on as it comes, but for the events that complete it; without, an
    agent sees pings, then the whole answer. An ASGI application; `start_unix` and `start_tcp` serve it in the
    running event loop.
    """

    def __init__(
        self,
        models: ModelRouter,
        sink: CallSink,
        keys: KeyRing,
        *,
        control: GenerationControl | None = None,
        observers: Sequence[CallObserver] = (),
        agent_telemetry: AgentTelemetry | None = None,
        streaming: bool = False,
        limits: RequestLimits = _LIMITS,
    ) -> None:
        self.control = control or GenerationControl()
        self._limits = limits
        self._models = models
        self._keys = keys
        self._unread = UnreadBodies(limits)
        self._agent_telemetry = agent_telemetry or AgentTelemetry()
        self._capture = Capture(models, sink, self.control, observers=observers, streaming=streaming)
        self._listeners: list[Listener] = []
        self._stopping = False
        self._dialects = dialects()
        self._routes: dict[tuple[str, str], tuple[str | None, _Handler]] = {
            ("POST", "/v1/messages"): (Anthropic.name, self._answer),
            ("POST", "/v1/messages/count_tokens"): (Anthropic.name, self._count),
            ("POST", "/v1/chat/completions"): (OpenAIChat.name, self._answer),
            ("POST", "/v1/responses"): (OpenAIResponses.name, self._answer),
            ("GET", "/v1/models"): (None, self._list),
            ("HEAD", "/"): (None, _alive),
            ("GET", "/healthz"): (None, _alive),
            **{("POST", path): (None, self._export) for path in PATHS},
        }

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket at `path`, of any length, mode 0666. Raises ConfigError."""
        await self._listen(Listener(self, unix_socket(path), path, head_s=self._limits.head_s))

    async def start_tcp(self, host: str, port: int) -> str:
        """Listen on `host`, at a free port when `port` is 0; returns the base URL. Raises ConfigError."""
        listener, url = tcp_socket(host, port)
        await self._listen(Listener(self, listener, head_s=self._limits.head_s))
        return url

    async def stop(self) -> None:
        """Let what is under way end for a while, abandon the rest, commit all of it, close."""
        self._stopping = True
        async with AsyncExitStack() as stack:  # all are stopped, even when this is cancelled
            while self._listeners:
                stack.push_async_callback(self._listeners.pop().stop)
            await self._capture.drain(self._limits.drain_s)

    async def _listen(self, listener: Listener) -> None:
        await listener.start()
        self._listeners.append(listener)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        _, handler = self._routes.get((request.method, request.path), (None, _unknown))
        dialect = self.speaking(request)
        try:
            await handler(request, dialect)
        except ClientGone:
            return
        except UnderstudyError as error:
            await request.fail(dialect, fault_of(error))
        finally:
            request.release()

    def speaking(self, request: HttpRequest) -> Dialect:
        """The dialect of a request: its path decides, or its headers where the path is none's."""
        name, _ = self._routes.get((request.method, request.path), (None, None))
        if name is None:
            foreign = request.path.startswith(_OPENAI_PATHS) and b"anthropic-version" not in request.headers
            name = OpenAIChat.name if foreign else Anthropic.name
        return self._dialects[name]

    # --- handlers ---------------------------------------------------------------------------------------

    async def _answer(self, request: HttpRequest, dialect: Dialect) -> None:
        asked = await self._open(request, dialect)
        if isinstance(asked, Fault):
            return await request.fail(dialect, asked)
        try:
            job = self._capture.understand(asked)
        except InvalidRequest as error:
            return await request.fail(dialect, await self._capture.refuse(asked, error))
        await self._wait(request, job)

    async def _wait(self, request: HttpRequest, job: PreparedRequest) -> None:
        dialect = job.asked.dialect
        waiter = Subscriber()
        gone = asyncio.ensure_future(request.gone())
        gone.add_done_callback(waiter.wake)
        exchange = self._capture.join(job, waiter.wake)
        pause = self._limits.headers_after_s if job.stream else None
        said = 0
        try:
            while not exchange.task.done():
                if gone.done():
                    return
                if said < len(exchange.said):
                    fresh, said = exchange.said[said:], len(exchange.said)
                    await request.write(b"".join(fresh))
                    pause = self._limits.ping_every_s
                elif not await waiter.wait(pause):
                    await request.write(dialect.ping(exchange.message_id))
                    pause = self._limits.ping_every_s
        finally:
            gone.cancel()
            self._capture.leave(exchange, waiter.wake)
        answer = exchange.task.result()
        if isinstance(answer, Fault):
            await request.fail(dialect, answer)
        elif job.stream:
            rest = dialect.events(answer.body) if answer.tail is None else answer.tail
            await request.write(b"".join((*exchange.said[said:], rest)), last=True)
        else:
            await request.reply(200, answer.body)

    async def _count(self, request: HttpRequest, dialect: Dialect) -> None:
        asked = await self._open(request, dialect)
        if isinstance(asked, Fault):
            return await request.fail(dialect, asked)
        try:
            answer = await self._capture.understand(asked).count()
        except RecursionError as error:
            raise too_deep() from error
        await request.reply(200, answer)

    async def _export(self, request: HttpRequest, dialect: Dialect) -> None:
        asked = await self._open(request, dialect)
        if isinstance(asked, Fault):
            return await request.fail(dialect, asked)
        attempt_id = asked.session.attempt_id
        reply = await self._agent_telemetry.take(request.path, request.headers, asked.body, attempt_id)
        await request.reply(reply.status, reply.body, content_type=reply.content_type)

    async def _list(self, request: HttpRequest, dialect: Dialect) -> None:
        if await self._keys.find(request.key()) is None:
            return await request.fail(dialect, _no_key())
        await request.reply(200, dialect.models(self._models.names()))

    async def _open(self, request: HttpRequest, dialect: Dialect) -> AgentRequest | Fault:
        """A request on a model path with its session and its body, or why it is refused."""
        session = await self._keys.find(request.key())
        if session is None:
            return _no_key()
        body = await request.body(self._unread, session)
        if isinstance(body, Fault):
            return body
        # Both asked last: nothing may begin for an attempt that ended while the body was on its way, nor once
        # `stop` has waited for what was under way.
        session = await self._keys.find(request.key())
        if session is None:
            return _no_key()
        if self._stopping:
            return Fault(kind="overloaded", message="the gateway is stopping; try again when it is back")
        return AgentRequest(
            session=session,
            branch=dialect.branch(request.headers),
            dialect=dialect,
            body=body,
            target=request.target,
            headers=request.headers,
        )


def _no_key() -> Fault:
    return Fault(kind="permission", message="this key opens nothing: it is wrong, or its attempt is over")


async def _alive(request: HttpRequest, dialect: Dialect) -> None:
    await request.reply(200, b'{"status":"ok"}')


async def _unknown(request: HttpRequest, dialect: Dialect) -> None:
    message = f"{request.method} {request.path[:200]}: there is nothing at this path"
    await request.fail(dialect, Fault(kind="not_found", message=message))


_Handler = Callable[[HttpRequest, Dialect], Awaitable[None]]
