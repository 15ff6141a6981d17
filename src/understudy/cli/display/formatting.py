"""Amounts as progress tells them."""

from __future__ import annotations


def short(count: int) -> str:
    """A count in a few characters: 12.3k, 4.5M."""
    for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count)


def time_left(seconds: float) -> str:
    """How long it will still take, in words."""
    return f"{seconds:.0f} s left" if seconds < 120 else f"{seconds / 60:.0f} min left"
