"""Functions of sequences of any kind."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many of the first elements of two sequences are equal."""
    for number, (element, counterpart) in enumerate(zip(first, second, strict=False)):
        if element != counterpart:
            return number
    return min(len(first), len(second))
