"""What chance alone could have made of a solve rate, and of the difference between two. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Literal

from msgspec import Struct

from understudy.train.loop.evaluation import Z_95, Interval, wilson
from understudy.train.loop.evaluation import difference as newcombe

SIGNIFICANT = 0.05
LEAST_TASKS = 6
"""With fewer tasks in common even tasks that all got better could have done so by chance: 2 / 2⁵ > 0.05."""

_ENUMERABLE = 4_000_000
"""Steps of the exact permutation test, above which a normal distribution stands for it."""

Judgement = Literal["better", "worse", "open"]


class Tried(Struct, frozen=True):
    """How often a task was solved, of the rollouts of it that were graded."""

    solved: int
    graded: int


class Difference(Struct, frozen=True, kw_only=True):
    """The later of two solve rates less the earlier.

    `apart`: the two rates' own intervals do not touch. `p_by_task` is None where the two have no task in common.
    `judgement` is "open" unless zero is outside the interval and, where there is one, `p_by_task` is below 0.05.
    """

    value: float
    low: float
    high: float
    apart: bool
    p_by_task: float | None
    common_tasks: int
    judgement: Judgement


def rate(tried: Sequence[Tried]) -> Interval | None:
    """The solve rate over all rollouts with Wilson's interval; None where none was graded."""
    total = sum(task.graded for task in tried)
    return wilson(sum(task.solved for task in tried), total) if total else None


def mean(values: Sequence[float]) -> Interval | None:
    """A mean with its interval: Wilson's where all are 0 or 1, else Student's. None without values.

    One value alone has an interval of no width.
    """
    if not values:
        return None
    if all(value in (0.0, 1.0) for value in values):
        return wilson(sum(value == 1.0 for value in values), len(values))
    middle = fmean(values)
    if len(values) < 2:
        return Interval(middle, middle, middle)
    half = _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(middle, middle - half, middle + half)


def difference(before: dict[str, Tried], after: dict[str, Tried]) -> Difference | None:
    """How a later solve rate differs from an earlier one, given what became of each task; None if one is empty.

    The interval is Newcombe's. It takes rollouts for independent, which several of one task are not; hence the
    second test, which asks how often the tasks in common would differ as much if each one's two rates were
    swapped at random.
    """
    first, last = rate(list(before.values())), rate(list(after.values()))
    if first is None or last is None:
        return None
    found = newcombe(_total(before), _total(after))
    both = [task for task in before if task in after and before[task].graded and after[task].graded]
    p = swapped([(before[task], after[task]) for task in both]) if both else None
    beyond = (found.low > 0 or found.high < 0) and (p is None or p < SIGNIFICANT)
    return Difference(
        value=found.estimate,
        low=found.low,
        high=found.high,
        apart=first.high < last.low or last.high < first.low,
        p_by_task=p,
        common_tasks=len(both),
        judgement="open" if not beyond else "better" if found.estimate > 0 else "worse",
    )


def swapped(pairs: Sequence[tuple[Tried, Tried]]) -> float:
    """How likely the tasks' rates differ by as much, on the whole, when each task's two change places at random.

    Two-sided; exact where the sums can be enumerated, else by a normal distribution. Each was graded at least
    once.
    """
    scale = math.lcm(*(tried.graded for pair in pairs for tried in pair))
    steps = [
        last.solved * (scale // last.graded) - first.solved * (scale // first.graded) for first, last in pairs
    ]
    common = math.gcd(*steps)
    if common == 0:
        return 1.0
    steps = [step // common for step in steps if step]
    seen, reach = abs(sum(steps)), sum(map(abs, steps))
    if len(steps) * min(reach, 1 << len(steps)) > _ENUMERABLE:
        spread = math.sqrt(sum(float(step) ** 2 for step in steps))
        return 2 * (1 - NormalDist().cdf(seen / spread))
    ways = {0: 1.0}
    for step in steps:
        following: dict[int, float] = {}
        for total, share in ways.items():
            for signed in (total + step, total - step):
                following[signed] = following.get(signed, 0.0) + share / 2
        ways = following
    return min(1.0, sum(share for total, share in ways.items() if abs(total) >= seen))


def _total(tasks: dict[str, Tried]) -> tuple[int, int]:
    return sum(task.solved for task in tasks.values()), sum(task.graded for task in tasks.values())


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's distribution: exact for 1 and 2, else a series in 1/degrees."""
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
