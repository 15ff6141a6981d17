"""Server-sent events: one for every change of a store, found by polling the store's own change counter."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from understudy.view.faults import encode
from understudy.view.open_store import ViewedStore
from understudy.view.schema.actions import StoreChange
from understudy.view.schema.stores import StoreState

POLL_INTERVAL_S: Final = 0.25
PING_INTERVAL_S: Final = 15.0
"""How often a comment is sent, in seconds, so that a lost connection is noticed."""
MAX_FOLLOWED_STORES: Final = 200
"""How many stores are followed at once: if there are more, the ones written to last."""

ListStores = Callable[[], Sequence[ViewedStore]]


class ChangeWatch:
    """The states and counters of some stores, as one client last saw them."""

    def __init__(self, list_stores: ListStores) -> None:
        self._list_stores = list_stores
        self._last_states: dict[str, tuple[StoreState, object]] = {}
        self._counters: dict[str, int] = {}
        self._stores: dict[str, ViewedStore] = {}

    def poll(self, *, rescan: bool) -> list[StoreChange]:
        """Return the stores that changed since the last call; with `rescan`, also look for new stores.

        The first call returns nothing.
        """
        first = not self._stores
        if rescan or first:
            stores = sorted(self._list_stores(), key=lambda store: store.stamp()[2::3], reverse=True)[
                :MAX_FOLLOWED_STORES
            ]
            self._stores |= {store.id: store for store in stores}
        changes: list[StoreChange] = []
        for key, viewed in self._stores.items():
            now = viewed.state()
            if self._last_states.get(key) != now:
                known_before = key in self._last_states
                self._last_states[key] = now
                if known_before or not first:
                    self._counters[key] = self._counters.get(key, 0) + 1
                    changes.append(StoreChange(store_id=key, counter=self._counters[key], state=now[0]))
        return changes


async def send_events(
    watch: ChangeWatch, write: Callable[[bytes], Awaitable[None]], stopping: asyncio.Event
) -> None:
    """Send the changes that a watch finds until the server stops.

    The caller cancels it when the connection ends.
    """
    await write(b"retry: 1000\n: connected\n\n")
    loop = asyncio.get_running_loop()
    await asyncio.to_thread(watch.poll, rescan=True)
    pinged = scanned = loop.time()
    while not stopping.is_set():
        now = loop.time()
        rescan = now - scanned > 2.0
        scanned = now if rescan else scanned
        changes = await asyncio.to_thread(watch.poll, rescan=rescan)
        for change in changes:
            await write(b"event: change\ndata: " + encode(change) + b"\n\n")
        if now - pinged > PING_INTERVAL_S:
            pinged = now
            await write(b": ping\n\n")
        try:
            async with asyncio.timeout(POLL_INTERVAL_S):
                await stopping.wait()
        except TimeoutError:
            continue
