"""The worker on another machine: serves one local sandbox over stdin and stdout.

It ends with the connection, at the sandbox's deadline, or when it has received nothing for a while. With it end
all processes in the sandbox, and all files that were written there are removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from understudy import __version__
from understudy.config import CACHE_LOCK
from understudy.errors import ConfigError, SandboxError, SandboxLost, UnderstudyError
from understudy.sandbox.base import Mount, OpenSandbox, Sandbox, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.content import ContentCache
from understudy.sandbox.remote.messages import MessageStream, NumberedReply, NumberedRequest, RemoteEnvironment
from understudy.sandbox.remote.registry import SandboxRegistry
from understudy.sandbox.remote.relay_program import GREETING, Multiplexer, RelayBroken, listen, stdio
from understudy.util.files import share_lock

_DECODER = msgspec.msgpack.Decoder(NumberedRequest)


class SandboxWorker:
    """Answers the requests of one connection. `cache` is the cache directory; `environment` returns what this
    machine provides.
    """

    def __init__(
        self, multiplexer: Multiplexer, cache: Path, environment: Callable[[], RemoteEnvironment]
    ) -> None:
        self._multiplexer = multiplexer
        self._environment = environment
        share_lock(cache / CACHE_LOCK)
        self._kind = LocalSandboxes()
        self._files = ContentCache(cache / "remote" / "files")
        self._trees = ContentCache(cache / "remote" / f"trees-{os.geteuid()}", self._kind.prepare_tree)
        self._registry = SandboxRegistry(cache / "remote" / "open")
        self._directory = Path(tempfile.mkdtemp(prefix="understudy-remote-"))
        self._sandbox: Sandbox | None = None
        self._id = ""
        self._running: dict[int, asyncio.Task[None]] = {}
        self._deadline: float | None = None
        self._ended = ""
        self._handlers: dict[type[Any], Callable[[Any], Awaitable[Any]]] = {
            messages.HelloRequest: self._hello,
            messages.MissingRequest: self._missing,
            messages.UploadRequest: self._upload,
            messages.OpenRequest: self._open,
            messages.RunRequest: self._run,
            messages.ReadRequest: self._read,
            messages.WriteRequest: self._write,
            messages.SealRequest: self._seal,
            messages.ResetRequest: self._reset,
            messages.PingRequest: self._ping,
            messages.CancelRequest: self._cancel,
            messages.ListRequest: self._list,
            messages.ReapRequest: self._reap,
        }

    async def serve(self, stream: MessageStream) -> str:
        """Answer requests until the stream ends; return why it ended."""
        try:
            while not self._ended:
                content = await self._next(stream)
                if content is None:
                    break
                message = _DECODER.decode(content)
                task = asyncio.create_task(self._answer(stream, message))
                self._running[message.number] = task
                task.add_done_callback(lambda _, number=message.number: self._running.pop(number, None))
        finally:
            await self._close()
        return self._ended

    async def _next(self, stream: MessageStream) -> bytes | None:
        """Return the next message; None if none comes in time, with the reason in `_ended`."""
        seconds_left = math.inf if self._deadline is None else self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(min(messages.LEASE_S, seconds_left)):
                content = await stream.receive()
        except TimeoutError:
            late = seconds_left < messages.LEASE_S
            self._ended = "the sandbox has reached its deadline" if late else "nothing was heard for too long"
            return None
        except ConnectionResetError:
            content = None
        if content is None:
            self._ended = "the connection ended"
        return content

    async def _answer(self, stream: MessageStream, message: NumberedRequest) -> None:
        try:
            result = await self._handlers[type(message.request)](message.request)
            reply = NumberedReply(message.number, "", result)
        except asyncio.CancelledError:
            error = SandboxLost if self._ended else SandboxError
            reply = NumberedReply(message.number, error.__name__, self._ended or "the command was given up")
        except (UnderstudyError, FileNotFoundError) as error:
            reply = NumberedReply(message.number, type(error).__name__, str(error))
        except OSError as error:
            reply = NumberedReply(message.number, SandboxError.__name__, str(error))
        with contextlib.suppress(ConnectionError):
            try:
                await stream.send(reply)
            except SandboxError as error:  # too long for a message: the caller must not wait for it in vain
                await stream.send(NumberedReply(message.number, SandboxError.__name__, str(error)))

    async def _close(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._sandbox is not None:
            await self._sandbox.close()
        await self._kind.aclose()
        if self._id:
            self._registry.remove(self._id)
        shutil.rmtree(self._directory, ignore_errors=True)

    # --- requests ----------------------------------------------------------------------------------------

    async def _hello(self, request: messages.HelloRequest) -> messages.HelloReply:
        if request.version != __version__:
            raise ConfigError(
                f"this worker has Understudy {__version__}, but the caller has {request.version}; install the "
                "same release on both machines"
            )
        problems = await asyncio.to_thread(self._kind.problems)
        environment = await asyncio.to_thread(self._environment)
        return messages.HelloReply(problems, self._kind.warnings(), environment)

    async def _missing(self, request: messages.MissingRequest) -> list[str]:
        return [digest for digest in request.digests if self._cache_of(digest)[0].path_of(_name(digest)) is None]

    async def _upload(self, request: messages.UploadRequest) -> None:
        cache, name = self._cache_of(request.digest)
        archive = self._directory / name
        with archive.open("ab") as file:
            file.write(request.piece)
        if request.last:
            try:
                await asyncio.to_thread(cache.add, name, archive)
            finally:
                archive.unlink()

    def _cache_of(self, digest: str) -> tuple[ContentCache, str]:
        """Return the cache of a content and its name there; digests of trees begin with "tree-"."""
        name = _name(digest)
        if len(name) != 64 or not set(name) <= set("0123456789abcdef"):
            raise SandboxError(
                f"invalid digest {digest!r}; expected 64 hexadecimal digits: install the same release of "
                "Understudy on both machines"
            )
        return (self._trees if digest.startswith(messages.TREE) else self._files), name

    def _content(self, digest: str) -> Path:
        cache, name = self._cache_of(digest)
        path = cache.path_of(name)
        if path is None:
            raise SandboxError(
                f"the content {digest} was not sent, or was removed from the cache; run the same command again"
            )
        return path

    async def _open(self, request: messages.OpenRequest) -> messages.OpenReply:
        if self._sandbox is not None:
            raise SandboxError("this worker already has a sandbox; open another connection for a second one")
        sockets = {mount.socket for mount in request.mounts if mount.socket is not None}
        paths = [str(self._directory / f"socket-{number}") for number in range(max(sockets, default=-1) + 1)]
        await listen(self._multiplexer, paths)
        spec = SandboxSpec(
            tree=self._content(request.tree),
            workdir=request.workdir,
            mounts=tuple(
                Mount(self._source(mount, paths), mount.target, mount.private) for mount in request.mounts
            ),
            env=request.env,
            path_prefixes=tuple(request.path_prefixes),
            limits=request.limits,
        )
        now = time.time()
        self._deadline = time.monotonic() + request.deadline_s
        sandbox = await self._kind.open(spec)
        self._sandbox, self._id = sandbox, uuid.uuid4().hex[:12]
        self._registry.add(
            OpenSandbox(id=self._id, labels=request.labels, opened=now, deadline=now + request.deadline_s),
            os.getpid(),
        )
        return messages.OpenReply(self._id, sandbox.home)

    def _source(self, mount: messages.RemoteMount, sockets: list[str]) -> Path:
        if mount.socket is not None:
            return Path(sockets[mount.socket])
        return Path(mount.path) if mount.path else self._content(mount.digest)

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxLost(
                "internal error: this worker was asked about a sandbox before it opened one; please report it"
            )
        return self._sandbox

    async def _run(self, request: messages.RunRequest) -> Any:
        return await self._opened().run(**msgspec.structs.asdict(request))

    async def _read(self, request: messages.ReadRequest) -> bytes:
        return await self._opened().read(request.path, limit=request.limit)

    async def _write(self, request: messages.WriteRequest) -> None:
        await self._opened().write(request.path, request.data, mode=request.mode)

    async def _seal(self, request: messages.SealRequest) -> None:
        await self._opened().seal(request.paths)

    async def _reset(self, request: messages.ResetRequest) -> None:
        await self._opened().reset()

    async def _ping(self, request: messages.PingRequest) -> None:
        """Do nothing: receiving the message has already renewed the lease."""

    async def _cancel(self, request: messages.CancelRequest) -> None:
        if (task := self._running.get(request.number)) is not None:
            task.cancel()

    async def _list(self, request: messages.ListRequest) -> list[OpenSandbox]:
        return self._registry.sandboxes()

    async def _reap(self, request: messages.ReapRequest) -> list[str]:
        return self._registry.reap(request.ids)


def _name(digest: str) -> str:
    return digest.removeprefix(messages.TREE)


async def serve_sandbox(cache: Path, environment: Callable[[], RemoteEnvironment]) -> str:
    """Serve one sandbox over this process's stdin and stdout; return why it ended. See SandboxWorker."""
    # stdout becomes stderr, so that nothing printed here gets between the frames.
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    reader, writer = await stdio()
    multiplexer = Multiplexer(reader, writer)
    writer.write(GREETING)
    reading = asyncio.create_task(multiplexer.run())
    try:
        channel = await multiplexer.open(messages.CONTROL)
        return await SandboxWorker(multiplexer, cache, environment).serve(MessageStream(channel))
    except (RelayBroken, ConnectionError, msgspec.DecodeError) as error:
        return f"the connection to the caller broke: {error}; if it was not stopped, run its command again"
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
