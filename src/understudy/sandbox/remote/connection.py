"""The connection to a worker on another machine, over stdin and stdout of a local program (ssh, kubectl)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from understudy import errors
from understudy.errors import SandboxError, SandboxLost
from understudy.sandbox.process import seal_descriptors
from understudy.sandbox.remote import messages
from understudy.sandbox.remote.messages import MessageStream, NumberedReply, NumberedRequest, Request
from understudy.sandbox.remote.relay import START_S, SocketRelay, read_greeting
from understudy.sandbox.remote.relay_program import FRAME_BYTES, Channel, Multiplexer, RelayBroken

T = TypeVar("T")

_REPLY = msgspec.msgpack.Decoder(NumberedReply)
ANSWER_S = 600.0
"""How long a request is waited for that has no time limit of its own."""

_ERROR_BYTES = 2000
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (errors.SandboxError, errors.SandboxLost, errors.ConfigError, errors.TaskError, FileNotFoundError)
}


class ConnectionOptions(Struct, frozen=True, kw_only=True):
    """How a connection to a worker is made and ended."""

    env: Mapping[str, str] | None = None
    """The program's whole environment; None: this process's."""
    advice: str = "install the same release of Understudy on both machines"
    """The end of the error for a worker that does not start."""
    start_s: float = START_S
    """How long the program may take until it is connected to the worker."""
    silence_s: float = messages.LEASE_S
    """A worker that sends nothing for that long counts as lost, because a live one answers the regular pings."""
    end_s: float = 5.0
    """How long the program may take to end once its stdin is closed; then it is killed."""
    on_start: Callable[[int], None] | None = None
    """Called with the program's process id."""
    on_close: Callable[[], Awaitable[None]] | None = None
    """Called when the program has ended; must not raise."""


_DEFAULTS = ConnectionOptions()


class WorkerConnection:
    """Sends requests to one worker, and relays the sockets of its sandbox. Opened by `connect`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        name: str,
        sockets: Sequence[Path],
        options: ConnectionOptions,
    ) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._name = name
        self._options = options
        self._relay = SocketRelay(sockets)
        self._multiplexer = Multiplexer(process.stdout, process.stdin, self._accept)
        self._stream: asyncio.Future[MessageStream] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[NumberedReply]] = {}
        self._stderr = bytearray()
        self._reason = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._closing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Wait until the worker is ready. Raises SandboxError."""
        assert self._process.stdout is not None
        self._tasks.append(asyncio.create_task(self._read_errors()))
        try:
            await read_greeting(self._process.stdout, self._options.start_s)
        except SandboxError as error:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            output = self._error_output()
            problem = f"{output} ({error})" if output else error
            raise SandboxError(f"{self._name}: {problem}; {self._options.advice}") from error
        self._tasks += [asyncio.create_task(self._read()), asyncio.create_task(self._keep_alive())]
        self._tasks.append(asyncio.create_task(self._end_when_silent()))
        try:
            async with asyncio.timeout(START_S):
                await asyncio.shield(self._stream)
        except TimeoutError as error:
            raise SandboxError(
                f"{self._name}: the worker did not respond within {START_S:g} s; check the load and the network "
                "of that machine, then run the same command again"
            ) from error

    async def ask(self, request: Request, type_: type[T], within_s: float = ANSWER_S) -> T:
        """Send a request and return the response.

        Raises the error that the worker raised, and SandboxLost when the worker is gone or has not responded
        within `within_s` seconds. When cancelled, the request is cancelled on the worker too, before this returns.
        """
        try:
            async with asyncio.timeout(within_s):
                return await self._ask(request, type_)
        except TimeoutError as error:
            what = type(request).__name__
            raise SandboxLost(
                f"{self._name}: no response to a {what} within {within_s:g} s; check the load and the network of "
                "that machine, then run the same command again"
            ) from error

    async def _ask(self, request: Request, type_: type[T]) -> T:
        number = next(self._numbers)
        reply = self._waiting[number] = asyncio.get_running_loop().create_future()
        # Sending is never cancelled: half a message would make all later ones unreadable.
        sending = asyncio.ensure_future(self._send(number, request))
        try:
            await asyncio.shield(sending)
            answer = await asyncio.shield(reply)
        except asyncio.CancelledError:
            with contextlib.suppress(SandboxError, TimeoutError):
                await sending
                await self._send(next(self._numbers), messages.CancelRequest(number))
                async with asyncio.timeout(START_S):
                    await reply
            raise
        finally:
            del self._waiting[number]
        if answer.error:
            error = _ERRORS.get(answer.error, SandboxError)
            # "this machine" in an error of the worker is the worker's, so the error names that machine.
            where = "" if error is FileNotFoundError else f"{self._name}: "
            raise error(f"{where}{answer.result}")
        return msgspec.convert(answer.result, type_)

    async def close(self) -> None:
        """End the connection, and with it the worker. Never raises; may be called twice."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    @property
    def alive(self) -> bool:
        """Whether the worker is still connected."""
        return not self._reason and self._closing is None

    # --- helpers -------------------------------------------------------------------------------------------

    async def _send(self, number: int, request: Request) -> None:
        if not self.alive:
            raise self._lost()
        try:
            await (await asyncio.shield(self._stream)).send(NumberedRequest(number, request))
        except ConnectionError as error:
            raise self._lost() from error
        except SandboxError as error:
            raise SandboxError(f"{self._name}: {error}") from error

    async def _accept(self, channel: Channel, number: int) -> None:
        if number != messages.CONTROL:
            await self._relay.connect(channel, number)
            return
        if self._stream.done():
            raise ConnectionRefusedError(
                "this connection already has a channel for messages, expected one; open another connection"
            )
        stream = MessageStream(channel)
        self._stream.set_result(stream)
        while (content := await stream.receive()) is not None:
            reply = _REPLY.decode(content)
            future = self._waiting.get(reply.number)
            if future is not None and not future.done():
                future.set_result(reply)

    async def _read(self) -> None:
        """Read frames until the connection ends; then fail all requests that still wait for a response."""
        try:
            await self._multiplexer.run()
            ended = "the connection ended" if self._closing is None else "the connection was closed"
            self._reason = self._reason or ended
        except (RelayBroken, SandboxError, msgspec.DecodeError) as error:
            self._reason = f"it sent {error} (install the same release of Understudy on both machines)"
        finally:
            self._reason = self._reason or "the connection was closed"
            with contextlib.suppress(TimeoutError):  # its last output on stderr says why it ended
                async with asyncio.timeout(1.0):
                    await self._process.wait()
            for future in (*self._waiting.values(), self._stream):
                if not future.done():
                    future.set_exception(self._lost())
                    future.exception()

    async def _read_errors(self) -> None:
        assert self._process.stderr is not None
        while content := await self._process.stderr.read(FRAME_BYTES):
            self._stderr += content
            del self._stderr[:-_ERROR_BYTES]

    async def _keep_alive(self) -> None:
        with contextlib.suppress(SandboxError):
            while True:
                await asyncio.sleep(messages.PING_S)
                await self.ask(messages.PingRequest(), type(None))

    async def _end_when_silent(self) -> None:
        left_s = self._options.silence_s
        while left_s > 0:
            await asyncio.sleep(left_s)
            left_s = self._multiplexer.heard_at + self._options.silence_s - time.monotonic()
        self._reason = f"nothing was heard of it for {self._options.silence_s:g} s"
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def _error_output(self) -> str:
        return bytes(self._stderr).decode(errors="replace").strip()[-500:]

    def _lost(self) -> SandboxLost:
        output = self._error_output()
        return SandboxLost(
            f"{self._name}: the connection to the sandbox was lost: {self._reason or 'it was closed'}; check that "
            "machine and its network, then run the same command again"
            + (f". Its output: {output}" if output else "")
        )

    async def _close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self._options.end_s):
                await self._process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._options.on_close is not None:
            await self._options.on_close()
        self._process._transport.close()  # pyright: ignore  # a child of it may hold the pipes open


async def connect(
    argv: Sequence[str],
    name: str,
    sockets: Sequence[Path] = (),
    options: ConnectionOptions = _DEFAULTS,
) -> WorkerConnection:
    """Start a program that connects to a worker, and wait until the worker responds. `name` is used in errors.

    The worker's socket number n is relayed to `sockets[n]`. Raises SandboxError. When cancelled, nothing stays
    behind.
    """
    seal_descriptors()
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            limit=2 * FRAME_BYTES,
            env=options.env,
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"{name}: cannot start {argv[0]}: {error}; install it on this machine") from error
    connection = WorkerConnection(process, name, sockets, options)
    try:
        if options.on_start is not None:
            options.on_start(process.pid)
        await connection.start()
    except BaseException:
        await asyncio.shield(connection.close())
        raise
    return connection
