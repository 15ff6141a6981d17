"""Runs the embedded model's server as a child process."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import NoReturn

import msgspec

from understudy.errors import BackendError, ConfigError
from understudy.model.server import DEFAULT_MODEL, KEY_VARIABLE
from understudy.util.processes import ChildProcess

_START_TIMEOUT_S = 60.0
_LOAD_TIMEOUT_S = 900.0
"""For weights, which may be many and come from a slow disk."""
_END_TIMEOUT_S = 5.0


class _Announcement(msgspec.Struct):
    url: str
    model: str


class ServerProcess(ChildProcess):
    """A running server: `url` without a path, the name of its `model`, and its `pid`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self.url = ""
        self.model = ""

    async def watch(self) -> NoReturn:
        """Wait until the server ends, which it does not do by itself. Raises BackendError with its last output."""
        await self._wait()
        raise BackendError(
            f"the embedded model's server ended {self._exit_description()}, expected it to run until it is "
            f"stopped; its last output: {self._log_tail()}. Correct the cause, then run the same command again"
        )

    async def start(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait until it listens. Raises BackendError when it ends first, or needs longer than `timeout_s`."""
        line = b""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._line()
            if line:
                announced = msgspec.json.decode(line, type=_Announcement)
                self.url, self.model = announced.url, announced.model
                return
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self._process.wait()
            await self._reader
        except TimeoutError:
            raise BackendError(
                f"the embedded model's server did not listen within {timeout_s:.0f} s; its last output: "
                f"{self._log_tail()}. Run the same command again when the machine is less busy"
            ) from None
        except msgspec.DecodeError as error:
            raise BackendError(
                f"the embedded model's server printed {line[:100]!r} at its start, expected its address as JSON "
                f"({error}); another installation may have been used: reinstall understudy"
            ) from error
        raise BackendError(
            f"the embedded model's server did not start, it ended {self._exit_description()}: "
            f"{self._log_tail()}. Correct the cause, then run the same command again"
        )


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

    It serves a `policy`, or the `weights` in a directory with the version `version` (None: a hash of their
    content). Raises BackendError when it does not start; `ServerProcess.watch` raises when it ends.
    """
    if (policy is None) == (weights is None):
        raise ConfigError(
            "the embedded server serves either a policy or weights, got "
            f"{'both' if policy else 'neither'}; give one of them"
        )
    arguments = ["--exit-with-parent", f"--host={host}", f"--port={port}", f"--model-name={model_name}"]
    arguments += [f"--policy={policy}"] if policy is not None else [f"--weights={weights}"]
    arguments += [f"--model-version={version}"] if version is not None else []
    arguments += [f"--max-model-len={max_model_len}"] if max_model_len is not None else []
    arguments += [f"--device={device}"] if device is not None else []
    arguments += [f"--tasks={tasks}"] if tasks else []
    arguments += [f"--policy-arg={key}={value}" for key, value in (policy_args or {}).items()]
    # Removed, because this server listens on loopback only; the variable is for servers started by hand.
    environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
    async with ServerProcess.running("understudy.model.server", arguments, environment) as server:
        await server.start(_START_TIMEOUT_S if weights is None else _LOAD_TIMEOUT_S)
        yield server
