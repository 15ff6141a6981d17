"""Budgets: how many calls, tokens, dollars and seconds an attempt may use, and what it has used."""

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
"""What is assumed of a request's body until its attempt shows more; English and code have about 1/4 in JSON."""
_LONG_BODY = 4096
_SHORT_COMPLETION = 1 << 16
"""Where less is left, a request without a limit gets what is left as its limit; more no model writes at once."""


class Budget(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one attempt may use, over all its branches; None is without limit.

    `tokens` are those of prompts and completions together, cached or not. `wall_s` counts seconds from the first
    call. Raises ConfigError for a limit that is not above 0.
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
    """What is held back of a budget for a call that has begun, until it is settled.

    `max_tokens` is how long its completion may be where less is left than the request asks for; None where the
    request may stay as it is.
    """

    body_bytes: int
    tokens: float = 0
    cost_usd: float = 0.0
    max_tokens: int | None = None


class Spending:
    """What an attempt has used of its budget, and what is reserved for its calls under way.

    A call counts when it begins; tokens and dollars are reserved then, and what was really used is counted when
    it is settled. So calls that are under way together do not end above a limit, as long as the estimate of a
    prompt is not below what the server counts. The estimate learns from the calls of the attempt; until the
    first of them has ended, the attempt's calls run one after the other.
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
        """Count a call that has ended and was never reserved. A cost that is not known counts nothing."""
        self._spent["calls"] += 1
        self._settle(usage, cost_usd, body_bytes)

    def left(self, name: Literal["tokens", "cost_usd"]) -> float:
        """What is neither used nor reserved of a limit; infinite where there is none."""
        limit = self._limits.get(name)
        reserved = sum(getattr(one, name) for one in self._open)
        return math.inf if limit is None else limit - self._spent[name] - reserved

    async def reserve(
        self, body_bytes: int, max_tokens: int | None, price: Price | None, *, adjustable: bool
    ) -> Reservation:
        """Begin a call: see `try_reserve`. Waits while only what others have reserved stands in its way."""
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
        """Count a call that begins, and reserve the most that it may use; None while it has to wait for others.

        `max_tokens` is what its completion may have, None where it does not say. Where nothing else is reserved
        and less is left than it asks for, an `adjustable` one gets a smaller limit; any other does not begin.
        Raises BudgetExceeded. Match each reservation by `settle`.
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
        """The US dollars that were spent, without those reserved."""
        return self._spent["cost_usd"]

    def settle(self, reservation: Reservation, usage: Usage, cost_usd: float | None) -> None:
        """A call has ended, however it did: count what it used in place of what was reserved."""
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
            else:  # mostly what the server puts around it
                self._overhead_tokens = max(self._overhead_tokens, usage.prompt_tokens)

    def started_ago(self, ago_s: float) -> None:
        """Start the wall clock this many seconds ago, when the first call was made in another process."""
        self._began = time.monotonic() - ago_s

    def exceeded_message(self) -> str | None:
        """The message for the agent, and for the attempt's finding, that a limit is reached; None while none is.

        Call it before each call of the model; the wall clock starts with the first time.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
        spent = self._spent | {"wall_s": now - self._began}
        for name, unit in _UNITS.items():
            limit = self._limits.get(name)
            if limit is not None and spent[name] >= limit:
                return f"The budget of this attempt is used up: {_say(spent[name])} of {_say(limit)} {unit}"
        return None

    def _too_small(self, name: Literal["tokens", "cost_usd"], prompt: float, max_tokens: int | None) -> str:
        """The message that nothing is under way and a request still may use more than is left of a limit."""
        return (
            f"The budget of this attempt is used up: {_say(max(self.left(name), 0))} of "
            f"{_say(self._limits[name])} {_UNITS[name]} are left, and the next request may have "
            f"{_say(prompt)} tokens and a response of "
            f"{'any length' if max_tokens is None else f'{_say(max_tokens)} more'}"
        )


class CostCeiling:
    """The most US dollars that all attempts of a run may cost together; `spent_usd` was spent by earlier starts.

    A call is begun only where it cannot cost more than is left, after what the calls under way may cost. The first
    that could sets `reached`, and whoever waits for that is to end the run.
    """

    def __init__(self, limit_usd: float, spent_usd: float = 0.0) -> None:
        self.limit_usd = limit_usd
        self.reached = asyncio.Event()
        self._spending = Spending(Budget(cost_usd=limit_usd))
        self._spending.add(Usage(), spent_usd)
        self._worst: dict[Reservation, float] = {}

    @property
    def spent_usd(self) -> float:
        """What has been spent, without what is reserved."""
        return self._spending.spent_usd

    async def reserve(self, body_bytes: int, max_tokens: int | None, price: Price | None) -> Reservation:
        """Begin a call; waits while only what others have reserved stands in its way. Raises BudgetExceeded."""
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
        """A call has ended. One that was `lost` may be billed all the same: it counts as the most it may cost."""
        worst = self._worst.pop(reservation)
        self._spending.settle(reservation, usage, worst if lost and not cost_usd else cost_usd)


def _finite(amount: float) -> float:
    return 0 if amount == math.inf else amount


def _rates(price: Price | None) -> tuple[float, float]:
    """The most that a token of a prompt and of a completion may cost, in US dollars."""
    if price is None:
        return 0.0, 0.0
    return max(price.input, price.cache_write or 0.0, price.cached or 0.0) / 1e6, price.output / 1e6


def _say(amount: float) -> str:
    """A number for a person: whole as it is, else in four digits at least."""
    return f"{amount:,.0f}" if amount == int(amount) or amount >= 1000 else f"{amount:.4g}"
