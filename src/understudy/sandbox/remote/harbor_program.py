"""Connects its stdin and stdout to a worker in an environment of the package `harbor`, by commands and polling.

    python -P harbor_program.py '{"provider": "daytona", "image": …}'

Harbor's `exec` has neither stdin nor a stream of output. So the worker runs in the background there: what it reads
is sent as numbered files, which a loop feeds to it; what it writes goes to a file, which is read from an offset. A
command whose result was lost can therefore be repeated. The environment is stopped when stdin ends, on SIGTERM, or
when the worker has ended.

This file needs Python 3.12 and harbor, and nothing of Understudy.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import importlib
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import uuid
from collections.abc import Generator
from pathlib import Path
from typing import Any

PIECE_BYTES = 8 << 20
_INLINE_BYTES = 48 << 10
"""Up to this size input is an argument of a command; larger pieces are uploaded as files."""

_OUTPUT_BYTES = 256 << 10
_POLL_S = 10
_COMMAND_S = 60
_TRIES = 3
_OUTPUT = re.compile(r"understudy-output:(\d*):([A-Za-z0-9+/=]*):end")

# The worker's output goes through a pipe, since asyncio does not write to files.
_FEED = """\
cd {directory} || exit 1
feed() {{
  n=0
  while [ ! -f ended ]; do
    if [ -f in.$n ]; then cat in.$n || return; rm -f in.$n; n=$((n + 1)); else sleep 0.05; fi
  done
}}
feed | {{ ({command}) 2>errors; echo $? >ended; }} | cat >out
mv ended exit
"""
_POLL = """\
cd {directory} || exit 1
i=0
while [ "$(wc -c <out)" -le {offset} ] && [ ! -f exit ] && [ $i -lt {times} ]; do sleep 0.1; i=$((i + 1)); done
printf 'understudy-output:%s:' "$(cat exit 2>/dev/null)"
tail -c +{first} out | head -c {limit} | base64 | tr -d '\\n'
printf ':end\\n'
"""


class EnvironmentFailed(Exception):
    """The environment failed; the message says how."""


class _BackgroundWorker:
    """The worker in a started environment."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._directory = f"/tmp/understudy-{uuid.uuid4().hex[:12]}"

    async def start(self, command: str) -> None:
        feed = _FEED.format(directory=self._directory, command=command)
        script = f"{self._directory}/feed.sh"
        await self._run(
            f"mkdir -m 700 {self._directory} && : >{self._directory}/out && "
            f"printf %s {shlex.quote(feed)} >{script} && (setsid sh {script} </dev/null >/dev/null 2>&1 &)"
        )

    async def send(self, number: int, content: bytes) -> None:
        """Give the worker the next piece of input."""
        path, target = f"{self._directory}/part.{number}", f"{self._directory}/in.{number}"
        if len(content) > _INLINE_BYTES:
            with _file_of(content) as file:
                await _retried(lambda: self._environment.upload_file(file, path))
            # The upload may belong to another user than the worker's.
            await self._run(f"cp {path} {path}.own && mv {path}.own {target}; rm -f {path}")
        else:
            text = base64.b64encode(content).decode()
            await self._run(f"printf %s {text} | base64 -d >{path} && mv {path} {target}")

    async def receive(self, offset: int) -> tuple[bytes, int | None]:
        """Wait a while for output beyond `offset`; return it, and the worker's exit code once it has ended."""
        poll = _POLL.format(
            directory=self._directory,
            offset=offset,
            first=offset + 1,
            limit=_OUTPUT_BYTES,
            times=10 * _POLL_S,
        )
        output = await self._run(poll)
        match = _OUTPUT.search(output)
        if match is None:
            raise EnvironmentFailed(
                f"expected the worker's output, got {output[-300:]!r}; check that the image has a POSIX shell"
            )
        return base64.b64decode(match[2]), int(match[1]) if match[1] else None

    async def errors(self) -> str:
        """Return the end of what the worker wrote to stderr."""
        return await self._run(f"tail -c 2000 {self._directory}/errors")

    async def _run(self, command: str) -> str:
        async def run() -> str:
            result = await self._environment.exec(command, timeout_sec=_COMMAND_S)
            if result.return_code != 0:
                problem = (result.stderr or result.stdout or "").strip()[-500:]
                raise EnvironmentFailed(
                    f"a command in the environment failed with exit code {result.return_code}: {problem}; check "
                    "the image"
                )
            return result.stdout or ""

        return await _retried(run)


@contextlib.contextmanager
def _file_of(content: bytes) -> Generator[Path]:
    """Yield a file with the content, which others may read after it is uploaded with its permissions."""
    with tempfile.NamedTemporaryFile(prefix="understudy-") as file:
        path = Path(file.name)
        path.chmod(0o644)
        file.write(content)
        file.flush()
        yield path


async def _retried(call: Any) -> Any:
    """Return what a call returns; try it several times, since a provider's API may fail now and then."""
    for attempt in range(1, _TRIES + 1):
        try:
            async with asyncio.timeout(2 * _COMMAND_S):
                return await call()
        except Exception as error:  # providers raise errors of their own
            if attempt == _TRIES:
                raise EnvironmentFailed(str(error) or type(error).__name__) from error
            await asyncio.sleep(attempt)


class _Input:
    """What arrives on stdin, taken in pieces."""

    def __init__(self) -> None:
        self._reader = asyncio.StreamReader(limit=PIECE_BYTES)

    async def open(self) -> None:
        protocol = asyncio.StreamReaderProtocol(self._reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)

    async def take(self) -> bytes:
        """Return all that has arrived, waiting for at least one byte; b"" at the end."""
        return await self._reader.read(PIECE_BYTES)


async def _send_all(worker: _BackgroundWorker, incoming: _Input) -> None:
    number = 0
    while content := await incoming.take():
        await worker.send(number, content)
        number += 1


async def _receive_all(worker: _BackgroundWorker, output: int) -> None:
    offset = 0
    while True:
        content, code = await worker.receive(offset)
        offset += len(content)
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[await asyncio.to_thread(os.write, output, unwritten) :]
        if code is not None and not content:
            sys.stderr.write(await worker.errors())
            return


def _environment(settings: dict[str, Any], directory: Path) -> Any:
    factory: Any = importlib.import_module("harbor.environments.factory")
    paths: Any = importlib.import_module("harbor.models.trial.paths")
    task: Any = importlib.import_module("harbor.models.task.config")
    trial: Any = importlib.import_module("harbor.models.trial.config")
    provider: str = settings["provider"]
    provider_field = {"import_path": provider} if ":" in provider else {"type": provider}
    definition = directory / "environment"
    definition.mkdir()
    if settings["image"]:
        (definition / "Dockerfile").write_text(f"FROM {settings['image']}\n")
    trial_paths = paths.TrialPaths(directory / "trial")
    trial_paths.mkdir()
    return factory.EnvironmentFactory.create_environment_from_config(
        trial.EnvironmentConfig(**provider_field, kwargs=settings["options"]),
        environment_dir=definition,
        environment_name="understudy",
        session_id=settings["session"],
        trial_paths=trial_paths,
        task_env_config=task.EnvironmentConfig(docker_image=settings["image"] or None),
    )


async def _serve(settings: dict[str, Any], output: int) -> None:
    with tempfile.TemporaryDirectory(prefix="understudy-harbor-") as directory:
        environment = _environment(settings, Path(directory))
        try:
            async with asyncio.timeout(settings["start_s"]):
                await environment.start(force_build=False)
            worker, incoming = _BackgroundWorker(environment), _Input()
            await incoming.open()
            await worker.start(settings["command"])
            sending = asyncio.create_task(_send_all(worker, incoming))
            receiving = asyncio.create_task(_receive_all(worker, output))
            done, pending = await asyncio.wait((sending, receiving), return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            for task in done:
                task.result()
        finally:
            await asyncio.shield(environment.stop(delete=True))


async def main() -> int:
    """Serve until stdin ends, the worker has ended, or SIGTERM; return the exit code."""
    # stdout becomes stderr, so that nothing that harbor prints gets into the worker's stream.
    output = os.dup(1)
    os.dup2(2, 1)
    serving = asyncio.create_task(_serve(json.loads(sys.argv[1]), output))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, serving.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await serving
    except Exception as error:  # noqa: BLE001  # providers raise errors of their own
        reason = "it did not start in time" if isinstance(error, TimeoutError) else str(error)
        sys.stderr.write(f"{reason or type(error).__name__}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
