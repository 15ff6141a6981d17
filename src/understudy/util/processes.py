"""Child processes, and how many CPUs this process may use."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self


def available_cpus(*, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of CPUs that this process may keep busy, at least 1.

    It is the smallest of the CPUs in its affinity mask (taskset, cpusets) and the CPU quotas of its control group
    and of all groups above it, version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); 1.5 CPUs count as 2.
    `cgroups` is where they are mounted, `membership` the file that names the process's own.
    """
    return max(1, math.ceil(min([_affinity(), *_quotas(cgroups, membership)])))


def raise_file_limit() -> None:
    """Raise this process's soft limit of open files to the hard limit, because rollouts, gateway connections and
    stores that are viewed need many.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """Yield the quotas, in CPUs, that apply to the process."""
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _with_parents(cgroups, path):
                quota, _, period = _read(group / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            # The mount's name depends on the distribution: all its controllers, or only this one.
            for mount in (cgroups / controllers, cgroups / "cpu"):
                for group in _with_parents(mount, path):
                    yield from _ratio(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    """Yield a group's directory and its ancestors, including the mount itself, which is the process's own in a
    container.
    """
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _ratio(quota: str, period: str) -> Iterator[float]:
    """Yield the CPUs that a quota allows; nothing if there is none ("max", -1, or no file)."""
    try:
        if int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
    except ValueError:
        return


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


_STOP_TIMEOUT_S = 5.0
_LOG_BYTES = 1 << 16
_TAIL_LINES, _TAIL_CHARACTERS = 50, 2000
_LINE_BYTES = 1 << 24


class ChildProcess:
    """A child process that runs a module of ours: it writes lines to stdout and logs to stderr, and ends when its
    stdin ends.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._log = b""
        self._reader = asyncio.create_task(self._read_log())

    @classmethod
    @asynccontextmanager
    async def running(
        cls, module: str, arguments: Sequence[str], environment: Mapping[str, str]
    ) -> AsyncGenerator[Self]:
        """Run it while the context lasts."""
        pipe = asyncio.subprocess.PIPE
        # A session of its own, so that Ctrl-C reaches only the parent, which still waits for answers.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module, *arguments),
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
            limit=_LINE_BYTES,
            env=environment,
        )
        child = cls(process)
        try:
            yield child
        finally:
            await child.stop()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    async def stop(self) -> None:
        """End it by closing its stdin; if it does not end, kill it."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:  # also on cancellation, so that no process is left behind
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    self._process.kill()
        await self._wait()

    async def _line(self) -> bytes:
        """Return the next line of its stdout; b"" at the end."""
        assert self._process.stdout is not None
        return await self._process.stdout.readline()

    async def _wait(self) -> int:
        """Wait until it has ended and its log is read; return its exit code, negative for a signal."""
        code = await self._process.wait()
        await self._reader
        return code

    def _exit_description(self) -> str:
        """Return how it ended, in words."""
        code = self._process.returncode
        return f"by signal {-code}" if code is not None and code < 0 else f"with exit code {code}"

    def _log_tail(self) -> str:
        """Return the last lines of its log."""
        lines = self._log.decode(errors="replace").strip().split("\n")
        return "\n".join(lines[-_TAIL_LINES:])[-_TAIL_CHARACTERS:] or "none"

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_LOG_BYTES):
            self._log = (self._log + chunk)[-_LOG_BYTES:]
