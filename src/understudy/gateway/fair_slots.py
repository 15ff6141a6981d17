"""Fair slots: a limit on concurrent requests, with a queue that is served round robin between attempts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from understudy.errors import BackendError

_Waiters = deque["asyncio.Future[None]"]


class QueueFull(BackendError):
    """The queue of a model is full; the agent should retry later."""

    def __init__(self, waiting: int, slots: int) -> None:
        super().__init__(
            f"overloaded: the model answers {slots} requests and {waiting} more wait in its queue; retry later, "
            "or raise the model's `concurrency` or `queue`",
            status=529,
        )


class FairSlots:
    """`slots` requests run at once, and up to `queue` more wait.

    Waiting requests are served round robin between keys, and first come, first served within a key.
    """

    def __init__(self, slots: int, queue_limit: int) -> None:
        self.slots = slots
        self.queue = queue_limit
        self.held = 0
        self.waiting = 0
        # The queues of the keys, in the order in which the keys take turns.
        self._turns: dict[str, _Waiters] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncGenerator[None]:
        """Hold one slot during the block. Raises QueueFull."""
        await self._acquire(key)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, key: str) -> None:
        # While a request waits, all slots are in use, and a slot that becomes free goes directly to the next
        # request in turn.
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
                self._release()
            elif turn in waiters:
                waiters.remove(turn)
                self.waiting -= 1
                if not waiters:
                    del self._turns[key]
            raise

    def _release(self) -> None:
        """Give a free slot to the waiting request whose turn it is, if any."""
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
