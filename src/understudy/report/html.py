"""The report as one HTML file that needs nothing else: no scripts, no fonts, no pictures from anywhere.

`page.html.jinja` is the page and `page.css` its style. Names, reasons and errors in it were written by models and
by what they ran: Jinja escapes all of them, and the page's own policy lets nothing be loaded or run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from understudy import __version__
from understudy.report import charts, formatting
from understudy.report.charts import Bar, ForestChart
from understudy.report.figures import ReportFigures
from understudy.report.runs import gain

_MOST_TASKS = 500


def page(figures: ReportFigures) -> str:
    """The whole document."""
    verdict, mood = formatting.describe_judgement(figures)
    tasks = figures.tasks
    if len(tasks) > _MOST_TASKS:
        tasks = (*tasks[: _MOST_TASKS // 2], *tasks[-_MOST_TASKS // 2 :])
    skipped: dict[str, float] = {}
    for step in figures.training:
        for reason, count in step.skipped.items():
            skipped[reason] = skipped.get(reason, 0.0) + count
    values: dict[str, Any] = {
        "figures": figures,
        "verdict": verdict,
        "mood": mood,
        "judged": _judged_rates(figures, mood),
        "totals": _totals(figures),
        "skipped": [(reason, count) for reason, count in skipped.items() if count],
        "tasks": tasks,
        "tasks_summary": _tasks_summary(figures, len(tasks)),
        "version": __version__,
        "charts": charts,
        "formatting": formatting,
        "gain": gain,
    }
    return _environment().get_template("page.html.jinja").render(values)


@cache
def _environment() -> Environment:
    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, finalize=_printable, undefined=StrictUndefined)


def _printable(value: Any) -> Any:
    """A value as it may stand on the page, where nothing may be a control sequence; Jinja escapes it then."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else charts.printable(value)


def _judged_rates(figures: ReportFigures, mood: str) -> ForestChart:
    """The solve rates that the judgement compares; without a comparison the last one."""
    headline = figures.headline
    if headline is None:
        return ForestChart(title="solve rate with its 95 % interval", bars=charts.runs_chart(figures).bars[-1:])
    when = ("before: ", "after: ") if figures.kind == "loop" else ("", "")
    styles = ("side", mood if mood != "open" else "main")
    bars = [
        Bar(name=f"{name}{point.label}", rate=point.solve_rate, style=style)
        for name, point, style in zip(when, (headline.before, headline.after), styles, strict=True)
        if point.solve_rate is not None
    ]
    return ForestChart(title="solve rate before and after, with 95 % intervals", bars=bars)


def _totals(figures: ReportFigures) -> list[tuple[str, str, bool]]:
    """The sums over all points: what of, how much, and whether that is bad."""
    every = [*figures.points, *figures.collected]
    if not every:
        return []
    number = formatting.number
    failed, suspicious = sum(point.failed for point in every), sum(point.suspicious for point in every)
    totals = [
        ("rollouts graded", number(sum(point.graded for point in every)), False),
        ("calls", number(sum(point.calls for point in every)), False),
        ("prompt tokens", number(sum(point.prompt_tokens for point in every)), False),
        ("sampled tokens", number(sum(point.completion_tokens for point in every)), False),
        ("infrastructure failures", number(failed), failed > 0),
        ("suspicious patches", number(suspicious), suspicious > 0),
    ]
    if cost := sum(point.cost_usd for point in every):
        totals.append(("US dollars", f"{cost:,.2f}", False))
    if pending := sum(point.pending for point in every):
        totals.append(("pending", number(pending), False))
    return totals


def _tasks_summary(figures: ReportFigures, shown: int) -> str:
    parts: list[str] = []
    if figures.tasks and len(figures.tasks[0].tried) > 1:
        changes = [gain(row) for row in figures.tasks]
        more, less = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        parts.append(f"{more} of {len(changes)} tasks are solved more often than at first, {less} less often.")
    if shown < len(figures.tasks):
        parts.append(f"Shown are the {_MOST_TASKS // 2} at either end; --json has all.")
    return " ".join(parts)
