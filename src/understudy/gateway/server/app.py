"""The gateway as an ASGI application: its routes, and how a client gets the response of its call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from understudy.errors import UnderstudyError
from understudy.gateway.control import GenerationControl, RunningCall
from understudy.gateway.errors import fault_of
from understudy.gateway.keys import PREFIX, KeyRing
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.capture import CallObserver, CallSink, Capture
from understudy.gateway.server.connections import ConnectionTable
from understudy.gateway.server.http import (
    IN_FLIGHT_LIMIT,
    ClientGone,
    HttpRequest,
    Receive,
    RequestLimits,
    RequestRefused,
    Send,
    Subscriber,
    UnreadBodies,
)
from understudy.gateway.server.listen import Listener, tcp_socket, unix_socket
from understudy.gateway.server.request import AgentRequest, PreparedRequest
from understudy.gateway.session import GatewaySession
from understudy.gateway.telemetry.agent_exports import PATHS, AgentTelemetry
from understudy.wire.anthropic import Anthropic
from understudy.wire.chat import OpenAIChat
from understudy.wire.dialect import Dialect
from understudy.wire.dialects import DIALECTS
from understudy.wire.errors import Fault, InvalidRequest, too_deep
from understudy.wire.gemini import Gemini, read_target, target_of
from understudy.wire.responses import OpenAIResponses

_LIMITS = RequestLimits()
_MODEL_PATHS = ("/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1/models", target_of("MODEL"))
_OPENAI_PATHS = ("/v1/chat", "/v1/responses", "/v1/models")
_GEMINI_PATHS = ("/v1beta/", "/v1alpha/")


class Gateway:
    """Answers agents that have a key, and stores every call in `sink` before its response is sent.

    `models` chooses the server for a model name, `control` can pause generation, `observers` get each stored call,
    and `agent_telemetry` receives the agents' own telemetry (dropped if it is None). With `streaming`, a
    generation is sent as it arrives, except for the events that complete it; otherwise an agent gets pings, then
    the whole response. An ASGI application; `start_unix` and `start_tcp` serve it in the running event loop.
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
        self._connections = ConnectionTable()
        self._stopping = False
        self._routes: dict[tuple[str, str], tuple[str | None, _Handler]] = {
            ("POST", "/v1/messages"): (Anthropic.name, self._generate),
            ("POST", "/v1/messages/count_tokens"): (Anthropic.name, self._count_tokens),
            ("POST", "/v1/chat/completions"): (OpenAIChat.name, self._generate),
            ("POST", "/v1/responses"): (OpenAIResponses.name, self._generate),
            ("GET", "/v1/models"): (None, self._list_models),
            ("GET", "/v1beta/models"): (Gemini.name, self._list_models),
            ("HEAD", "/"): (None, _alive),
            ("GET", "/healthz"): (None, _alive),
            **{("POST", path): (None, self._take_telemetry) for path in PATHS},
        }

    async def start_unix(self, path: Path) -> None:
        """Listen on a Unix socket at `path`, of any length, with mode 0666. Raises ConfigError."""
        await self._listen(unix_socket(path), path)

    async def start_tcp(self, host: str, port: int) -> str:
        """Listen on `host`, at a free port if `port` is 0. Returns the base URL. Raises ConfigError."""
        listener, url = tcp_socket(host, port)
        await self._listen(listener)
        return url

    def running_calls(self) -> list[RunningCall]:
        """Return the calls that have no answer yet, the oldest first."""
        return self._capture.running()

    async def stop(self) -> None:
        """Wait `drain_s` seconds for calls in flight, abandon the rest, store all of them, and close."""
        self._stopping = True
        async with AsyncExitStack() as stack:  # all are stopped, even if this is cancelled
            while self._listeners:
                stack.push_async_callback(self._listeners.pop().stop)
            await self._capture.drain(self._limits.drain_s)

    async def _listen(self, listening: socket.socket, path: Path | None = None) -> None:
        listener = Listener(self, listening, path, head_s=self._limits.head_s, table=self._connections)
        await listener.start()
        self._listeners.append(listener)

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        name, handler = self._route(request)
        dialect = self.dialect_of(request) if name is None else DIALECTS[name]
        try:
            await handler(request, dialect)
        except ClientGone:
            return
        except RequestRefused as refused:
            await request.send_fault(dialect, refused.fault)
        except UnderstudyError as error:
            await request.send_fault(dialect, fault_of(error))
        finally:
            request.release_body()

    def _route(self, request: HttpRequest) -> tuple[str | None, _Handler]:
        """Return the dialect that a request's path belongs to, if any, and the handler of the path."""
        if (route := self._routes.get((request.method, request.path))) is not None:
            return route
        if request.method == "POST" and (target := read_target(request.path)) is not None:
            return Gemini.name, self._count_tokens if target.method == "countTokens" else self._generate
        return None, _not_found

    def dialect_of(self, request: HttpRequest) -> Dialect:
        """Return the dialect of a request: by its path, or by its headers if the path belongs to no dialect."""
        name, _ = self._route(request)
        if name is None:
            if request.path.startswith(_GEMINI_PATHS) or b"x-goog-api-key" in request.headers:
                name = Gemini.name
            else:
                openai = request.path.startswith(_OPENAI_PATHS) and b"anthropic-version" not in request.headers
                name = OpenAIChat.name if openai else Anthropic.name
        return DIALECTS[name]

    # --- handlers ---------------------------------------------------------------------------------------

    async def _generate(self, request: HttpRequest, dialect: Dialect) -> None:
        agent_request = await self._read(request, dialect)
        try:
            prepared = self._capture.prepare(agent_request)
        except InvalidRequest as error:
            return await request.send_fault(dialect, await self._capture.record_invalid(agent_request, error))
        await self._respond(request, prepared)

    async def _respond(self, request: HttpRequest, prepared: PreparedRequest) -> None:
        """Send the events of a call as they come, with pings in between, until it ends or the client leaves."""
        dialect = prepared.agent_request.dialect
        subscriber, now = Subscriber(), asyncio.get_running_loop().time
        sent = 0  # the number of the call's events that were sent to this client
        sent_at = now()
        write_now: Callable[[bytes], bool] | None = None  # true while this task waits and a stream has begun

        def progress(*ended: object) -> None:
            # Events are sent at once where possible, since waking this task for each of them would cost more.
            nonlocal sent, sent_at
            if write_now is not None and not ended and write_now(b"".join(call.events[sent:])):
                sent, sent_at = len(call.events), now()
            else:
                subscriber.wake()

        disconnect = asyncio.ensure_future(request.wait_for_disconnect())
        disconnect.add_done_callback(subscriber.wake)
        call = self._capture.subscribe(prepared, progress)
        # The status line of a stream is delayed at first, so that a failure can still be sent as a status.
        pause_s = self._limits.headers_after_s if prepared.stream else None
        try:
            while not call.task.done():
                if disconnect.done():
                    return
                if sent < len(call.events):
                    new_events, sent = call.events[sent:], len(call.events)
                    await request.write(b"".join(new_events))
                    sent_at, pause_s = now(), self._limits.ping_every_s
                    continue
                write_now = request.write_now
                left_s = None if pause_s is None else max(sent_at + pause_s - now(), 0.0)
                woken = await subscriber.wait(left_s)
                write_now = None
                if not woken and pause_s is not None and now() >= sent_at + pause_s:
                    await request.write(dialect.ping(call.message_id))
                    sent_at, pause_s = now(), self._limits.ping_every_s
        finally:
            disconnect.cancel()
            self._capture.unsubscribe(call, progress)
        response = call.task.result()
        if isinstance(response, Fault):
            await request.send_fault(dialect, response)
        elif prepared.stream:
            remaining = response.remaining_events
            remaining = dialect.events(response.body) if remaining is None else remaining
            await request.write(b"".join((*call.events[sent:], remaining)), last=True)
        else:
            await request.send_response(200, response.body)

    async def _count_tokens(self, request: HttpRequest, dialect: Dialect) -> None:
        agent_request = await self._read(request, dialect)
        try:
            response = await self._capture.prepare(agent_request).count_tokens()
        except RecursionError as error:
            raise too_deep() from error
        await request.send_response(200, response)

    async def _take_telemetry(self, request: HttpRequest, dialect: Dialect) -> None:
        agent_request = await self._read(request, dialect)
        attempt_id = agent_request.session.attempt_id
        reply = await self._agent_telemetry.take(request.path, request.headers, agent_request.body, attempt_id)
        await request.send_response(reply.status, reply.body, content_type=reply.content_type)

    async def _list_models(self, request: HttpRequest, dialect: Dialect) -> None:
        await self._session(request)
        await request.send_response(200, dialect.models(self._models.names()))

    async def _session(self, request: HttpRequest) -> GatewaySession:
        """Return the session of the request's key. Raises RequestRefused."""
        key = request.api_key()
        session = await self._keys.find_session(key)
        if session is None:
            fault = "invalid API key: no active attempt has it" if key else "missing API key: the request has none"
            message = (
                f"{fault}, expected one that begins with {PREFIX}; start a new "
                "attempt, or make a key for this gateway: understudy gateway issue NAME"
            )
            raise RequestRefused(Fault(kind="permission", message=message))
        request.authenticate()
        return session

    async def _read(self, request: HttpRequest, dialect: Dialect) -> AgentRequest:
        """Return a request with its session and its body. Raises ClientGone and RequestRefused."""
        body = await request.read_body(self._unread, await self._session(request))
        # Checked again here, because no call may start for an attempt that ended while the body arrived, or after
        # `stop` has waited for the calls in flight.
        session = await self._session(request)
        if self._stopping:
            message = "the gateway is stopping; retry when it runs again"
            raise RequestRefused(Fault(kind="overloaded", message=message))
        if session.in_flight >= IN_FLIGHT_LIMIT:
            message = (
                f"overloaded: {IN_FLIGHT_LIMIT} requests of this attempt are unanswered, the maximum; retry later"
            )
            raise RequestRefused(Fault(kind="overloaded", message=message))
        return AgentRequest(
            session=session,
            branch=dialect.branch(request.headers),
            dialect=dialect,
            body=body,
            target=request.target,
            headers=request.headers,
        )


async def _alive(request: HttpRequest, dialect: Dialect) -> None:
    await request.send_response(200, b'{"status":"ok"}')


async def _not_found(request: HttpRequest, dialect: Dialect) -> None:
    message = (
        f"{request.method[:20]} {request.path[:200]}: no such path; expected one of {', '.join(_MODEL_PATHS)}: "
        "check the client's base URL"
    )
    await request.send_fault(dialect, Fault(kind="not_found", message=message))


_Handler = Callable[[HttpRequest, Dialect], Awaitable[None]]
