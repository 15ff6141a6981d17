"""How good a policy is on tasks it never learned from: solve rates with intervals, and their differences."""

from __future__ import annotations

import math

from msgspec import Struct

Z_95 = 1.959963984540054
"""Of a standard normal variable, 95 % lie within this of 0."""


class Interval(Struct, frozen=True):
    """An estimate with the bounds of its 95 % interval."""

    estimate: float
    low: float
    high: float


class Evaluation(Struct, frozen=True, kw_only=True):
    """What a policy version solved of the held-out tasks: `solved` of `total` graded rollouts.

    `run` is the run's directory, relative to the loop's. `tasks` maps each task to solved and graded rollouts;
    `failed` rollouts, for reasons of infrastructure, are not in the total.
    """

    step: int
    version: str
    run: str
    solved: int
    total: int
    failed: int = 0
    tasks: dict[str, tuple[int, int]] = {}
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for solved, total in ((self.solved, self.total), *self.tasks.values()):
            _check(solved, total)

    @property
    def rate(self) -> Interval:
        """The solve rate with Wilson's interval."""
        return wilson(self.solved, self.total)


def wilson(solved: int, total: int, z: float = Z_95) -> Interval:
    """The share of successes with Wilson's score interval; 0 to 1 where nothing was tried.

    Raises ValueError for counts that are none.
    """
    _check(solved, total)
    if total == 0:
        return Interval(0.0, 0.0, 1.0)
    share = solved / total
    scale = 1.0 + z * z / total
    middle = (share + z * z / (2 * total)) / scale
    half = z * math.sqrt(share * (1.0 - share) / total + z * z / (4 * total * total)) / scale
    low = 0.0 if solved == 0 else max(0.0, middle - half)
    high = 1.0 if solved == total else min(1.0, middle + half)
    return Interval(share, low, high)


def difference(before: tuple[int, int], after: tuple[int, int], z: float = Z_95) -> Interval:
    """How much greater the share of `after` is than that of `before`, each as successes and trials.

    The interval is Newcombe's (1998, method 10: a hybrid of two Wilson intervals); it excludes 0 where the two
    differ at that level. -1 to 1 where one of them was never tried.
    """
    first, second = wilson(*before, z), wilson(*after, z)
    if before[1] == 0 or after[1] == 0:
        return Interval(0.0, -1.0, 1.0)
    gain = second.estimate - first.estimate
    down = math.hypot(second.estimate - second.low, first.high - first.estimate)
    up = math.hypot(second.high - second.estimate, first.estimate - first.low)
    return Interval(gain, max(-1.0, gain - down), min(1.0, gain + up))


def _check(solved: int, total: int) -> None:
    if not 0 <= solved <= total:
        raise ValueError(f"{solved} of {total} is no share; expected 0 ≤ solved ≤ total")
