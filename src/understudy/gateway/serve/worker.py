"""One worker process of a gateway: `python -m understudy.gateway.serve.worker`, started by the supervisor."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import signal
import socket
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import uvloop
from msgspec import Struct

from understudy.errors import UnderstudyError
from understudy.gateway.config import GatewayConfig
from understudy.gateway.factory import open_gateway
from understudy.gateway.router import ModelRouter
from understudy.gateway.serve.admin import AdminApp, SingleGateway
from understudy.gateway.serve.forwarding import ForwardingApp
from understudy.gateway.serve.stored_keys import StoredKeys
from understudy.gateway.server.listen import Listener, unix_socket
from understudy.store.store import Store

READY = b"ready\n"
"""What a worker says on its stdout when it takes requests; else, in one line, why it ends."""

GC_THRESHOLDS = (50_000, 20, 20)
"""Requests hold no cycles, and with Python's own thresholds looking for some takes a tenth of the time."""


class WorkerSpec(Struct, frozen=True, kw_only=True):
    """What a worker is told on its stdin, as one JSON line; the rest of stdin stays open as long as it is wanted.

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
        """The socket for orders: what agents send is passed on to the other one, whatever its path."""
        return f"{self.sockets[self.index]}.orders"


async def work(spec: WorkerSpec) -> None:
    """Serve until the process is told to end, or its supervisor is gone. Raises UnderstudyError."""
    async with AsyncExitStack() as stack:
        store = stack.enter_context(Store.open(Path(spec.store)))
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
        admin = AdminApp(SingleGateway(parts.control, parts.metrics), spec.admin_key)
        own = {sockets[spec.index]: gateway, Path(spec.orders): admin}
        listeners = [Listener(app, unix_socket(path), path) for path, app in own.items()]
        listeners += [Listener(forward, socket.socket(fileno=number)) for number in spec.listeners]
        for listener in listeners:
            await listener.start()
            stack.push_async_callback(listener.stop)
        stack.push_async_callback(gateway.stop)  # before the listeners, so that whoever waits is told
        gc.freeze()  # what is there now stays until the end
        os.write(sys.stdout.fileno(), READY)
        await _wait_for_end()


async def _wait_for_end() -> None:
    """Returns at SIGTERM or SIGINT, and when stdin ends because the supervisor did."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    loop.add_reader(sys.stdin.fileno(), lambda: None if os.read(sys.stdin.fileno(), 4096) else ended.set())
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())


def main() -> int:
    """Serve as the line on stdin says; 0 at the end, and 2 when the worker cannot start."""
    gc.set_threshold(*GC_THRESHOLDS)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a connection is a file, on either side
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
