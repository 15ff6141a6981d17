"""A worker process of a gateway: `python -m understudy.gateway.serve.worker`, started by the supervisor.

All calls of an attempt belong to one worker, which has its session. Other workers forward them.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop
from msgspec import Struct

from understudy.errors import GatewayError, UnderstudyError
from understudy.gateway.config import GatewayConfig
from understudy.gateway.errors import fault_of
from understudy.gateway.factory import open_gateway
from understudy.gateway.router import ModelRouter
from understudy.gateway.serve.admin import AdminApp, SingleGateway
from understudy.gateway.serve.stored_keys import StoredKeys
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.connections import ConnectionTable
from understudy.gateway.server.http import ClientGone, HttpRequest, Receive, Send
from understudy.gateway.server.listen import Listener, unix_socket
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.util.garbage import collect_garbage_rarely
from understudy.wire.errors import Fault

_HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"host"})


def owner(attempt_id: str, workers: int) -> int:
    """Return the index of the worker that an attempt's calls belong to. Only this worker has the session."""
    return int.from_bytes(hashlib.sha256(attempt_id.encode()).digest()[:8]) % workers


class ForwardingApp:
    """An ASGI application in front of a gateway: it answers this worker's requests, and forwards those of other
    workers.

    `sockets` are those of all workers in order; requests arriving there are not forwarded again.
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
                request.authenticate()
                return await self._forward(request, self._client(index))
        except ClientGone:
            return
        except GatewayError as error:
            return await request.send_fault(self._gateway.dialect_of(request), fault_of(error))
        await self._gateway(scope, receive, send)

    async def _owner(self, key: str) -> int:
        """Return the worker that a key's calls belong to; this worker for an invalid key. Raises GatewayError."""
        attempt = await self._keys.attempt(key) if key and len(self._sockets) > 1 else None
        return self._index if attempt is None else owner(attempt, len(self._sockets))

    async def close(self) -> None:
        """Close the connections to the other workers."""
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
                work.cancel()  # the client has left, so cancel the request at the worker that answers it
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


READY = b"ready\n"
"""A worker writes this to stdout once it accepts requests, or else the error in one line."""


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """The settings of a worker, sent to its stdin as one JSON line. It stops when its stdin is closed.

    `store` is a directory or a URL; it is not on the command line, so its password is not visible there.
    `listeners` are inherited descriptors of listening sockets; `sockets` are the workers' own, by index.
    """

    config: GatewayConfig
    store: str
    index: int
    sockets: list[str]
    listeners: list[int]
    admin_key: str
    paused: bool = False
    version: str | None = None

    @property
    def orders(self) -> str:
        """The socket for admin requests.

        Agents' requests are forwarded to the other socket, whatever their path.
        """
        return f"{self.sockets[self.index]}.orders"


async def work(spec: WorkerSpec) -> None:
    """Serve until SIGTERM or SIGINT, or until the supervisor has ended. Raises UnderstudyError."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(Store.open(parse_location(spec.store)))
        config = spec.config

        def keys(models: ModelRouter) -> StoredKeys:
            return StoredKeys(store, models, config.sampling.training.as_dict(), config.budget)

        parts = await stack.enter_async_context(open_gateway(config, store.calls, keys, version=spec.version))
        if spec.paused:
            parts.control.pause()
        gateway = parts.gateway
        sockets = [Path(path) for path in spec.sockets]
        forward = ForwardingApp(gateway, parts.keys, spec.index, sockets)
        stack.push_async_callback(forward.close)
        admin = AdminApp(SingleGateway(parts.control, parts.metrics, gateway.running_calls), spec.admin_key)
        apps = {sockets[spec.index]: gateway, Path(spec.orders): admin}
        table = ConnectionTable()
        listeners = [Listener(app, unix_socket(path), path, table=table) for path, app in apps.items()]
        listeners += [Listener(forward, socket.socket(fileno=number), table=table) for number in spec.listeners]
        for listener in listeners:
            await listener.start()
            stack.push_async_callback(listener.stop)
        # stored before the listeners start, so that a waiting client sees the current state
        stack.push_async_callback(gateway.stop)
        gc.freeze()  # what is there now stays until the end
        os.write(sys.stdout.fileno(), READY)
        await _wait_for_end()


async def _wait_for_end() -> None:
    """Return at SIGTERM or SIGINT, or when stdin ends because the supervisor did."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else ended.set())
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())


def main() -> int:
    """Serve with the settings on stdin. Returns 0 at the end, and 2 if the worker cannot start."""
    collect_garbage_rarely()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # each connection takes a file descriptor, on either side
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(sys.stdin.fileno(), 65536) or b"\n"
    try:
        spec = msgspec.json.decode(line, type=WorkerSpec)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work(spec))
    except UnderstudyError as error:
        os.write(sys.stdout.fileno(), f"{error.boundary} error: {' '.join(str(error).split())}\n".encode()[:4096])
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
