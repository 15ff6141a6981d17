"""How many CPUs this process may use, by its affinity and the quotas of its control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path


def available_cpus(*, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """The number of CPUs that this process may keep busy, at least 1.

    It is the smallest of the CPUs in its affinity mask (taskset, cpusets) and the CPU quotas of its control group
    and of all groups above it, version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); 1.5 CPUs count as 2.
    `cgroups` is where they are mounted, `membership` the file that names the process's own.
    """
    return max(1, math.ceil(min([_affinity(), *_quotas(cgroups, membership)])))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quotas(cgroups: Path, membership: Path) -> Iterator[float]:
    """The quotas, in CPUs, that are in force for the process."""
    for line in _read(membership).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for group in _with_parents(cgroups, path):
                quota, _, period = _read(group / "cpu.max").partition(" ")
                yield from _ratio(quota, period)
        elif "cpu" in controllers.split(","):
            # Where it is mounted depends on the distribution: by all its controllers, or by the one.
            for mount in (cgroups / controllers, cgroups / "cpu"):
                for group in _with_parents(mount, path):
                    yield from _ratio(_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us"))


def _with_parents(mount: Path, path: str) -> Iterator[Path]:
    """A group's directory and those above it; the mount itself too, which is the process's own in a container."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _ratio(quota: str, period: str) -> Iterator[float]:
    """The CPUs that a quota of a period allows; nothing where there is none ("max", -1, or no file)."""
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
