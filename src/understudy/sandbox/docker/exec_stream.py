"""The streams of a command in a container: one connection that is HTTP at first and then frames of output.

Spoken here and not by the library, which would hold a thread for as long as a command runs, and may lose what
comes together with the head of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from understudy.errors import SandboxError
from understudy.sandbox.base import Completed
from understudy.sandbox.docker.engine import API_VERSION

_CHUNK = 1 << 18
_STDERR = 2


class ExecNotStarted(Exception):
    """The engine could not start the command; says why."""


class ExecOutput:
    """The first `limit` bytes of each stream. The rest is read and dropped: a flood neither blocks nor grows."""

    def __init__(self, limit: int) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.truncated = False
        self._limit = limit

    def add(self, stream: int, data: bytes) -> None:
        """Take what a command wrote to stream 1 or 2."""
        buffer = self.stderr if stream == _STDERR else self.stdout
        room = self._limit - len(buffer)
        buffer += data[:room]
        self.truncated = self.truncated or len(data) > room

    def completed(self, code: int | None, duration_s: float, *, timed_out: bool = False) -> Completed:
        """A finished command with this output."""
        return Completed(
            code, bytes(self.stdout), bytes(self.stderr), duration_s, timed_out=timed_out, truncated=self.truncated
        )


class ExecStream:
    """A command that has been asked to start: `pump` its output until all its pipes are closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def pump(self, output: ExecOutput, stdin: bytes) -> None:
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

    Raises NotStarted when the engine refuses, SandboxError when it does not answer.
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
