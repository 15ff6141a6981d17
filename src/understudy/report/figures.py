"""The numbers of a report: every page, picture and plot is made from one `ReportFigures`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

from msgspec import Struct, field

from understudy.store.outcomes import VersionUse
from understudy.util.statistics import (
    ConfidenceInterval,
    MeanEstimate,
    mean_estimate,
    newcombe,
    newcombe_paired,
    wilson,
)

SIGNIFICANT = 0.05
MAX_HEADLINE = 2
"""How many agents a headline compares."""
MIN_TASKS = 6
"""With fewer tasks in common even tasks that all got better could have done so by chance: 2 / 2⁵ > 0.05."""

_MAX_ENUMERATED = 4_000_000
"""Additions of the exact permutation test, above which a normal distribution stands in for it."""

Judgement = Literal["better", "worse", "open"]


class SolveCounts(Struct, frozen=True):
    """How many of a task's graded rollouts were solved."""

    solved: int
    graded: int


class RateDifference(Struct, frozen=True, kw_only=True):
    """The later of two solve rates minus the earlier one.

    `apart`: the intervals of the two rates do not overlap. `p_by_task` is None if there is no common task.
    `judgement` is "open" unless zero is outside the interval and `p_by_task`, if there is one, is below 0.05.
    """

    value: float
    low: float
    high: float
    apart: bool
    p_by_task: float | None
    common_tasks: int
    judgement: Judgement


def rate(tasks: Sequence[SolveCounts]) -> ConfidenceInterval | None:
    """Return the solve rate over all rollouts with Wilson's interval; None if none was graded."""
    graded = sum(task.graded for task in tasks)
    return wilson(sum(task.solved for task in tasks), graded) if graded else None


def mean_reward(rewards: Sequence[float]) -> MeanEstimate | None:
    """Return the mean reward with its interval: Wilson's if all rewards are 0 or 1, otherwise Student's. None if
    there are no rewards.
    """
    if rewards and all(reward in (0.0, 1.0) for reward in rewards):
        share = wilson(sum(reward == 1.0 for reward in rewards), len(rewards))
        return MeanEstimate(share.estimate, share.low, share.high)
    return mean_estimate(rewards)


def compare(before: dict[str, SolveCounts], after: dict[str, SolveCounts]) -> RateDifference | None:
    """Return how a later solve rate differs from an earlier one, from the counts of each task; None if one has no
    graded rollout.

    The interval is Newcombe's, which treats rollouts as independent. Those of one task are not, so there is a
    second test over the tasks in common, `permutation_p_value`.
    """
    before_rate, after_rate = rate(list(before.values())), rate(list(after.values()))
    if before_rate is None or after_rate is None:
        return None
    gain = newcombe(_total(before), _total(after))
    common = [task for task in before if task in after and before[task].graded and after[task].graded]
    p = permutation_p_value([(before[task], after[task]) for task in common]) if common else None
    beyond = (gain.low > 0 or gain.high < 0) and (p is None or p < SIGNIFICANT)
    return RateDifference(
        value=gain.estimate,
        low=gain.low,
        high=gain.high,
        apart=before_rate.high < after_rate.low or after_rate.high < before_rate.low,
        p_by_task=p,
        common_tasks=len(common),
        judgement="open" if not beyond else "better" if gain.estimate > 0 else "worse",
    )


def permutation_p_value(pairs: Sequence[tuple[SolveCounts, SolveCounts]]) -> float:
    """Return the probability of a difference at least as large as the observed one if, for each task, the two
    rates were swapped at random.

    Two-sided. Exact if the sums can be enumerated, otherwise approximated by a normal distribution. Each task must
    have been graded on both sides.
    """
    # Over a common denominator the differences are whole numbers, of which equal sums can be counted together.
    scale = math.lcm(*(counts.graded for pair in pairs for counts in pair))
    steps = [
        last.solved * (scale // last.graded) - first.solved * (scale // first.graded) for first, last in pairs
    ]
    divisor = math.gcd(*steps)
    if divisor == 0:
        return 1.0
    steps = [step // divisor for step in steps if step]
    observed, reach = abs(sum(steps)), sum(map(abs, steps))
    if len(steps) * min(reach, 1 << len(steps)) > _MAX_ENUMERATED:
        deviation = math.sqrt(sum(float(step) ** 2 for step in steps))
        return 2 * (1 - NormalDist().cdf(observed / deviation))
    # The probability of each sum over the tasks so far, both signs of a task being equally likely.
    probabilities = {0: 1.0}
    for step in steps:
        following: dict[int, float] = {}
        for total, probability in probabilities.items():
            for signed in (total + step, total - step):
                following[signed] = following.get(signed, 0.0) + probability / 2
        probabilities = following
    return min(1.0, sum(share for total, share in probabilities.items() if abs(total) >= observed))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for the number of comparisons by Holm's step-down method (1979).

    Below 0.05 each, they are wrong about any of the comparisons in at most 5 % of such families.
    """
    adjusted, least = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        least = max(least, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = least
    return adjusted


def compare_by_task(
    before: dict[str, SolveCounts], after: dict[str, SolveCounts]
) -> tuple[int, ConfidenceInterval | None, float | None]:
    """Return the number of tasks that two runs have in common, the gain in solve rate on them with its interval,
    and the p-value over tasks.

    The interval treats tasks, not rollouts, as independent. The last two are None if there is no common task.
    """
    pairs = [(before[task], after[task]) for task in before if task in after]
    if not pairs:
        return 0, None, None
    shares = [(first.solved / first.graded, second.solved / second.graded) for first, second in pairs]
    return len(pairs), newcombe_paired(shares), permutation_p_value(pairs)


def _total(tasks: dict[str, SolveCounts]) -> tuple[int, int]:
    return sum(task.solved for task in tasks.values()), sum(task.graded for task in tasks.values())


Kind = Literal["run", "runs", "loop", "training"]


class Point(Struct, frozen=True, kw_only=True):
    """A point of a report's charts: the rollouts of one policy in a run, a step of a loop, or an evaluation in it.

    `step` is None outside of a loop. `solved` counts rollouts whose last verdict has the reward 1, `unsolved` the
    other graded ones, and `suspicious` graded ones whose patch may deceive the grader. `failed` counts those with
    an infrastructure failure, `pending` those that have not ended.

    `solve_rate` and `reward` are over graded rollouts. `turns` (answered calls), `sampled` (completion tokens) and
    `seconds` are means over graded rollouts, or None if there are none. Tokens, calls and costs are sums over all
    attempts. `from_store` is False if the store was removed, so that only the counts in the loop's state are
    known.
    """

    label: str
    step: int | None = None
    version: str | None = None
    directory: str = ""
    solved: int = 0
    unsolved: int = 0
    suspicious: int = 0
    suspicious_solved: int = 0
    failed: int = 0
    pending: int = 0
    timeouts: int = 0
    solve_rate: ConfidenceInterval | None = None
    reward: MeanEstimate | None = None
    turns: MeanEstimate | None = None
    sampled: MeanEstimate | None = None
    seconds: MeanEstimate | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    from_store: bool = True

    @property
    def graded(self) -> int:
        """Return the number of rollouts that have a verdict."""
        return self.solved + self.unsolved


class TaskRow(Struct, frozen=True, kw_only=True):
    """One task: (solved, graded) in each of the points of the report, and its turns in the last of them."""

    task_id: str
    tried: tuple[tuple[int, int], ...]
    turns: float | None = None


class BoundaryRow(Struct, frozen=True, kw_only=True):
    """Errors of one boundary: the number of attempts that had one, of rollouts that failed for good because of it,
    and the most frequent message.
    """

    boundary: str
    attempts: int
    given_up: int
    example: str


class TrainingStep(Struct, frozen=True, kw_only=True):
    """The trainer's report of one step: metrics by name, and the number of skipped items by reason."""

    step: int
    version: str | None
    values: dict[str, float]
    skipped: dict[str, float] = field(default_factory=dict[str, float])


class Headline(Struct, frozen=True, kw_only=True):
    """The comparison of the first point with the last. In `strict`, suspicious patches do not count as solved."""

    before: Point
    after: Point
    difference: RateDifference
    strict: RateDifference


class AgentRow(Struct, frozen=True, kw_only=True):
    """How well a model does with the agent of one run. `label` is the run's, `solve_rate` the mean over its tasks.

    `difference` is the difference to the first run over the tasks that both have, task by task. It is None for the
    first run, and if there is no common task. `p_by_task` is as in RateDifference; `p_adjusted` is adjusted for
    the number of such comparisons (`holm`). `judgement` is "open" unless `p_adjusted` is below 0.05 and zero is
    outside the interval, which is not adjusted.
    """

    label: str
    agent: str
    tasks: int
    solve_rate: float
    common_tasks: int = 0
    difference: ConfidenceInterval | None = None
    p_by_task: float | None = None
    p_adjusted: float | None = None
    judgement: Judgement = "open"


class ReportFigures(Struct, frozen=True, kw_only=True):
    """A report in numbers.

    `points` are compared with each other: the evaluations of a loop, or the given runs. `collected` are a loop's
    steps on its training tasks. `tasks` are the tasks of `points`. `about` describes what was run, `unsolved`
    counts why graded rollouts were not solved, and `notes` name what is missing or contradicts. `made_at` is in
    Unix seconds. `agents` compares the agents of several runs; it is empty if there is only one. With three or
    more rows there, each is compared with the first, and there is no headline.
    """

    title: str
    kind: Kind
    directory: str
    made_at: float
    about: dict[str, str]
    points: tuple[Point, ...] = ()
    collected: tuple[Point, ...] = ()
    headline: Headline | None = None
    training: tuple[TrainingStep, ...] = ()
    tasks: tuple[TaskRow, ...] = ()
    boundaries: tuple[BoundaryRow, ...] = ()
    unsolved: dict[str, int] = field(default_factory=dict[str, int])
    versions: tuple[VersionUse, ...] = ()
    agents: tuple[AgentRow, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def compares_many(self) -> bool:
        """Return whether several agents are each compared with the first, in place of a headline."""
        return len(self.agents) > MAX_HEADLINE
