"""The budget of a replay: cost is reserved before a request is sent, and settled at what it turned out to be."""

from __future__ import annotations

import asyncio
import math

from understudy.errors import ConfigError

UNITS = 1_000_000_000
"""Sums are kept in whole billionths of a dollar, rounded up: adding them up loses nothing."""


def to_units(usd: float) -> int:
    """Dollars as units, rounded up but for what a float cannot hold."""
    return math.ceil(round(usd * UNITS, 3))


def to_dollars(amount: int) -> float:
    """Units as dollars."""
    return amount / UNITS


class CostBudget:
    """What may be spent (`limit_usd`, None: any sum), what was (`spent`) and what is held for requests under way.

    `spent` begins with `before`, what earlier invocations spent or may have spent. It holds what was settled, at
    its real cost where that is known, else at the most it can be. The sum of `spent` and `held` is never above the
    limit, but for what a teacher bills beyond what it was asked for.
    """

    def __init__(self, limit_usd: float | None, before: float = 0.0) -> None:
        if limit_usd is not None and not 0 < limit_usd < 1e9:
            raise ConfigError(f"--max-cost: expected a positive number of US dollars, got {limit_usd}")
        self.limit = None if limit_usd is None else math.floor(round(limit_usd * UNITS, 3))
        self.spent = to_units(before)
        self.held = 0
        self._changed = asyncio.Event()

    def fits(self, amount: int) -> bool:
        """Whether so much can be reserved now."""
        return self.limit is None or self.spent + self.held + amount <= self.limit

    def can_never_fit(self, amount: int) -> bool:
        """Whether so much could not be reserved, even if all that is under way should cost nothing."""
        return self.limit is not None and self.spent + amount > self.limit

    async def reserve(self, amount: int, stopped: asyncio.Event) -> bool:
        """Hold so much. Waits while only what is under way stands in its way.

        False when it does not fit, or `stopped` is set meanwhile (see `wake`).
        """
        while not stopped.is_set() and not self.can_never_fit(amount):
            if self.fits(amount):
                self.held += amount
                return True
            await self._changed.wait()
        return False

    def settle(self, amount: int, spent: int) -> None:
        """Of what was reserved, so much was spent."""
        self.held -= amount
        self.spent += spent
        self.wake()

    def wake(self) -> None:
        """Have all that wait look again."""
        self._changed.set()
        self._changed = asyncio.Event()
