"""What calls cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.prices import Price, cost, list_price
from understudy.types import Usage

COUNT = st.integers(0, 10**6)
DOLLARS = st.floats(0, 1000)


def test_fresh_cached_and_written_tokens_have_their_own_prices() -> None:
    usage = Usage(
        prompt_tokens=1_000_000, completion_tokens=100_000, cached_tokens=600_000, cache_write_tokens=300_000
    )
    price = Price(input=3, output=15, cached=0.3, cache_write=3.75)
    assert cost(usage, price) == pytest.approx(0.1 * 3 + 0.6 * 0.3 + 0.3 * 3.75 + 0.1 * 15)
    assert cost(usage, Price(input=3, output=15)) == pytest.approx(3 + 1.5)


@given(COUNT, COUNT, COUNT, COUNT, DOLLARS, DOLLARS)
def test_without_cache_prices_cached_tokens_cost_as_much_as_fresh_ones(
    prompt: int, completion: int, cached: int, written: int, fresh: float, output: float
) -> None:
    usage = Usage(
        prompt_tokens=prompt + cached + written,
        completion_tokens=completion,
        cached_tokens=cached,
        cache_write_tokens=written,
    )
    plain = Usage(prompt_tokens=prompt + cached + written, completion_tokens=completion)
    price = Price(input=fresh, output=output)
    assert cost(usage, price) == pytest.approx(cost(plain, price))
    assert cost(usage, price) >= 0


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("claude-sonnet-4-5-20250929", "claude-sonnet-4-5"),
        ("claude-sonnet-4-5@20250929", "claude-sonnet-4-5"),
        ("claude-3-5-haiku-latest", "claude-3-5-haiku"),
        ("gpt-4.1-2025-04-14", "gpt-4.1"),
        ("gpt-4.1-mini", "gpt-4.1-mini"),
    ],
)
def test_a_dated_model_snapshot_has_the_price_of_its_model(name: str, model: str) -> None:
    assert list_price(name) == list_price(model) is not None


@pytest.mark.parametrize("name", ["", "qwen3-coder", "gpt-5-nano-turbo", "claude-opus-4-9", "gpt", "my-gpt-4o"])
def test_an_unknown_model_has_no_list_price(name: str) -> None:
    assert list_price(name) is None


def test_list_prices_rise_with_model_size_and_from_input_to_output() -> None:
    mini, full = list_price("gpt-4.1-mini"), list_price("gpt-4.1")
    assert mini and full and mini.input < full.input < full.output
    sonnet = list_price("claude-sonnet-4-5")
    assert sonnet == Price(input=3, output=15, cached=0.3, cache_write=3.75)
