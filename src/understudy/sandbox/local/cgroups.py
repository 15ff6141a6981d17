"""A memory bound for all processes of a sandbox together, where this machine lets us make control groups.

Groups are named after the process that made them, so that one left behind when everything is killed at once is
known as stale.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from understudy.errors import SandboxError

PREFIX = "understudy"
ROOT = Path("/sys/fs/cgroup")

LIMIT_FILES = {
    # cgroup v1: the second bounds memory and swap together, and exists only where swap is accounted.
    "memory.limit_in_bytes": None,
    "memory.memsw.limit_in_bytes": None,
    # cgroup v2
    "memory.max": None,
    "memory.swap.max": 0,
}
"""Files that bound memory, in the order to write them; None stands for the limit itself."""

_numbers = itertools.count()


def _own_groups() -> Iterator[Path]:
    """Directories that could hold our groups: our own group first, then its ancestors, in v1 and in v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base = ROOT / "memory"
        elif controllers == "" and (ROOT / "cgroup.controllers").exists():
            base = ROOT
        else:
            continue
        own = base / path.lstrip("/")
        yield from (group for group in (own, *own.parents) if group.is_relative_to(base) and group.is_dir())


def find_parent() -> Path | None:
    """The directory to make groups in, or None when memory cannot be bounded so; clears stale groups there."""
    with contextlib.suppress(OSError):
        for group in _own_groups():
            delegates = group / "cgroup.subtree_control"
            if delegates.exists() and "memory" not in delegates.read_text().split():
                continue
            if os.access(group, os.W_OK):
                _sweep(group)
                return group
    return None


def _stamp(pid: int) -> str:
    """A name that no other process has, now or later: pid namespace, pid and start time."""
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{Path('/proc/self/ns/pid').stat().st_ino}-{pid}-{started}"


def _is_stale(group: Path) -> bool:
    stamp = group.name.removeprefix(f"{PREFIX}-").rpartition("-")[0]
    namespace, _, rest = stamp.partition("-")
    if namespace != _stamp(os.getpid()).partition("-")[0]:
        return False
    try:
        return _stamp(int(rest.partition("-")[0])) != stamp
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return True


def _sweep(parent: Path) -> None:
    for group in parent.glob(f"{PREFIX}-*"):
        if _is_stale(group):
            remove(group)


def reserve(parent: Path) -> Path:
    """A unique path for a new group, which is not created yet."""
    return parent / f"{PREFIX}-{_stamp(os.getpid())}-{next(_numbers)}"


def create(group: Path, memory_bytes: int) -> None:
    """Make a group whose processes may use `memory_bytes` together. Raises SandboxError."""
    try:
        group.mkdir()
        for name, value in LIMIT_FILES.items():
            if (group / name).exists():
                (group / name).write_text(str(memory_bytes if value is None else value))
    except OSError as error:
        remove(group)
        raise SandboxError(f"cannot limit the memory of a sandbox to {memory_bytes} bytes: {error}") from error


def remove(group: Path) -> None:
    """Remove a group without processes; one that is gone or busy is left as it is."""
    with contextlib.suppress(OSError):
        group.rmdir()


JOIN = 'if [ -e "$1/tasks" ]; then echo 0 > "$1/tasks"; else echo 0 > "$1/cgroup.procs"; fi && shift && exec "$@"'
"""A shell script that runs a command ($2…) within the group $1.

Only v1 has `tasks`. It moves one thread, and a shell has one; `cgroup.procs` would wait for every process of the
machine to come by, some 10 ms.
"""

OUTLIVE = """group=$1; shift
"$@"; code=$?
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -d "$group" ] && ! rmdir "$group" 2>/dev/null && sleep 0.02; done
exit $code"""
"""A shell script that runs a command ($2…) and removes the group $1 when it has ended.

It runs before the group is made, so that there is none without somebody to remove it.
"""
