"""Functions of sequences of any kind."""

from __future__ import annotations

from collections.abc import Sequence


def common_prefix_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Return how many of the first elements of two sequences are equal."""
    for number, (first, second) in enumerate(zip(one, other, strict=False)):
        if first != second:
            return number
    return min(len(one), len(other))
