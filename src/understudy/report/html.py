"""The report as one HTML file that needs nothing else: no scripts, no fonts, no pictures from anywhere.

Names, reasons and errors in it were written by models and by what they ran: all of them are escaped, and the
page's own policy lets nothing be loaded or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from understudy import __version__
from understudy.report import formatting
from understudy.report.charts import chart_cards, points_chart, training_cards
from understudy.report.figures import Figures, Point, TaskRow
from understudy.report.page import CLOSING, OPENING
from understudy.report.runs import gain
from understudy.report.svg import Bar, forest, strip, text

_MOST_TASKS = 500
_LONG = 400
_HOW = (
    "Solve rates are over rollouts that were graded; infrastructure failures and what is pending are in none "
    "of them. Bands, whiskers and brackets are 95 % intervals: Wilson's of a rate, Student's of a mean, "
    "Newcombe's of a difference of two rates. These take rollouts for independent, which several of one task "
    "are not. So a difference is called beyond chance only where its interval excludes 0 and, besides, a test "
    "by task agrees: how often would the tasks in both differ as much on the whole, if each task's two rates "
    "changed places at random? That needs p below 0.05. The first point is compared with the last, never with "
    "the best: choosing the best of several makes a gain out of chance. Everything about reward comes of "
    "graded rollouts in the stores, nothing of it from the trainer."
)


def page(figures: Figures) -> str:
    """The whole document."""
    verdict, mood = formatting.judged(figures)
    title = text(f"{figures.title}: {verdict}")
    parts = [
        OPENING.replace("{title}", title),
        _head(figures),
        _verdict(figures, verdict, mood),
        _totals(figures),
        _section("How it went", _grid(chart_cards(figures))),
        _section("What the trainer told", _grid(training_cards(figures), "small") + _skipped(figures)),
        _section(
            "Each point" if len(figures.points) + len(figures.collected) > 1 else "The run", _points(figures)
        ),
        _section("Tasks", _tasks(figures)),
        _section("Why rollouts were not solved", _unsolved(figures)),
        _section("Failures by boundary", _failures(figures)),
        _section("Policy versions", _versions(figures)),
        _section("What to know of these figures", _notes(figures)),
        _section("What was run", _about(figures)),
        f"<footer><p>{text(_HOW)}</p>",
        f"<p>Understudy {text(__version__)}, {formatting.moment(figures.made_at)}</p></footer>",
        CLOSING,
    ]
    return "".join(parts)


def _head(figures: Figures) -> str:
    kinds = {"loop": "Training loop", "run": "Run", "runs": "Runs compared", "training": "Training"}
    return (
        f'<header><p class="eyebrow">{kinds[figures.kind]}</p><h1>{text(figures.title)}</h1>'
        f'<p class="where">{text(figures.directory)}</p></header>'
    )


def _verdict(figures: Figures, verdict: str, mood: str) -> str:
    headline = figures.headline
    big = body = ""
    if headline is not None:
        found = headline.difference
        big = f'<p class="big">{formatting.points(found.value)}<small>points</small></p>'
        bars = [
            _bar(headline.before, "side", "before: " if figures.kind == "loop" else ""),
            _bar(headline.after, mood if mood != "open" else "main", "after: " if figures.kind == "loop" else ""),
        ]
        body = f'<div class="beside">{forest(bars, name="solve rate before and after, with 95 % intervals")}</div>'
        body += '<ul class="why">' + "".join(
            f'<li class="{"yes" if holds else "no"}">{text(line)}</li>'
            for holds, line in formatting.reasons(headline)
        )
        body += "</ul>"
    elif figures.kind != "training" and (shown := [point for point in figures.points if point.solve_rate]):
        bar = forest([_bar(shown[-1], "main")], name="solve rate with its 95 % interval")
        body = f'<div class="beside">{bar}</div>'
    return (
        f'<section class="verdict {mood}"><div class="said">{big}<div><h2>{text(verdict)}</h2>'
        f"<p>{text(formatting.sentence(figures))}</p></div></div>{body}</section>"
    )


def _bar(point: Point, style: str, name: str = "") -> Bar:
    assert point.solve_rate is not None
    told = formatting.rate(point.solve_rate)
    return Bar(
        name=f"{name}{point.label}",
        value=point.solve_rate.estimate,
        low=point.solve_rate.low,
        high=point.solve_rate.high,
        told=told,
        style=style,
    )


def _totals(figures: Figures) -> str:
    every = [*figures.points, *figures.collected]
    if not every:
        return ""
    told = {
        "rollouts graded": sum(point.graded for point in every),
        "calls": sum(point.calls for point in every),
        "prompt tokens": sum(point.prompt_tokens for point in every),
        "sampled tokens": sum(point.completion_tokens for point in every),
        "infrastructure failures": sum(point.failed for point in every),
        "suspicious patches": sum(point.suspicious for point in every),
    }
    cards = [(name, formatting.number(value), name in _BAD and value > 0) for name, value in told.items()]
    if cost := sum(point.cost_usd for point in every):
        cards.append(("US dollars", f"{cost:,.2f}", False))
    if pending := sum(point.pending for point in every):
        cards.append(("pending", formatting.number(pending), False))
    return (
        '<section class="totals">'
        + "".join(
            f'<div class="{"total bad" if bad else "total"}"><b>{text(value)}</b><span>{text(name)}</span></div>'
            for name, value, bad in cards
        )
        + "</section>"
    )


_BAD = ("infrastructure failures", "suspicious patches")


def _section(title: str, body: str) -> str:
    return f"<section><h2>{text(title)}</h2>{body}</section>" if body else ""


def _grid(cards: Sequence[tuple[str, str, str]], style: str = "") -> str:
    """Cards of (title, chart, caption)."""
    if not cards:
        return ""
    return (
        f'<div class="grid {style}">'
        + "".join(
            f"<figure><figcaption><b>{text(title)}</b> {caption}</figcaption>{chart}</figure>"
            for title, chart, caption in cards
        )
        + "</div>"
    )


def _skipped(figures: Figures) -> str:
    counted: dict[str, float] = {}
    for step in figures.training:
        for reason, count in step.skipped.items():
            counted[reason] = counted.get(reason, 0.0) + count
    rows = [(text(reason), formatting.number(count)) for reason, count in counted.items() if count]
    return "" if not rows else "<h3>Skipped in training</h3>" + _table(("why", "how many"), rows)


def _points(figures: Figures) -> str:
    head = ("", "policy", "solved", "rate [95 %]", "mean reward", "turns", "sampled tokens", "time", "")
    chart = f'<div class="beside">{drawn}</div>' if (drawn := points_chart(figures)) else ""
    tables: list[str] = []
    for title, every in (("Evaluations", figures.points), ("Collected for training", figures.collected)):
        rows = [
            (
                text(point.label),
                text(point.version or formatting.NOTHING),
                f"{point.solved} of {point.graded}",
                text(formatting.rate(point.solve_rate)),
                formatting.number(point.reward.estimate if point.reward else None),
                formatting.number(point.turns.estimate if point.turns else None),
                formatting.number(point.sampled.estimate if point.sampled else None),
                formatting.duration(point.seconds.estimate if point.seconds else None),
                text(formatting.state(point)),
            )
            for point in every
        ]
        if rows:
            tables.append((f"<h3>{title}</h3>" if figures.collected else "") + _table(head, rows))
    return chart + "".join(tables)


def _tasks(figures: Figures) -> str:
    if not figures.tasks:
        return ""
    rows = figures.tasks
    shown = rows if len(rows) <= _MOST_TASKS else (*rows[: _MOST_TASKS // 2], *rows[-_MOST_TASKS // 2 :])
    several = len(rows[0].tried) > 1
    head = (
        ("task", "first", "last", "change", "each point", "turns") if several else ("task", "solved", "", "turns")
    )
    body = _table(head, [_task(row, several) for row in shown], "tasks")
    told = ""
    if several:
        counted = [sum(map(better, map(gain, rows))) for better in (_up, _down)]
        told = f"{counted[0]} tasks are solved more often than at first, {counted[1]} less often, of {len(rows)}."
    if len(shown) < len(rows):
        told += f" Shown are the {_MOST_TASKS // 2} at either end; --json has all."
    return (f'<p class="told">{text(told.strip())}</p>' if told else "") + (
        f"<details{' open' if len(shown) <= 40 else ''}><summary>{len(shown)} tasks</summary>{body}</details>"
    )


def _task(row: TaskRow, several: bool) -> tuple[str, ...]:
    name, turns = f"<code>{text(row.task_id[:_LONG])}</code>", formatting.number(row.turns)
    if not several:
        return (name, _of(row.tried[-1]), strip(row.tried), turns)
    change = gain(row)
    mood = "up" if change > 0 else "down" if change < 0 else "same"
    shown = (
        f'<span class="{mood}">{formatting.points(change)}</span>' if row.tried[0][1] and row.tried[-1][1] else "–"
    )
    return (name, _of(row.tried[0]), _of(row.tried[-1]), shown, strip(row.tried), turns)


def _unsolved(figures: Figures) -> str:
    most = max(figures.unsolved.values(), default=0)
    rows = [
        (f"<code>{text(reason[:_LONG])}</code>", _measure(count / most), formatting.number(count))
        for reason, count in figures.unsolved.items()
    ]
    where = f"{figures.points[-1].label}" if figures.points else ""
    return f'<p class="told">{text(where)}</p>' + _table(("why", "", "rollouts"), rows) if rows else ""


def _failures(figures: Figures) -> str:
    if not figures.boundaries:
        return '<p class="told">None: no attempt met a fault.</p>' if figures.points or figures.collected else ""
    most = max(row.attempts for row in figures.boundaries)
    rows = [
        (
            f"<b>{text(row.boundary)}</b>",
            _measure(row.attempts / most),
            formatting.number(row.attempts),
            formatting.number(row.given_up),
            f"<code>{text(row.example[:_LONG])}</code>",
        )
        for row in figures.boundaries
    ]
    return _table(("boundary", "", "attempts", "rollouts given up", "most often"), rows)


def _versions(figures: Figures) -> str:
    rows = [
        (
            f"<code>{text(row.version or 'not known')}</code>",
            formatting.number(row.calls),
            formatting.number(row.mixed),
            formatting.number(row.completion_tokens),
            formatting.moment(row.first_at),
            formatting.moment(row.last_at),
        )
        for row in figures.versions
    ]
    head = ("version", "calls", "met an update", "sampled tokens", "first call", "last call")
    return _table(head, rows) if rows else ""


def _notes(figures: Figures) -> str:
    return (
        "<ul>" + "".join(f"<li>{text(note[:2000])}</li>" for note in figures.notes) + "</ul>"
        if figures.notes
        else ""
    )


def _about(figures: Figures) -> str:
    rows = [(text(name), f"<code>{text(value[:_LONG])}</code>") for name, value in figures.about.items()]
    return _table(("", ""), rows, "about") if rows else ""


def _table(head: Iterable[str], rows: Iterable[Sequence[str]], style: str = "") -> str:
    """A table; the cells are HTML already."""
    cells = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    table = f'<table class="{style}"><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div class="wide">{table}</div>'


def _measure(share: float) -> str:
    return f'<span class="measure"><i style="width:{100 * share:.0f}%"></i></span>'


def _of(tried: tuple[int, int]) -> str:
    return f"{tried[0]}/{tried[1]}" if tried[1] else formatting.NOTHING


def _up(change: float) -> bool:
    return change > 0


def _down(change: float) -> bool:
    return change < 0
