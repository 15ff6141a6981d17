"""The process that keeps a sandbox's mounts alive. When it dies, the kernel frees the whole sandbox.

It is bubblewrap in a pid namespace, waiting for the end of its stdin, whose other end is ours. So it ends with
this process, in whatever way that ends, and its end kills everything that runs inside.

Where this machine allows control groups, one limits the memory of all processes of a sandbox together. A group's
name contains the process that made it, so that groups left behind by killed processes can be recognised and
removed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

from understudy.errors import SandboxError, SandboxLost
from understudy.sandbox.local.mounts import BOX, SYSTEM_PATH
from understudy.sandbox.process import has_ended, kill_group, own_stamp, seal_descriptors
from understudy.sandbox.spawn import SpawnedProcess, spawn

START_TIMEOUT_S = 60.0
"""How long making the mounts may take on a machine under load, in seconds."""

END_TIMEOUT_S = 5.0
HELPER_ENV = {"PATH": SYSTEM_PATH, "LC_ALL": "C"}
"""Environment of our own helpers; never the spec's, for some of them run with our rights."""

GROUP_PREFIX = "understudy"
CGROUP_ROOT = Path("/sys/fs/cgroup")

LIMIT_FILES = {
    # cgroup v1. The second file limits memory and swap together; it exists only where swap is accounted.
    "memory.limit_in_bytes": None,
    "memory.memsw.limit_in_bytes": None,
    # cgroup v2
    "memory.max": None,
    "memory.swap.max": 0,
}
"""Files that limit memory, in the order to write them; None stands for the limit in bytes."""

_numbers = itertools.count()


def _own_groups() -> Iterator[Path]:
    """Yield directories in which we may be able to create groups: our own group, then its ancestors, in v1 and in
    v2.
    """
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = CGROUP_ROOT / "memory"
        elif controllers == "" and (CGROUP_ROOT / "cgroup.controllers").exists():
            base = CGROUP_ROOT
        else:
            continue
        group_path = base / path.lstrip("/")
        yield from (
            group for group in (group_path, *group_path.parents) if group.is_relative_to(base) and group.is_dir()
        )


def find_group_parent() -> Path | None:
    """Return the directory to create groups in, after removing stale groups there; None if groups are not
    possible.
    """
    with contextlib.suppress(OSError):
        for group in _own_groups():
            delegates = group / "cgroup.subtree_control"
            if delegates.exists() and "memory" not in delegates.read_text().split():
                continue
            if os.access(group, os.W_OK):
                for stale in group.glob(f"{GROUP_PREFIX}-*"):
                    if has_ended(stale.name.removeprefix(f"{GROUP_PREFIX}-").rpartition("-")[0]):
                        remove_group(stale)
                return group
    return None


def new_group_path(parent: Path) -> Path:
    """Return a unique path for a new group, without creating it."""
    return parent / f"{GROUP_PREFIX}-{own_stamp()}-{next(_numbers)}"


def create_group(group: Path, memory_bytes: int) -> None:
    """Create a group whose processes together may use `memory_bytes`. Raises SandboxError."""
    try:
        group.mkdir()
        for name, value in LIMIT_FILES.items():
            if (group / name).exists():
                (group / name).write_text(str(memory_bytes if value is None else value))
    except OSError as error:
        remove_group(group)
        if error.errno == errno.ENODEV:
            return  # the holder has ended, which removes the group; its own output says why
        raise SandboxError(
            f"cannot limit the memory of a sandbox to {memory_bytes} bytes: {error}; check the control "
            "groups with `understudy doctor`"
        ) from error


def remove_group(group: Path) -> None:
    """Remove a group. One that does not exist, or still has processes, is left as it is."""
    with contextlib.suppress(OSError):
        group.rmdir()


RUN_IN_GROUP = (
    'if [ -e "$1/tasks" ]; then echo 0 > "$1/tasks"; else echo 0 > "$1/cgroup.procs"; fi && shift && exec "$@"'
)
"""A shell script that runs a command ($2…) within the group $1.

Only v1 has `tasks`. It moves one thread, and a shell has one; `cgroup.procs` would wait for every process of the
machine to come by, some 10 ms.
"""

RUN_THEN_REMOVE_GROUP = """group=$1; shift
"$@"; code=$?
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -d "$group" ] && ! rmdir "$group" 2>/dev/null && sleep 0.02; done
exit $code"""
"""A shell script that runs a command ($2…) and removes the group $1 when it has ended.

It runs before the group is made, so that there is none without somebody to remove it.
"""


class _HolderProtocol(asyncio.SubprocessProtocol):
    def __init__(self) -> None:
        self.output = {1: bytearray(), 2: bytearray()}
        self.answered = asyncio.Event()
        self.ended = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd] += data
        if self.ready:
            self.answered.set()

    @property
    def ready(self) -> bool:
        return self.output[1].endswith(b"ready\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set()
        self.answered.set()


class MountHolder:
    """A running holder process.

    `target` is a process in its namespaces, by its pid on this machine; `box` and `proc` are descriptors of the
    root that commands see and of the holder's own /proc; `group` is the control group that limits the sandbox's
    memory.
    """

    def __init__(self, child: SpawnedProcess, watch: _HolderProtocol, group: Path | None, depth: int) -> None:
        self.group = group
        self._child = child
        self._watch = watch
        self._closing: asyncio.Task[None] | None = None
        first_pid = child.pid
        for _ in range(depth):
            first_pid = _child(first_pid)
        # The shell's memory belongs to the inner user namespace, so its /proc entries can be read without being
        # root.
        self.target = _child(first_pid)
        with contextlib.ExitStack() as stack:
            self._pidfd = os.pidfd_open(first_pid)
            stack.callback(os.close, self._pidfd)
            self.box = os.open(f"/proc/{self.target}/root{BOX}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self.box)
            self.proc = os.open(f"/proc/{self.target}/root/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self.proc)
            self._opened = stack.pop_all()

    @property
    def alive(self) -> bool:
        """Whether the holder, and so the sandbox, is still running."""
        if self._closing is not None:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)

    async def close(self) -> None:
        """Kill everything inside and wait until it is gone. May be called several times, also concurrently."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        await _end(self._child, self._watch)
        self._opened.close()
        if self.group is not None:
            remove_group(self.group)


def _child(pid: int) -> int:
    """Return the only child of a process. Raises SandboxLost if it has none."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise SandboxLost(
            "the sandbox was killed right after it was opened; check the machine's free memory, then run the "
            "same command again"
        )
    return int(children[0])


async def _end(child: SpawnedProcess, watch: _HolderProtocol) -> None:
    """Close the holder's stdin, which ends it in any state, and wait for its end."""
    child.close_stdin()
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await watch.ended.wait()
    except TimeoutError:
        kill_group(child.pid)
        await watch.ended.wait()
    finally:  # also when the event loop ends first and cancels this
        child.close()


async def start_holder(command: Sequence[str], groups: Path | None, memory_bytes: int) -> MountHolder:
    """Start a holder process and wait until its mounts are made.

    If `groups` is given, a control group that limits memory is created in it, and removed when the holder ends.
    Raises SandboxError with the output of the helper programs. If cancelled, nothing stays behind.
    """
    group = None if groups is None else new_group_path(groups)
    group_wrapper = [] if group is None else ["/bin/sh", "-c", RUN_THEN_REMOVE_GROUP, "hold", str(group)]
    seal_descriptors()
    try:
        watch = _HolderProtocol()
        child = spawn([*group_wrapper, *command], watch, stdin=None, env=HELPER_ENV)
    except OSError as error:
        raise SandboxError(
            f"cannot start a sandbox: {error}; check this machine with `understudy doctor`"
        ) from error
    try:
        if group is not None:
            create_group(group, memory_bytes)
        async with asyncio.timeout(START_TIMEOUT_S):
            await watch.answered.wait()
        if not watch.ready:
            message = watch.output[2].decode(errors="replace").strip() or "a helper program ended without output"
            raise SandboxError(
                f"cannot set up the mounts of a sandbox: {message[-1000:]}; check this machine with `understudy "
                "doctor`"
            )
        return MountHolder(child, watch, group, depth=1 if group is None else 2)
    except BaseException as error:
        await asyncio.shield(_end(child, watch))
        if group is not None:
            remove_group(group)
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"cannot open a sandbox: its mounts were not made within {START_TIMEOUT_S:g} s; run the same "
                "command again when the machine is less busy, or with fewer attempts at a time (--concurrency)"
            ) from error
        if isinstance(error, OSError):  # a process that was inspected has ended
            raise SandboxLost(
                f"the sandbox was killed while it was opened: {error}; check the machine's free memory, then "
                "run the same command again"
            ) from error
        raise
