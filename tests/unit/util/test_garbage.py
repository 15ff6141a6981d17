"""How often this process searches for reference cycles."""

from __future__ import annotations

import gc

from understudy.util.garbage import collect_garbage_rarely


def searches_for(objects: int) -> int:
    """How often cycles are searched for while so many containers are made."""
    before = gc.get_stats()[0]["collections"]
    kept = [[number] for number in range(objects)]
    assert len(kept) == objects
    return gc.get_stats()[0]["collections"] - before


def test_cycles_are_searched_for_rarely_but_still_are() -> None:
    thresholds = gc.get_threshold()
    try:
        collect_garbage_rarely()
        gc.collect()
        assert searches_for(20_000) == 0
        assert searches_for(200_000) >= 3
    finally:
        gc.set_threshold(*thresholds)
