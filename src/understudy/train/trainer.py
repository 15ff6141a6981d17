"""The trainer's process, as who started it sees it (see `worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import ConfigError, UnderstudyError
from understudy.train.options import GRPOOptions
from understudy.train.updater import UpdateReport
from understudy.train.worker import Ready
from understudy.types import ErrorInfo

_STOP_TIMEOUT_S = 5.0


class Trainer:
    """A running worker. `ready` is what it said when its model was loaded."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log: deque[bytes] = deque(maxlen=50)
        self._reader = asyncio.create_task(self._read_log())
        self._turn = asyncio.Lock()
        self.ready = Ready(False, 0, 0, 0, "")

    @property
    def pid(self) -> int:
        """The worker's process id."""
        return self._process.pid

    async def start(self) -> None:
        """Wait until the model is loaded. Raises ConfigError when it cannot be."""
        self.ready = msgspec.convert(await self._answer(), Ready)

    async def update(self, groups: Path, step: int, version: str, weights: Path) -> UpdateReport:
        """Learn from the groups in a file that `data.write_groups` wrote, and save the weights to a directory.

        Returns when the directory is whole. Raises ConfigError when it could not be done, or the worker ended.
        """
        order = {"op": "update", "step": step, "version": version, "groups": str(groups), "weights": str(weights)}
        async with self._turn:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(msgspec.json.encode(order) + b"\n")
                await self._process.stdin.drain()
            except (BrokenPipeError, ConnectionResetError):
                raise await self._ended() from None
            answer = await self._answer()
        return msgspec.convert(answer["report"], UpdateReport)

    async def stop(self) -> None:
        """End the worker; what it was at is lost, what it had saved is whole."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_TIMEOUT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._reader

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise await self._ended()
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            raise _error(msgspec.convert(answer["error"], ErrorInfo))
        return answer

    async def _ended(self) -> ConfigError:
        code = await self._process.wait()
        await self._reader
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        words = b"".join(self._log).decode(errors="replace").strip()[-2000:] or "none"
        why = "; the machine may have no memory left: lower --micro-batch-tokens" if code == -9 else ""
        return ConfigError(f"the trainer's process ended {how}{why}; its last words: {words}")

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(1 << 16):
            self._log.append(chunk)


def _error(info: ErrorInfo) -> UnderstudyError:
    kinds = {kind.__name__: kind for kind in UnderstudyError.__subclasses__()}
    return kinds.get(info.type, ConfigError)(info.message)


@contextlib.asynccontextmanager
async def start_trainer(
    model: Path,
    options: GRPOOptions,
    *,
    resume: Path | None = None,
    reference: Path | None = None,
    threads: int = 0,
    environment: Mapping[str, str] | None = None,
) -> AsyncGenerator[Trainer]:
    """Run a worker while the context lasts; it never outlives this process.

    `resume` is a directory that an earlier update saved its weights to. `threads` of the CPU (0: as torch takes).
    Raises ConfigError when the model cannot be loaded.
    """
    command = [sys.executable, "-m", "understudy.train.worker", "--model", str(model)]
    command += ["--options", msgspec.json.encode(options).decode()]
    command += ["--resume", str(resume)] if resume else []
    command += ["--reference", str(reference)] if reference else []
    given = dict(os.environ if environment is None else environment)
    if threads:
        given["OMP_NUM_THREADS"] = str(threads)
    pipe = asyncio.subprocess.PIPE
    # In a session of its own: a Ctrl-C at the terminal is for who started it, who has answers to wait for.
    process = await asyncio.create_subprocess_exec(
        *command, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, limit=1 << 24, env=given
    )
    trainer = Trainer(process)
    try:
        await trainer.start()
        yield trainer
    finally:
        await trainer.stop()
