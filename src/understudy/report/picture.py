"""Draws the report as one picture with matplotlib, which the extra `train` installs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.report import formatting
from understudy.report.charts import ForestChart, LineChart, loop_charts, runs_chart, training_charts
from understudy.report.figures import ReportFigures
from understudy.util.files import atomic_path
from understudy.util.text import visible

_JUDGEMENT_COLOURS = {"better": "#0a7d57", "worse": "#b3321f", "open": "#5d636d"}
_MAIN_COLOUR, _SIDE_COLOUR, _SOFT_COLOUR, _GRID_COLOUR = "#2559c9", "#b07a1e", "#666b73", "#e3e1da"
_MAX_BARS = 24


def draw(figures: ReportFigures, path: Path) -> None:
    """Write a PNG with the judgement, the solve rates and their intervals, and further charts. Raises ConfigError
    if matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png: the picture is drawn by the package matplotlib, which is not installed; install it with: pip "
            "install 'understudy[train]', or leave out --png"
        ) from error
    main, small = _chosen(figures)
    tall = 7.6 if small else 5.2
    drawn: Any = Figure(figsize=(11.0, tall), dpi=140, facecolor="white")
    FigureCanvasAgg(drawn)
    judgement_text, judgement = formatting.describe_judgement(figures)
    grid = drawn.add_gridspec(
        2 if small else 1,
        max(1, len(small)),
        height_ratios=[2.1, 1] if small else [1],
        left=0.08,
        right=0.965,
        top=0.77 if small else 0.66,
        bottom=0.08 if small else 0.11,
        hspace=0.42,
        wspace=0.3,
    )
    lines = [
        (0.52, judgement_text, 21, _JUDGEMENT_COLOURS[judgement], "bold"),
        (0.88, formatting.sentence(figures), 11, "#1b1d21", "normal"),
    ]
    lines += [
        (1.14 + 0.2 * row, line, 9.5, _SOFT_COLOUR, "normal")
        for row, line in enumerate(_lines_below_heading(figures))
    ]
    for below, line, size, colour, weight in lines:
        place_in = {"x": 0.04, "y": 1 - below / tall, "fontsize": size, "fontweight": weight, "color": colour}
        drawn.text(s=_plain(line), parse_math=False, **place_in)
    axes = drawn.add_subplot(grid[0, :])
    if isinstance(main, ForestChart):
        _forest(axes, main)
    else:
        _lines(axes, main)
    for column, chart in enumerate(small):
        _lines(drawn.add_subplot(grid[1, column]), chart, small=True)
    try:
        with atomic_path(path) as fresh:
            drawn.savefig(fresh, format="png")
    except OSError as error:
        raise ConfigError(
            f"--png: {path} cannot be written: {error.strerror or error}; choose an --output in another "
            "directory, beside which the picture is written, or leave out --png"
        ) from error


def _chosen(figures: ReportFigures) -> tuple[LineChart | ForestChart, list[LineChart]]:
    """Return the large chart, and up to three small ones that are drawn below it."""
    charts = {chart.name: chart for chart in (*training_charts(figures), *loop_charts(figures))}
    if figures.kind == "loop":
        large, names = "solve_rate", ("sampled", "turns", "mismatch_mean", "loss")
    elif figures.kind == "training":
        large, names = "loss", ("mismatch_mean", "grad_norm")
    else:
        return runs_chart(figures), []
    empty = LineChart(name=large, title="", series=[])
    return charts.get(large, empty), [charts[name] for name in names if name in charts][:3]


def _lines(axes: Any, chart: LineChart, *, small: bool = False) -> None:
    for series in chart.series:
        colour, dash = (_MAIN_COLOUR, "-") if series.style == "main" else (_SIDE_COLOUR, "--")
        bounded = [(dot.x, dot.low, dot.high) for dot in series.dots if dot.low is not None]
        if bounded:
            x, low, high = zip(*bounded, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.13, lw=0)
            if series.style == "main":
                axes.vlines(x, low, high, color=colour, alpha=0.55, lw=1.4)
        axes.plot(
            [dot.x for dot in series.dots],
            [dot.y for dot in series.dots],
            dash,
            color=colour,
            marker="o",
            markersize=3 if small else 5,
            linewidth=1.6,
            label=series.name,
        )
    if chart.bounds:
        axes.set_ylim(*chart.bounds)
    axes.set_title(_plain(chart.title), fontsize=10 if small else 11, loc="left", color="#1b1d21")
    axes.yaxis.set_major_formatter(_formatter(formatting.tick if chart.is_share else formatting.number))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if small:
        axes.yaxis.get_major_locator().set_params(nbins=4)
    else:
        axes.set_xlabel(chart.x_name, fontsize=9, color=_SOFT_COLOUR)
        if len(chart.series) > 1:
            axes.legend(frameon=False, fontsize=9, loc="best")
    _style_axes(axes)


def _forest(axes: Any, chart: ForestChart) -> None:
    bars = chart.bars[-_MAX_BARS:]
    for row, bar in enumerate(bars):
        colour = _MAIN_COLOUR if bar.style == "main" else _SIDE_COLOUR
        axes.hlines(row, bar.rate.low, bar.rate.high, color=colour, alpha=0.4, lw=5)
        axes.plot([bar.rate.estimate], [row], "o", color=colour, markersize=9)
        value = _plain(formatting.rate(bar.rate))
        axes.text(1.02, row, value, va="center", fontsize=10, parse_math=False, clip_on=False)
    axes.set_yticks(range(len(bars)), [_plain(bar.name)[:28] for bar in bars], parse_math=False)
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_title(chart.title, fontsize=11, loc="left")
    axes.xaxis.set_major_formatter(_formatter(formatting.tick))
    _style_axes(axes)
    box = axes.get_position()
    axes.set_position([0.2, box.y0, 0.62, box.height])


def _lines_below_heading(figures: ReportFigures) -> list[str]:
    """Return up to two lines below the heading: the title and the reasons for the judgement."""
    reasons = [line for _, line in formatting.reasons(figures.headline)] if figures.headline else []
    return ["  ·  ".join(line) for line in ([figures.title[:80], *reasons[:2]], reasons[2:]) if line]


def _formatter(show: Callable[[float], str]) -> Callable[[float, object], str]:
    """Return a formatter for the values of an axis, as matplotlib calls it: it also passes the tick's number."""
    return lambda value, _: show(value)


def _style_axes(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_GRID_COLOUR)
    axes.grid(True, color=_GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=_SOFT_COLOUR)


def _plain(text: str) -> str:
    """Return a text in one line, with `?` for characters that the font does not have."""
    from matplotlib import font_manager

    fonts: Any = font_manager
    font = fonts.get_font(fonts.findfont("DejaVu Sans"))
    line = " ".join(visible(text).split())
    return "".join(letter if font.get_char_index(ord(letter)) else "?" for letter in line)
