"""The number of agents follows what vLLM and SGLang tell of their load."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from aiohttp import web

from understudy.errors import ConfigError
from understudy.run.engine_load import AgentSlots, ConcurrencyController, EngineLoad, next_limit, parse_load

from fakes.listen import listen

VLLM = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} RUNNING
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} WAITING
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 7.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} PREEMPTED
# TYPE vllm:num_preemptions_created gauge
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
"""
"""As vLLM 0.32 writes it."""

SGLANG = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
"""


def vllm(running: int, waiting: int = 0, preempted: int = 0) -> str:
    """What a server tells."""
    counts = {"RUNNING": running, "WAITING": waiting, "PREEMPTED": preempted}
    text = VLLM
    for word, number in counts.items():
        text = text.replace(f" {word}\n", f" {number}.0\n")
    return text


def test_the_metrics_of_both_servers_are_read() -> None:
    assert parse_load(vllm(5, 1, 9)) == EngineLoad(5, 1, 0.25, 9)
    two = vllm(5, 1, 9) + vllm(4, 0, 2).replace('"0"', '"1"').replace("0.25", "0.5")
    assert parse_load("\n".join(dict.fromkeys(two.splitlines()))) == EngineLoad(9, 1, 0.5, 11)
    assert parse_load(SGLANG) == EngineLoad(3, 2, 0.28, 0)
    assert parse_load("# TYPE other gauge\nother 1\n") is None


IDLE = EngineLoad(4, 0, 0.2, 5)


@pytest.mark.parametrize(
    ("now", "in_use", "expected"),
    [
        (IDLE, 8, 9),
        (IDLE, 7, 8),  # not all places are used: more would change nothing
        (EngineLoad(4, 1, 0.2, 5), 8, 8),
        (EngineLoad(4, 0, 0.9, 5), 8, 8),
        (EngineLoad(4, 0, 0.96, 5), 8, 6),
        (EngineLoad(4, 0, 0.2, 6), 8, 6),
    ],
)
def test_more_work_while_nothing_waits_and_fewer_after_preemptions(
    now: EngineLoad, in_use: int, expected: int
) -> None:
    assert next_limit(8, in_use, IDLE, now, low=2, high=64) == expected


def test_the_bounds_hold() -> None:
    full = EngineLoad(4, 9, 1.0, 9)
    assert next_limit(2, 2, IDLE, full, low=2, high=64) == 2
    assert next_limit(64, 64, IDLE, IDLE, low=2, high=64) == 64


async def test_with_fewer_places_none_is_given_until_enough_are_back() -> None:
    slots = AgentSlots(2)
    for _ in range(2):
        await slots.acquire()
    third, fourth = (asyncio.create_task(slots.acquire()) for _ in range(2))
    await asyncio.sleep(0)
    slots.resize(1)
    slots.release()
    await asyncio.sleep(0)
    assert slots.locked() and not third.done() and slots.in_use == 1
    third.cancel()
    await asyncio.gather(third, return_exceptions=True)
    slots.resize(2)
    await asyncio.wait_for(fourth, 5)
    assert slots.in_use == 2
    # Who is called off while the place is on its way gives it back.
    fifth = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    slots.release()
    fifth.cancel()
    await asyncio.gather(fifth, return_exceptions=True)
    assert slots.in_use == 1 and not slots.locked()
    # A place comes back between the cancelling of one that waits and its end.
    await slots.acquire()
    sixth = asyncio.create_task(slots.acquire())
    await asyncio.sleep(0)
    sixth.cancel()
    slots.release()
    assert [type(one) for one in await asyncio.gather(sixth, return_exceptions=True)] == [asyncio.CancelledError]
    assert slots.in_use == 1 and not slots.locked()


class _Engine:
    """A server with vLLM's metrics: beyond `bears` requests some wait, beyond `fits` some are evicted."""

    def __init__(self, slots: AgentSlots, bears: int, fits: int) -> None:
        self._slots = slots
        self._bears, self._fits = bears, fits
        self._preempted = 0
        self.fails = False

    async def answer(self, _: web.Request) -> web.Response:
        if self.fails:
            return web.Response(status=500)
        agents = self._slots.in_use
        self._preempted += max(0, agents - self._fits)
        return web.Response(text=vllm(min(agents, self._bears), max(0, agents - self._bears), self._preempted))


async def _until(holds: Callable[[], bool]) -> None:
    for _ in range(6000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it did not come to that in 30 s")


async def test_agents_become_more_until_requests_wait_and_fewer_when_some_are_evicted() -> None:
    slots = AgentSlots(2)
    engine = _Engine(slots, bears=12, fits=16)
    app = web.Application()
    app.router.add_get("/metrics", engine.answer)
    agents = [asyncio.create_task(slots.acquire()) for _ in range(40)]
    runner, url = await listen(app)
    try:
        controller = ConcurrencyController(slots, [f"{url}/v1"], high=32, period_s=0.01)
        watching = asyncio.create_task(controller.watch())
        await _until(lambda: slots.limit == 13)  # the first number at which one waits
        engine.fails = True
        await asyncio.sleep(0.05)
        assert slots.limit == 13 and not watching.done()
        engine.fails, engine._fits = False, 8
        await _until(lambda: slots.limit < 9)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        engine.fails = True
        with pytest.raises(ConfigError, match="/metrics: the server's load cannot be read"):
            await controller.watch()
    finally:
        await runner.cleanup()
    for agent in agents:
        agent.cancel()
    await asyncio.gather(*agents, return_exceptions=True)
