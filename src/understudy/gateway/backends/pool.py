"""Several endpoints of one model: a conversation stays on one endpoint, and endpoints that are down are
skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Generic, TypeVar

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.base import (
    Backend,
    NativeRequest,
    NativeResponse,
    Relay,
    RestorableBackend,
    UpstreamServer,
)
from understudy.gateway.backends.http import NotServedError
from understudy.wire.model import ChatRequest, ConversationHandle, Emit, Generation

FIRST_PROBE_S, LAST_PROBE_S = 1.0, 30.0
"""Seconds before a dead endpoint is probed: at first, and at most. The pause doubles with each probe."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


_S = TypeVar("_S", bound=UpstreamServer)


def _was_not_served(error: BackendError) -> bool:
    """Return whether the request may be sent to another endpoint, because the server did not accept it.

    A relay wraps that error.
    """
    return isinstance(error, NotServedError) or isinstance(error.__cause__, NotServedError)


class _Endpoint(Generic[_S]):
    """One server, and the task that probes it while it is down."""

    def __init__(self, server: _S, number: int) -> None:
        self.server = server
        self.number = number
        self._probe: asyncio.Task[None] | None = None

    @property
    def is_down(self) -> bool:
        """Whether the endpoint is skipped, because it did not answer."""
        return self._probe is not None and not self._probe.done()

    def mark_down(self) -> None:
        """Skip the endpoint until it answers again."""
        if not self.is_down:
            self._probe = asyncio.get_running_loop().create_task(self._wait_until_up())

    def weight(self, key: bytes) -> bytes:
        """Return the weight for rendezvous hashing: of the endpoints that are up, the one with the lowest
        weight serves the key.
        """
        return hashlib.blake2b(b"%d %b" % (self.number, key), digest_size=8).digest()

    async def close(self) -> None:
        try:
            if self._probe is not None:
                self._probe.cancel()
                await asyncio.wait({self._probe})
        finally:
            await self.server.close()

    async def _wait_until_up(self) -> None:
        """Return once the endpoint answers. The probe is a request that every server answers at no cost."""
        pause = FIRST_PROBE_S
        while True:
            await asyncio.sleep(pause)
            try:
                await self.server.models()
            except BackendError as error:
                if not _was_not_served(error):
                    return  # An error response shows that the server is up.
                pause = min(2 * pause, LAST_PROBE_S)
            else:
                return


class _EndpointPool(Generic[_S]):
    """Interchangeable servers. A conversation stays with one of them; if that one is down, another one answers."""

    def __init__(self, servers: Sequence[_S]) -> None:
        if not servers:
            raise ConfigError(
                "endpoints: expected at least one address, got none; add one, such as http://HOST:PORT/v1"
            )
        self.name, self.model, self.price = servers[0].name, servers[0].model, servers[0].price
        self._endpoints = [_Endpoint(server, index) for index, server in enumerate(servers)]
        self._anonymous = itertools.count()

    async def _ask(self, conversation: ConversationHandle | None, act: Callable[[_S], Awaitable[_T]]) -> _T:
        """Return an endpoint's answer: of the conversation's own endpoint or, if that is down, of the next best.

        Once an endpoint has accepted a request, no other is tried. Raises the error of the last one tried.
        """
        key = conversation.key if conversation else f"nobody {next(self._anonymous)}"
        *earlier_endpoints, last_endpoint = self._ranked(key)
        for endpoint in earlier_endpoints:
            try:
                return await act(endpoint.server)
            except BackendError as error:
                if not _was_not_served(error):
                    raise
                _log.warning(
                    "endpoint %d does not respond and is skipped until it does: %s", endpoint.number, error
                )
                endpoint.mark_down()
        return await act(last_endpoint.server)

    def _ranked(self, key: str) -> list[_Endpoint[_S]]:
        """Return all endpoints, the best first. Dead ones come last, in case no other answers."""
        if len(self._endpoints) == 1:
            return self._endpoints
        data = key.encode("utf-8", "surrogatepass")
        return sorted(self._endpoints, key=lambda endpoint: (endpoint.is_down, endpoint.weight(data)))

    async def models(self) -> list[str]:
        """Return the names of the models that an endpoint offers. Raises BackendError."""
        return await self._ask(None, lambda server: server.models())

    async def close(self) -> None:
        """Close the connections of all endpoints. May be called twice."""
        async with AsyncExitStack() as stack:  # all are closed, even if this is cancelled
            for endpoint in self._endpoints:
                stack.push_async_callback(endpoint.close)


class BackendPool(_EndpointPool[Backend]):
    """A backend (see Backend) made of several that serve one model. It closes them."""

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """See Backend."""
        return await self._ask(request.conversation, lambda server: server.generate(request, emit))

    async def count_tokens(self, request: ChatRequest) -> int:
        """See Backend."""
        return await self._ask(request.conversation, lambda server: server.count_tokens(request))


class RememberingPool(BackendPool):
    """A pool of backends that share their memory of conversations. `memory`, one of them, restores calls."""

    def __init__(self, backends: Sequence[Backend], memory: RestorableBackend) -> None:
        super().__init__(backends)
        self._memory = memory

    def restore(self, request: ChatRequest, generation: Generation) -> None:
        """See RestorableBackend."""
        self._memory.restore(request, generation)


class RelayPool(_EndpointPool[Relay]):
    """A relay (see Relay) made of several to one provider. It closes them."""

    def __init__(self, relays: Sequence[Relay]) -> None:
        super().__init__(relays)
        self.dialect = relays[0].dialect

    async def relay(self, request: NativeRequest, emit: Callable[[bytes], None] | None = None) -> NativeResponse:
        """See Relay."""
        return await self._ask(request.conversation, lambda server: server.relay(request, emit))

    async def relay_count(self, request: NativeRequest) -> bytes:
        """See Relay."""
        return await self._ask(request.conversation, lambda server: server.relay_count(request))
