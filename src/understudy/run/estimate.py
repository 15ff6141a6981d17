"""Estimates a run's hours, tokens and dollars from similar finished rollouts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean

from msgspec import Struct

from understudy.errors import ConfigError
from understudy.gateway.prices import Price, cost
from understudy.store import Store
from understudy.store.outcomes import RolloutOutcome
from understudy.types import Usage


class MeasuredRollouts(Struct, frozen=True, kw_only=True):
    """Means over `count` finished rollouts: calls, tokens, and seconds from an attempt's start to its verdict."""

    count: int
    calls: float
    prompt_tokens: float
    cached_tokens: float
    completion_tokens: float
    seconds: float


class RunEstimate(Struct, frozen=True, kw_only=True):
    """What `rollouts` are likely to take. `cost_usd` is None if the price is unknown."""

    rollouts: int
    measured: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    hours: float
    cost_usd: float | None


def measure(directories: Iterable[Path]) -> MeasuredRollouts:
    """Return means over the graded rollouts in runs' directories. Raises ConfigError if there are none."""
    paths = list(directories)
    ended: list[RolloutOutcome] = []
    for directory in paths:
        with Store.open(directory, create=False) as store:
            for run in store.runs.all():
                ended += [rollout for rollout in store.outcomes.of_run(run.id) if rollout.reward is not None]
    if not ended:
        raise ConfigError(
            f"--measured-by: found no graded rollout in {', '.join(map(str, paths)) or 'the loop'}, expected at "
            "least one to estimate from; make a small run first, with the same model, agent and kind of tasks, "
            "such as one with --limit 4"
        )
    return MeasuredRollouts(
        count=len(ended),
        calls=fmean(rollout.turns for rollout in ended),
        prompt_tokens=fmean(rollout.prompt_tokens for rollout in ended),
        cached_tokens=fmean(rollout.cached_tokens for rollout in ended),
        completion_tokens=fmean(rollout.completion_tokens for rollout in ended),
        seconds=fmean(rollout.seconds or 0.0 for rollout in ended),
    )


def estimate(measured: MeasuredRollouts, rollouts: int, concurrency: int, price: Price | None) -> RunEstimate:
    """Estimate `rollouts` rollouts like the measured ones, `concurrency` at a time and as fast as those.

    `price` is the price of tokens; tokens that were read from a cache count as cached again.
    """
    usage = Usage(
        prompt_tokens=round(measured.prompt_tokens * rollouts),
        completion_tokens=round(measured.completion_tokens * rollouts),
        cached_tokens=round(measured.cached_tokens * rollouts),
    )
    return RunEstimate(
        rollouts=rollouts,
        measured=measured.count,
        calls=round(measured.calls * rollouts),
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        hours=round(measured.seconds * rollouts / max(1, min(concurrency, rollouts)) / 3600, 3),
        cost_usd=None if price is None else round(cost(usage, price), 4),
    )
