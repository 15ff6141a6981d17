"""Budgets of attempts."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.gateway.budget import Budget, CostCeiling, Reservation, Spending
from understudy.gateway.errors import BudgetExceeded
from understudy.gateway.prices import Price
from understudy.types import Usage

usages = st.builds(Usage, st.integers(0, 10**6), st.integers(0, 10**5))


@pytest.mark.parametrize(
    ("budget", "usage"),
    [
        (Budget(calls=2), "2 of 2 calls"),
        (Budget(tokens=2000), "2,220 of 2,000 tokens"),
        (Budget(cost_usd=0.25), "0.3 of 0.25 US dollars"),
    ],
)
def test_an_exceeded_budget_is_reported_with_usage_and_limit(budget: Budget, usage: str) -> None:
    spending = Spending(budget)
    assert spending.exceeded_message() is None
    spending.add(Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=900), 0.1)
    assert spending.exceeded_message() is None
    spending.add(Usage(prompt_tokens=1000, completion_tokens=120), 0.2)
    (name,) = (name for name in ("calls", "tokens", "cost_usd") if getattr(budget, name) is not None)
    assert spending.exceeded_message() == (
        f"The budget of this attempt is used up: {usage}; whoever runs the gateway can raise budget.{name}"
    )


def test_the_wall_time_budget_starts_with_the_first_call() -> None:
    spending = Spending(Budget(wall_s=0.05))
    time.sleep(0.06)
    assert spending.exceeded_message() is None
    time.sleep(0.06)
    assert "of 0.05 seconds" in (spending.exceeded_message() or "")


def test_an_unknown_cost_counts_as_zero() -> None:
    spending = Spending(Budget(cost_usd=0.01))
    spending.add(Usage(prompt_tokens=10**9), None)
    assert spending.exceeded_message() is None


@given(st.lists(usages))
def test_a_budget_without_limits_is_never_exceeded(calls: list[Usage]) -> None:
    for spending in (Spending(None), Spending(Budget())):
        for usage in calls:
            spending.add(usage, 1.0)
            assert spending.exceeded_message() is None


@given(st.integers(1, 10**6), st.lists(usages, max_size=20))
def test_a_budget_is_exceeded_once_usage_reaches_its_limit(limit: int, calls: list[Usage]) -> None:
    spending, used = Spending(Budget(tokens=limit)), 0
    for usage in calls:
        assert (spending.exceeded_message() is not None) == (used >= limit)
        spending.add(usage, None)
        used += usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("limits", [{"calls": 0}, {"tokens": -1}, {"cost_usd": float("nan")}, {"wall_s": 0.0}])
def test_budget_limits_must_be_positive(limits: dict[str, Any]) -> None:
    (name,) = limits
    with pytest.raises(ConfigError, match=rf"budget\.{name}: expected a number above 0, got"):
        Budget(**limits)
    with pytest.raises(ConfigError, match=rf"budget\.{name}"):
        msgspec.convert(limits, Budget)


def test_a_misspelt_budget_limit_is_an_error() -> None:
    with pytest.raises(msgspec.ValidationError, match="call"):
        msgspec.convert({"call": 3}, Budget)


# --- reservations --------------------------------------------------------------------------------------

PRICE = Price(input=3.0, output=15.0, cached=0.3, cache_write=3.75)
limits = st.builds(
    Budget,
    calls=st.none() | st.integers(1, 20),
    tokens=st.none() | st.integers(1, 20_000),
    cost_usd=st.none() | st.floats(0.0001, 0.2),
)
begins = st.tuples(st.integers(1, 9000), st.none() | st.integers(1, 2000), st.booleans())
"""The size of a body, its `max_tokens`, and whether that may be lowered."""


@given(limits, st.lists(begins | st.tuples(st.integers(0, 50), st.floats(0, 1)), max_size=60))
def test_spent_plus_reserved_never_exceeds_the_budget(budget: Budget, steps: list[tuple[Any, ...]]) -> None:
    """A call that uses no more than was reserved for it cannot take its attempt above a limit."""
    spending, under_way, started = Spending(budget), list[Reservation](), 0
    for step in steps:
        if len(step) == 3:
            body_bytes, max_tokens, adjustable = step
            try:
                reservation = spending.try_reserve(body_bytes, max_tokens, PRICE, adjustable=adjustable)
            except BudgetExceeded:
                continue
            assert reservation is not None or under_way  # nothing waits for nobody
            if reservation is not None:
                started += 1
                under_way.append(reservation)
        elif under_way:
            number, share = step
            one = under_way.pop(number % len(under_way))
            usage = Usage(prompt_tokens=int(one.tokens * share))
            spending.settle(one, usage, one.cost_usd * share)
        assert spending.left("tokens") >= 0
        assert spending.left("cost_usd") >= -1e-9
        assert budget.calls is None or started <= budget.calls


def test_a_request_above_the_remaining_budget_gets_lower_max_tokens_or_is_refused() -> None:
    spending = Spending(Budget(tokens=1000))
    lowered = spending.try_reserve(300, 5000, None, adjustable=True)
    assert lowered is not None
    assert lowered.max_tokens == 900
    spending.settle(lowered, Usage(), None)  # it failed: nothing was used
    with pytest.raises(BudgetExceeded, match="1,000 of 1,000 tokens are left, and the next request may have 100 "):
        spending.try_reserve(300, 5000, None, adjustable=False)


def test_reservations_wait_until_the_first_call_reports_its_prompt_tokens() -> None:
    spending = Spending(Budget(tokens=3000))
    first = spending.try_reserve(100, 50, None, adjustable=True)
    assert first is not None
    assert spending.try_reserve(100, 50, None, adjustable=True) is None
    spending.settle(first, Usage(prompt_tokens=1000, completion_tokens=50), None)
    second = spending.try_reserve(100, 50, None, adjustable=True)
    assert second is not None
    assert second.tokens == 1000 + 34 + 50
    assert spending.try_reserve(100, 50, None, adjustable=True) is None


async def test_a_cost_ceiling_spans_attempts_and_counts_spent_and_lost_calls():
    price = Price(input=1.0, output=10.0)
    ceiling = CostCeiling(0.05, spent_usd=0.02)
    first = await ceiling.reserve(3_000, 1_000, price)
    ceiling.settle(first, Usage(prompt_tokens=1_000, completion_tokens=500), 0.006, lost=False)
    assert ceiling.spent_usd == pytest.approx(0.026) and not ceiling.reached.is_set()
    lost = await ceiling.reserve(3_000, 1_000, price)
    ceiling.settle(lost, Usage(), None, lost=True)
    assert ceiling.spent_usd == pytest.approx(0.026 + 0.001 + 0.01)
    with pytest.raises(BudgetExceeded):
        await ceiling.reserve(3_000, 2_000, price)
    assert ceiling.reached.is_set()


async def test_a_call_waits_while_other_reservations_fill_the_cost_ceiling():
    price = Price(input=1.0, output=10.0)
    ceiling = CostCeiling(0.03)
    warm = await ceiling.reserve(3_000, 100, price)
    ceiling.settle(warm, Usage(prompt_tokens=1_000, completion_tokens=10), 0.001, lost=False)
    first = await ceiling.reserve(3_000, 2_000, price)
    second = asyncio.ensure_future(ceiling.reserve(3_000, 2_000, price))
    await asyncio.sleep(0)
    assert not second.done() and not ceiling.reached.is_set()
    ceiling.settle(first, Usage(prompt_tokens=1_000, completion_tokens=10), 0.0011, lost=False)
    ceiling.settle(await second, Usage(), 0.0, lost=False)
