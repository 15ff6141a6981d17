"""Fair slots: so many at once, and those who wait are served in turns, however much one of them asks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from understudy.errors import BackendError

_Waiters = deque["asyncio.Future[None]"]


class QueueFull(BackendError):
    """More requests wait for a model than may; the agent is asked to try again."""

    def __init__(self, waiting: int, slots: int) -> None:
        super().__init__(
            f"the model is busy: {slots} requests are being answered and {waiting} wait already; try again",
            status=529,
        )


class FairSlots:
    """Room for `slots` holders at once and for `queue` that wait.

    Who waits is served round robin between keys, and first come, first served within a key.
    """

    def __init__(self, slots: int, queue_limit: int) -> None:
        self.slots = slots
        self.queue = queue_limit
        self.held = 0
        self.waiting = 0
        # The keys that wait, in the order of their turns.
        self._turns: dict[str, _Waiters] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[None]:
        """Holds one slot while the block runs. Raises Crowded when the queue is full."""
        await self._take(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _take(self, key: str) -> None:
        # While anyone waits, all slots are held: one that becomes free is passed on at once.
        if self.held < self.slots:
            self.held += 1
            return
        if self.waiting >= self.queue:
            raise QueueFull(self.waiting, self.slots)
        turn = asyncio.get_running_loop().create_future()
        waiters = self._turns.setdefault(key, deque())
        waiters.append(turn)
        self.waiting += 1
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self._pass_on()
            elif turn in waiters:
                waiters.remove(turn)
                self.waiting -= 1
                if not waiters:
                    del self._turns[key]
            raise

    def _pass_on(self) -> None:
        """Give a slot that is no longer held to whose turn it is, or back."""
        while self._turns:
            key = next(iter(self._turns))
            waiters = self._turns.pop(key)
            turn = waiters.popleft()
            self.waiting -= 1
            if waiters:
                self._turns[key] = waiters
            if not turn.done():
                turn.set_result(None)
                return
        self.held -= 1
