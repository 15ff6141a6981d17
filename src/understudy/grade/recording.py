"""A wrapper around a sandbox that records its commands, for the script beside a report."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping, Sequence

from understudy.sandbox.base import Completed, Sandbox
from understudy.sandbox.forwarding import ForwardingSandbox

APPLIED_HERE = (
    "# here the patch was applied (patch.diff, without what the gate left out), and the hidden tests laid over it"
)
"""Replaces the commands of `understudy.grade.apply`, which read a tar of the patch, in a list of commands."""


class RecordingSandbox(ForwardingSandbox):
    """Forwards everything to a sandbox; `commands` are the commands run and files written, as shell commands."""

    def __init__(self, sandbox: Sandbox) -> None:
        super().__init__(sandbox)
        self.commands: list[str] = []

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
        return await super().run(argv, timeout_s=timeout_s, stdin=stdin, env=env, cwd=cwd, reveal=reveal)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Record the file and write it."""
        target = shlex.quote(posixpath.join(self.workdir, path))
        self.commands.append(f"printf %s {shlex.quote(data.decode(errors='replace'))} >{target}")
        await super().write(path, data, mode=mode)
