"""Reads a store from an event loop, which goes on meanwhile: a database's server may not answer for minutes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from understudy.errors import StoreUnavailable
from understudy.store.driver import OUTAGE_S

_P = ParamSpec("_P")
_T = TypeVar("_T")

_PAUSE_S = 1.0

_threads = ThreadPoolExecutor(2, thread_name_prefix="store-reader")
"""Not those of asyncio, which sandboxes and files need: during an outage all of these may wait."""


async def through_outages(read: Callable[[], Awaitable[_T]]) -> _T:
    """Return what a read returns. If the database's server is lost while it reads, it is called again.

    Raises StoreError, also if the server is not back in time.
    """
    began = time.monotonic()
    while True:
        try:
            return await read()
        except StoreUnavailable:
            if time.monotonic() - began > OUTAGE_S:
                raise
        await asyncio.sleep(_PAUSE_S)


async def read_stored(read: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Return what a function that reads the store returns, called in a thread.

    If the database's server is lost while it reads, it is called again. Raises StoreError, also if the server is
    not back in time.
    """
    loop = asyncio.get_running_loop()
    return await through_outages(lambda: loop.run_in_executor(_threads, lambda: read(*args, **kwargs)))
