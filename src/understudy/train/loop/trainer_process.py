"""The trainer's process, as who started it sees it (see `worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import ConfigError, UnderstudyError
from understudy.train.algorithms.updater import UpdateReport
from understudy.train.loop.worker import TrainerReady
from understudy.train.options import GRPOOptions
from understudy.types import ErrorInfo
from understudy.util.child_process import ChildProcess


class TrainerProcess(ChildProcess):
    """A running worker. `ready` is what it said when its model was loaded."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self._turn = asyncio.Lock()
        self.ready = TrainerReady(False, 0, 0, 0, "")

    async def start(self) -> None:
        """Wait until the model is loaded. Raises ConfigError when it cannot be."""
        self.ready = msgspec.convert(await self._answer(), TrainerReady)

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
            except (BrokenPipeError, ConnectionResetError, RuntimeError):
                # The last is uvloop's word for a pipe that it closed when the worker ended, long before.
                raise await self._ended() from None
            answer = await self._answer()
        return msgspec.convert(answer["report"], UpdateReport)

    async def _answer(self) -> dict[str, Any]:
        if not (line := await self._line()):
            raise await self._ended()
        answer = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in answer:
            raise _error(msgspec.convert(answer["error"], ErrorInfo))
        return answer

    async def _ended(self) -> ConfigError:
        killed = await self._wait() == -9
        why = "; the machine may have no memory left: lower --micro-batch-tokens" if killed else ""
        return ConfigError(
            f"the trainer's process ended {self._exit_description()}{why}; its last output: {self._log_tail()}"
        )


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
) -> AsyncGenerator[TrainerProcess]:
    """Run a worker while the context lasts; it never outlives this process.

    `resume` is a directory that an earlier update saved its weights to. `threads` of the CPU (0: as torch takes).
    Raises ConfigError when the model cannot be loaded.
    """
    arguments = ["--model", str(model), "--options", msgspec.json.encode(options).decode()]
    arguments += ["--resume", str(resume)] if resume else []
    arguments += ["--reference", str(reference)] if reference else []
    variables = dict(os.environ if environment is None else environment)
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    async with TrainerProcess.running("understudy.train.loop.worker", arguments, variables) as trainer:
        await trainer.start()
        yield trainer
