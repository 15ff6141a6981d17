"""Selects the charts of a report, as plain data: the viewer's page draws them, and `picture` makes a PNG."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from understudy.report import formatting
from understudy.report.figures import Point, ReportFigures
from understudy.train.loop.state import step_number
from understudy.util.statistics import ConfidenceInterval, MeanEstimate

_TRAINER_METRICS = (
    ("mismatch_mean", "Mismatch, mean", "behaviour against training log-probabilities of the same tokens"),
    ("mismatch_max", "Mismatch, greatest", "of any one token"),
    ("loss", "Loss", ""),
    ("grad_norm", "Norm of the gradient", "before it is clipped"),
    ("kl", "KL to the reference", ""),
    ("entropy", "Entropy", "of the policy, per token"),
    ("clip_fraction", "Clipped", "share of tokens"),
    ("tokens", "Tokens learned from", ""),
    ("groups", "Groups learned from", ""),
    ("seconds", "Seconds", "of the update"),
)
_SHOWN_ELSEWHERE = {"reward", "reward_mean", "collected", "solved", "rollouts", "sequences"}
"""Metrics of the trainer that the graded rollouts themselves show."""
_MAX_OTHERS = 24


class Dot(Struct, frozen=True, kw_only=True):
    """A value, the bounds of its interval if it has one, and a sentence about it."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    description: str = ""


class Series(Struct, frozen=True, kw_only=True):
    """Dots of one kind, by x. `style` is "main", or "side" for what matters less."""

    name: str
    dots: Sequence[Dot]
    style: str = "main"


class LineChart(Struct, frozen=True, kw_only=True):
    """Values over whole numbers. `name` is the metric's name. With `is_share` the values are between 0 and 1, and
    their axis shows percent. Without `bounds` the axis follows from the values.
    """

    name: str
    title: str
    series: Sequence[Series]
    caption: str = ""
    is_share: bool = False
    x_name: str = "updates of the policy"
    bounds: tuple[float, float] | None = None


class Bar(Struct, frozen=True, kw_only=True):
    """A row of a forest plot: a rate with its interval, its name at the left, its value as text at the right."""

    name: str
    rate: ConfidenceInterval
    style: str = "main"


class ForestChart(Struct, frozen=True, kw_only=True):
    """Rates with their intervals under each other, on one axis from 0 to 1."""

    title: str
    bars: Sequence[Bar]


def loop_charts(figures: ReportFigures) -> list[LineChart]:
    """Return charts of solve rate, reward, tokens and turns over the steps of a loop; empty for anything else."""
    if figures.kind != "loop":
        return []
    binary = all(
        point.reward is None or point.solve_rate is None or point.reward.estimate == point.solve_rate.estimate
        for point in (*figures.points, *figures.collected)
    )
    zero_to_one = (0.0, 1.0)
    charts = [
        _over_steps(figures, "solve_rate", "Solve rate", is_share=True, bounds=zero_to_one),
        _over_steps(
            figures,
            "reward",
            "Mean reward",
            caption="every reward was 0 or 1, so this is the solve rate" if binary else "",
            bounds=zero_to_one if binary else None,
        ),
        _over_steps(figures, "sampled", "Sampled tokens", caption="of a rollout"),
        _over_steps(figures, "turns", "Turns", caption="answered calls of a rollout"),
    ]
    return [chart for chart in charts if chart.series]


def training_charts(figures: ReportFigures) -> list[LineChart]:
    """Return a chart for each metric that the trainer reported: well-known metrics first, others only if they
    change.
    """
    values: dict[str, set[float]] = {}
    for step in figures.training:
        for name, value in step.values.items():
            values.setdefault(name, set()).add(value)
    well_known = [row for row in _TRAINER_METRICS if row[0] in values]
    changing = {name for name, different in values.items() if len(different) > 1}
    other_metrics = sorted(changing - {name for name, _, _ in _TRAINER_METRICS} - _SHOWN_ELSEWHERE)[:_MAX_OTHERS]
    charts: list[LineChart] = []
    for name, title, caption in [*well_known, *((name, name, "") for name in other_metrics)]:
        dots = [
            Dot(
                x=step.step,
                y=step.values[name],
                description=f"step {step.step}: {formatting.number(step.values[name])}",
            )
            for step in figures.training
            if name in step.values
        ]
        series = [Series(name=name, dots=dots)]
        charts.append(LineChart(name=name, title=title[:80], series=series, caption=caption, x_name="step"))
    return charts


def runs_chart(figures: ReportFigures) -> ForestChart:
    """Return a chart of the solve rates of all points, with the last one as the main one."""
    rated = [(point.label, point.solve_rate) for point in figures.points if point.solve_rate is not None]
    bars = [
        Bar(name=label, rate=rate, style="main" if index == len(rated) - 1 else "side")
        for index, (label, rate) in enumerate(rated)
    ]
    return ForestChart(title="Solve rate, with 95 % intervals", bars=bars)


def _over_steps(
    figures: ReportFigures,
    name: str,
    title: str,
    *,
    caption: str = "",
    is_share: bool = False,
    bounds: tuple[float, float] | None = None,
) -> LineChart:
    """Return the chart of an attribute of `Point` over the steps, for held-out and training tasks."""
    series = [
        Series(name=label, dots=dots, style=style)
        for label, points, style in (
            ("training tasks", figures.collected, "side"),
            ("held-out tasks", figures.points, "main"),
        )
        if (dots := _dots(points, name))
    ]
    return LineChart(name=name, title=title, series=series, caption=caption, is_share=is_share, bounds=bounds)


def _dots(points: Sequence[Point], name: str) -> list[Dot]:
    show = formatting.percent if name == "solve_rate" else formatting.number
    dots: list[Dot] = []
    for point in points:
        value: ConfidenceInterval | MeanEstimate | None = getattr(point, name)
        if value is None:
            continue
        if value.low is None or value.high is None:
            interval = "of one rollout, so without an interval"
        else:
            interval = f"95 % interval {show(value.low)} to {show(value.high)}; {point.graded} rollouts"
        description = f"{point.label}: {show(value.estimate)}, {interval}"
        x, y = _updates(point), value.estimate
        dots.append(Dot(x=x, y=y, low=value.low, high=value.high, description=description))
    return sorted(dots, key=lambda dot: dot.x)


def _updates(point: Point) -> float:
    """Return how many updates the policy of a loop's point had: by its version's number, otherwise by the step."""
    number = step_number(point.version)
    return float(point.step or 0) if number is None else float(number)
