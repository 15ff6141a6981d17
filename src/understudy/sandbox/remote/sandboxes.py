"""Sandboxes that a worker on another machine serves (`worker.py`), however that machine is reached.

Files are sent once and cached there by their content. The sandboxes have no network: their agents' connections to
the gateway's socket come back through the connection to the worker.
"""

from __future__ import annotations

import asyncio
import stat
import tempfile
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, TypeVar

from understudy import __version__
from understudy.errors import ConfigError, SandboxError
from understudy.sandbox.base import (
    Completed,
    HostEnvironment,
    IsolatedSandbox,
    Mount,
    RemoteSandboxes,
    Sandbox,
    SandboxSpec,
    sandbox_labels,
)
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.connection import ANSWER_S, WorkerConnection
from understudy.sandbox.remote.content import PIECE_BYTES, digest_of, pack
from understudy.sandbox.remote.messages import RemoteMount
from understudy.sandbox.time_limit import longest_s

DEADLINE_S = 6 * 3600.0
STARTING = 8
START_S = 600.0
"""How long a machine may take until it is ready: one may have to be started, and to fetch its image, first."""

WORKER_COMMAND = "understudy sandboxes serve"

T = TypeVar("T")


class WorkerSandbox(IsolatedSandbox, Sandbox):
    """An open sandbox on another machine."""

    def __init__(self, spec: SandboxSpec, connection: WorkerConnection, home: str) -> None:
        self._spec = spec
        self._connection = connection
        self._home = home

    @property
    def home(self) -> str:
        """The home directory, on the sandbox's size-limited tmpfs."""
        return self._home

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reveal: bool = False,
    ) -> Completed:
        """See Sandbox."""
        request = messages.RunRequest(
            argv=list(argv),
            timeout_s=timeout_s,
            stdin=stdin,
            env=None if env is None else dict(env),
            cwd=cwd,
            reveal=reveal,
        )
        return await self._connection.ask(request, Completed, within_s=longest_s(timeout_s) + ANSWER_S)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """See Sandbox."""
        return await self._connection.ask(messages.ReadRequest(path, limit), bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        await self._connection.ask(messages.WriteRequest(path, data, mode), type(None))

    async def seal(self, paths: Sequence[str]) -> None:
        """See Sandbox."""
        await self._connection.ask(messages.SealRequest(list(paths)), type(None))

    async def reset(self) -> None:
        """See Sandbox."""
        await self._connection.ask(messages.ResetRequest(), type(None))

    async def close(self) -> None:
        """End the connection, and with it the sandbox."""
        await self._connection.close()


class WorkerSandboxes(RemoteSandboxes):
    """Opens each sandbox through a connection to a worker of its own.

    `address` names the machine as in `--sandbox`. A sandbox ends `deadline_s` seconds after it was opened; at most
    `starting` of them are being opened at the same time. Raises ConfigError for invalid numbers.
    """

    def __init__(self, address: str, *, deadline_s: str | float, starting: str | int) -> None:
        self._deadline_s = positive_seconds(address, "deadline_s", deadline_s)
        try:
            starting_limit = int(starting)
        except ValueError:
            starting_limit = 0
        if starting_limit < 1:
            raise ConfigError(f"--sandbox {address}: got starting={starting}; give a whole number of at least 1")
        self._address = address
        self._hello: messages.HelloReply | None = None
        self._starting = asyncio.Semaphore(starting_limit)
        self._digests: dict[Path, asyncio.Future[str]] = {}

    @abstractmethod
    async def _connect(self, sockets: Sequence[Path] = ()) -> WorkerConnection:
        """Start a worker and connect to it; it can connect to `sockets` of this machine. Raises SandboxError.

        When cancelled, nothing stays behind.
        """

    def problems(self) -> list[str]:
        """Return the reasons why the other machine cannot run local sandboxes, or cannot be asked.

        Raises SandboxError if it cannot be reached, which may be so for a while only.
        """
        try:
            return [f"{self._address}: {problem}" for problem in self._greet().problems]
        except ConfigError as error:
            return [str(error)]

    def warnings(self) -> list[str]:
        """Return the limits that local sandboxes of the other machine cannot enforce."""
        return [f"{self._address}: {warning}" for warning in self._greet().warnings]

    def host_environment(self) -> HostEnvironment | None:
        """Return what the other machine provides for tasks. Raises SandboxError, ConfigError."""
        environment = self._greet().environment
        mounts = tuple(Mount(Path(mount.path), mount.target, remote=True) for mount in environment.mounts)
        return HostEnvironment(mounts, environment.path_prefixes, environment.env)

    def _greet(self) -> messages.HelloReply:
        """Return the worker's description of its machine, asked for once. Raises SandboxError, ConfigError."""
        if self._hello is None:
            # In a thread, because the caller may be inside an event loop.
            with ThreadPoolExecutor(1) as pool:
                hello = messages.HelloRequest(__version__)
                reply: messages.HelloReply = pool.submit(
                    asyncio.run, self._ask(hello, messages.HelloReply)
                ).result()
                self._hello = reply
        return self._hello

    async def _ask(self, request: messages.Request, type_: type[T]) -> T:
        connection = await self._connect()
        try:
            return await connection.ask(request, type_)
        finally:
            await connection.close()

    async def open(self, spec: SandboxSpec) -> WorkerSandbox:
        """Open a sandbox there, after sending the files that it needs. Raises SandboxError."""
        self._check(spec)
        sockets = [mount.source for mount in spec.mounts if _is_socket(mount)]
        async with self._starting:
            connection = await self._connect(sockets)
            try:
                mounts = [await self._remote(mount, sockets) for mount in spec.mounts]
                tree = messages.TREE + await self._digest(spec.tree)
                await self._upload(connection, spec, mounts, tree)
                request = messages.OpenRequest(
                    tree=tree,
                    workdir=spec.workdir,
                    mounts=mounts,
                    env=spec.env,
                    path_prefixes=list(spec.path_prefixes),
                    limits=spec.limits,
                    labels=sandbox_labels(),
                    deadline_s=self._deadline_s,
                )
                reply = await connection.ask(request, messages.OpenReply)
            except BaseException:
                await asyncio.shield(connection.close())
                raise
        return WorkerSandbox(spec, connection, reply.home)

    def _check(self, spec: SandboxSpec) -> None:
        """Raise SandboxError for files missing on this machine; the worker checks the rest of the spec."""
        missing = [mount.source for mount in spec.mounts if not mount.remote and not mount.source.exists()]
        if missing or not spec.tree.is_dir():
            raise SandboxError(
                f"cannot open a sandbox: {(missing or [spec.tree])[0]}, which was prepared on this machine, is "
                "missing or no directory; run the same command again, and if an agent's files are missing, first: "
                "understudy setup --agent NAME"
            )

    async def _remote(self, mount: Mount, sockets: list[Path]) -> RemoteMount:
        if mount.remote:
            return RemoteMount(mount.target, path=str(mount.source), private=mount.private)
        if mount.source in sockets:
            return RemoteMount(mount.target, socket=sockets.index(mount.source), private=mount.private)
        return RemoteMount(mount.target, digest=await self._digest(mount.source), private=mount.private)

    async def _digest(self, path: Path) -> str:
        """Return the digest of a path whose content never changes; computed once."""
        if path not in self._digests:
            self._digests[path] = asyncio.ensure_future(asyncio.to_thread(digest_of, path))
        try:
            return await asyncio.shield(self._digests[path])
        except SandboxError:
            self._digests.pop(path, None)
            raise

    async def _upload(
        self, connection: WorkerConnection, spec: SandboxSpec, mounts: list[RemoteMount], tree: str
    ) -> None:
        """Send the contents that the other machine lacks."""
        sources = {
            mount.digest: local.source for mount, local in zip(mounts, spec.mounts, strict=True) if mount.digest
        }
        sources[tree] = spec.tree
        missing = await connection.ask(messages.MissingRequest(list(sources)), list[str])
        for digest in missing:
            with tempfile.TemporaryFile() as archive:
                await asyncio.to_thread(pack, sources[digest], archive)
                await _send(connection, digest, archive)


async def _send(connection: WorkerConnection, digest: str, archive: IO[bytes]) -> None:
    size = archive.tell()
    archive.seek(0)
    while True:
        piece = archive.read(PIECE_BYTES)
        is_last = archive.tell() == size
        await connection.ask(messages.UploadRequest(digest, piece, is_last), type(None))
        if is_last:
            return


def positive_seconds(address: str, option: str, value: str | float) -> float:
    """Return the value of an option of `--sandbox address` that is a time. Raises ConfigError."""
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"--sandbox {address}: got {option}={value}; give a number of seconds above 0")
    return seconds


def _is_socket(mount: Mount) -> bool:
    return not mount.remote and stat.S_ISSOCK(mount.source.stat().st_mode)
