"""Budgets: how many calls, tokens, dollars and seconds an attempt may use, and how much it has used."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Literal

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.gateway.errors import BudgetExceeded
from understudy.gateway.prices import Price
from understudy.types import Usage

_UNITS = {"calls": "calls", "tokens": "tokens", "cost_usd": "US dollars", "wall_s": "seconds"}
_TOKENS_PER_BYTE = 1 / 3
"""The assumed tokens per byte of a request body until the attempt shows more.

English and code have about 1/4 in JSON.
"""
_LONG_BODY = 4096
_SHORT_COMPLETION = 1 << 16
"""If less than this is left, a request without a limit gets the rest as its limit.

No model writes more at once.
"""


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attempt may use, over all its branches. None means no limit.

    `tokens` covers prompts and completions together, cached or not. `wall_s` counts seconds from the first call.
    Raises ConfigError for a limit that is not above 0.
    """

    calls: int | None = None
    tokens: int | None = None
    cost_usd: float | None = None
    wall_s: float | None = None

    def __post_init__(self) -> None:
        for name in _UNITS:
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(
                    f"budget.{name}: expected a number above 0, got {limit}; leave it out for no limit"
                )


class Reservation(Struct, frozen=True, eq=False, kw_only=True):
    """The part of a budget that is reserved for a call in progress, until it is settled.

    `max_tokens` is the limit for its completion if less is left than the request asks for; None if the request can
    stay as it is.
    """

    body_bytes: int
    tokens: float = 0
    cost_usd: float = 0.0
    max_tokens: int | None = None


class Spending:
    """What an attempt has used of its budget, and what is reserved for its calls in progress.

    A call counts from its beginning: its maximum tokens and dollars are reserved, and replaced by the actual use
    when it is settled. So concurrent calls do not exceed a limit, as long as the prompt's estimate is not below
    what the server counts. The estimate learns from the attempt's calls; until the first has ended, calls run one
    after another.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._limits = {} if budget is None else msgspec.structs.asdict(budget)
        self._reserves = any(self._limits.get(name) is not None for name in ("tokens", "cost_usd"))
        self._spent: dict[str, float] = {"calls": 0, "tokens": 0, "cost_usd": 0.0}
        self._open: dict[Reservation, None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self._began: float | None = None
        self._learned = False
        self._tokens_per_byte = _TOKENS_PER_BYTE
        self._overhead_tokens = 0

    def add(self, usage: Usage, cost_usd: float | None, body_bytes: int = 0) -> None:
        """Count a finished call that was never reserved. An unknown cost counts as nothing."""
        self._spent["calls"] += 1
        self._settle(usage, cost_usd, body_bytes)

    def left(self, name: Literal["tokens", "cost_usd"]) -> float:
        """Return how much of a limit is neither used nor reserved; infinity if there is no limit."""
        limit = self._limits.get(name)
        reserved = sum(getattr(reservation, name) for reservation in self._open)
        return math.inf if limit is None else limit - self._spent[name] - reserved

    async def reserve(
        self, body_bytes: int, max_tokens: int | None, price: Price | None, *, adjustable: bool
    ) -> Reservation:
        """Begin a call (see `try_reserve`). Waits while only the reservations of other calls are in the way."""
        while (reservation := self.try_reserve(body_bytes, max_tokens, price, adjustable=adjustable)) is None:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            finally:
                if turn in self._waiting:
                    self._waiting.remove(turn)
        return reservation

    def try_reserve(
        self, body_bytes: int, max_tokens: int | None, price: Price | None, *, adjustable: bool
    ) -> Reservation | None:
        """Count a new call, and reserve the most that it may use. Returns None if it has to wait for other calls.

        `max_tokens` is the limit of its completion, None if it has none. If nothing else is reserved and less is
        left than the call asks for, an `adjustable` call gets a lower limit; any other is refused. Raises
        BudgetExceeded. Every reservation must be ended by `settle`.
        """
        if message := self.exceeded_message():
            raise BudgetExceeded(message)
        reservation = Reservation(body_bytes=body_bytes)
        if self._reserves:
            alone = not self._open
            if not alone and (max_tokens is None or not self._learned):
                return None
            prompt = self._overhead_tokens + math.ceil(body_bytes * self._tokens_per_byte)
            input_price, output_price = _rates(price)
            left_tokens, left_cost = self.left("tokens"), self.left("cost_usd")
            room = left_tokens - prompt
            if output_price:
                room = min(room, (left_cost - prompt * input_price) / output_price)
            completion = room if max_tokens is None else max_tokens
            if completion > room and not alone:
                return None
            smaller: int | None = None
            if completion > room or (max_tokens is None and room < _SHORT_COMPLETION):
                if room < 1 or not adjustable:
                    short_of = "tokens" if left_tokens - prompt <= room else "cost_usd"
                    raise BudgetExceeded(self._too_small(short_of, prompt, max_tokens))
                completion = smaller = int(room)
            exclusive = max_tokens is None or not self._learned
            reservation = Reservation(
                body_bytes=body_bytes,
                tokens=_finite(left_tokens if exclusive else prompt + completion),
                cost_usd=_finite(left_cost if exclusive else prompt * input_price + completion * output_price),
                max_tokens=smaller,
            )
        self._spent["calls"] += 1
        self._open[reservation] = None
        return reservation

    @property
    def spent_usd(self) -> float:
        """The US dollars spent so far, without reservations."""
        return self._spent["cost_usd"]

    def settle(self, reservation: Reservation, usage: Usage, cost_usd: float | None) -> None:
        """End a call, however it ended: replace its reservation by what it used."""
        del self._open[reservation]
        self._settle(usage, cost_usd, reservation.body_bytes)
        waiting, self._waiting = self._waiting, []
        for turn in waiting:
            if not turn.done():
                turn.set_result(None)

    def _settle(self, usage: Usage, cost_usd: float | None, body_bytes: int) -> None:
        self._spent["tokens"] += usage.prompt_tokens + usage.completion_tokens
        self._spent["cost_usd"] += cost_usd or 0.0
        if usage.prompt_tokens:
            self._learned = True
            if body_bytes >= _LONG_BODY:
                self._tokens_per_byte = max(self._tokens_per_byte, usage.prompt_tokens / body_bytes)
            else:  # mostly the framing that the server adds around the prompt
                self._overhead_tokens = max(self._overhead_tokens, usage.prompt_tokens)

    def started_ago(self, ago_s: float) -> None:
        """Start the wall clock this many seconds in the past, because the first call was made by another
        process.
        """
        self._began = time.monotonic() - ago_s

    def exceeded_message(self) -> str | None:
        """Return the message for the agent, and the attempt's finding, if a limit is reached; else None.

        Call it before each call of the model: the first time starts the wall clock.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
        spent = self._spent | {"wall_s": now - self._began}
        for name, unit in _UNITS.items():
            limit = self._limits.get(name)
            if limit is not None and spent[name] >= limit:
                return (
                    f"The budget of this attempt is used up: {_say(spent[name])} of {_say(limit)} {unit}; whoever "
                    f"runs the gateway can raise budget.{name}"
                )
        return None

    def _too_small(self, name: Literal["tokens", "cost_usd"], prompt: float, max_tokens: int | None) -> str:
        """Return the message for a request that may use more than is left of a limit, when nothing is in
        progress.
        """
        return (
            f"The budget of this attempt is used up: {_say(max(self.left(name), 0))} of "
            f"{_say(self._limits[name])} {_UNITS[name]} are left, and the next request may have "
            f"{_say(prompt)} tokens and a response of "
            f"{'any length' if max_tokens is None else f'{_say(max_tokens)} more'}; whoever runs the gateway can "
            f"raise budget.{name}"
        )


class CostCeiling:
    """The maximum cost in US dollars of all attempts of a run together.

    `spent_usd` was spent by earlier invocations.

    A call begins only if its maximum cost, and that of the calls in progress, fit in what is left. The first call
    that does not fit sets `reached`; whoever waits for that must end the run.
    """

    def __init__(self, limit_usd: float, spent_usd: float = 0.0) -> None:
        self.limit_usd = limit_usd
        self.reached = asyncio.Event()
        self._spending = Spending(Budget(cost_usd=limit_usd))
        self._spending.add(Usage(), spent_usd)
        self._worst: dict[Reservation, float] = {}

    @property
    def spent_usd(self) -> float:
        """The US dollars spent so far, without reservations."""
        return self._spending.spent_usd

    async def reserve(self, body_bytes: int, max_tokens: int | None, price: Price | None) -> Reservation:
        """Begin a call. Waits while only reservations of other calls are in the way. Raises BudgetExceeded."""
        try:
            reservation = await self._spending.reserve(body_bytes, max_tokens, price, adjustable=False)
        except BudgetExceeded:
            self.reached.set()
            raise
        input_price, output_price = _rates(price)
        prompt = math.ceil(body_bytes * _TOKENS_PER_BYTE)
        self._worst[reservation] = prompt * input_price + (max_tokens or 0) * output_price
        return reservation

    def settle(self, reservation: Reservation, usage: Usage, cost_usd: float | None, *, lost: bool) -> None:
        """End a call. A `lost` call may be billed anyway, so it counts with its maximum cost."""
        worst = self._worst.pop(reservation)
        self._spending.settle(reservation, usage, worst if lost and not cost_usd else cost_usd)


def _finite(amount: float) -> float:
    return 0 if amount == math.inf else amount


def _rates(price: Price | None) -> tuple[float, float]:
    """Return the highest prices of a prompt token and of a completion token, in US dollars."""
    if price is None:
        return 0.0, 0.0
    return max(price.input, price.cache_write or 0.0, price.cached or 0.0) / 1e6, price.output / 1e6


def _say(amount: float) -> str:
    """Format a number: integers in full, others with at least four digits."""
    return f"{amount:,.0f}" if amount == int(amount) or amount >= 1000 else f"{amount:.4g}"
