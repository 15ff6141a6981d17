"""The time limit of a command, which does not count time in which the machine had no processor for it.

On a machine with much more work than processors, tests that need 8 s of a processor may take minutes. A limit on
the wall clock would then end them, and an honest patch would have no reward because of its neighbours.

The kernel keeps for each thread how long it ran and how long it waited in the queue for a processor. Time counts
in which the command's processes ran or slept, but not time in which they only waited. So a command that sleeps is
ended on time, and so is one whose many threads take processors from each other, because some of them run. As code
can make itself wait (with a low priority beside other work), a command is ended after `WALL_CLOCK_FACTOR` times
its limit, whatever it waited for.

All time of a command with more than `MAX_THREADS` threads counts: they wait for one another, and looking at each
of them would take long on a machine that they keep busy, as a fork bomb does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

WALL_CLOCK_FACTOR = 10.0
"""After how many times its limit a command is ended, however long it waited for a processor."""

MAX_THREADS = max(64, 4 * (os.cpu_count() or 1))
"""The most threads of a command of which the waiting is looked at."""

_SAMPLES = 240
"""About how often a command that uses up its limit is looked at. Threads that end between two looks are missed,
and their time counts as if they had not waited.
"""

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.25, 10.0
_MIN_LEFT_S = 0.05
"""The shortest pause when hardly anything of the limit is left: what is left only shrinks a little each time."""


class ThreadTimes(Struct, frozen=True):
    """How many seconds a thread has run, and how many it has waited for a processor."""

    ran_s: float = 0.0
    waited_s: float = 0.0


def longest_s(timeout_s: float) -> float:
    """Return how many seconds a command with this time limit may take at most."""
    return WALL_CLOCK_FACTOR * timeout_s


def read_threads(roots: Iterable[int]) -> dict[str, ThreadTimes]:
    """Return the times of all threads of these processes and their descendants, by thread id.

    Processes that have ended are left out. Empty if there are more than `MAX_THREADS`, and where the kernel does
    not keep these times.
    """
    threads: dict[str, ThreadTimes] = {}
    pending = [str(root) for root in roots]
    while pending:
        if len(threads) + len(pending) > MAX_THREADS:
            return {}
        with suppress(OSError):  # the process has ended
            for thread in Path("/proc", pending.pop(), "task").iterdir():
                with suppress(OSError):  # the thread has ended
                    pending += (thread / "children").read_text().split()
                    ran, waited, _ = (thread / "schedstat").read_text().split()
                    threads[thread.name] = ThreadTimes(int(ran) / 1e9, int(waited) / 1e9)
    return threads


class TimeLimit:
    """Counts the time of one command, which starts now. Call `count` after each pause of `pause_s` seconds."""

    def __init__(
        self,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        read: Callable[[Iterable[int]], Mapping[str, ThreadTimes]] = read_threads,
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._read = read
        self._started = self._counted_until = clock()
        self._counted_s = 0.0
        self._threads: Mapping[str, ThreadTimes] = {}

    def pause_s(self) -> float:
        """Return how many seconds to wait for the command until the next `count`; 0 if its time is up."""
        left_s = self._timeout_s - self._counted_s
        until_end_s = longest_s(self._timeout_s) - (self._clock() - self._started)
        if left_s <= 0 or until_end_s <= 0:
            return 0.0
        pause_s = min(max(self._timeout_s / _SAMPLES, _MIN_PAUSE_S), _MAX_PAUSE_S)
        return min(pause_s, max(left_s, _MIN_LEFT_S), until_end_s)

    def count(self, roots: Iterable[int]) -> None:
        """Count the time since the last call, less the time in which the command waited for a processor.

        `roots` are the ids of its processes from which all others descend; if empty, all time counts.
        """
        threads, now_s = self._read(roots), self._clock()
        passed_s = now_s - self._counted_until
        ran_s = waited_s = 0.0
        for thread, times in threads.items():
            before = self._threads.get(thread, ThreadTimes())
            ran_s += max(0.0, times.ran_s - before.ran_s)  # not below 0: an ended thread's id may be used again
            waited_s += max(0.0, times.waited_s - before.waited_s)
        self._counted_s += passed_s - max(0.0, min(waited_s, passed_s - ran_s))
        self._threads, self._counted_until = threads, now_s
