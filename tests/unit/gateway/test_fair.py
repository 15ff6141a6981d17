"""Fair slots: never too many, never idle while someone waits, in turns between keys."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.fair_slots import FairSlots, QueueFull


class Bench:
    """Holders of slots that tests start, end and cancel; `granted` are their names in the order of their slots."""

    def __init__(self, slots: int, queue: int = 1000) -> None:
        self.fair = FairSlots(slots, queue)
        self.granted: list[str] = []
        self.holding: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, key: str, name: str) -> None:
        self.tasks[name] = asyncio.ensure_future(self._hold(key, name))

    async def _hold(self, key: str, name: str) -> None:
        async with self.fair.hold(key):
            self.granted.append(name)
            self.holding[name] = asyncio.Event()
            try:
                await self.holding[name].wait()
            finally:
                del self.holding[name]

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)


async def test_slots_rotate_between_keys_so_a_busy_key_does_not_starve_others() -> None:
    bench = Bench(slots=1)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2", "c1"):
        bench.start(name[0], name)
    await bench.settle()
    while bench.holding:
        next(iter(bench.holding.values())).set()
        await bench.settle()
    assert bench.granted == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert (bench.fair.held, bench.fair.waiting) == (0, 0)


async def test_a_full_queue_is_a_retryable_error() -> None:
    bench = Bench(slots=2, queue=1)
    for name in ("1", "2", "3"):
        bench.start("a", name)
    await bench.settle()
    with pytest.raises(QueueFull, match="the model answers 2 requests and 1 more wait") as raised:
        async with bench.fair.hold("b"):
            pass
    assert (raised.value.status, raised.value.retryable) == (529, True)
    bench.holding["1"].set()
    await bench.settle()
    bench.start("b", "4")
    await bench.settle()
    assert bench.fair.waiting == 1
    await bench.close()


async def test_a_slot_granted_to_a_task_cancelled_at_that_moment_passes_to_the_next() -> None:
    bench = Bench(slots=1)
    for name in ("1", "2", "3"):
        bench.start("a", name)
    await bench.settle()
    bench.holding["1"].set()
    await asyncio.sleep(0)  # 2 has been given the slot, and does not know it yet
    assert (bench.fair.held, bench.fair.waiting, bench.granted) == (1, 1, ["1"])
    bench.tasks["2"].cancel()
    await bench.settle()
    assert bench.granted == ["1", "3"]
    await bench.close()
    assert (bench.fair.held, bench.fair.waiting) == (0, 0)


async def test_an_exception_in_the_block_releases_the_slot() -> None:
    fair = FairSlots(1, 0)
    with pytest.raises(ZeroDivisionError):
        async with fair.hold("a"):
            raise ZeroDivisionError
    async with fair.hold("a"):
        assert fair.held == 1


steps = st.lists(
    st.tuples(st.sampled_from(["start", "start", "end", "cancel", "settle"]), st.integers(0, 50)), max_size=60
)


@given(st.integers(1, 3), steps)
def test_slots_stay_full_and_fair_under_random_starts_ends_and_cancellations(
    slots: int, script: list[tuple[str, int]]
) -> None:
    asyncio.run(_check(slots, script))


async def _check(slots: int, script: list[tuple[str, int]]) -> None:
    bench = Bench(slots)
    started = 0
    for step, number in script:
        match step:
            case "start":
                bench.start("abc"[number % 3], f"{'abc'[number % 3]}{started:03}")
                started += 1
            case "end" if bench.holding:
                list(bench.holding.values())[number % len(bench.holding)].set()
            case "cancel" if alive := [task for task in bench.tasks.values() if not task.done()]:
                alive[number % len(alive)].cancel()
            case _:
                await bench.settle()
        assert bench.fair.held <= slots
        assert len(bench.holding) <= slots
    await bench.settle()
    waiting = defaultdict[str, list[str]](list)
    for name, task in bench.tasks.items():
        if not task.done() and name not in bench.holding:
            waiting[name[0]].append(name)
    total = sum(map(len, waiting.values()))
    assert (bench.fair.held, bench.fair.waiting) == (len(bench.holding), total)
    assert total == 0 or len(bench.holding) == slots
    # From here on nobody comes or leaves: each key's turn comes once a round, and within it who came first.
    before = len(bench.granted)
    while bench.holding:
        next(iter(bench.holding.values())).set()
        await bench.settle()
    order = bench.granted[before:]
    for key, names in waiting.items():
        assert [name for name in order if name[0] == key] == names
    served = defaultdict[str, int](int)
    for name in order:
        served[name[0]] += 1
        ahead = served[name[0]]
        assert all(served[key] >= min(ahead - 1, len(names)) for key, names in waiting.items())
    assert (bench.fair.held, bench.fair.waiting) == (0, 0)
