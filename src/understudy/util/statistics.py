"""Shares and means with their 95 % confidence intervals; percentiles. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, pstdev, stdev

from msgspec import Struct

Z_95 = 1.959963984540054
"""95 % of a standard normal variable lie within this distance of 0."""


class ConfidenceInterval(Struct, frozen=True):
    """An estimate with the bounds of its 95 % interval."""

    estimate: float
    low: float
    high: float


class MeanEstimate(Struct, frozen=True):
    """A mean with the bounds of its 95 % interval; the bounds are None for a single value, whose spread is
    unknown.
    """

    estimate: float
    low: float | None
    high: float | None


def wilson(successes: int, trials: int, z: float = Z_95) -> ConfidenceInterval:
    """Return the share of successes with Wilson's score interval; 0 to 1 without trials.

    Raises ValueError unless 0 <= successes <= trials.
    """
    check_share(successes, trials)
    if trials == 0:
        return ConfidenceInterval(0.0, 0.0, 1.0)
    return _wilson_interval(successes / trials, trials, z)


def _wilson_interval(share: float, trials: int, z: float) -> ConfidenceInterval:
    """Return a share of some trials with Wilson's score interval."""
    scale = 1.0 + z * z / trials
    middle = (share + z * z / (2 * trials)) / scale
    half = z * math.sqrt(share * (1.0 - share) / trials + z * z / (4 * trials * trials)) / scale
    low = 0.0 if share == 0 else max(0.0, middle - half)
    high = 1.0 if share == 1 else min(1.0, middle + half)
    return ConfidenceInterval(share, low, high)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that is not exceeded by at least this share of them."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def newcombe(before: tuple[int, int], after: tuple[int, int], z: float = Z_95) -> ConfidenceInterval:
    """Return the share of `after` minus that of `before`, each given as (successes, trials), from -1 to 1.

    The interval is Newcombe's (1998, method 10: a hybrid of two Wilson intervals); it excludes 0 where the two
    shares differ at that level. It is -1 to 1 if one of them has no trials.
    """
    first, second = wilson(*before, z), wilson(*after, z)
    if before[1] == 0 or after[1] == 0:
        return ConfidenceInterval(0.0, -1.0, 1.0)
    gain = second.estimate - first.estimate
    down = math.hypot(second.estimate - second.low, first.high - first.estimate)
    up = math.hypot(second.high - second.estimate, first.estimate - first.low)
    return ConfidenceInterval(gain, max(-1.0, gain - down), min(1.0, gain + up))


def newcombe_paired(pairs: Sequence[tuple[float, float]], z: float = Z_95) -> ConfidenceInterval:
    """Return the mean over pairs of the second share minus the first.

    Each pair is of one thing that was tried twice, and each share from 0 to 1. The interval is Newcombe's for
    pairs (1998, method 10 of those), with the correlation of the shares less a correction for continuity. It is -1
    to 1 without pairs.
    """
    if not pairs:
        return ConfidenceInterval(0.0, -1.0, 1.0)
    firsts, seconds = zip(*pairs, strict=True)
    before, after = _wilson_interval(fmean(firsts), len(pairs), z), _wilson_interval(fmean(seconds), len(pairs), z)
    spread = pstdev(firsts) * pstdev(seconds)
    common = fmean(first * second for first, second in pairs) - before.estimate * after.estimate
    common = min(common, max(0.0, common - 1 / (2 * len(pairs))))
    phi = max(-1.0, min(1.0, common / spread)) if spread else 0.0
    gain = after.estimate - before.estimate

    def reach(first: float, second: float) -> float:
        return math.sqrt(max(0.0, first * first - 2 * phi * first * second + second * second))

    down = reach(after.estimate - after.low, before.high - before.estimate)
    up = reach(after.high - after.estimate, before.estimate - before.low)
    return ConfidenceInterval(gain, max(-1.0, gain - down), min(1.0, gain + up))


def mean_estimate(values: Sequence[float]) -> MeanEstimate | None:
    """Return the mean with Student's interval; without an interval for a single value, and None without values."""
    if not values:
        return None
    mean = fmean(values)
    if len(values) < 2:
        return MeanEstimate(mean, None, None)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return MeanEstimate(mean, mean - half, mean + half)


def check_share(successes: int, trials: int) -> None:
    """Raise ValueError unless 0 <= successes <= trials."""
    if not 0 <= successes <= trials:
        raise ValueError(
            f"invalid share {successes} of {trials}; expected 0 ≤ successes ≤ trials: correct the counts"
        )


def _student(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution: exact for 1 and 2 degrees of freedom, else a series in
    1/degrees.
    """
    tail = NormalDist().cdf(Z_95)
    if degrees == 1:
        return math.tan(math.pi * (tail - 0.5))
    if degrees == 2:
        return (2 * tail - 1) * math.sqrt(2 / (4 * tail * (1 - tail)))
    z, n = Z_95, degrees
    return z * (
        1
        + (z**2 + 1) / (4 * n)
        + (5 * z**4 + 16 * z**2 + 3) / (96 * n**2)
        + (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / (384 * n**3)
    )
