"""The container engine: finds its Unix socket on this machine, calls it in threads, and translates its errors."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import docker
import docker.errors
import requests
import urllib3.exceptions
from docker.transport import unixconn

from understudy.errors import ConfigError, SandboxError
from understudy.sandbox.docker.seccomp import security_options
from understudy.sandbox.network import drop_packets
from understudy.sandbox.process import CommandOutput, has_ended, own_stamp

T = TypeVar("T")

API_VERSION = "1.41"
"""That of Docker 20.10; later engines and Podman 4 speak it too."""

LABEL = "understudy.sandbox"
OWNER = "understudy.owner"
"""Labels of all that we make: what it is, and the process that made it."""

CALL_TIMEOUT_S = 120
_PING_TIMEOUT_S = 10
_THREADS = 16
_FULL = "no space left on device"

_log = logging.getLogger("understudy.sandbox.docker")

EngineNotFound = docker.errors.NotFound
"""What a call raises when the container, image or path is not there."""

EngineRefused = docker.errors.APIError
"""What a call raises when the engine says no."""


def sockets() -> list[str]:
    """Return the URLs where an engine may listen, in the order to try them: only DOCKER_HOST if that is set."""
    if configured := os.environ.get("DOCKER_HOST"):
        return [configured]
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    places = (
        "/var/run/docker.sock",
        f"{runtime}/docker.sock",
        f"{runtime}/podman/podman.sock",
        "/run/podman/podman.sock",
    )
    return [f"unix://{path}" for path in places if Path(path).is_socket()]


class ContainerEngine:
    """A client of the engine at `url`, a Unix socket of this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.socket = url.removeprefix("unix://")
        self.api: Any = docker.APIClient(base_url=url, version=API_VERSION, timeout=CALL_TIMEOUT_S)
        adapter = SocketAdapter(f"http+unix://{self.socket}", CALL_TIMEOUT_S)
        self.api.mount("http+docker://", adapter)
        self.api._custom_adapter = adapter
        self._pool = ThreadPoolExecutor(_THREADS, "docker")
        self._security: list[str] = []

    async def do(self, what: str, call: Callable[..., T], *args: Any, **options: Any) -> T:
        """Run a blocking call in a thread. Errors are converted by `engine_errors`."""

        def work() -> T:
            with engine_errors(what):
                return call(*args, **options)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def info(self) -> Mapping[str, Any]:
        """Return the engine's description of itself. Raises SandboxError."""
        with engine_errors("ask the container engine what it is"):
            return self.api.info()

    def create_container(self, config: Mapping[str, Any]) -> str:
        """Create a container from a config of `isolated`, with the security options that prevent gaining
        privileges; return its id.
        """
        if not self._security:
            self._security = security_options(self.api.info(), self.api.version(api_version=False))
        host = {**config["HostConfig"], "SecurityOpt": self._security}
        return self.api.create_container_from_config({**config, "HostConfig": host})["Id"]

    def get(self, path: str, /, *, stream: bool = False, **params: str | bytes) -> Any:
        """Return the response to a GET request that the library has no method for, or only one that does not
        stream.
        """
        response = self.api.get(f"{self.api.base_url}/v{API_VERSION}{path}", params=params, stream=stream)
        self.api._raise_for_status(response)  # raises the library's own errors for error statuses
        return response

    def stat(self, container: str, path: str) -> Mapping[str, Any] | None:
        """Return what is at a path of a container, without following a final link; None if there is nothing.

        Keys: name, size, mode (Go's bits), linkTarget (where a link finally leads to).
        """
        url = f"{self.api.base_url}/v{API_VERSION}/containers/{container}/archive"
        response = self.api.head(url, params={"path": os.fsencode(path)})
        if response.status_code in (400, 404):  # 400 means that a part of the path above is a file
            return None
        if response.status_code >= 400:
            text = (
                f"the container engine answered a query about {path} with HTTP status {response.status_code}, "
                "expected 200, 400 or 404"
            )
            # The library prints its own text in place of the message, but keeps the explanation.
            raise docker.errors.APIError(text, response=response, explanation=text)
        return json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))

    def written(self, container: str) -> int:
        """Return the number of bytes in a container's own layer."""
        only = json.dumps({"id": [container]})
        response = self.get("/containers/json", all="1", size="1", filters=only)
        return sum(int(container_info.get("SizeRw") or 0) for container_info in response.json())

    def close(self) -> None:
        """Close the connections; later calls open new ones."""
        self.api.close()


@contextlib.contextmanager
def engine_errors(what: str) -> Generator[None]:
    """Convert the library's errors to SandboxError, "cannot `what`: …". EngineNotFound passes unchanged."""
    try:
        yield
    except (EngineNotFound, FileNotFoundError):
        raise
    except (
        docker.errors.DockerException,
        requests.RequestException,
        urllib3.exceptions.HTTPError,
        OSError,
    ) as error:
        raise SandboxError(f"cannot {what}: {_describe(error)}") from error


def _describe(error: Exception) -> str:
    message = engine_message(error)
    if _FULL in message.lower():
        return f"the container engine's disk is full ({message}); make room there, as: docker system prune"
    if isinstance(error, requests.ConnectionError | urllib3.exceptions.ProtocolError | ConnectionError):
        return f"the container engine does not answer ({message}); start it, as: systemctl start docker"
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return f"the container engine timed out ({message}); retry when the machine is less busy"
    return f"{message}; look in the container engine's log, for example with: journalctl --unit docker"


def engine_message(error: Exception) -> str:
    """Return the engine's own message, without the text that the library adds."""
    message = str(getattr(error, "explanation", None) or error)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = str(json.loads(message)["message"])
    return " ".join(message.split())[-1000:]


def find_engine() -> ContainerEngine:
    """Return a client of the first engine that responds. Raises ConfigError, with what to do, if none does."""
    refused: list[str] = []
    for url in sockets():
        if not url.startswith("unix://"):
            raise ConfigError(
                f"DOCKER_HOST is {url}, but the container engine must run on this machine; unset "
                f"DOCKER_HOST, or set it to unix:///path/to/its.sock"
            )
        try:
            # connected here first, because the library leaks its socket when the connection fails
            with socket.socket(socket.AF_UNIX) as trial:
                trial.settimeout(_PING_TIMEOUT_S)
                trial.connect(url.removeprefix("unix://"))
            with contextlib.closing(
                docker.APIClient(base_url=url, version=API_VERSION, timeout=_PING_TIMEOUT_S)
            ) as client:
                client.ping()
            return ContainerEngine(url)
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            hint = "; add yourself to the group docker, or use sudo" if "Permission denied" in str(error) else ""
            refused.append(f"{url}: {engine_message(error)}{hint}")
    if refused:
        raise ConfigError(
            f"no container engine responds: {'; '.join(refused)}; start one, for example: systemctl start docker"
        )
    raise ConfigError(
        "no container engine found: install Docker (Debian: apt-get install docker.io) or Podman "
        "(apt-get install podman; systemctl --user start podman.socket), or set DOCKER_HOST to its socket"
    )


def isolated(
    image: str,
    command: Sequence[str],
    args: Sequence[str],
    what: str,
    *,
    capabilities: Sequence[str] = (),
    **host: Any,
) -> dict[str, Any]:
    """Return the config of a container that runs a command as root, without a network, and with only
    `capabilities`.

    `what` is the value of its label. `host` are further settings under HostConfig.
    """
    return {
        "Image": image,
        "Entrypoint": list(command),
        "Cmd": list(args),
        "User": "0:0",
        "WorkingDir": "/",
        "Labels": owner_labels(what),
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "NetworkMode": "none",
            # Nothing listens there, so name lookups fail at once, and this machine's name servers are not shown.
            "Dns": ["127.0.0.1"],
            "CapDrop": ["ALL"],
            "CapAdd": list(capabilities),
            **host,
        },
    }


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def owner_labels(what: str) -> dict[str, str]:
    """Return labels for a container that belongs to this process and must be removed when it has ended."""
    return {LABEL: what, OWNER: f"{_boot_id()}/{own_stamp().replace('-', '/')}"}


def _is_dead(owner: str) -> bool:
    """Return whether an owner has certainly ended: its process is gone, or the machine has rebooted since."""
    boot, _, stamp = owner.partition("/")
    return stamp.count("/") == 2 and (boot != _boot_id() or has_ended(stamp.replace("/", "-")))


def remove_orphans(engine: ContainerEngine) -> int:
    """Remove the containers whose owner has ended; return how many. Raises SandboxError."""
    with engine_errors("look for containers left behind"):
        containers: list[Mapping[str, Any]] = engine.api.containers(all=True, filters={"label": [LABEL, OWNER]})
    stale = [container["Id"] for container in containers if _is_dead(container["Labels"][OWNER])]
    for container in stale:
        remove_container(engine, container)
    return len(stale)


def start_container(engine: ContainerEngine, container: str) -> None:
    """Start or restart a container, in a network where connections to other machines time out.

    This needs root, and the engine's processes on this machine; otherwise such connections fail at once. Raises
    EngineNotFound or EngineRefused.
    """
    engine.api.start(container)
    pid: int = engine.api.inspect_container(container)["State"]["Pid"]
    try:
        if is_process_of(container, pid):
            drop_packets(f"/proc/{pid}/ns/net")
    except OSError as error:
        _log.info("connections from the sandbox %s fail at once instead of timing out: %s", container[:12], error)


def is_process_of(container: str, pid: int) -> bool:
    """Return whether a process of this machine is a container's.

    An engine in a virtual machine reports ids of other processes; 0 stands for none. Raises OSError
    when there is no such process.
    """
    return bool(pid) and container in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8")


def remove_container(engine: ContainerEngine, container: str) -> None:
    """Kill and remove a container with its anonymous volumes; one that is gone is no error. Raises
    SandboxError.
    """
    with engine_errors(f"remove the container {container[:12]}"):
        try:
            engine.api.remove_container(container, force=True, v=True)
        except EngineNotFound:
            return
        except EngineRefused as error:
            if "already in progress" not in str(error):
                raise


_Connection: Any = unixconn.UnixHTTPConnection
_Pool: Any = unixconn.UnixHTTPConnectionPool
_Adapter: Any = unixconn.UnixHTTPAdapter


class SocketConnection(_Connection):
    """The library's connection, but it closes its socket when connecting fails."""

    def connect(self) -> None:
        """Connect, or raise OSError."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self.unix_socket)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


class SocketPool(_Pool):
    """A connection pool that uses these connections."""

    def _new_conn(self) -> SocketConnection:
        return SocketConnection(self.base_url, self.socket_path, self.timeout)


class SocketAdapter(_Adapter):
    """The library's adapter, but with a single pool: the library has one per URL, and so hardly ever reuses a
    connection.
    """

    def get_connection(self, url: str, proxies: object = None) -> SocketPool:
        """Return the single pool."""
        with self.pools.lock:
            pool = self.pools.get("")
            if pool is None:
                pool = self.pools[""] = SocketPool(
                    "http+docker://", self.socket_path, self.timeout, self.max_pool_size
                )
            return pool


_CHUNK = 1 << 18


# The streams of a command in a container: a connection that begins as HTTP and then carries frames of output.
# Implemented here, because the library would block a thread while a command runs, and may lose bytes that arrive
# together with the response's head.


class ExecNotStarted(Exception):
    """The engine could not start the command; the message is its reason."""


class ExecStream:
    """A started command: `pump` transfers its input and output until all its pipes are closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def pump(self, output: CommandOutput, stdin: bytes) -> None:
        """Send stdin to the command and collect its output to the end. A lost connection counts as the end."""
        feeding = asyncio.create_task(self._feed(stdin)) if stdin else None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await self._reader.readexactly(8)
                    frame_bytes_left = int.from_bytes(head[4:], "big")
                    while frame_bytes_left:
                        data = await self._reader.read(min(frame_bytes_left, _CHUNK))
                        if not data:
                            return
                        output.add(head[0], data)
                        frame_bytes_left -= len(data)
        finally:
            if feeding is not None:
                feeding.cancel()
                await asyncio.wait([feeding])

    async def _feed(self, stdin: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self._writer.write(stdin)
            await self._writer.drain()
            self._writer.write_eof()

    async def close(self) -> None:
        """Close the connection."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def start_exec(socket: str, execution: str) -> ExecStream:
    """Start the command that the engine has registered as `execution`.

    Raises ExecNotStarted when the engine refuses, SandboxError when it does not respond.
    """
    body = json.dumps({"Detach": False, "Tty": False}).encode()
    request = (
        f"POST /v{API_VERSION}/exec/{execution}/start HTTP/1.1\r\nHost: docker\r\n"
        "Content-Type: application/json\r\n"
        f"Connection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_unix_connection(socket, limit=_CHUNK)
    except OSError as error:
        raise SandboxError(
            f"the container engine does not respond at {socket}: {error}; start it, for example: "
            "systemctl start docker"
        ) from error
    attached = ExecStream(reader, writer)
    try:
        writer.write(request.encode() + body)
        head = await reader.readuntil(b"\r\n\r\n")
        status = int(head.split(None, 2)[1])
        if status not in (101, 200):
            reply = await reader.read(1 << 16)
            raise ExecNotStarted(reply.decode(errors="replace").strip())
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError, IndexError) as error:
        await attached.close()
        raise SandboxError(
            f"the container engine at {socket} closed the connection, or sent an invalid response, while a "
            f"command was starting: {error}; check it with `docker info`, then run the same command again"
        ) from error
    except BaseException:
        await attached.close()
        raise
    return attached
