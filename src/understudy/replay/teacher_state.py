"""A teacher while it is asked: its line, its places, how long it is left alone, and why it is asked no more."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import suppress

from msgspec import Struct, field

from understudy.replay.gateways import TeacherConnection
from understudy.replay.outcome import AskOutcome
from understudy.replay.teachers import Teacher

DOWN_AFTER = 5
"""A teacher is asked no more in this invocation when so many of its asks in a row came to nothing."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two tries of an ask, unless the teacher says how long: twice as long each time."""

MOST_PATIENCE_S = 600.0
"""A teacher that asks for a longer pause than this is asked no more."""


class AskCounts(Struct):
    """How the asks of one teacher ended, in this invocation. `tokens` are those that the answers were billed for.

    `lost` were under way when a process died: they count at the most they can have cost, and are not sent again.
    `recovered` of the answered were answered before, and only noted now. `unaffordable` did not fit below the
    budget. `overruns` are answers that were billed for more tokens than they were asked for.
    `dismissed`: why it is asked no more.
    """

    answered: int = 0
    recovered: int = 0
    failed: int = 0
    lost: int = 0
    refused_before: int = 0
    answered_before: int = 0
    unaffordable: int = 0
    tries: int = 0
    overruns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    dismissed: str | None = None
    why: Counter[str] = field(default_factory=Counter[str])


class TeacherState:
    """One teacher, or the judge."""

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher
        self.line: TeacherConnection | None = None
        self.slots = asyncio.Semaphore(teacher.config.concurrency)
        self.tally = AskCounts()
        self._failures = 0
        self._not_before = 0.0

    @property
    def dismissed(self) -> str | None:
        """Why it is asked no more."""
        return self.tally.dismissed

    @property
    def resting(self) -> bool:
        """Whether it is to be left alone for a while."""
        return time.monotonic() < self._not_before

    def dismiss(self, why: str) -> None:
        """Ask it no more; the first reason stays."""
        self.tally.dismissed = self.tally.dismissed or why

    def pause(self, tried: int, retry_after_s: float | None) -> None:
        """Leave it alone for a while, after so many tries of an ask."""
        wait = min(FIRST_PAUSE_S * 2 ** (tried - 1), LONGEST_PAUSE_S) if retry_after_s is None else retry_after_s
        if wait > MOST_PATIENCE_S:
            self.dismiss(f"it wants to be left alone for {wait:.0f} s")
        self._not_before = max(self._not_before, time.monotonic() + wait)

    async def rested(self, stopped: asyncio.Event) -> None:
        """Returns when it may be asked again, or `stopped` is set."""
        while not stopped.is_set() and (left := self._not_before - time.monotonic()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(stopped.wait(), left)

    def note(self, result: AskOutcome) -> None:
        """Take note of how an ask ended."""
        error_message = result.error.message if result.error else ""
        if result.then == "dismiss":
            self.dismiss(error_message)
        self._failures = self._failures + 1 if result.then in ("again", "doubt") else 0
        if self._failures >= DOWN_AFTER:
            self.dismiss(f"{self._failures} asks in a row came to nothing, the last because of: {error_message}")
