"""Starts processes without copying this one, and reads their output in the event loop.

uvloop forks: the kernel copies this process's page tables, and then each page that is written before the child
executes its program. While a run holds a few hundred megabytes that takes 10 ms and more, in which the event loop,
and with it the gateway, stands still. `posix_spawn` shares the memory with the child until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

_READ_BYTES = 1 << 18
_DEFAULT_HANDLING = frozenset(map(int, signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}))


class SpawnedProcess:
    """A running child process, in a session of its own. Must be closed; belongs to the running event loop."""

    def __init__(
        self,
        pid: int,
        pidfd: int,
        protocol: asyncio.SubprocessProtocol,
        outputs: Mapping[int, int],
        stdin: int | None,
    ) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._outputs = dict(outputs)
        self._stdin = stdin
        self._pidfd = pidfd
        self._loop.add_reader(self._pidfd, self._ended)
        for stream, descriptor in outputs.items():
            os.set_blocking(descriptor, False)
            self._loop.add_reader(descriptor, partial(self._read, stream))

    def close_stdin(self) -> None:
        """Close our end of its stdin, if that is a pipe."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def close(self) -> None:
        """Close the pipes, and kill the process if it is still running. May be called again."""
        self.close_stdin()
        for stream in list(self._outputs):
            self._close_output(stream)
        if self.returncode is None and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            if self._loop.is_closed():
                self._ended()

    def _read(self, stream: int) -> None:
        try:
            data = os.read(self._outputs[stream], _READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data:
            self._protocol.pipe_data_received(stream, data)
            return
        self._close_output(stream)
        self._end()

    def _close_output(self, stream: int) -> None:
        descriptor = self._outputs.pop(stream)
        if not self._loop.is_closed():
            self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _ended(self) -> None:
        if not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        try:
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:  # somebody else has waited for it; asyncio returns the same code then
            self.returncode = 255
        self._protocol.process_exited()
        self._end()

    def _end(self) -> None:
        if self.returncode is not None and not self._outputs:
            self._protocol.connection_lost(None)


def _system_program(name: str) -> str:
    return shutil.which(name, path=os.defpath) or f"/usr/bin/{name}"


def spawn(
    argv: Sequence[str],
    protocol: asyncio.SubprocessProtocol,
    *,
    stdin: BinaryIO | None,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
) -> SpawnedProcess:
    """Start a program in a new session, with the default signal handling; `protocol` is told what becomes of it.

    Without `stdin` it gets a pipe. It inherits `pass_fds`, and no descriptor that is not inheritable. Raises
    OSError or ValueError when it cannot be started.
    """
    command = list(argv)
    program = command[0] if "/" in command[0] else shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    if cwd is not None:
        program_path = Path(cwd, program)
        if not Path(cwd).is_dir() or not program_path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(program_path))
        if not os.access(program_path, os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(program_path))
        # A shell would change variables. `env` takes a name with = for one, which `nice` does not.
        unchanged = (_system_program("nice"), "-n", "0") if "=" in program else ()
        command = ["env", "-C", cwd, *unchanged, program, *command[1:]]
        program = _system_program("env")
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        reads: dict[int, int] = {}
        actions: list[tuple[int, ...]] = []
        if stdin is None:
            source, sink = os.pipe()
            theirs.callback(os.close, source)
            ours.callback(os.close, sink)
        else:
            source, sink = stdin.fileno(), None
        actions.append((os.POSIX_SPAWN_DUP2, source, 0))
        for stream in (1, 2):
            reads[stream], write = os.pipe()
            ours.callback(os.close, reads[stream])
            theirs.callback(os.close, write)
            actions.append((os.POSIX_SPAWN_DUP2, write, stream))
        actions += [(os.POSIX_SPAWN_DUP2, descriptor, descriptor) for descriptor in pass_fds]
        pid = os.posix_spawn(
            program,
            command,
            dict(env),
            file_actions=actions,
            setsid=True,
            setsigmask=(),
            setsigdef=_DEFAULT_HANDLING,
        )
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        ours.pop_all()
    return SpawnedProcess(pid, pidfd, protocol, reads, sink)
