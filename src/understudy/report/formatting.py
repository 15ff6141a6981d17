"""Formats numbers and judgements as text, in the same way for a page, a picture and a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from understudy.report.figures import MIN_TASKS, SIGNIFICANT, AgentRow, Headline, Judgement, ReportFigures
from understudy.util.statistics import ConfidenceInterval

NOTHING = "–"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def percent(share: float) -> str:
    """Return a share as a percentage, with one decimal unless it is 0 or 100 %."""
    return f"{_percent_digits(share)}\u00a0%"


def tick(share: float) -> str:
    """Return a share as a whole percentage, for an axis."""
    return f"{100 * share:.0f}\u00a0%"


def points(share: float) -> str:
    """Return a difference of shares in percentage points, with its sign."""
    text = f"{100 * share:+.1f}".removesuffix(".0")
    return "±0" if text in ("+0", "-0") else text.replace("-", "−")


def number(value: float | None) -> str:
    """Return a number in at most about five characters."""
    if value is None:
        return NOTHING
    size = abs(value)
    for scale, letter in _SCALES:
        if size >= scale * 9.995:
            return f"{value / scale:.3g}\u00a0{letter}".replace("-", "−")
    if size >= 100 or value == int(value):
        return f"{value:,.0f}".replace(",", "\u202f").replace("-", "−")
    if size >= 0.001:
        return f"{value:.3g}".replace("-", "−")
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits.removesuffix('.0')}·10{str(int(power)).translate(_SUPERSCRIPTS)}".replace("-", "−")


def moment(unix_s: float) -> str:
    """Return a time, given in Unix seconds, in UTC to the minute."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def rate(interval: ConfidenceInterval | None) -> str:
    """Return a solve rate with its interval."""
    if interval is None:
        return NOTHING
    return f"{percent(interval.estimate)} [{interval_bounds(interval)}]"


def interval_bounds(interval: ConfidenceInterval) -> str:
    """Return the bounds of an interval of shares as percentages."""
    return f"{_percent_digits(interval.low)}–{_percent_digits(interval.high)}"


def describe_judgement(figures: ReportFigures) -> tuple[str, Judgement]:
    """Return the judgement in a few words, and its class for colours: better, worse or open."""
    headline = figures.headline
    if headline is None:
        if figures.compares_many and any(row.difference for row in figures.agents):
            return (_many_agents(figures.agents), "open")
        last_point = next((point for point in reversed(figures.points) if point.solve_rate), None)
        if last_point is None or last_point.solve_rate is None:
            return ("Nothing is graded yet", "open")
        if figures.kind == "run":
            return (f"{percent(last_point.solve_rate.estimate)} solved", "open")
        return ("Nothing to compare with yet", "open")
    if headline.difference.judgement == "open":
        if 0 < headline.difference.common_tasks < MIN_TASKS:
            return ("Too few tasks to tell", "open")
        return ("No difference beyond chance", "open")
    if headline.strict.judgement != headline.difference.judgement:
        return ("Not to be trusted: suspicious patches make the difference", "worse")
    if headline.difference.judgement == "better":
        return ("Better, beyond chance", "better")
    return ("Worse, beyond chance", "worse")


def sentence(figures: ReportFigures) -> str:
    """Return a sentence that says what the judgement is based on."""
    headline = figures.headline
    if headline is None:
        return _each_agent(figures.agents) if figures.compares_many else _last_point(figures)
    first, last, difference = headline.before, headline.after, headline.difference
    assert first.solve_rate is not None and last.solve_rate is not None
    what = "held-out rollouts" if figures.kind == "loop" else "rollouts"
    compared = "with the first agent" if figures.agents else "before"
    return (
        f"{percent(last.solve_rate.estimate)} of {what} solved ({last.solved} of {last.graded}, {last.label}), "
        f"{percent(first.solve_rate.estimate)} {compared} ({first.solved} of {first.graded}, {first.label}): "
        f"{points(difference.value)} points, 95 % interval {points(difference.low)} to {points(difference.high)}."
    )


def reasons(headline: Headline) -> list[tuple[bool, str]]:
    """Return the reasons for and against a difference beyond chance, as pairs (whether it is a reason for it,
    text).
    """
    difference = headline.difference
    excluded = difference.low > 0 or difference.high < 0
    lines = [
        (excluded, f"95 % interval of the difference {'excludes' if excluded else 'includes'} 0"),
        (difference.apart, f"the two rates' own intervals {'are apart' if difference.apart else 'overlap'}"),
    ]
    if difference.p_by_task is None:
        lines.append((False, "no task is in both: other tasks may be easier or harder"))
    else:
        p_text = "< 0.001" if difference.p_by_task < 0.001 else f"= {difference.p_by_task:.2g}"
        text = f"by task: p {p_text} over {difference.common_tasks} tasks in both"
        if difference.common_tasks < MIN_TASKS:
            text += f", fewer than the {MIN_TASKS} that this test needs"
        lines.append((difference.p_by_task < SIGNIFICANT, text))
    suspicious = headline.before.suspicious_solved + headline.after.suspicious_solved
    if suspicious:
        lines.append((False, f"{suspicious} of the solved patches may deceive the grader"))
    return lines


def agent_name(row: AgentRow) -> str:
    """Return the name of a row of agents: its label, with the agent if it has another name."""
    return row.label if row.label == row.agent else f"{row.label} ({row.agent})"


def _many_agents(rows: Sequence[AgentRow]) -> str:
    reference, *other_rows = rows
    apart = sum(row.judgement != "open" for row in other_rows)
    if not apart:
        return f"No agent differs from {reference.label} beyond chance"
    verb = "differs" if apart == 1 else "differ"
    return f"{apart} of {len(other_rows)} agents {verb} from {reference.label} beyond chance"


def _each_agent(rows: Sequence[AgentRow]) -> str:
    reference, *other_rows = rows
    rates = ", ".join(f"{percent(row.solve_rate)} with {agent_name(row)}" for row in rows if row.tasks)
    tested = sum(row.p_adjusted is not None for row in other_rows)
    return (
        f"Mean over tasks: {rates or 'nothing graded yet'}. Each is compared with {reference.label} over the "
        f"tasks that both have; p-values are adjusted for {tested} comparisons (Holm), intervals are not."
    )


def _last_point(figures: ReportFigures) -> str:
    last_point = next((point for point in reversed(figures.points) if point.solve_rate), None)
    if last_point is None or last_point.solve_rate is None:
        if figures.kind == "training":
            return "These are a trainer's own numbers; how good the policy is, only graded rollouts tell."
        pending = sum(point.pending for point in figures.points)
        return f"{pending} rollouts are pending." if pending else "There is no graded rollout in it."
    text = (
        f"{last_point.solved} of {last_point.graded} rollouts solved ({last_point.label}), 95 % interval "
        f"{percent(last_point.solve_rate.low)} to {percent(last_point.solve_rate.high)}."
    )
    return f"{text} {last_point.pending} are pending." if last_point.pending else text


def _percent_digits(share: float) -> str:
    return f"{100 * share:.0f}" if share in (0.0, 1.0) else f"{100 * share:.1f}"
