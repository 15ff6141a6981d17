"""Budgets of attempts."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.gateway.budget import Budget, Spending
from understudy.types import Usage

usages = st.builds(Usage, st.integers(0, 10**6), st.integers(0, 10**5))


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        (Budget(calls=2), "2 of 2 calls"),
        (Budget(tokens=2000), "2,220 of 2,000 tokens"),
        (Budget(cost_usd=0.25), "0.3 of 0.25 US dollars"),
    ],
)
def test_what_is_used_up_is_said(budget: Budget, said: str) -> None:
    spending = Spending(budget)
    assert spending.exceeded_message() is None
    spending.add(Usage(prompt_tokens=1000, completion_tokens=100, cached_tokens=900), 0.1)
    assert spending.exceeded_message() is None
    spending.add(Usage(prompt_tokens=1000, completion_tokens=120), 0.2)
    assert spending.exceeded_message() == f"The budget of this attempt is used up: {said}"


def test_the_clock_starts_with_the_first_call() -> None:
    spending = Spending(Budget(wall_s=0.05))
    time.sleep(0.06)
    assert spending.exceeded_message() is None
    time.sleep(0.06)
    assert (spending.exceeded_message() or "").endswith("of 0.05 seconds")


def test_a_cost_that_is_not_known_counts_nothing() -> None:
    spending = Spending(Budget(cost_usd=0.01))
    spending.add(Usage(prompt_tokens=10**9), None)
    assert spending.exceeded_message() is None


@given(st.lists(usages))
def test_without_limits_nothing_is_used_up(calls: list[Usage]) -> None:
    for spending in (Spending(None), Spending(Budget())):
        for usage in calls:
            spending.add(usage, 1.0)
            assert spending.exceeded_message() is None


@given(st.integers(1, 10**6), st.lists(usages, max_size=20))
def test_a_limit_holds_from_the_call_that_reaches_it(limit: int, calls: list[Usage]) -> None:
    spending, used = Spending(Budget(tokens=limit)), 0
    for usage in calls:
        assert (spending.exceeded_message() is not None) == (used >= limit)
        spending.add(usage, None)
        used += usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("limits", [{"calls": 0}, {"tokens": -1}, {"cost_usd": float("nan")}, {"wall_s": 0.0}])
def test_a_limit_is_above_nothing(limits: dict[str, Any]) -> None:
    (name,) = limits
    with pytest.raises(ConfigError, match=rf"budget\.{name}: expected a number above 0, got"):
        Budget(**limits)
    with pytest.raises(ConfigError, match=rf"budget\.{name}"):
        msgspec.convert(limits, Budget)


def test_a_misspelt_limit_is_told() -> None:
    with pytest.raises(msgspec.ValidationError, match="call"):
        msgspec.convert({"call": 3}, Budget)
