"""The `ssh` kind of sandbox: a local sandbox on another machine that has the same release of Understudy.

    understudy run … --sandbox 'ssh:user@machine'

For each sandbox, ssh starts a worker (`worker.py`) there, which ends with its connection. Files are sent once and
cached there by their content. The sandbox has no network: its agent's connections to the gateway's socket come
back through the same ssh connection.
"""

from __future__ import annotations

import asyncio
import re
import stat
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, ClassVar

from understudy import __version__
from understudy.errors import ConfigError, SandboxError
from understudy.sandbox.base import (
    Completed,
    HostEnvironment,
    IsolatedSandbox,
    Mount,
    OpenSandbox,
    RemoteSandboxes,
    Sandbox,
    SandboxSpec,
    sandbox_labels,
)
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.connection import ANSWER_S, WorkerConnection, connect
from understudy.sandbox.remote.content import PIECE_BYTES, digest_of, pack
from understudy.sandbox.remote.messages import RemoteMount

DEADLINE_S = 6 * 3600.0
STARTING = 8

_SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=20"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4", "-o", "ClearAllForwardings=yes"),
    *("-o", "ForwardAgent=no", "-o", "PermitLocalCommand=no", "-o", "ControlMaster=no"),
)
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@:\[\]-]*")


class SshSandbox(IsolatedSandbox, Sandbox):
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
        return await self._connection.ask(request, Completed, within_s=timeout_s + ANSWER_S)

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


class SshSandboxes(RemoteSandboxes):
    """Opens sandboxes on the machine `target`, a destination for ssh.

    `config` is a file for `ssh -F`; `command` starts the worker there. A sandbox ends `deadline_s` seconds after
    it was opened; at most `starting` of them are being opened at the same time.
    """

    name: ClassVar[str] = "ssh"

    def __init__(
        self,
        target: str = "",
        *,
        config: str = "",
        command: str = "understudy sandboxes serve",
        deadline_s: str | float = DEADLINE_S,
        starting: str | int = STARTING,
    ) -> None:
        if _HOST.fullmatch(target) is None:
            raise ConfigError(
                f"--sandbox ssh:{target}: invalid name; expected a machine in ssh's form, such as ssh:user@machine"
            )
        try:
            self._deadline_s, self._starting_limit = float(deadline_s), int(starting)
        except ValueError as error:
            raise ConfigError(
                f"--sandbox ssh:{target}: deadline_s and starting must be numbers: {error}; correct them"
            ) from error
        if self._deadline_s <= 0 or self._starting_limit < 1:
            raise ConfigError(
                f"--sandbox ssh:{target}: got deadline_s={self._deadline_s:g} and "
                f"starting={self._starting_limit}; expected deadline_s above 0 and starting of at least 1; "
                "correct them"
            )
        options = ["-F", config] if config else []
        self._argv = [*_SSH, *options, "--", target, command]
        self._name = f"ssh {target}"
        self._hello: messages.HelloReply | None = None
        self._starting = asyncio.Semaphore(self._starting_limit)
        self._digests: dict[Path, asyncio.Future[str]] = {}

    def problems(self) -> list[str]:
        """Return the reasons why the other machine cannot be reached, or cannot run local sandboxes."""
        try:
            return self._greet().problems
        except (SandboxError, ConfigError) as error:
            return [f"{error}; `ssh` must connect without asking anything, so the host's key must be known"]

    def warnings(self) -> list[str]:
        """Return the limits that local sandboxes of the other machine cannot enforce."""
        return self._greet().warnings

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

    async def _ask(self, request: messages.Request, type_: Any) -> Any:
        connection = await connect(self._argv, self._name)
        try:
            return await connection.ask(request, type_)
        finally:
            await connection.close()

    async def sandboxes(self) -> list[OpenSandbox]:
        """Return the sandboxes that are open on the other machine, the oldest first. Raises SandboxError."""
        return await self._ask(messages.ListRequest(), list[OpenSandbox])

    async def reap(self, ids: Sequence[str]) -> list[str]:
        """End these sandboxes, and those past their deadline; return the ids of the ended ones. Raises
        SandboxError.
        """
        return await self._ask(messages.ReapRequest(list(ids)), list[str])

    async def open(self, spec: SandboxSpec) -> SshSandbox:
        """Open a sandbox there, after sending the files that it needs. Raises SandboxError."""
        self._check(spec)
        sockets = [mount.source for mount in spec.mounts if _is_socket(mount)]
        async with self._starting:
            connection = await connect(self._argv, self._name, sockets)
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
        return SshSandbox(spec, connection, reply.home)

    def _check(self, spec: SandboxSpec) -> None:
        """Raise SandboxError for files missing on this machine; the worker checks the rest of the spec."""
        missing = [mount.source for mount in spec.mounts if not mount.remote and not mount.source.exists()]
        if missing or not spec.tree.is_dir():
            raise SandboxError(
                f"cannot open a sandbox: {(missing or [spec.tree])[0]} does not exist on this machine; "
                "create it, or correct the path"
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
            mount.digest: own.source for mount, own in zip(mounts, spec.mounts, strict=True) if mount.digest
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
        last = archive.tell() == size
        await connection.ask(messages.UploadRequest(digest, piece, last), type(None))
        if last:
            return


def _is_socket(mount: Mount) -> bool:
    return not mount.remote and stat.S_ISSOCK(mount.source.stat().st_mode)
