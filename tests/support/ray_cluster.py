"""A real Ray cluster: `UNDERSTUDY_RAY_PYTHON` names a Python with ray and Understudy, which `.ci/run` makes.

The code of this checkout comes before what is installed there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

PYTHON = os.environ.get("UNDERSTUDY_RAY_PYTHON", "")
UNDERSTUDY = Path(PYTHON).parent / "understudy"
SOURCE = str(Path(__file__).parents[2] / "src")
_PROGRAM = Path(__file__).with_name("ray_program.py")


class RayCluster(Struct, frozen=True):
    """The address of a cluster, and the process of each node's raylet."""

    address: str
    raylets: list[int]


def problems() -> list[str]:
    """Why there can be no cluster here."""
    return [] if PYTHON else ["UNDERSTUDY_RAY_PYTHON names no Python with ray; `.ci/run` makes one"]


def environment() -> dict[str, str]:
    """What a process of that Python needs."""
    return {**os.environ, "PYTHONPATH": SOURCE, "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def running_cluster(*nodes: tuple[int, str]) -> Iterator[RayCluster]:
    """A cluster with nodes of so many CPUs and such a PYTHONPATH each, and a head without a CPU."""
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: there are sockets in it
    process = subprocess.Popen(
        [PYTHON, _PROGRAM, json.dumps(nodes)],
        # No processes in advance, which would be started for each CPU.
        env={**environment(), "RAY_TMPDIR": directory, "RAY_prestart_worker_first_driver": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("{"):
                yield RayCluster(**json.loads(line))
                break
        else:
            raise AssertionError("the cluster did not start")
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()
        shutil.rmtree(directory, ignore_errors=True)
