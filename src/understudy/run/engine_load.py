"""Limits how many agents run at a time by the load of the model servers, read from their Prometheus metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence

import aiohttp
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from understudy.errors import ConfigError

PERIOD_S = 5.0
"""How often the metrics are read."""

FULL_CACHE, BUSY_CACHE = 0.95, 0.85
"""Shares of the KV cache in use: from `FULL_CACHE` on the number of agents falls, from `BUSY_CACHE` on it does not
rise.
"""

_TIMEOUT_S = 10.0
_METRICS = {
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "cache_use": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    "preemptions": ("vllm:num_preemptions_total",),
}
"""The names of the metrics in vLLM and SGLang, by field of `EngineLoad`. SGLang has no monotonic count of
preemptions.
"""

_log = logging.getLogger(__name__)


class EngineLoad(Struct, frozen=True):
    """Requests that run and that wait, the share of the KV cache in use (0 to 1), and preemptions so far."""

    running: float
    waiting: float
    cache_use: float
    preemptions: float


def parse_load(text: str) -> EngineLoad | None:
    """Return the load from the metrics of a vLLM or SGLang server; None if they have no queue lengths. Raises
    ValueError.
    """
    values: dict[str, list[float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values.setdefault(sample.name, []).append(sample.value)
    fields = {
        field: next((values[name] for name in names if name in values), None) for field, names in _METRICS.items()
    }
    if fields["running"] is None or fields["waiting"] is None:
        return None
    # A server may report several engines: their requests are added, and the fullest cache counts.
    return EngineLoad(
        sum(fields["running"]),
        sum(fields["waiting"]),
        max(fields["cache_use"] or [0.0]),
        sum(fields["preemptions"] or [0.0]),
    )


def next_limit(limit: int, in_use: int, before: EngineLoad, now: EngineLoad, *, low: int, high: int) -> int:
    """Return how many agents may work at a time after a period with the limit `limit`.

    The limit falls by a quarter after preemptions or with a full cache. It stays while requests wait, the cache is
    busy, or not all places are used. Otherwise it rises by an eighth.
    """
    if now.preemptions > before.preemptions or now.cache_use >= FULL_CACHE:
        return max(low, limit * 3 // 4)
    if now.waiting > 0 or now.cache_use >= BUSY_CACHE or in_use < limit:
        return limit
    return min(high, limit + max(1, limit // 8))


class AgentSlots:
    """Slots for agents, whose number may change. Belongs to one event loop."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def locked(self) -> bool:
        """Return whether `acquire` would wait now."""
        return self.in_use >= self.limit or bool(self._waiting)

    async def acquire(self) -> None:
        """Wait for a slot. Slots are given in the order of the calls."""
        if not self.locked():
            self.in_use += 1
            return
        slot_future = asyncio.get_running_loop().create_future()
        self._waiting.append(slot_future)
        try:
            await slot_future
        except asyncio.CancelledError:
            if not slot_future.cancelled():
                self.release()
            elif slot_future in self._waiting:  # not if `_admit` has removed it already
                self._waiting.remove(slot_future)
            raise

    def release(self) -> None:
        """Release a slot."""
        self.in_use -= 1
        self._admit()

    def resize(self, limit: int) -> None:
        """Set the number of slots. If more are in use, none is given until enough are released."""
        self.limit = limit
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self.in_use < self.limit:
            slot_future = self._waiting.popleft()
            if not slot_future.done():
                self.in_use += 1
                slot_future.set_result(None)


class ConcurrencyController:
    """Adapts the number of agents to the load of the model servers, between two bounds."""

    def __init__(self, slots: AgentSlots, urls: Sequence[str], *, high: int, period_s: float = PERIOD_S) -> None:
        """The current number of slots is the lower bound. `urls` are the servers' base URLs, ending in /v1."""
        self._slots = slots
        self._urls = [f"{url.rstrip('/').removesuffix('/v1')}/metrics" for url in urls]
        self._low, self._high = slots.limit, high
        self._period_s = period_s

    async def watch(self) -> None:
        """Adapt the number of agents to the servers' load until cancelled; it stays the same while the load is
        unreadable.

        Raises ConfigError if the first attempt to read it fails.
        """
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session:
            before = await self._read(session)
            silent = False
            while True:
                await asyncio.sleep(self._period_s)
                try:
                    now = await self._read(session)
                except ConfigError as error:
                    if not silent:
                        _log.warning(
                            "the number of agents stays at %d until the load can be read again: %s",
                            self._slots.limit,
                            error,
                        )
                    silent = True
                    continue
                limit = next_limit(
                    self._slots.limit, self._slots.in_use, before, now, low=self._low, high=self._high
                )
                if limit != self._slots.limit:
                    _log.info("%d agents at a time, %d before: %s", limit, self._slots.limit, now)
                    self._slots.resize(limit)
                before, silent = now, False

    async def _read(self, session: aiohttp.ClientSession) -> EngineLoad:
        """Return the load of all servers: sums of requests, and the share of the fullest cache."""
        loads = await asyncio.gather(*(_read_load(session, url) for url in self._urls))
        return EngineLoad(
            sum(load.running for load in loads),
            sum(load.waiting for load in loads),
            max(load.cache_use for load in loads),
            sum(load.preemptions for load in loads),
        )


async def _read_load(session: aiohttp.ClientSession, url: str) -> EngineLoad:
    try:
        async with session.get(url) as response:
            response.raise_for_status()
            load = parse_load(await response.text())
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ConfigError(
            f"{url}: the server's load cannot be read: {str(error) or type(error).__name__}; check that it runs "
            "(SGLang: started with --enable-metrics), or leave out --max-concurrency"
        ) from error
    if load is None:
        raise ConfigError(
            f"{url}: has no known metrics of load, by which --max-concurrency adapts the number of agents; use "
            "vLLM, or SGLang started with --enable-metrics, or leave out --max-concurrency"
        )
    return load
