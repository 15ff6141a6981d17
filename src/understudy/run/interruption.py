"""Interrupts a command in a sandbox from outside, as Ctrl-C in a terminal does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from understudy.sandbox.base import Completed, Sandbox

_WATCHED = """\
(
    while [ ! -e "$0" ]; do sleep 0.1; done
    read -r watcher rest < /proc/self/stat
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        if [ "$pid" != "$watcher" ] && grep -q "^PPid:[[:space:]]*$$\\$" "$process/status"; then
            kill -INT "$pid"
        fi
    done
    if tr '\\0' '\\n' < "/proc/$$/cmdline" | grep -q "^$1"; then kill -INT $$; fi
) > /dev/null 2>&1 &
shift
exec "$@"
"""
"""Runs a command. Once the file $0 exists, interrupts its children, and itself if an argument begins with $1."""


class InterruptibleSandbox(Sandbox):
    """An open sandbox whose commands can be interrupted: their children, and those that have an argument below
    `program`, for an agent that is started by our launcher or without it.

    A command cannot be reached by another one of the sandbox, which has process numbers of its own, so each is
    started with a shell that waits for a file.
    """

    def __init__(self, sandbox: Sandbox, program: str) -> None:
        self._sandbox = sandbox
        self._program = program
        self._signal = f"{sandbox.home}/.interrupt"

    async def interrupt(self) -> None:
        """Interrupt what runs, and every later command that is found."""
        await self._sandbox.write(self._signal, b"")

    @property
    def workdir(self) -> str:
        """See Sandbox."""
        return self._sandbox.workdir

    @property
    def home(self) -> str:
        """See Sandbox."""
        return self._sandbox.home

    def locate(self, target: str) -> str:
        """See Sandbox."""
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
        """See Sandbox."""
        watched = ["sh", "-c", _WATCHED, self._signal, self._program, *argv]
        return await self._sandbox.run(watched, timeout_s=timeout_s, stdin=stdin, env=env, cwd=cwd, reveal=reveal)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """See Sandbox."""
        return await self._sandbox.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        await self._sandbox.write(path, data, mode=mode)

    async def reset(self) -> None:
        """See Sandbox."""
        await self._sandbox.reset()

    async def close(self) -> None:
        """See Sandbox."""
        await self._sandbox.close()
