"""A wrapper around a sandbox that records its commands, for the script beside a report."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence

from understudy.sandbox.base import Completed, IgnoreFilter, Sandbox, TreeChanges

APPLIED_HERE = (
    "# here the patch was applied (patch.diff, without what the gate left out), and the hidden tests laid over it"
)
"""Stands among the commands for those of `understudy.grade.apply`, which read a tar of the patch."""


class RecordingSandbox(Sandbox):
    """Forwards everything to a sandbox; `commands` are the commands run and files written, as shell commands."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self.commands: list[str] = []

    @property
    def workdir(self) -> str:
        """Return the sandbox's working directory."""
        return self._sandbox.workdir

    @property
    def home(self) -> str:
        """Return the sandbox's home."""
        return self._sandbox.home

    def locate(self, target: str) -> str:
        """Return the path of a mount in the sandbox."""
        return self._sandbox.locate(target)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reveal: bool = False,
    ) -> Completed:
        """Record the command and run it."""
        variables = [f"{name}={value}" for name, value in (env or {}).items()]
        command = shlex.join(["env", "-C", posixpath.join(self.workdir, cwd or ""), *variables, *argv])
        note = f"  # its stdin had {len(stdin)} bytes" if stdin else ""
        self.commands.append(command + note)
        return await self._sandbox.run(argv, timeout_s=timeout_s, stdin=stdin, env=env, cwd=cwd, reveal=reveal)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Return the content of a file."""
        return await self._sandbox.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Record the file and write it."""
        target = shlex.quote(posixpath.join(self.workdir, path))
        self.commands.append(f"printf %s {shlex.quote(data.decode(errors='replace'))} >{target}")
        await self._sandbox.write(path, data, mode=mode)

    async def seal(self, paths: Sequence[str]) -> None:
        """Seal the files."""
        await self._sandbox.seal(paths)

    async def read_changes(self, *, file_limit: int, ignored: IgnoreFilter) -> TreeChanges | None:
        """Return the changes in the sandbox."""
        return await self._sandbox.read_changes(file_limit=file_limit, ignored=ignored)

    async def reset(self) -> None:
        """Remove what was written."""
        await self._sandbox.reset()

    async def close(self) -> None:
        """Close the sandbox."""
        await self._sandbox.close()
