"""How many CPUs a process may use, by its affinity and by control groups of both versions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from understudy.util.processes import available_cpus


def cpus(root: Path, membership: str, files: Mapping[str, str]) -> int:
    for name, content in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(content)
    (root / "membership").write_text(membership)
    return available_cpus(cgroups=root / "cgroup", membership=root / "membership")


@pytest.fixture(autouse=True)
def _eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


V1 = "7:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "300000 100000\n"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 2),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "250000 50000\n"}, 5),
        ("0::/a\n", {"a/cpu.max": "10000 100000\n"}, 1),
        ("0::/a\n", {"a/cpu.max": "6400000 100000\n"}, 8),
        ("0::/../elsewhere\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/a\n", {"a/cpu.max": "nonsense\n"}, 8),
        (V1, {"cpu,cpuacct/docker/a/cpu.cfs_quota_us": "-1\n"}, 8),
        (
            V1,
            {
                "cpu,cpuacct/docker/a/cpu.cfs_quota_us": "400000\n",
                "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        # In a container its own group is mounted at the root, under the controller's plain name.
        (V1, {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
def test_the_smallest_limit_counts(tmp_path: Path, membership: str, files: dict[str, str], expected: int):
    assert cpus(tmp_path, membership, files) == expected


def test_affinity_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3}, raising=False)
    assert cpus(tmp_path, "0::/\n", {"cpu.max": "400000 100000\n"}) == 1


def test_this_machine_has_some():
    assert available_cpus() >= 1
