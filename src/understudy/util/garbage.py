"""How often this process searches for reference cycles."""

from __future__ import annotations

import gc


def collect_garbage_rarely() -> None:
    """Let this process search for reference cycles less often than by default.

    Requests and rollouts make hardly any. With Python's default thresholds the search takes a tenth of a gateway's
    time, and with all that a run imports, parsing a file takes nearly twice as long.
    """
    gc.set_threshold(50_000, 20, 20)
