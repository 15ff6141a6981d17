"""Prices of tokens: list prices of well-known models, and the cost of a call."""

from __future__ import annotations

import re

from msgspec import Struct

from understudy.types import Usage


class Price(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """US dollars per million tokens.

    Prompt tokens that are read from or written to a cache may have other prices.
    """

    input: float
    output: float
    cached: float | None = None
    cache_write: float | None = None


def cost(usage: Usage, price: Price) -> float:
    """Return the cost of a call in US dollars.

    Cached tokens without a price of their own cost as much as others.
    """
    fresh = max(usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens, 0)
    read = price.input if price.cached is None else price.cached
    written = price.input if price.cache_write is None else price.cache_write
    total = fresh * price.input + usage.cached_tokens * read + usage.cache_write_tokens * written
    return (total + usage.completion_tokens * price.output) / 1e6


_DATED = re.compile(r"[-@](\d{8}|\d{4}-\d{2}-\d{2}|latest)$")


def list_price(model: str) -> Price | None:
    """Return the list price of a well-known model, or None for others.

    A name may end with the date of a snapshot. Any other suffix names another model, with another price.
    """
    return _LIST.get(_DATED.sub("", model))


def _anthropic(fresh: float, output: float) -> Price:
    return Price(input=fresh, output=output, cached=round(fresh / 10, 4), cache_write=round(fresh * 1.25, 4))


def _openai(fresh: float, output: float, cached: float | None) -> Price:
    return Price(input=fresh, output=output, cached=cached)


# The public list prices of 2026-02: standard tier, short prompts, cache entries of 5 minutes.
_LIST: dict[str, Price] = {
    **dict.fromkeys(("claude-opus-4-6", "claude-opus-4-5"), _anthropic(5, 25)),
    **dict.fromkeys(("claude-opus-4-1", "claude-opus-4-0", "claude-opus-4"), _anthropic(15, 75)),
    **dict.fromkeys(
        ("claude-sonnet-4-6", "claude-sonnet-4-5", "claude-sonnet-4-0", "claude-sonnet-4", "claude-3-7-sonnet"),
        _anthropic(3, 15),
    ),
    "claude-haiku-4-5": _anthropic(1, 5),
    "claude-3-5-haiku": _anthropic(0.8, 4),
    "gpt-5.2": _openai(1.75, 14, 0.175),
    **dict.fromkeys(("gpt-5.1", "gpt-5.1-codex", "gpt-5", "gpt-5-codex"), _openai(1.25, 10, 0.125)),
    "gpt-5-mini": _openai(0.25, 2, 0.025),
    "gpt-5-nano": _openai(0.05, 0.4, 0.005),
    "gpt-5-pro": _openai(15, 120, None),
    **dict.fromkeys(("gpt-4.1", "o3"), _openai(2, 8, 0.5)),
    "gpt-4.1-mini": _openai(0.4, 1.6, 0.1),
    "gpt-4.1-nano": _openai(0.1, 0.4, 0.025),
    "gpt-4o": _openai(2.5, 10, 1.25),
    "gpt-4o-mini": _openai(0.15, 0.6, 0.075),
    "o3-mini": _openai(1.1, 4.4, 0.55),
    "o4-mini": _openai(1.1, 4.4, 0.275),
}
