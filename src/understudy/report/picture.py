"""The report as one picture, drawn by matplotlib (the extra `train` brings it)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.report import formatting
from understudy.report.charts import place
from understudy.report.figures import Figures, Point
from understudy.util.atomic import atomic_path
from understudy.util.text import visible

_MOODS = {"better": "#0a7d57", "worse": "#b3321f", "open": "#5d636d"}
_MAIN, _SIDE, _SOFT, _LINE = "#2559c9", "#b07a1e", "#666b73", "#e3e1da"
_MOST_BARS = 24


def draw(figures: Figures, path: Path) -> None:
    """Write a PNG: the judgement, the solve rates with their intervals, and what goes with them.

    Raises ConfigError where matplotlib is missing or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a picture needs matplotlib; install it: pip install 'understudy[train]'") from error
    small = _small(figures)
    tall = 7.6 if small else 5.2
    drawn: Any = Figure(figsize=(11.0, tall), dpi=140, facecolor="white")
    FigureCanvasAgg(drawn)
    verdict, mood = formatting.judged(figures)
    grid = drawn.add_gridspec(
        2 if small else 1,
        max(1, len(small)),
        height_ratios=[2.1, 1] if small else [1],
        left=0.08,
        right=0.965,
        top=0.77 if small else 0.7,
        bottom=0.08 if small else 0.11,
        hspace=0.42,
        wspace=0.3,
    )
    said = [
        (0.52, verdict, 21, _MOODS[mood], "bold"),
        (0.88, formatting.sentence(figures), 11, "#1b1d21", "normal"),
    ]
    said += [(1.14 + 0.2 * row, line, 9.5, _SOFT, "normal") for row, line in enumerate(_under(figures))]
    for below, line, size, colour, weight in said:
        place_in = {"x": 0.04, "y": 1 - below / tall, "fontsize": size, "fontweight": weight, "color": colour}
        drawn.text(s=_plain(line), parse_math=False, **place_in)
    main = drawn.add_subplot(grid[0, :])
    if figures.kind == "loop":
        _curves(main, figures)
    elif figures.kind == "training":
        _line(main, "loss", _told(figures, "loss"))
    else:
        _bars(main, [point for point in figures.points if point.solve_rate][-_MOST_BARS:])
    for at, (name, points) in enumerate(small):
        _line(drawn.add_subplot(grid[1, at]), name, points)
    try:
        with atomic_path(path) as fresh:
            drawn.savefig(fresh, format="png")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error


def _curves(axes: Any, figures: Figures) -> None:
    """Solve rates over the updates of the policy."""
    for points, name, colour, style in (
        (figures.collected, "training tasks", _SIDE, "--"),
        (figures.points, "held-out tasks", _MAIN, "-"),
    ):
        shown = [(place(point), point.solve_rate) for point in points if point.solve_rate]
        if not shown:
            continue
        shown.sort(key=lambda row: row[0])
        x = [at for at, _ in shown]
        axes.fill_between(x, [r.low for _, r in shown], [r.high for _, r in shown], color=colour, alpha=0.13, lw=0)
        if colour == _MAIN:
            axes.vlines(x, [r.low for _, r in shown], [r.high for _, r in shown], color=colour, alpha=0.55, lw=1.4)
        axes.plot(x, [r.estimate for _, r in shown], style, color=colour, marker="o", markersize=5, label=name)
    axes.set_ylim(0, 1)
    axes.set_title("Solve rate, with 95 % intervals", fontsize=11, loc="left")
    axes.set_xlabel("updates of the policy", fontsize=9, color=_SOFT)
    axes.yaxis.set_major_formatter(_as_percent)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=9, loc="best")
    _calm(axes)


def _line(axes: Any, name: str, points: list[tuple[float, float]]) -> None:
    """One number over the steps."""
    axes.plot(*zip(*points, strict=True), color=_MAIN, linewidth=1.6, marker="o", markersize=3)
    axes.set_title(_plain(name), fontsize=10, loc="left", color="#1b1d21")
    axes.yaxis.set_major_formatter(_as_number)
    axes.yaxis.get_major_locator().set_params(nbins=4)
    axes.xaxis.get_major_locator().set_params(integer=True)
    _calm(axes)


def _bars(axes: Any, points: list[Point]) -> None:
    """Solve rates under each other."""
    for row, point in enumerate(points):
        assert point.solve_rate is not None
        colour = _MAIN if row == len(points) - 1 else _SIDE
        axes.hlines(row, point.solve_rate.low, point.solve_rate.high, color=colour, alpha=0.4, lw=5)
        axes.plot([point.solve_rate.estimate], [row], "o", color=colour, markersize=9)
        told = formatting.rate(point.solve_rate)
        axes.text(1.02, row, _plain(told), va="center", fontsize=10, parse_math=False, clip_on=False)
    axes.set_yticks(range(len(points)), [_plain(point.label)[:28] for point in points], parse_math=False)
    axes.set_ylim(len(points) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.set_title("Solve rate, with 95 % intervals", fontsize=11, loc="left")
    axes.xaxis.set_major_formatter(_as_percent)
    _calm(axes)
    box = axes.get_position()
    axes.set_position([0.2, box.y0, 0.62, box.height])


def _small(figures: Figures) -> list[tuple[str, list[tuple[float, float]]]]:
    """Up to three curves below: what a rollout sampled, its turns, and the mismatch."""
    rows = [
        (
            "sampled tokens of a rollout",
            [(place(point), point.sampled.estimate) for point in figures.points if point.sampled],
        ),
        ("turns of a rollout", [(place(point), point.turns.estimate) for point in figures.points if point.turns]),
        ("mismatch, mean", _told(figures, "mismatch_mean")),
    ]
    if figures.kind == "training":
        rows.append(("norm of the gradient", _told(figures, "grad_norm")))
    elif figures.kind == "loop":
        rows.append(("loss", _told(figures, "loss")))
    else:
        return []
    return [(name, sorted(dots)) for name, dots in rows if dots][:3]


def _told(figures: Figures, name: str) -> list[tuple[float, float]]:
    """What the trainer told of a number, by step."""
    return [(float(step.step), step.values[name]) for step in figures.training if name in step.values]


def _under(figures: Figures) -> list[str]:
    """The title, and what speaks for the judgement, in up to two lines."""
    said = [line for _, line in formatting.reasons(figures.headline)] if figures.headline else []
    return ["  ·  ".join(line) for line in ([figures.title[:80], *said[:2]], said[2:]) if line]


def _as_percent(value: float, _: object) -> str:
    return f"{100 * value:.0f} %"


def _as_number(value: float, _: object) -> str:
    return formatting.number(value)


def _calm(axes: Any) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_LINE)
    axes.grid(True, color=_LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=_SOFT)


def _plain(text: str) -> str:
    """A text in one line and in letters that the font has."""
    from matplotlib import font_manager

    fonts: Any = font_manager
    font = fonts.get_font(fonts.findfont("DejaVu Sans"))
    line = " ".join(visible(text).split())
    return "".join(letter if font.get_char_index(ord(letter)) else "?" for letter in line)
