"""Tries several candidates for tasks in parallel, and yields the results in the candidates' order."""

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
    """Yield the result of `attempt` for each candidate, in their order; up to `ahead` run in parallel.

    Closing the generator cancels the running ones. Raises what `attempt` raises.
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
