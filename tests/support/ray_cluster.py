"""A real Ray cluster: `UNDERSTUDY_RAY_PYTHON` names a Python with ray and Understudy, which `.ci/run` makes.

The code of this checkout comes before what is installed there.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from msgspec import Struct

from support.hosts import Host
from support.workers import started

PYTHON = os.environ.get("UNDERSTUDY_RAY_PYTHON", "")
UNDERSTUDY = Path(PYTHON).parent / "understudy"
SOURCE = str(Path(__file__).parents[2] / "src")
_PORT = 6379
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
    # Ray's workers yield to everything else on the machine, which beside other tests means that they do nothing.
    return {**os.environ, "PYTHONPATH": SOURCE, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


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


class RayHosts(Struct, frozen=True):
    """A cluster with a raylet on each of some hosts, and its head without a CPU on another one."""

    address: str
    _directory: Path

    def enter(self, host: Host) -> list[str]:
        """What comes before a command to run it on a host, whose files of Ray are its own."""
        files = self._directory / host.name
        files.mkdir(exist_ok=True)
        variables = [f"{name}={value}" for name, value in environment().items() if name not in os.environ]
        place = self._directory / "ray"
        return [*host.enter_with(files, place), "env", *variables, f"RAY_TMPDIR={place}"]

    def node(self, host: Host, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
        """Start Ray on a host."""
        arguments += (f"--node-ip-address={host.address}", "--object-store-memory=80000000", "--block")
        return started(*self.enter(host), UNDERSTUDY.with_name("ray"), "start", *arguments)


@contextmanager
def cluster_on(head: Host, nodes: Sequence[Host], cpus: int) -> Iterator[RayHosts]:
    """A cluster of hosts with so many CPUs each; its processes end with their namespaces at the latest."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # short: there are sockets in it
    (directory / "ray").mkdir()
    cluster = RayHosts(f"{head.address}:{_PORT}", directory)
    join = [(node, f"--address={cluster.address}", f"--num-cpus={cpus}") for node in nodes]
    begin = (head, "--head", f"--port={_PORT}", "--include-dashboard=false", "--num-cpus=0")
    try:
        with ExitStack() as stack:
            for places in ([begin], join):
                starting = [stack.enter_context(cluster.node(*place)) for place in places]
                for ray in starting:
                    assert ray.stdout is not None
                    assert any("Ray runtime started" in line for line in ray.stdout), "a node did not start"
            yield cluster
    finally:
        shutil.rmtree(directory, ignore_errors=True)
