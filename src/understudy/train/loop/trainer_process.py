"""A trainer in a process of its own: it keeps a model loaded, and makes updates on commands from stdin.

    python -m understudy.train.loop.trainer_process --model DIR --options JSON [--resume DIR] [--reference DIR]

Commands and responses are JSON objects, one per line. The first line on stdout is `{"ready": …}`. Then each
command gets one response, in order:

    {"op": "update", "step": 1, "version": "step-0001", "groups": FILE, "weights": DIR}
    → {"report": {…}, "weights": DIR}            when DIR is completely written

With `"token_values": FILE` the values that the update computed for tokens are written to that file.

A command that fails gets the response `{"error": {"boundary": …, "type": …, "message": …}}`, and the trainer
continues. It exits as soon as stdin is closed, so it never outlives its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, UnderstudyError
from understudy.train.algorithms.updater import UpdateReport
from understudy.train.options import GRPOOptions, read_options
from understudy.types import ErrorInfo, info_of
from understudy.util.processes import ChildProcess

_THREADS = "OMP_NUM_THREADS"


class TrainerReady(Struct, frozen=True):
    """The trainer's first line, when its model is loaded. `step` is the last step of the loaded weights
    (0: none).
    """

    ready: bool
    step: int
    parameters: int
    trained: int
    device: str


class TrainerCommand(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A command to the trainer."""

    op: str
    step: int = 0
    version: str = ""
    groups: str = ""
    weights: str = ""
    token_values: str = ""


def main(arguments: list[str]) -> int:
    """Run until stdin ends. Exit code 2 when the model cannot be loaded; the error is written to stdout."""
    parser = argparse.ArgumentParser(prog="python -m understudy.train.loop.trainer_process")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--options", default="{}")
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--reference", type=Path)
    parsed = parser.parse_args(arguments)
    # Responses go to a copy of stdout; fd 1 becomes stderr, so that libraries cannot print between responses.
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    commands = _command_lines()
    try:
        options = read_options(msgspec.json.decode(parsed.options, type=dict[str, Any]))
        updater = _load_updater(parsed.model, options, parsed.resume, parsed.reference)
    except (msgspec.MsgspecError, UnderstudyError) as error:
        _send_error(output, error, "--options")
        return 2
    parameters: list[Any] = list(updater.model.parameters())
    parameter_count = sum(parameter.numel() for parameter in parameters)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    _send(output, TrainerReady(True, updater.step, parameter_count, trained, str(updater.device)))
    while True:
        line = commands.get()
        try:
            command = msgspec.json.decode(line, type=TrainerCommand)
            _send(output, _execute(updater, command))
        except (msgspec.MsgspecError, UnderstudyError) as error:
            _send_error(output, error, "invalid command")


def _load_updater(model: Path, options: GRPOOptions, resume: Path | None, reference: Path | None) -> Any:
    from understudy.model.directory import require_packages

    require_packages()
    import torch

    from understudy.train.algorithms.updater import Updater

    if os.environ.get(_THREADS, "").isdigit():
        torch.set_num_threads(max(1, int(os.environ[_THREADS])))
    return Updater(model, options, resume=resume, reference=reference)


_OTHER_RELEASE = (
    "the loop and its trainer's process may be of different releases of Understudy: install the same for both"
)


def _execute(updater: Any, command: TrainerCommand) -> dict[str, Any]:
    from understudy.train.groups import read_groups, write_token_values

    if command.op != "update":
        raise ConfigError(f"invalid op {command.op!r}, expected 'update'; {_OTHER_RELEASE}")
    updater.keeps_token_values = bool(command.token_values)
    report = updater.update(read_groups(Path(command.groups)), command.step, command.version or None)
    if command.token_values:
        write_token_values(Path(command.token_values), updater.token_values)
    if command.weights:
        updater.save(Path(command.weights), command.version or None)
    return {"report": report, "weights": command.weights or None}


def _command_lines() -> SimpleQueue[bytes]:
    """Return a queue of the lines of stdin. When stdin ends, the whole process exits at once, even during an
    update.
    """
    lines: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, name="orders", daemon=True).start()
    return lines


def _send_error(output: BinaryIO, error: Exception, decoded: str) -> None:
    """Respond with an error. Any error but an UnderstudyError is a decoding error of what is `decoded`."""
    reported = (
        error if isinstance(error, UnderstudyError) else ConfigError(f"{decoded}: {error}; {_OTHER_RELEASE}")
    )
    _send(output, {"error": info_of(reported)})


def _send(output: BinaryIO, message: Any) -> None:
    output.write(msgspec.json.encode(message) + b"\n")


if __name__ == "__main__":
    # Not sys.exit, which would wait for the thread that reads stdin. All that must be kept is on disk by now.
    os._exit(main(sys.argv[1:]))


class TrainerProcess(ChildProcess):
    """A running trainer process. `ready` is its first line."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__(process)
        self._lock = asyncio.Lock()
        self.ready = TrainerReady(False, 0, 0, 0, "")

    async def start(self) -> None:
        """Wait until the model is loaded. Raises ConfigError when it cannot be loaded."""
        self.ready = msgspec.convert(await self._read_response(), TrainerReady)

    async def update(
        self, groups: Path, step: int, version: str, weights: Path, token_values: Path | None = None
    ) -> UpdateReport:
        """Learn from the groups in a file that `groups.write_groups` wrote, and save the weights to a directory.

        The values computed for tokens are written to `token_values` where that is given. Returns when all files
        are complete. Raises the trainer's error, or ConfigError when the trainer ended.
        """
        command = TrainerCommand(
            op="update",
            step=step,
            version=version,
            groups=str(groups),
            weights=str(weights),
            token_values=str(token_values or ""),
        )
        async with self._lock:
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(msgspec.json.encode(command) + b"\n")
                await self._process.stdin.drain()
            except (BrokenPipeError, ConnectionResetError, RuntimeError):
                # uvloop raises RuntimeError for a pipe that it closed when the trainer ended.
                raise await self._ended_error() from None
            response = await self._read_response()
        return msgspec.convert(response["report"], UpdateReport)

    async def _read_response(self) -> dict[str, Any]:
        if not (line := await self._line()):
            raise await self._ended_error()
        response = msgspec.json.decode(line, type=dict[str, Any])
        if "error" in response:
            error = msgspec.convert(response["error"], ErrorInfo)
            kinds = {kind.__name__: kind for kind in UnderstudyError.__subclasses__()}
            raise kinds.get(error.type, ConfigError)(error.message)
        return response

    async def _ended_error(self) -> ConfigError:
        killed = await self._wait() == -9
        why = "; the machine may have no memory left: lower --micro-batch-tokens" if killed else ""
        return ConfigError(
            f"the trainer's process ended {self._exit_description()}{why}; its last output: "
            f"{self._log_tail()}. Correct what it reports, then run the same command again, which continues"
        )


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
    """Run a trainer while the context lasts; it never outlives this process.

    `resume` is a directory to which an earlier update saved its weights. `threads` is the number of CPU threads
    (0: torch's default). Raises ConfigError when the model cannot be loaded.
    """
    arguments = ["--model", str(model), "--options", msgspec.json.encode(options).decode()]
    arguments += ["--resume", str(resume)] if resume else []
    arguments += ["--reference", str(reference)] if reference else []
    variables = dict(os.environ if environment is None else environment)
    if threads:
        variables["OMP_NUM_THREADS"] = str(threads)
    async with TrainerProcess.running("understudy.train.loop.trainer_process", arguments, variables) as trainer:
        await trainer.start()
        yield trainer
