"""An environment in harbor's own types that runs commands as processes here. Imported by harbor's Python.

What harbor's providers lack is lacking here too: commands have no stdin, and their output comes at the end.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult


class ProcessEnvironment(BaseEnvironment):
    """Notes in the file `log` what is started and stopped. Every `failing`th command fails before it is run."""

    def __init__(self, *args: object, log: str, failing: int = 0, **kwargs: object) -> None:
        self._log = Path(log)
        self._failing = failing
        self._commands = 0
        self._groups: set[int] = set()
        super().__init__(*args, **kwargs)

    @staticmethod
    def type() -> str:
        return "processes"

    def _validate_definition(self) -> None:
        if not (self.environment_dir / "Dockerfile").is_file() and self.task_env_config.docker_image is None:
            raise FileNotFoundError("no Dockerfile and no image")

    async def start(self, force_build: bool) -> None:
        if self.task_env_config.docker_image == "no-such-image:1":
            raise RuntimeError("manifest for no-such-image:1 not found")
        self._note("start")

    async def stop(self, delete: bool) -> None:
        self._kill()
        self._note("stop")

    def _kill(self) -> None:
        # Everything of the environment ends with it: processes are known by a variable that they inherit.
        mark = f"HARBOR_SESSION={self.session_id}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
            except OSError:
                continue

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        self._commands += 1
        if self._failing and self._commands % self._failing == 0:
            raise ConnectionError("the provider's API returned 502")
        process = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {}), "HARBOR_SESSION": self.session_id},
        )
        stdout, stderr = await process.communicate()
        return ExecResult(stdout=stdout.decode(), stderr=stderr.decode(), return_code=process.returncode or 0)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copyfile(source_path, target_path)

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        raise NotImplementedError

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        raise NotImplementedError

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError

    def _note(self, event: str) -> None:
        with self._log.open("a") as file:
            file.write(f"{event} {self.session_id}\n")
