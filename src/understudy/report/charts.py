"""Which charts a report has, as plain data, and how they are drawn as SVG for the page; `picture` draws a PNG.

The colours and fonts of the SVG are the page's, by class. Every text in it is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from markupsafe import Markup
from msgspec import Struct

from understudy.report import formatting
from understudy.report.figures import Point, ReportFigures
from understudy.train.loop.state import step_number
from understudy.util.statistics import ConfidenceInterval, MeanEstimate
from understudy.util.text import visible

_WIDTH, _HEIGHT = 560.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 16.0, 12.0, 34.0


def text(value: str) -> str:
    """A text as it may stand in HTML and SVG, in elements and quoted attributes."""
    return escape(printable(value), quote=True)


def printable(value: str) -> str:
    """A text without control characters, form feeds too."""
    return visible(value).replace("\f", "\u240c")


def line_chart(chart: LineChart, size: tuple[float, float] = (_WIDTH, _HEIGHT)) -> Markup:
    """Values over whole numbers, with bands and whiskers for their intervals; empty without values."""
    series, bounds, axis = chart.series, chart.bounds, chart.axis
    dots = [dot for one in series for dot in one.dots]
    if not dots:
        return Markup()
    (width, height), (low, high) = size, bounds or _reach(dots)
    ticks = _ticks(low, high, 4 if height > 160 else 2)
    if bounds is None:
        low, high = min(low, ticks[0]), max(high, ticks[-1])
    first, last = min(dot.x for dot in dots), max(dot.x for dot in dots)
    below = height - _BOTTOM + 17
    inner, tall = width - _LEFT - _RIGHT, height - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + inner * ((x - first) / (last - first) if last > first else 0.5)

    def down(y: float) -> float:
        return _TOP + tall * (1 - (min(max(y, low), high) - low) / (high - low))

    parts = [
        f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(chart.title)}">',
        *(
            f'<line class="rule" x1="{_LEFT:g}" x2="{width - _RIGHT:g}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{_LEFT - 8:g}" y="{y + 4:.1f}" text-anchor="end">{text(axis(tick))}</text>'
            for tick, y in ((tick, down(tick)) for tick in ticks if low <= tick <= high)
        ),
        *(
            f'<text class="tick" x="{across(x):.1f}" y="{below:g}" text-anchor="middle">{x:g}</text>'
            for x in _whole(first, last)
        ),
        f'<text class="axis" x="{width - _RIGHT:g}" y="{height - 3:g}" text-anchor="end">'
        f"{text(chart.x_name)}</text>",
    ]
    for one in series:
        parts += _band(one, across, down)
    for one in series:
        path = " ".join(f"{across(dot.x):.1f},{down(dot.y):.1f}" for dot in one.dots)
        parts.append(f'<polyline class="line {one.style}" points="{path}"/>')
        few = len(one.dots) <= 60
        for dot in one.dots:
            if few and dot.low is not None and dot.high is not None:
                parts.append(
                    f'<line class="whisker {one.style}" x1="{across(dot.x):.1f}" x2="{across(dot.x):.1f}" '
                    f'y1="{down(dot.low):.1f}" y2="{down(dot.high):.1f}"/>'
                )
            parts.append(
                f'<circle class="dot {one.style}" cx="{across(dot.x):.1f}" cy="{down(dot.y):.1f}" '
                f'r="{4 if few else 1.6}"><title>{text(dot.description)}</title></circle>'
            )
    return Markup("".join([*parts, "</svg>"]))


def forest_chart(chart: ForestChart) -> Markup:
    """Rates with their intervals under each other on one axis from 0 to 1."""
    row, left, right, width = 38.0, 170.0, 190.0, 760.0
    height = row * len(chart.bars) + 30

    def across(value: float) -> float:
        return left + (width - left - right) * min(max(value, 0.0), 1.0)

    view = f'viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(chart.title)}"'
    parts = [f'<svg class="chart forest" {view}>']
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = across(tick)
        parts.append(
            f'<line class="rule{"" if tick else " strong"}" x1="{x:.1f}" x2="{x:.1f}" y1="0" '
            f'y2="{height - 26:g}"/>'
            f'<text class="tick" x="{x:.1f}" y="{height - 8:g}" text-anchor="middle">{100 * tick:.0f} %</text>'
        )
    for index, bar in enumerate(chart.bars):
        value = formatting.rate(bar.rate)
        y = row * index + row / 2
        parts.append(
            f'<text class="name" x="{left - 14:g}" y="{y + 5:.1f}" text-anchor="end">{text(_cut(bar.name, 22))}'
            f"<title>{text(bar.name)}</title></text>"
            f'<line class="interval {bar.style}" x1="{across(bar.rate.low):.1f}" x2="{across(bar.rate.high):.1f}" '
            f'y1="{y:g}" y2="{y:g}"/>'
            f'<circle class="dot {bar.style}" cx="{across(bar.rate.estimate):.1f}" cy="{y:g}" r="7">'
            f"<title>{text(value)}</title></circle>"
            f'<text class="value" x="{width - right + 14:g}" y="{y + 5:.1f}">{text(value)}</text>'
        )
    return Markup("".join([*parts, "</svg>"]))


def strip(counts: Sequence[tuple[int, int]]) -> Markup:
    """A cell for each point, the fuller the more was solved; an empty frame where nothing was graded."""
    size = max(4.0, min(14.0, 168.0 / max(1, len(counts))))
    cells = "".join(
        f'<rect class="{"cell" if graded else "cell none"}" x="{index * size + 0.5:.1f}" y="0.5" '
        f'width="{size - 1:.1f}" height="13"'
        + (f' style="fill-opacity:{0.08 + 0.92 * solved / graded:.2f}"' if graded else "")
        + f"><title>{solved} of {graded}</title></rect>"
        for index, (solved, graded) in enumerate(counts)
    )
    wide = size * len(counts) + 1
    return Markup(f'<svg class="strip" viewBox="0 0 {wide:.1f} 14" width="{wide:.0f}" height="14">{cells}</svg>')


def _band(series: Series, across: Callable[[float], float], down: Callable[[float], float]) -> list[str]:
    """The area between the bounds, where there are at least two dots that have them."""
    sure = [(dot.x, dot.low, dot.high) for dot in series.dots if dot.low is not None and dot.high is not None]
    if len(sure) < 2:
        return []
    above = [f"{across(x):.1f},{down(high):.1f}" for x, _, high in sure]
    below = [f"{across(x):.1f},{down(low):.1f}" for x, low, _ in reversed(sure)]
    return [f'<polygon class="band {series.style}" points="{" ".join([*above, *below])}"/>']


def _reach(dots: Sequence[Dot]) -> tuple[float, float]:
    """From the least to the greatest, with 0 where it is near; never empty."""
    values = [value for dot in dots for value in (dot.y, dot.low, dot.high) if value is not None]
    low, high = min(values), max(values)
    if 0 < low < 0.6 * high:
        low = 0.0
    size = max(abs(low), abs(high))
    if high - low <= size * 1e-9:
        room = size * 0.1 if size > 1e-90 else 1.0
        return low - room if low else 0.0, high + room
    return low, high


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers from just below `low` to just above `high`."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [at * step for at in range(first, last + 1)]


def _whole(first: float, last: float) -> list[float]:
    """Whole numbers from first to last, at most about ten."""
    step = max(1, math.ceil((last - first) / 10))
    return [first + at * step for at in range(int((last - first) // step) + 1)]


def _cut(value: str, most: int) -> str:
    return value if len(value) <= most else f"{value[: most - 1]}…"


_TRAINING = (
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
    """A value, the bounds of its interval where it has one, and a sentence about it."""

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
    """Values over whole numbers. `name` is the metric's, `axis` writes a value at the axis.

    Without `bounds` the axis follows from the values.
    """

    name: str
    title: str
    series: Sequence[Series]
    caption: str = ""
    axis: Callable[[float], str] = formatting.number
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
    """Solve rate, reward, tokens and turns over the steps of a loop; none of anything else."""
    if figures.kind != "loop":
        return []
    binary = all(
        point.reward is None or point.solve_rate is None or point.reward.estimate == point.solve_rate.estimate
        for point in (*figures.points, *figures.collected)
    )
    share = (0.0, 1.0)
    charts = [
        _over_steps(figures, "solve_rate", "Solve rate", axis=formatting.tick, bounds=share),
        _over_steps(
            figures,
            "reward",
            "Mean reward",
            caption="every reward was 0 or 1, so this is the solve rate" if binary else "",
            bounds=share if binary else None,
        ),
        _over_steps(figures, "sampled", "Sampled tokens", caption="of a rollout"),
        _over_steps(figures, "turns", "Turns", caption="answered calls of a rollout"),
    ]
    return [chart for chart in charts if chart.series]


def training_charts(figures: ReportFigures) -> list[LineChart]:
    """A chart for each number that the trainer reported: well-known ones first, others where they change."""
    values: dict[str, set[float]] = {}
    for step in figures.training:
        for name, value in step.values.items():
            values.setdefault(name, set()).add(value)
    well_known = [row for row in _TRAINING if row[0] in values]
    changing = {name for name, different in values.items() if len(different) > 1}
    others = sorted(changing - {name for name, _, _ in _TRAINING} - _SHOWN_ELSEWHERE)[:_MAX_OTHERS]
    charts: list[LineChart] = []
    for name, title, caption in [*well_known, *((name, name, "") for name in others)]:
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
    """The solve rates of all points, the last of them as the main one."""
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
    axis: Callable[[float], str] = formatting.number,
    bounds: tuple[float, float] | None = None,
) -> LineChart:
    """The chart of an attribute of `Point`, for held-out and training tasks."""
    series = [
        Series(name=label, dots=dots, style=style)
        for label, points, style in (
            ("training tasks", figures.collected, "side"),
            ("held-out tasks", figures.points, "main"),
        )
        if (dots := _dots(points, name))
    ]
    return LineChart(name=name, title=title, series=series, caption=caption, axis=axis, bounds=bounds)


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
    """How many updates the policy of a point of a loop had: by its version's number, else by the step."""
    number = step_number(point.version)
    return float(point.step or 0) if number is None else float(number)
