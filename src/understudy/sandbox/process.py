"""Runs a child process: feeds stdin, collects limited output, enforces the timeout and kills the process group.

All kinds of sandboxes run their helper processes through this module.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import stat
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from understudy.errors import SandboxError
from understudy.sandbox.base import Completed
from understudy.sandbox.spawn import SpawnedProcess, spawn
from understudy.sandbox.time_limit import TimeLimit

T = TypeVar("T")

GRACE_S = 1.0
"""How many seconds a killed process may take to end and its pipes to close. A process that still holds them then
has left the group.
"""


LAST_SIGNAL = 64


def read_regular(descriptor: int, path: str, limit: int) -> bytes:
    """Return the content of an open file, and close it. Raises SandboxError unless it is regular and within
    `limit` bytes.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SandboxError(
            f"cannot read {path} in the sandbox: it is a directory or special file; expected a regular file: "
            "give another path"
        )
    with os.fdopen(descriptor, "rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise SandboxError(
            f"cannot read {path} in the sandbox: it is too large; expected at most {limit} bytes: write less into "
            "it"
        )
    return data


def exit_code_of_shell(code: int) -> int:
    """Return -n for a shell's exit code 128 + n, which means signal n; other codes unchanged."""
    return 128 - code if 128 < code <= 128 + LAST_SIGNAL else code


def process_stamp(pid: int) -> str:
    """Return a name that identifies a process until the next boot: pid namespace, pid and start time.

    Raises OSError when there is no such process.
    """
    return f"{Path('/proc/self/ns/pid').stat().st_ino}-{pid}-{_stat_fields(pid)[_STARTED]}"


@lru_cache(maxsize=1)  # the kernel takes milliseconds to write the stat file of a process with many threads
def _own_stamp(pid: int) -> str:
    return process_stamp(pid)


def own_stamp() -> str:
    """Return the `process_stamp` of this process."""
    return _own_stamp(os.getpid())


_STARTED = 19
"""The position of the start time in the fields of `/proc/PID/stat` from the state on."""


def _stat_fields(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def has_ended(stamp: str) -> bool:
    """Return whether the process of a stamp has certainly ended. False for one in another pid namespace, which is
    unknown.
    """
    namespace, _, process = stamp.partition("-")
    if namespace != own_stamp().partition("-")[0]:
        return False
    pid, _, started = process.partition("-")
    try:
        fields = _stat_fields(int(pid))
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True
    # One that was killed is a zombie until its parent asks for its end, which may be never.
    return fields[_STARTED] != started or fields[0] in ("Z", "X")


class CommandOutput:
    """The first `limit` bytes of each stream. The rest is read and dropped, so a flood of output neither blocks
    nor fills memory.
    """

    def __init__(self, limit: int) -> None:
        self.stdout = bytearray()
        self.stderr = bytearray()
        self.truncated = False
        self._limit = limit

    def add(self, stream: int, data: bytes) -> None:
        """Add output of stream 1 (stdout) or 2 (stderr)."""
        buffer = self.stderr if stream == 2 else self.stdout
        room = self._limit - len(buffer)
        buffer += data[:room]
        self.truncated = self.truncated or len(data) > room

    def completed(self, code: int | None, duration_s: float, *, timed_out: bool = False) -> Completed:
        """Return the finished command with this output; its exit code is None if it `timed_out`."""
        code = None if timed_out else code
        return Completed(code, bytes(self.stdout), bytes(self.stderr), duration_s, timed_out, self.truncated)


class _OutputCollector(asyncio.SubprocessProtocol):
    def __init__(self, output_bytes: int, ended: asyncio.Event) -> None:
        self.output = CommandOutput(output_bytes)
        self.ended = ended
        self.exited = asyncio.Event()
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output.add(fd, data)

    def process_exited(self) -> None:
        self.exited.set()
        self.ended.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


def seal_descriptors() -> None:
    """Make all inherited descriptors of this process non-inheritable, because none is closed in
    children.

    An inherited directory descriptor would be a way out of every sandbox.
    """
    with os.scandir("/proc/self/fd") as entries:
        descriptors = [int(entry.name) for entry in entries]
    for descriptor in descriptors:
        if descriptor > 2:
            with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
                os.set_inheritable(descriptor, False)


def kill_group(leader: int) -> None:
    """Send SIGKILL to the process group of `leader`, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


async def _reap(child: SpawnedProcess, watch: _OutputCollector, kill: Callable[[int], None]) -> None:
    """Kill what is still running, reap the leader and close the pipes."""
    try:
        kill(child.pid)
        try:
            async with asyncio.timeout(GRACE_S):
                await watch.exited.wait()
        except TimeoutError:
            kill_group(child.pid)
            await watch.exited.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                await watch.closed.wait()
    finally:
        child.close()


@contextlib.contextmanager
def _file_of(content: bytes) -> Generator[BinaryIO]:
    """Yield a memory file with the content, to be a child's stdin.

    Not a pipe: asyncio's would be a socket, which some programs, such as Claude Code, do not read as stdin; and
    nothing has to wait for a child that reads late or never.
    """
    with os.fdopen(os.memfd_create("stdin"), "w+b", buffering=0) as file:
        unwritten = memoryview(content)
        while unwritten:
            unwritten = unwritten[file.write(unwritten) :]
        file.seek(0)
        yield file


async def run_to_completion(work: Callable[[asyncio.Event], Coroutine[Any, Any, T]]) -> T:
    """Await `work` in a task that is never cancelled midway; return its result.

    When the caller is cancelled, the event that `work` was given is set, and the caller waits until `work` has
    ended.
    """
    cancelled = asyncio.Event()
    task = asyncio.create_task(work(cancelled))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        cancelled.set()
        await asyncio.wait([task])
        if not task.cancelled():
            # Retrieved, so that asyncio does not log it as never retrieved; the caller is cancelled and needs no
            # result.
            task.exception()
        raise


async def run_process(
    argv: Sequence[str],
    ended: asyncio.Event,
    *,
    timeout_s: float,
    output_bytes: int,
    stdin: bytes,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    kill: Callable[[int], None] = kill_group,
) -> Completed:
    """Run `argv` in a new session until it ends, `ended` is set, or `timeout_s` seconds have passed, not counting
    those in which the machine had no processor for it (see `TimeLimit`).

    What is left then is killed by calling `kill` with its pid. `exit_code` is negative for a signal, None after a
    timeout. Raises OSError or ValueError when the program cannot be started. Must not be cancelled; set `ended`
    instead (see `run_to_completion`).
    """
    started = time.monotonic()
    seal_descriptors()
    with _file_of(stdin) as file:
        watch = _OutputCollector(output_bytes, ended)
        child = spawn(argv, watch, stdin=file, env=env, cwd=cwd, pass_fds=pass_fds)
    limit = TimeLimit(timeout_s)
    try:
        while not ended.is_set() and (pause_s := limit.pause_s()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await ended.wait()
            limit.count([child.pid])
    finally:
        timed_out = not ended.is_set()
        duration_s = time.monotonic() - started
        await asyncio.shield(_reap(child, watch, kill))
    return watch.output.completed(child.returncode, duration_s, timed_out=timed_out)
