"""The container engine: found at a Unix socket of this machine, spoken to in threads, its faults in our words."""

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
from understudy.sandbox.process import CommandOutput, has_ended, process_stamp

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
    """The URLs where an engine may answer, in the order to ask: DOCKER_HOST alone when it is set."""
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
    """A connection to the engine at `url`, a Unix socket of this machine."""

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
        """Run a blocking call in a thread. Raises as `doing` does."""

        def work() -> T:
            with engine_errors(what):
                return call(*args, **options)

        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def info(self) -> Mapping[str, Any]:
        """What the engine says of itself. Raises SandboxError."""
        with engine_errors("ask the container engine what it is"):
            return self.api.info()

    def create_container(self, config: Mapping[str, Any]) -> str:
        """Make a container as `isolated` describes it, without ways to get rights; returns its id."""
        if not self._security:
            self._security = security_options(self.api.info(), self.api.version(api_version=False))
        host = {**config["HostConfig"], "SecurityOpt": self._security}
        return self.api.create_container_from_config({**config, "HostConfig": host})["Id"]

    def get(self, path: str, /, *, stream: bool = False, **params: str | bytes) -> Any:
        """The response to a GET request that the library has no method for, or none that streams."""
        response = self.api.get(f"{self.api.base_url}/v{API_VERSION}{path}", params=params, stream=stream)
        self.api._raise_for_status(response)  # makes the library's own errors of it
        return response

    def stat(self, container: str, path: str) -> Mapping[str, Any] | None:
        """What is at a path of a container, final links not followed; None when there is nothing.

        Keys: name, size, mode (Go's bits), linkTarget (where a link leads to in the end).
        """
        url = f"{self.api.base_url}/v{API_VERSION}/containers/{container}/archive"
        response = self.api.head(url, params={"path": os.fsencode(path)})
        if response.status_code in (400, 404):  # 400: it is looked for below a file
            return None
        if response.status_code >= 400:
            raise docker.errors.APIError(f"HTTP status {response.status_code} for {path}", response=response)
        return json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))

    def written(self, container: str) -> int:
        """The bytes that lie in a container's own layer."""
        only = json.dumps({"id": [container]})
        response = self.get("/containers/json", all="1", size="1", filters=only)
        return sum(int(container_info.get("SizeRw") or 0) for container_info in response.json())

    def close(self) -> None:
        """Give connections back; later calls open new ones."""
        self.api.close()


@contextlib.contextmanager
def engine_errors(what: str) -> Generator[None]:
    """Convert the library's errors to SandboxError, "cannot `what`: …"; EngineNotFound passes unchanged."""
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
    return message


def engine_message(error: Exception) -> str:
    """The engine's own message, without what the library adds."""
    message = str(getattr(error, "explanation", None) or error)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        message = str(json.loads(message)["message"])
    return " ".join(message.split())[-1000:]


def find_engine() -> ContainerEngine:
    """The first engine that answers. Raises ConfigError with what to do when none does."""
    refused: list[str] = []
    for url in sockets():
        if not url.startswith("unix://"):
            raise ConfigError(
                f"DOCKER_HOST is {url}, but the container engine must run on this machine; unset "
                f"DOCKER_HOST, or set it to unix:///path/to/its.sock"
            )
        try:
            with socket.socket(socket.AF_UNIX) as trial:  # the library leaves one open that it cannot connect
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
            f"no container engine answers: {'; '.join(refused)}. Start it, for example: systemctl start docker"
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
    """A container for `create_container` and a command that runs as root, without a network or rights but
    `capabilities`.

    `what` is the value of its label. `host` are further settings that the engine takes under HostConfig.
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
            "Dns": [
                "127.0.0.1"
            ],  # nobody answers there: names fail at once, and those of this machine are not shown
            "CapDrop": ["ALL"],
            "CapAdd": list(capabilities),
            **host,
        },
    }


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def owner_labels(what: str) -> dict[str, str]:
    """The labels of something that we make and that is to go when we have ended."""
    return {LABEL: what, OWNER: f"{_boot_id()}/{process_stamp(os.getpid()).replace('-', '/')}"}


def _is_dead(owner: str) -> bool:
    """Whether an owner certainly lives no more: its machine has started again since, or it has ended."""
    boot, _, stamp = owner.partition("/")
    return stamp.count("/") == 2 and (boot != _boot_id() or has_ended(stamp.replace("/", "-")))


def remove_orphans(engine: ContainerEngine) -> int:
    """Remove the containers whose owner is dead; returns how many. Raises SandboxError."""
    with engine_errors("look for containers left behind"):
        containers: list[Mapping[str, Any]] = engine.api.containers(all=True, filters={"label": [LABEL, OWNER]})
    stale = [container["Id"] for container in containers if _is_dead(container["Labels"][OWNER])]
    for container in stale:
        remove_container(engine, container)
    return len(stale)


def start_container(engine: ContainerEngine, container: str) -> None:
    """Start a container, again too, in a network where connections to other machines time out.

    That needs root and the engine's processes on this machine; elsewhere connections fail at once. Raises what the
    engine refuses with.
    """
    engine.api.start(container)
    pid: int = engine.api.inspect_container(container)["State"]["Pid"]
    try:
        # An engine in a virtual machine has other processes under these numbers.
        if pid and container in Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8"):
            drop_packets(f"/proc/{pid}/ns/net")
    except OSError as error:
        _log.info("connections from the sandbox %s fail at once instead of timing out: %s", container[:12], error)


def remove_container(engine: ContainerEngine, container: str) -> None:
    """Kill and remove a container, with what it alone used; one that is gone is fine. Raises SandboxError."""
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
    """As the library's, which leaves a socket open that it cannot connect."""

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
    """Connections that can be used again."""

    def _new_conn(self) -> SocketConnection:
        return SocketConnection(self.base_url, self.socket_path, self.timeout)


class SocketAdapter(_Adapter):
    """As the library's, which has a pool for every URL, so that hardly a connection is used twice."""

    def get_connection(self, url: str, proxies: object = None) -> SocketPool:
        """The one pool."""
        with self.pools.lock:
            pool = self.pools.get("")
            if pool is None:
                pool = self.pools[""] = SocketPool(
                    "http+docker://", self.socket_path, self.timeout, self.max_pool_size
                )
            return pool


_CHUNK = 1 << 18


# The streams of a command in a container: one connection that is HTTP at first and then frames of output. Spoken
# here and not by the library, which would hold a thread for as long as a command runs, and may lose what comes
# together with the head of the response.


class ExecNotStarted(Exception):
    """The engine could not start the command; says why."""


class ExecStream:
    """A command that has been asked to start: `pump` its output until all its pipes are closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def pump(self, output: CommandOutput, stdin: bytes) -> None:
        """Feed the command and take what it writes, to the end. A lost connection is an end too."""
        feeding = asyncio.create_task(self._feed(stdin)) if stdin else None
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                while True:
                    head = await self._reader.readexactly(8)
                    left = int.from_bytes(head[4:], "big")
                    while left:
                        data = await self._reader.read(min(left, _CHUNK))
                        if not data:
                            return
                        output.add(head[0], data)
                        left -= len(data)
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
        """Give the connection back."""
        self._writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


async def start_exec(socket: str, execution: str) -> ExecStream:
    """Start the command that the engine has made ready as `execution`.

    Raises ExecNotStarted when the engine refuses, SandboxError when it does not answer.
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
        raise SandboxError(f"the container engine does not answer at {socket}: {error}") from error
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
            f"the connection to the container engine was lost while a command was starting: {error}"
        ) from error
    except BaseException:
        await attached.close()
        raise
    return attached
