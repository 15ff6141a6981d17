"""Interrupts a command in a sandbox from outside, as Ctrl-C in a terminal does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from understudy.sandbox.base import Completed, Sandbox
from understudy.sandbox.forwarding import ForwardingSandbox

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


class InterruptibleSandbox(ForwardingSandbox):
    """An open sandbox whose running commands can be interrupted, as by Ctrl-C (SIGINT).

    The signal goes to a command's child processes, where an agent runs that our launcher started, and to the
    command itself if one of its arguments begins with the path `program`, as for an agent without the launcher.
    Each command has a PID namespace of its own, so no other command can signal it. Therefore it is started by a
    shell that waits for a file and then sends the signal.
    """

    def __init__(self, sandbox: Sandbox, program: str) -> None:
        super().__init__(sandbox)
        self._program = program
        self._started = 0
        self._running: set[str] = set()

    async def interrupt(self) -> None:
        """Interrupt the commands that run now. Later ones, such as those that collect logs, are not affected."""
        for signal in sorted(self._running):
            await self.write(signal, b"")

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
        self._started += 1
        signal = f"{self.home}/.interrupt-{self._started}"
        watched = ["sh", "-c", _WATCHED, signal, self._program, *argv]
        self._running.add(signal)
        try:
            return await super().run(watched, timeout_s=timeout_s, stdin=stdin, env=env, cwd=cwd, reveal=reveal)
        finally:
            self._running.remove(signal)
