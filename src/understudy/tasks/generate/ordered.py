"""Candidates for tasks, tried several at a time and taken in their order, whatever the timing."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import TypeVar

_Candidate = TypeVar("_Candidate")
_Result = TypeVar("_Result")


async def ordered(
    candidates: Iterator[_Candidate], attempt: Callable[[_Candidate], Awaitable[_Result]], ahead: int
) -> AsyncGenerator[_Result]:
    """What `attempt` says of each candidate, in their order, with `ahead` of them begun at a time.

    Closing the generator cancels those that have begun. Raises what `attempt` raises.
    """
    pending: deque[asyncio.Future[_Result]] = deque()
    try:
        while True:
            while len(pending) < ahead and (candidate := next(candidates, None)) is not None:
                pending.append(asyncio.ensure_future(attempt(candidate)))
            if not pending:
                return
            yield await pending.popleft()
    finally:
        for unfinished in pending:
            unfinished.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
