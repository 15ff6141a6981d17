"""Listening sockets (Unix sockets with paths of any length, TCP), and the server on top of them."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn

from understudy.errors import ConfigError
from understudy.gateway.server.connections import BoundedProtocol, ConnectionTable

BACKLOG = 1024
KEEP_ALIVE_S = 3600
"""Longer than any tool runs, because closing a connection just when the agent reuses it costs a retry."""
GRACE_S = 15
"""How many seconds a stopping listener waits for answers in progress. Longer than any gateway drains."""
HEAD_S = 30.0
"""How many seconds the request line and headers of a request may take."""


@contextmanager
def _short(path: Path) -> Generator[str]:
    """Yield a name for a socket that fits into the 108 bytes that the kernel allows, however deep the path is."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def unix_socket(path: Path) -> socket.socket:
    """Return a socket listening at `path`, open to every user; mounts decide who can reach it.

    A socket left by a dead process is replaced. Raises ConfigError if a live one listens there, or the path cannot
    be used.
    """
    try:
        with _short(path) as name:
            _clear(path, name)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listener.bind(name)
                Path(name).chmod(0o666)
                listener.listen(BACKLOG)
            except OSError:
                listener.close()
                raise
    except OSError as error:
        raise ConfigError(
            f"cannot listen on the socket {path}: {error.strerror or error}; choose another path"
        ) from error
    listener.setblocking(False)
    return listener


def _clear(path: Path, name: str) -> None:
    try:
        mode = os.lstat(name).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(
            f"cannot listen on the socket {path}: that file is not a socket; move it away, or choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(name)
        except ConnectionRefusedError:
            Path(name).unlink(missing_ok=True)
            return
    raise ConfigError(f"cannot listen on the socket {path}: another process listens there; choose another path")


def tcp_socket(host: str, port: int) -> tuple[socket.socket, str]:
    """Return a socket listening on `host` (at a free port if `port` is 0) and its URL. Raises ConfigError."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
        # Accepted sockets inherit this option, which asyncio sets only if it knows the protocol. Without it, a
        # response in two writes waits 40 ms for the client's delayed acknowledgement.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        hint = {
            errno.EADDRINUSE: "another process listens there: choose another port",
            errno.EACCES: "choose a port above 1023, or run as a user who may listen there",
        }.get(getattr(error, "errno", None) or 0, "give an address of this machine and a free port")
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; {hint}") from error
    listener.setblocking(False)
    return listener, http_url(host, listener.getsockname()[1])


def http_url(host: str, port: int) -> str:
    """Return the URL of a server."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Generator[None]:
        # Ctrl-C is handled by whoever runs the gateway.
        yield


class Listener:
    """A server on one listening socket, in the event loop that starts it.

    Listeners of one process share a `table`, so that its limits apply to all of them together.
    """

    def __init__(
        self,
        app: Callable[..., Any],
        listener: socket.socket,
        path: Path | None = None,
        *,
        head_s: float = HEAD_S,
        table: ConnectionTable | None = None,
    ) -> None:
        config = uvicorn.Config(
            app,
            loop="none",
            http=partial(BoundedProtocol, table or ConnectionTable(), head_s),  # pyright: ignore[reportArgumentType]
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # invalid requests of agents should not appear as warnings in the operator's log
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
        self._server = _Uvicorn(config)
        self._socket = listener
        self._path = path
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are accepted. The socket is closed if it raises or is cancelled."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]))
        try:
            while not self._server.started:
                if self._task.done():
                    await self._task
                    raise ConfigError("the HTTP server stopped while it was starting; see its log above")
                await asyncio.sleep(0.001)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Return when the last connection is closed. If it is cancelled, it does not wait for that."""
        self._server.should_exit = True
        try:
            if self._task is not None:
                await self._task
        finally:
            for server in getattr(self._server, "servers", ()):  # uvicorn has connections once it got that far
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._socket.close()
            if self._path is not None:
                self._path.unlink(missing_ok=True)
