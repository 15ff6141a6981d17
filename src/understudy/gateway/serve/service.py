"""A gateway from its sockets to its last worker: what `understudy gateway serve` does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.gateway.config import GatewayConfig
from understudy.gateway.serve.admin import AdminApp
from understudy.gateway.serve.admin_client import GatewayAddress, admin_key, announce
from understudy.gateway.serve.stored_keys import issue
from understudy.gateway.serve.supervisor import Supervisor, supervise
from understudy.gateway.server.listen import Listener, tcp_socket, unix_socket
from understudy.store.store import Store
from understudy.util.locks import locked

FIRST_CLIENT = "default"
_LEFT_OVER_S = 30.0
"""How long the workers of a gateway that was killed may take for what they have begun."""


class ServicePaths(Struct, frozen=True):
    """Where a gateway keeps its calls and where it listens. Ports may be 0, for a free one."""

    directory: Path
    host: str
    port: int
    socket: Path | None
    admin_port: int


@asynccontextmanager
async def service(
    config: GatewayConfig, places: ServicePaths, *, workers: int
) -> AsyncGenerator[tuple[Supervisor, GatewayAddress, str | None]]:
    """A gateway that answers, its address, and the first key of a directory that had none.

    It ends with the context. Raises ConfigError, StoreError or GatewayError.
    """
    directory = places.directory
    alone = locked(
        directory / ".gateway.lock",
        busy=f"another gateway is using {directory}; give another --dir",
        remedy="give a --dir that you can write",
    )
    with alone:
        with Store.open(directory) as store:  # made once, not by all workers at the same time
            first_time = not store.keys.clients()
        async with AsyncExitStack() as stack:
            lock = await _alone_at_work(stack, directory)
            listener, url = tcp_socket(places.host, places.port)
            listeners = [stack.enter_context(listener)]
            if places.socket is not None:
                listeners.append(stack.enter_context(unix_socket(places.socket)))
                stack.callback(places.socket.unlink, missing_ok=True)
            supervisor = await stack.enter_async_context(
                supervise(config, directory, listeners, workers=workers, lock=lock)
            )
            operator = AdminApp(supervisor, admin_key(directory))
            admin_socket, admin_url = tcp_socket("127.0.0.1", places.admin_port)
            admin = Listener(operator, admin_socket)
            await admin.start()
            stack.push_async_callback(admin.stop)
            address = GatewayAddress(url, admin_url, os.getpid())
            with Store.open(directory) as store:
                # Now only: it is shown once, and not at all by a gateway that could not start.
                key = await issue(store, FIRST_CLIENT) if first_time else None
            announce(directory, address)
            yield supervisor, address, key


async def _alone_at_work(stack: AsyncExitStack, directory: Path) -> int:
    """The lock that workers hold beside us. Those that a killed gateway left go on until what they answer is kept:
    two that number the calls of one attempt would lose some.
    """
    deadline = time.monotonic() + _LEFT_OVER_S
    while True:
        try:
            busy = f"workers of a gateway that was killed are still using {directory}; end them"
            return stack.enter_context(locked(directory / ".workers.lock", busy=busy))
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def serve_until_signal(
    config: GatewayConfig,
    places: ServicePaths,
    *,
    workers: int,
    started: Callable[[GatewayAddress, str | None], None],
) -> None:
    """Serve until SIGINT or SIGTERM; `started` is told the address and the first key. Raises as `service` does."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    async with service(config, places, workers=workers) as (supervisor, address, key):
        started(address, key)
        watch = asyncio.ensure_future(supervisor.watch())
        end = asyncio.ensure_future(signalled.wait())
        await asyncio.wait({watch, end}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if watch.done():
            watch.result()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
