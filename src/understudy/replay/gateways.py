"""Runs a gateway for each teacher, on loopback: one key per ask, and every call is stored before it is read."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Generator
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import aiohttp
from msgspec import Struct

from understudy.errors import ConfigError, GatewayError, StoreError
from understudy.gateway.backends.http import MAX_RETRY_AFTER_S, retry_after_s
from understudy.gateway.config import GatewayConfig, ModelsConfig
from understudy.gateway.factory import open_gateway
from understudy.gateway.keys import digest_of, new_key
from understudy.gateway.session import GatewaySession
from understudy.replay.teachers import Teacher
from understudy.store import Store
from understudy.types import Call

_SESSION_HEADERS = {"anthropic": "x-claude-code-session-id"}
_CHAT_SESSION_HEADER = "x-session-id"


class _AskSession(GatewaySession):
    """The session of one ask. All asks of a replay belong to one attempt, so that their calls are counted
    together. A replay decides by the pause that the teacher's server asks for, so it gets it unbounded.
    """

    def __init__(self, attempt_id: str, numbers: itertools.count[int]) -> None:
        super().__init__(attempt_id, {})
        self._numbers = numbers
        self.retry_after_limit_s = MAX_RETRY_AFTER_S

    def next_sequence(self) -> int:
        return next(self._numbers)


class AskKeys:
    """The keys of the running asks (see KeyRing): each key opens a session of its own, and is removed with its
    ask.

    Answers of one teacher are not remembered for the next, because tool ids of different answers may be equal.
    """

    def __init__(self, attempt_id: str, sequence: int) -> None:
        self._attempt_id = attempt_id
        self._numbers = itertools.count(sequence)
        self._sessions: dict[bytes, GatewaySession] = {}

    async def find_session(self, key: str) -> GatewaySession | None:
        """Return the session that a key opens, or None."""
        return self._sessions.get(digest_of(key))

    @contextmanager
    def issued(self) -> Generator[str]:
        """Yield a key that is valid inside the block."""
        key = new_key()
        digest = digest_of(key)
        self._sessions[digest] = _AskSession(self._attempt_id, self._numbers)
        try:
            yield key
        finally:
            del self._sessions[digest]


class AskCalls:
    """The store as the gateways see it. The last call of an ask is kept until `take` returns it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._last: dict[str, Call] = {}
        self.fault: StoreError | None = None
        """Why a call could not be kept, once that has happened."""

    def append(self, call: Call) -> Future[None]:
        """See CallSink."""
        future = self._store.calls.append(call)

        def on_stored(stored: Future[None]) -> None:
            if not stored.cancelled() and isinstance(error := stored.exception(), StoreError):
                self.fault = error

        future.add_done_callback(on_stored)
        if call.session_id is not None:
            self._last[call.session_id] = call
        return future

    def take(self, ask_id: str) -> Call | None:
        """Return and forget the last call of an ask; None if there is none."""
        return self._last.pop(ask_id, None)


class AskReply(Struct, frozen=True):
    """The result of one request: the gateway's call, if it made one, and its response."""

    call: Call | None
    status: int
    retry_after_s: float | None
    text: str


class TeacherConnection:
    """The connection to one teacher, through a gateway."""

    def __init__(
        self, teacher: Teacher, url: str, keys: AskKeys, calls: AskCalls, client: aiohttp.ClientSession
    ) -> None:
        self.teacher = teacher
        self._url = url
        self._keys = keys
        self._calls = calls
        self._client = client
        self._session_header = _SESSION_HEADERS.get(teacher.config.backend, _CHAT_SESSION_HEADER)

    async def send(self, ask_id: str, path: str, body: bytes) -> AskReply:
        """Send a request once, on the branch of its ask. Raises StoreError when its call could not be stored."""
        with self._keys.issued() as key:
            headers = {
                "authorization": f"Bearer {key}",
                "content-type": "application/json",
                self._session_header: ask_id,
            }
            try:
                async with self._client.post(self._url + path, data=body, headers=headers) as response:
                    text = await response.read()
                    wait = retry_after_s(response.headers.get("retry-after"))
                    status = response.status
            except aiohttp.ClientError as error:
                raise GatewayError(
                    f"the replay's own gateway at {self._url}, on this machine, does not respond: {error}; run "
                    "the same command again, which keeps the answers so far"
                ) from error
        if self._calls.fault is not None:
            raise self._calls.fault
        call = self._calls.take(ask_id)
        return AskReply(call, status, wait, text[:2000].decode(errors="replace"))


@asynccontextmanager
async def connect(teacher: Teacher, keys: AskKeys, calls: AskCalls) -> AsyncGenerator[TeacherConnection]:
    """Connect to a teacher, through a gateway that ends with the context.

    Raises ConfigError for a missing key or a model that the server does not have, BackendError when the server
    does not respond.
    """
    config = GatewayConfig(models=ModelsConfig(high=teacher.model))
    async with AsyncExitStack() as stack:
        try:
            gateway = await stack.enter_async_context(open_gateway(config, calls, lambda _: keys))
        except ConfigError as error:
            raise ConfigError("--teachers: " + str(error).replace("models.high", teacher.table, 1)) from error
        url = await gateway.gateway.start_tcp("127.0.0.1", 0)
        unbounded = aiohttp.ClientTimeout(total=None)
        client = await stack.enter_async_context(
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=unbounded, cookie_jar=aiohttp.DummyCookieJar()
            )
        )
        yield TeacherConnection(teacher, url, keys, calls, client)


async def client_attempt(store: Store, replay_id: str) -> tuple[str, int]:
    """Return the attempt that the calls of a replay belong to, and the sequence number of its next call."""
    attempt = await asyncio.wrap_future(store.keys.add_client(f"replay-{replay_id}"))
    return attempt.id, await asyncio.to_thread(store.calls.next_sequence, attempt.id)
