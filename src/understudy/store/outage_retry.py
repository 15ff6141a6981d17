"""Repeats actions that fail because a server is unavailable for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0


def repeat_for(action: Callable[[], T], repeatable_for_s: Callable[[Exception], float]) -> T:
    """Return what an action returns. It is repeated after an error for as long as `repeatable_for_s` says.

    Raises the last error.
    """
    began, pause_s = time.monotonic(), FIRST_PAUSE_S
    while True:
        try:
            return action()
        except Exception as error:
            if time.monotonic() - began + pause_s > repeatable_for_s(error):
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
