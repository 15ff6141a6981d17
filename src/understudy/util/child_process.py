"""A child process of ours, as who started it sees it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Self

_STOP_TIMEOUT_S = 5.0
_LOG_BYTES = 1 << 16
_TAIL_LINES, _TAIL_CHARACTERS = 50, 2000
_LINE_BYTES = 1 << 24


class ChildProcess:
    """A module of ours that runs: it speaks in lines on stdout, logs to stderr, and ends when its stdin does."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log = b""
        self._reader = asyncio.create_task(self._read_log())

    @classmethod
    @asynccontextmanager
    async def running(
        cls, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> AsyncGenerator[Self]:
        """Run it while the context lasts."""
        pipe = asyncio.subprocess.PIPE
        # In a session of its own: a Ctrl-C at the terminal is for who started it, who has answers to wait for.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            limit=_LINE_BYTES,
            env=environment,
        )
        child = cls(process)
        try:
            yield child
        finally:
            await child.stop()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def stop(self) -> None:
        """End it: its stdin ends, and if that does not help it is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            pass
        finally:  # who has no time to wait leaves none behind either
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._wait()

    async def _line(self) -> bytes:
        """What it says next; nothing when it says no more."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def _wait(self) -> int:
        """Wait until it has ended, and all that it logged is read; its exit code, below 0 for a signal."""
        code = await self._process.wait()
        await self._reader
        return code

    def _exit_description(self) -> str:
        """How it ended, in words."""
        code = self._process.returncode
        return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"

    def _log_tail(self) -> str:
        """The last lines that it logged."""
        lines = self._log.decode(errors="replace").strip().split("\n")
        return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "none"

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_LOG_BYTES):
            self._log = (self._log + chunk)[-_LOG_BYTES:]
