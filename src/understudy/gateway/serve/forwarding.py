"""Forwards requests between workers: all calls of an attempt belong to one worker, which has its session."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from understudy.errors import GatewayError
from understudy.gateway.errors import fault_of
from understudy.gateway.serve.stored_keys import StoredKeys
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import ClientGone, HttpRequest, Receive, Send
from understudy.wire.errors import Fault

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host"})


def owner(attempt_id: str, workers: int) -> int:
    """The worker that an attempt's calls belong to: it alone holds the session, so nothing is kept twice."""
    return int.from_bytes(hashlib.sha256(attempt_id.encode()).digest()[:8]) % workers


class ForwardingApp:
    """An ASGI application in front of a gateway: answers what is this worker's, passes on what is another's.

    `sockets` are those of all workers, in their order, which take requests without passing them on again.
    """

    def __init__(self, gateway: Gateway, keys: StoredKeys, index: int, sockets: Sequence[Path]) -> None:
        self._gateway = gateway
        self._keys = keys
        self._index = index
        self._sockets = sockets
        self._clients: dict[int, aiohttp.ClientSession] = {}

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive, send)
        try:
            index = await self._owner(request.api_key())
            if index != self._index:
                return await self._forward(request, self._client(index))
        except ClientGone:
            return
        except GatewayError as error:
            return await request.send_fault(self._gateway.dialect_of(request), fault_of(error))
        await self._gateway(scope, receive, send)

    async def _owner(self, key: str) -> int:
        """The worker that a key's calls belong to; this one for an invalid key. Raises GatewayError."""
        attempt = await self._keys.attempt(key) if key and len(self._sockets) > 1 else None
        return self._index if attempt is None else owner(attempt, len(self._sockets))

    async def close(self) -> None:
        """Drop the connections to the other workers."""
        for client in self._clients.values():
            await client.close()

    def _client(self, index: int) -> aiohttp.ClientSession:
        client = self._clients.get(index)
        if client is None:
            client = self._clients[index] = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(str(self._sockets[index]), limit=0),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return client

    async def _forward(self, request: HttpRequest, client: aiohttp.ClientSession) -> None:
        read = asyncio.Event()

        async def body() -> AsyncGenerator[bytes]:
            async for chunk in request.body_chunks():
                yield chunk
            read.set()

        async def gone() -> None:
            await read.wait()
            await request.wait_for_disconnect()

        work = asyncio.ensure_future(self._exchange(request, client, body()))
        watch = asyncio.ensure_future(gone())
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()  # the client left: so does the request at the worker that answers it
            await asyncio.wait({work})
            if not work.cancelled():
                work.result()
        finally:
            watch.cancel()

    async def _exchange(
        self, request: HttpRequest, client: aiohttp.ClientSession, body: AsyncGenerator[bytes]
    ) -> None:
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in request.headers.items()
            if name not in _HOP_BY_HOP
        ]
        has_body = request.method not in ("GET", "HEAD")
        try:
            async with client.request(
                request.method,
                f"http://worker{request.target}",
                headers=headers,
                data=body if has_body else None,
                allow_redirects=False,
            ) as response:
                headers_out = [pair for pair in response.raw_headers if pair[0].lower() not in _HOP_BY_HOP]
                await request.start(response.status, [(name.lower(), value) for name, value in headers_out])
                async for chunk in response.content.iter_any():
                    await request.write(chunk)
                await request.write(b"", last=True)
        except (aiohttp.ClientError, OSError):
            fault = Fault(
                kind="overloaded", message="overloaded: the worker that has this attempt is restarting; retry"
            )
            await request.send_fault(self._gateway.dialect_of(request), fault)
