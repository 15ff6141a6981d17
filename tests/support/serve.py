"""`understudy gateway serve` as a real process for tests: started, asked, killed and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import aiohttp
import msgspec

from understudy.gateway.serve.admin import ADDRESS, GatewayAddress

from support import close_pipes, understudy

_COMMAND = [sys.executable, "-c", "from understudy.cli.main import main; main()", "gateway"]


async def gateway(*arguments: str) -> str:
    """What `understudy gateway ARGUMENTS` prints; it has to succeed."""
    done = await asyncio.to_thread(understudy, "gateway", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


class Served:
    """A gateway in processes of its own, over the store in `directory`."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.arguments: Sequence[str] = arguments
        self.url = ""
        self.said = b""
        self._process: asyncio.subprocess.Process | None = None
        self._killed: list[asyncio.subprocess.Process] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Returns when it answers; the port stays the same over all starts."""
        (self.directory / ADDRESS).unlink(missing_ok=True)
        port = self.url.rsplit(":", 1)[1] if self.url else "0"
        self._process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            "serve",
            *self.arguments,
            "--dir",
            str(self.directory),
            "--port",
            port,
            stderr=asyncio.subprocess.PIPE,
        )
        while not (self.directory / ADDRESS).exists():
            if self._process.returncode is not None:
                assert self._process.stderr is not None
                raise AssertionError((await self._process.stderr.read()).decode())
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
        await self._process.wait()
        self._killed.append(self._process)  # its workers write to its stderr as long as they live
        await self.start()

    async def stop(self) -> int:
        """End it with SIGTERM; its exit code."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        _, self.said = await self._process.communicate()
        for process in self._killed:
            close_pipes(process)
        assert self._process.returncode is not None
        return self._process.returncode

    async def ask(self, http: aiohttp.ClientSession, key: str, text: str, **fields: object) -> tuple[int, bytes]:
        """Status and body of the answer to one message."""
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": text}], **fields}
        headers = {"x-api-key": key}
        async with http.post(f"{self.url}/v1/messages", json=body, headers=headers) as reply:
            return reply.status, await reply.read()
