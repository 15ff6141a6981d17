"""Budgets: how many calls, tokens, dollars and seconds an attempt may use, and what it has used."""

from __future__ import annotations

import time

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.types import Usage

_UNITS = {"calls": "calls", "tokens": "tokens", "cost_usd": "US dollars", "wall_s": "seconds"}


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


class Spending:
    """What an attempt has used of its budget.

    Calls are counted when they have ended: those that are under way together may end above a limit.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._limits = {} if budget is None else msgspec.structs.asdict(budget)
        self._spent: dict[str, float] = {"calls": 0, "tokens": 0, "cost_usd": 0.0}
        self._began: float | None = None

    def add(self, usage: Usage, cost_usd: float | None) -> None:
        """Count a call that has ended. A cost that is not known counts nothing."""
        self._spent["calls"] += 1
        self._spent["tokens"] += usage.prompt_tokens + usage.completion_tokens
        self._spent["cost_usd"] += cost_usd or 0.0

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


def _say(amount: float) -> str:
    """A number for a person: whole as it is, else in four digits at least."""
    return f"{amount:,.0f}" if amount == int(amount) or amount >= 1000 else f"{amount:.4g}"
