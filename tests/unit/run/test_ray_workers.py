"""When a fleet of Ray actors goes on after errors of its workers, and when it gives up."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.run import ray_workers
from understudy.run.ray_cluster import RayOptions
from understudy.run.ray_workers import RayFleet
from understudy.types import ErrorInfo


class _Method:
    """A method of an actor: its calls return the results after a while, and when there is none left, nothing."""

    def __init__(self, *results: object) -> None:
        self.results = list(results)
        self.called = 0

    def remote(self, *arguments: object) -> _Method:
        self.called += 1
        return self

    def future(self) -> Future[Any]:
        future: Future[Any] = Future()
        if self.results:
            asyncio.get_running_loop().call_later(0.003, future.set_result, self.results.pop(0))
        return future


def fleet_of(*works: _Method) -> RayFleet:
    """A fleet on a Ray whose actors are placed at once, and whose workers end as the methods say."""
    actors = [
        SimpleNamespace(__ray_ready__=_Method(*[True] * 9999), work=work, stop=_Method(None)) for work in works
    ]
    ray = SimpleNamespace(
        remote=lambda kind: ray,
        options=lambda **options: SimpleNamespace(remote=lambda *arguments: actors.pop(0)),
        exceptions=SimpleNamespace(RayError=RuntimeError),
        available_resources=lambda: {"CPU": 1.0},
        cluster_resources=lambda: {"CPU": 4.0},
        kill=lambda actor: None,
    )
    return RayFleet(ray, "postgresql://host/name", RayOptions(), len(actors))


ERROR = ErrorInfo("store", "StoreError", "the database is away")


async def test_a_fleet_gives_up_after_several_errors_in_a_row_of_each_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_workers, "_RESTART_PAUSE_S", 0.05)
    first, second = _Method(*[ERROR] * 2), _Method(*[ERROR] * 9999)
    fleet = fleet_of(first, second)
    fleet.start("run")
    lines: set[str] = set()
    while second.called < 5:  # while the first one works, nothing is given up
        lines.add(fleet.idle_reason())
        await asyncio.sleep(0.01)
    assert any("begins anew in 0 s: the database is away" in line for line in lines)
    await fleet.close()

    fleet = fleet_of(_Method(*[ERROR] * 9999))
    fleet.start("run")
    tries = 0
    with pytest.raises(ConfigError, match="3 times in a row, the last one with: the database is away"):
        while True:
            tries += "begins anew" in fleet.idle_reason()
            await asyncio.sleep(0.01)
    assert tries > 1
    await fleet.close()


async def test_a_thread_asks_while_the_errors_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_workers, "_RESTART_PAUSE_S", 0.003)
    fleet = fleet_of(_Method(*[ERROR] * 9999), _Method())
    fleet.start("run")

    def slowly(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        time.sleep(0.002)  # after each line, so that the event loop does something in between
        return slowly

    def ask() -> set[str]:
        before = sys.gettrace()
        sys.settrace(slowly)
        try:
            return {fleet.idle_reason()[:5] for _ in range(12)}
        finally:
            sys.settrace(before)

    async with asyncio.timeout(20):  # a StopIteration in a thread would never come out of it
        assert await asyncio.to_thread(ask) <= {"actor", "Ray h"}
    await fleet.close()
