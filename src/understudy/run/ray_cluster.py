"""A connection to a Ray cluster: its options, and which of its nodes can hold actors of ours."""

from __future__ import annotations

import asyncio
import importlib
import math
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from msgspec import Struct

from understudy import __version__
from understudy.errors import ConfigError
from understudy.util.settings import option
from understudy.util.text import visible_line

_CONNECT_TIMEOUT_S = 10.0
_NODES_TIMEOUT_S = 60.0


class RayOptions(Struct, frozen=True, kw_only=True):
    """Which Ray cluster to use, and what each of our actors gets there."""

    ray_address: Annotated[str, option("With --engine ray: the address of the cluster as HOST:PORT, or auto.")] = (
        "auto"
    )
    ray_workers: (
        Annotated[
            int, option("With --engine ray: number of actors [default: one on each node with room for it].", ge=1)
        ]
        | None
    ) = None
    ray_capacity: Annotated[
        int, option("With --engine ray: rollouts or gradings at a time in an actor.", ge=1)
    ] = 8
    ray_cpus: (
        Annotated[
            float,
            option("With --engine ray: CPUs that each actor reserves [default: half of --ray-capacity].", ge=0),
        ]
        | None
    ) = None

    @property
    def cpus(self) -> float:
        """The CPUs that an actor requests from Ray. Above 1, only whole numbers are allowed."""
        cpus = self.ray_capacity / 2 if self.ray_cpus is None else self.ray_cpus
        return float(math.ceil(cpus)) if cpus > 1 else cpus


def _ray() -> Any:
    """Return the module ray. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "--engine ray needs the package ray here and on every node, in the cluster's own version; install it "
            "with: pip install 'understudy[ray]'"
        ) from error


@asynccontextmanager
async def connected(options: RayOptions) -> AsyncGenerator[tuple[Any, int]]:
    """Connect to a Ray cluster; yield the module ray, and how many actors to start there.

    Raises ConfigError if the cluster cannot be reached, or its nodes have another release of Understudy.
    """
    ray = _ray()
    # Ray prints messages about its nodes on stdout, where only the summary should be.
    with redirect_stdout(sys.stderr):
        # This runs in a thread, because in the main thread Ray would install its own SIGTERM handler.
        await asyncio.to_thread(_connect, ray, options.ray_address)
        try:
            nodes = await _check_nodes(ray, options.cpus)
            yield ray, options.ray_workers or max(1, nodes)
        finally:
            await asyncio.to_thread(ray.shutdown)


def _connect(ray: Any, address: str) -> None:
    host, colon, port = address.rpartition(":")
    try:
        if colon and port.isdecimal() and "://" not in host:
            # Ray's own retries would take minutes.
            socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        # Ray also reports this error if its own version or Python's differs from the cluster's.
        raise ConfigError(
            f"--ray-address {address}: {visible_line(str(error))}; start a cluster with `ray start --head`, or "
            "give the HOST:PORT of one with the same versions of Ray and Python"
        ) from error


async def _check_nodes(ray: Any, cpus: float) -> int:
    """Return how many nodes have room for an actor. Raises ConfigError if one of those has another release."""
    affinity: Any = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    nodes = [
        node
        for node in await asyncio.to_thread(ray.nodes)
        if node["Alive"] and node["Resources"].get("CPU", 0.0) >= cpus
    ]
    # A function of Python's standard library, since ours cannot be imported on a node without Understudy.
    get_version = ray.remote(num_cpus=0, max_retries=0)(version)
    releases: dict[str, str] = {}

    async def read_release(node: dict[str, Any]) -> None:
        strategy = affinity(node["NodeID"], soft=False)
        try:
            release = await asyncio.wrap_future(
                get_version.options(scheduling_strategy=strategy).remote("understudy").future()
            )
        except PackageNotFoundError:
            release = "none"
        except ray.exceptions.RayError:
            return  # the node went away meanwhile
        releases[f"{node['NodeManagerAddress']} ({node['NodeID'][:8]})"] = release

    if version_tasks := [asyncio.create_task(read_release(node)) for node in nodes]:
        await asyncio.wait(version_tasks, timeout=_NODES_TIMEOUT_S)
    if other_releases := [
        f"{release} on {name}" for name, release in sorted(releases.items()) if release != __version__
    ]:
        raise ConfigError(
            f"--engine ray: expected Understudy {__version__} on every node, got {', '.join(other_releases)}; "
            f"install understudy=={__version__} on those nodes of the Ray cluster"
        )
    return len(nodes)
