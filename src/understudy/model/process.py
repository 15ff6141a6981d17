"""The embedded model's server as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from understudy.errors import BackendError, ConfigError
from understudy.model.server import DEFAULT_MODEL, KEY_VARIABLE

_START_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 900.0
"""For weights, which may be many and come from a slow disk."""
_STOP_TIMEOUT_S = 5.0


class _Announcement(msgspec.Struct):
    url: str
    model: str


class ServerProcess:
    """A running server: `url` without a path, the name of its `model`, and its `pid`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log: deque[bytes] = deque(maxlen=50)
        self._reader = asyncio.create_task(self._read_log())
        self.url = ""
        self.model = ""

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    async def watch(self) -> NoReturn:
        """Wait until the server ends, which it does not by itself. Raises BackendError with its last words."""
        await self._process.wait()
        await self._reader
        raise BackendError(
            f"the embedded model's server ended {self._how()}; its last words: {self._last_words()}. "
            "Give the same command again"
        )

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until it listens. Raises BackendError when it ends before, or does not in so many seconds."""
        stdout = self._process.stdout
        assert stdout is not None
        try:
            line = await asyncio.wait_for(stdout.readline(), timeout_s)
            if line:
                announced = msgspec.json.decode(line, type=_Announcement)
                self.url, self.model = announced.url, announced.model
                return
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
            await self._reader
        except TimeoutError:
            raise BackendError(
                f"the embedded model's server did not listen within {timeout_s:.0f} s: {self._last_words()}"
            ) from None
        except msgspec.DecodeError as error:
            raise BackendError(f"the embedded model's server announced itself wrongly: {error}") from error
        raise BackendError(
            f"the embedded model's server did not start, it ended {self._how()}: {self._last_words()}"
        )

    async def stop(self) -> None:
        """End the server: its stdin ends, and if that does not help it is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            self._log.append(line)

    def _how(self) -> str:
        code = self._process.returncode
        return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"

    def _last_words(self) -> str:
        return b"".join(self._log).decode(errors="replace").strip() or "none"


@contextlib.asynccontextmanager
async def start_server(
    policy: str | None = None,
    *,
    weights: Path | None = None,
    version: str | None = None,
    tasks: Path | None = None,
    policy_args: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    model_name: str = DEFAULT_MODEL,
    max_model_len: int | None = None,
    device: str | None = None,
) -> AsyncGenerator[ServerProcess]:
    """Run the embedded model's server while the context lasts; it never outlives this process.

    It serves a `policy`, or the `weights` in a directory, which are called `version` (None: by a hash of their
    content). Raises BackendError when it does not start; `ServerProcess.watch` tells when it ends.
    """
    if (policy is None) == (weights is None):
        raise ConfigError("the embedded server serves either a policy or the weights in a directory: give one")
    command = [sys.executable, "-m", "understudy.model.server", "--exit-with-parent"]
    command += [f"--host={host}", f"--port={port}", f"--model-name={model_name}"]
    command += [f"--policy={policy}"] if policy is not None else [f"--weights={weights}"]
    command += [f"--model-version={version}"] if version is not None else []
    command += [f"--max-model-len={max_model_len}"] if max_model_len is not None else []
    command += [f"--device={device}"] if device is not None else []
    command += [f"--tasks={tasks}"] if tasks else []
    command += [f"--policy-arg={key}={value}" for key, value in (policy_args or {}).items()]
    pipe = asyncio.subprocess.PIPE
    # In a session of its own: a Ctrl-C at the terminal is for the run, which still has answers to wait for.
    # It answers to us alone, on loopback: a key in our environment is for servers that are started by hand.
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=1 << 20, env=environment
    )
    server = ServerProcess(process)
    try:
        await server.start(_START_TIMEOUT_S if weights is None else _LOAD_TIMEOUT_S)
        yield server
    finally:
        await server.stop()
