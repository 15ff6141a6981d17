"""`understudy gateway serve` as a real process for tests: started, asked, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from understudy.gateway.serve.admin import ADDRESS, GatewayAddress

from support import UNDERSTUDY, understudy, warm, warm_socket


async def gateway(*arguments: str) -> str:
    """What `understudy gateway ARGUMENTS` prints; it has to succeed."""
    done = await asyncio.to_thread(understudy, "gateway", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class _Process:
    """A forked command, whose stderr is kept."""

    def __init__(self, connection: socket.socket, pid: int, stderr: int) -> None:
        self.pid = pid
        pool = ThreadPoolExecutor(2)
        self._end = asyncio.wrap_future(pool.submit(warm.result, connection))
        self._stderr = asyncio.wrap_future(pool.submit(self._read, stderr))
        pool.shutdown(wait=False)

    @property
    def ended(self) -> bool:
        return self._end.done()

    async def code(self) -> int:
        """Its exit code, once it has ended."""
        return await asyncio.shield(self._end)

    async def stderr(self) -> bytes:
        """What was written to stderr, once it and all that it started have ended."""
        return await asyncio.shield(self._stderr)

    @staticmethod
    def _read(stderr: int) -> bytes:
        with os.fdopen(stderr, "rb") as file:
            return file.read()

    @classmethod
    def start(cls, *arguments: str) -> Self:
        stderr, end = os.pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        try:
            command = [str(UNDERSTUDY), *arguments]
            connection, pid = warm.ask(
                warm_socket(), command, os.environ, str(Path.cwd()), (nothing, nothing, end)
            )
        finally:
            os.close(nothing)
            os.close(end)
        return cls(connection, pid, stderr)


class Served:
    """A gateway in processes of its own, over the store in `directory`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.arguments: Sequence[str] = arguments
        self.url = ""
        self.stderr = b""
        self._process: _Process | None = None
        self._killed: list[_Process] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when it answers; the port stays the same over all starts."""
        (self.directory / ADDRESS).unlink(missing_ok=True)
        port = self.url.rsplit(":", 1)[1] if self.url else "0"
        options = ("--dir", str(self.directory), "--port", port)
        self._process = _Process.start("gateway", "serve", *self.arguments, *options)
        while not (self.directory / ADDRESS).exists():
            if self._process.ended:
                raise AssertionError((await self._process.stderr()).decode())
            await asyncio.sleep(0.01)
        self.url = msgspec.json.decode((self.directory / ADDRESS).read_bytes(), type=GatewayAddress).url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def workers(self) -> list[int]:
        """The worker processes that run now."""
        path = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    async def kill(self) -> None:
        """Kill the supervisor with SIGKILL, and start the gateway again."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGKILL)
        await self._process.code()
        self._killed.append(self._process)  # its workers write to its stderr as long as they live
        await self.start()

    async def stop(self) -> int:
        """End it with SIGTERM; its exit code."""
        assert self._process is not None
        if not self._process.ended:
            os.kill(self.pid, signal.SIGTERM)
        code = await self._process.code()
        self.stderr = await self._process.stderr()
        for process in self._killed:
            await process.stderr()
        return code

    async def ask(self, http: aiohttp.ClientSession, key: str, text: str, **fields: object) -> tuple[int, bytes]:
        """Status and body of the answer to one message."""
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}], **fields}
        headers = {"x-api-key": key}
        async with http.post(f"{self.url}/v1/messages", json=body, headers=headers) as reply:
            return reply.status, await reply.read()
