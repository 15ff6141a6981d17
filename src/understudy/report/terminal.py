"""Shows the report in a terminal: the judgement, and the solve rates with their intervals as a plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from understudy.report import formatting
from understudy.report.figures import AgentRow, Point, ReportFigures
from understudy.report.runs import gain
from understudy.util.text import visible

_JUDGEMENT_STYLES = {"better": "bold green", "worse": "bold red", "open": "bold yellow"}
_MAX_POINTS = 24
_SPARKS = "▁▂▃▄▅▆▇█"
_PLOT_COLUMNS = 40


def terminal(figures: ReportFigures, *, width: int = _PLOT_COLUMNS) -> RenderableType:
    """Return what rich prints. No text in it is interpreted as markup or as a control sequence. `width` is that of
    the plot, in columns.
    """
    judgement_text, judgement = formatting.describe_judgement(figures)
    parts: list[RenderableType] = [
        Text(_plain(figures.title), style="bold"),
        Text(_plain(judgement_text), style=_JUDGEMENT_STYLES[judgement]),
        Text(_plain(formatting.sentence(figures))),
    ]
    if figures.headline is not None:
        parts += [
            Text(f"  {'✓' if holds else '✗'} {_plain(line)}", style="green" if holds else "yellow")
            for holds, line in formatting.reasons(figures.headline)
        ]
    for title, points, style in (
        ("held-out tasks" if figures.kind == "loop" else "", figures.points, "blue"),
        ("training tasks", figures.collected, "yellow"),
    ):
        if measured := [point for point in points if point.solve_rate]:
            parts += ["", _plot(title, measured, width, style)]
    if figures.agents:
        parts += ["", _agents(figures.agents)]
    if lines := _lines(figures):
        parts += ["", *lines]
    parts += [Text(f"note: {_plain(note)}", style="dim") for note in figures.notes]
    return Group(*parts)


def _plot(title: str, points: Sequence[Point], width: int, style: str) -> Table:
    """Return a table with a row for each point: its interval as ├──●──┤ on an axis from 0 to 100 %."""
    table = Table(box=None, show_header=True, header_style="dim", pad_edge=False, padding=(0, 1))
    table.add_column(Text(title), no_wrap=True, max_width=24, overflow="ellipsis")
    middle = f"{'50 %':^{width - 8}}"
    table.add_column(Text(f"0 %{middle}100 %"), no_wrap=True, width=width)
    table.add_column("solve rate", no_wrap=True, justify="right")
    table.add_column("95 %", no_wrap=True)
    table.add_column("solved", no_wrap=True, justify="right")
    plotted = points if len(points) <= _MAX_POINTS else [*points[: _MAX_POINTS // 2], *points[-_MAX_POINTS // 2 :]]
    for column, point in enumerate(plotted):
        if len(plotted) < len(points) and column == _MAX_POINTS // 2:
            table.add_row(Text("⋮", style="dim"), "", "", "", "")
        assert point.solve_rate is not None
        table.add_row(
            Text(_plain(point.label)),
            whisker(point.solve_rate.low, point.solve_rate.estimate, point.solve_rate.high, width, style),
            Text(formatting.percent(point.solve_rate.estimate), style="bold"),
            Text(formatting.interval_bounds(point.solve_rate), style="dim"),
            Text(f"{point.solved}/{point.graded}"),
        )
    return table


def _agents(rows: Sequence[AgentRow]) -> Table:
    """Return a table with a row for each agent, and its difference to the first over the tasks in common."""
    table = Table(box=None, show_header=True, header_style="dim", pad_edge=False, padding=(0, 1))
    names = ("agent", "by task", "tasks", f"to {_plain(rows[0].label)}", "95 %", "p by task", "adjusted")
    for title in names:
        table.add_column(Text(title), no_wrap=True)
    for row in rows:
        cells = [_plain(formatting.agent_name(row)), formatting.percent(row.solve_rate), str(row.tasks)]
        if row.difference is not None and row.p_by_task is not None and row.p_adjusted is not None:
            low, high = (formatting.points(bound) for bound in (row.difference.low, row.difference.high))
            cells += [formatting.points(row.difference.estimate), f"{low} to {high}"]
            cells += [f"{row.p_by_task:.3f}", f"{row.p_adjusted:.3f}"]
        table.add_row(*map(Text, cells))
    return table


def whisker(low: float, value: float, high: float, width: int, style: str) -> Text:
    """Return a share from 0 to 1 with its interval, drawn in `width` characters."""
    low_column, value_column, high_column = (
        min(width - 1, max(0, round(share * (width - 1)))) for share in (low, value, high)
    )
    line = Text()
    for column in range(width):
        if column == value_column:
            line.append("●", style=f"bold {style}")
        elif low_column <= column <= high_column:
            line.append("├" if column == low_column else "┤" if column == high_column else "─", style=style)
        else:
            line.append("│" if column in (0, width - 1) else "·" if column == width // 2 else " ", style="dim")
    return line


def spark(values: Sequence[float], most: int = 60) -> str:
    """Return the last `most` values as bars in one line."""
    last_values = values[-most:]
    low, high = min(last_values), max(last_values)
    if high == low:
        return _SPARKS[3] * len(last_values)
    return "".join(_SPARKS[round((value - low) / (high - low) * (len(_SPARKS) - 1))] for value in last_values)


def _lines(figures: ReportFigures) -> list[Text]:
    """Return one line each for sums, the trainer's metrics and failures."""
    all_points = [*figures.points, *figures.collected]
    lines: list[tuple[str, str]] = []
    if all_points:
        lines.append(
            (
                "in all",
                f"{formatting.number(sum(point.graded for point in all_points))} rollouts graded, "
                f"{formatting.number(sum(point.calls for point in all_points))} calls, "
                f"{formatting.number(sum(point.completion_tokens for point in all_points))} sampled tokens",
            )
        )
    if len(figures.points) > 1 and figures.tasks and not figures.compares_many:
        changes = [gain(row) for row in figures.tasks]
        up, down = sum(change > 0 for change in changes), sum(change < 0 for change in changes)
        lines.append(("by task", f"{up} solved more often, {down} less often, of {len(changes)}"))
    for name in ("loss", "mismatch_mean", "mismatch_max"):
        if values := [step.values[name] for step in figures.training if name in step.values]:
            lines.append((name.replace("_", " "), f"{spark(values)}  {formatting.number(values[-1])}"))
    if faults := [f"{row.boundary} {row.attempts}" for row in figures.boundaries]:
        lines.append(("faults of attempts by boundary", ", ".join(faults)))
    return [Text.assemble((f"{name}: ", "dim"), _plain(value)) for name, value in lines]


def _plain(text: str) -> str:
    return " ".join(visible(text).replace("\u00a0", " ").replace("\u202f", " ").split(" "))
