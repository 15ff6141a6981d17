"""The report as one HTML file that needs nothing else: no scripts, no fonts, no pictures from anywhere.

Names, reasons and errors in it were written by models and by what they ran: all of them are escaped, and the
page's own policy lets nothing be loaded or run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from understudy import __version__
from understudy.report import formatting
from understudy.report.charts import (
    Bar,
    ForestChart,
    LineChart,
    forest_chart,
    line_chart,
    loop_charts,
    runs_chart,
    strip,
    text,
    training_charts,
)
from understudy.report.figures import ReportFigures, TaskRow
from understudy.report.runs import gain

_MOST_TASKS = 500
_LONG = 400
_HOW = (
    "Solve rates are over rollouts that were graded; infrastructure failures and what is pending are in none "
    "of them. Bands, whiskers and brackets are 95 % intervals: Wilson's of a rate, Student's of a mean, "
    "Newcombe's of a difference of two rates; the mean of a single rollout has none. These take rollouts for "
    "independent, which several of one task are not. So a difference is called beyond chance only where its "
    "interval excludes 0 and, besides, a test by task agrees: how often would the tasks in both differ as much on "
    "the whole, if each task's two rates changed places at random? That needs p below 0.05. The first point is "
    "compared with the last, never with the best: choosing the best of several makes a gain out of chance. "
    "Everything about reward comes of graded rollouts in the stores, nothing of it from the trainer."
)


def page(figures: ReportFigures) -> str:
    """The whole document."""
    verdict, mood = formatting.describe_judgement(figures)
    title = text(f"{figures.title}: {verdict}")
    parts = [
        _OPENING.replace("{title}", title),
        _head(figures),
        _verdict(figures, verdict, mood),
        _totals(figures),
        _section("How it went", _grid(loop_charts(figures))),
        _section("What the trainer told", _grid(training_charts(figures), small=True) + _skipped(figures)),
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
        _CLOSING,
    ]
    return "".join(parts)


def _head(figures: ReportFigures) -> str:
    kinds = {"loop": "Training loop", "run": "Run", "runs": "Runs compared", "training": "Training"}
    return (
        f'<header><p class="eyebrow">{kinds[figures.kind]}</p><h1>{text(figures.title)}</h1>'
        f'<p class="where">{text(figures.directory)}</p></header>'
    )


def _verdict(figures: ReportFigures, verdict: str, mood: str) -> str:
    headline = figures.headline
    big = body = ""
    if headline is not None:
        difference = headline.difference
        big = f'<p class="big">{formatting.points(difference.value)}<small>points</small></p>'
        when = ("before: ", "after: ") if figures.kind == "loop" else ("", "")
        bars = [
            Bar(name=f"{name}{point.label}", rate=point.solve_rate, style=style)
            for name, point, style in zip(
                when, (headline.before, headline.after), ("side", mood if mood != "open" else "main"), strict=True
            )
            if point.solve_rate is not None
        ]
        body = _forest(ForestChart(title="solve rate before and after, with 95 % intervals", bars=bars))
        body += '<ul class="why">' + "".join(
            f'<li class="{"yes" if holds else "no"}">{text(line)}</li>'
            for holds, line in formatting.reasons(headline)
        )
        body += "</ul>"
    elif bars := runs_chart(figures).bars:
        body = _forest(ForestChart(title="solve rate with its 95 % interval", bars=bars[-1:]))
    return (
        f'<section class="verdict {mood}"><div class="said">{big}<div><h2>{text(verdict)}</h2>'
        f"<p>{text(formatting.sentence(figures))}</p></div></div>{body}</section>"
    )


def _forest(chart: ForestChart) -> str:
    return f'<div class="beside">{forest_chart(chart)}</div>'


def _totals(figures: ReportFigures) -> str:
    every = [*figures.points, *figures.collected]
    if not every:
        return ""
    totals = {
        "rollouts graded": sum(point.graded for point in every),
        "calls": sum(point.calls for point in every),
        "prompt tokens": sum(point.prompt_tokens for point in every),
        "sampled tokens": sum(point.completion_tokens for point in every),
        "infrastructure failures": sum(point.failed for point in every),
        "suspicious patches": sum(point.suspicious for point in every),
    }
    cards = [(name, formatting.number(value), name in _BAD and value > 0) for name, value in totals.items()]
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


def _grid(charts: Sequence[LineChart], *, small: bool = False) -> str:
    """Charts with titles and captions; small ones have the last value in place of a legend."""
    if not charts:
        return ""
    cards: list[str] = []
    for chart in charts:
        if small:
            last = f"<em>{text(chart.axis(chart.series[-1].dots[-1].y))}</em>"
            caption, drawing = f"{last}{text(chart.caption)}", line_chart(chart, (400, 140))
        else:
            legend = (f'<span class="key {each.style}">{text(each.name)}</span>' for each in chart.series[::-1])
            caption, drawing = f"{text(chart.caption)} {''.join(legend)}", line_chart(chart)
        cards.append(f"<figure><figcaption><b>{text(chart.title)}</b> {caption}</figcaption>{drawing}</figure>")
    return f'<div class="grid{" small" if small else ""}">{"".join(cards)}</div>'


def _skipped(figures: ReportFigures) -> str:
    counted: dict[str, float] = {}
    for step in figures.training:
        for reason, count in step.skipped.items():
            counted[reason] = counted.get(reason, 0.0) + count
    rows = [(text(reason), formatting.number(count)) for reason, count in counted.items() if count]
    return "" if not rows else "<h3>Skipped in training</h3>" + _table(("why", "how many"), rows)


def _points(figures: ReportFigures) -> str:
    head = ("", "policy", "solved", "rate [95 %]", "mean reward", "turns", "sampled tokens", "time", "")
    # Fewer than three are beside the judgement already.
    chart = _forest(runs_chart(figures)) if figures.kind == "runs" and len(figures.points) > 2 else ""
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
                text(formatting.point_problems(point)),
            )
            for point in every
        ]
        if rows:
            tables.append((f"<h3>{title}</h3>" if figures.collected else "") + _table(head, rows))
    return chart + "".join(tables)


def _tasks(figures: ReportFigures) -> str:
    if not figures.tasks:
        return ""
    rows = figures.tasks
    shown = rows if len(rows) <= _MOST_TASKS else (*rows[: _MOST_TASKS // 2], *rows[-_MOST_TASKS // 2 :])
    several = len(rows[0].tried) > 1
    head = (
        ("task", "first", "last", "change", "each point", "turns") if several else ("task", "solved", "", "turns")
    )
    body = _table(head, [_task(row, several) for row in shown], "tasks")
    summary = ""
    if several:
        counted = [sum(map(better, map(gain, rows))) for better in (_up, _down)]
        summary = (
            f"{counted[0]} of {len(rows)} tasks are solved more often than at first, {counted[1]} less often."
        )
    if len(shown) < len(rows):
        summary += f" Shown are the {_MOST_TASKS // 2} at either end; --json has all."
    return (f'<p class="told">{text(summary.strip())}</p>' if summary else "") + (
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


def _unsolved(figures: ReportFigures) -> str:
    most = max(figures.unsolved.values(), default=0)
    rows = [
        (f"<code>{text(reason[:_LONG])}</code>", _measure(count / most), formatting.number(count))
        for reason, count in figures.unsolved.items()
    ]
    where = f"{figures.points[-1].label}" if figures.points else ""
    return f'<p class="told">{text(where)}</p>' + _table(("why", "", "rollouts"), rows) if rows else ""


def _failures(figures: ReportFigures) -> str:
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


def _versions(figures: ReportFigures) -> str:
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


def _notes(figures: ReportFigures) -> str:
    return (
        "<ul>" + "".join(f"<li>{text(note[:2000])}</li>" for note in figures.notes) + "</ul>"
        if figures.notes
        else ""
    )


def _about(figures: ReportFigures) -> str:
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


# --- the frame: the page's policy, which forbids everything but its own style, and that style -----------------

_STYLE = """
:root{color-scheme:light dark;--paper:#f7f6f2;--card:#fff;--ink:#1b1d21;--soft:#666b73;--line:#e3e1da;
--main:#2559c9;
--side:#b07a1e;--better:#0a7d57;--worse:#b3321f;--open:#5d636d;--wash:#eef2fb}
@media (prefers-color-scheme:dark){:root{--paper:#131417;--card:#1b1d21;--ink:#ecebe6;--soft:#9ca1aa;
--line:#2e3137;
--main:#7aa5ff;--side:#e0ab55;--better:#3fc893;--worse:#ff8670;--open:#a3a9b3;--wash:#20263a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:36px 28px 60px;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
h1{font-size:30px;line-height:1.2;margin:2px 0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:18px;margin:0 0 12px}h3{font-size:14px;margin:18px 0 6px;color:var(--soft)}
.eyebrow{margin:0;color:var(--soft);text-transform:uppercase;letter-spacing:.09em;font-size:12px}
.where,.told{color:var(--soft);margin:0 0 10px;overflow-wrap:anywhere}.where{font-size:13px}
section{margin-top:34px}
.verdict{--mood:var(--open);margin-top:18px;padding:26px 28px;background:var(--card);
border:1px solid var(--line);
border-left:8px solid var(--mood);border-radius:12px}
.verdict.better{--mood:var(--better)}.verdict.worse{--mood:var(--worse)}
.said{display:flex;gap:28px;align-items:center;flex-wrap:wrap}.said>div{flex:1 1 380px}
.verdict h2{font-size:27px;line-height:1.2;margin:0 0 6px;color:var(--mood);letter-spacing:-.01em}
.verdict p{margin:0;font-size:16px;max-width:62ch}
.verdict .big{font-size:62px;font-weight:700;line-height:1;color:var(--mood);letter-spacing:-.03em;
font-variant-numeric:tabular-nums;white-space:nowrap}
.big small{font-size:16px;font-weight:500;letter-spacing:0;margin-left:8px;color:var(--soft)}
.beside{margin:20px 0 4px;max-width:860px}
.why{list-style:none;display:flex;flex-wrap:wrap;gap:8px;margin:14px 0 0;padding:0}
.why li{padding:3px 12px 3px 8px;border:1px solid var(--line);border-radius:99px;font-size:13px}
.why li::before{display:inline-block;width:1.3em;font-weight:700}
.why .yes::before{content:"✓";color:var(--better)}.why .no::before{content:"✗";color:var(--worse)}
.totals{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin-top:14px}
.total{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}
.total b{display:block;font-size:22px;font-variant-numeric:tabular-nums}
.total span{color:var(--soft);font-size:13px}.total.bad b{color:var(--worse)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:14px}
.grid.small{grid-template-columns:repeat(auto-fit,minmax(300px,1fr))}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 14px 8px;
min-width:0}
figcaption{font-size:13px;color:var(--soft);margin-bottom:8px;overflow-wrap:anywhere}
figcaption b{color:var(--ink);font-size:15px}
figcaption em{float:right;margin-left:10px;font-style:normal;font-weight:650;color:var(--main);
font-variant-numeric:tabular-nums}
.key{margin-left:10px;white-space:nowrap}
.key::before{content:"";display:inline-block;width:10px;height:10px;border-radius:9px;margin-right:5px;
background:var(--main)}
.key.side::before{background:var(--side)}
.chart{display:block;width:100%;height:auto}
.chart text{fill:var(--soft);font:12px system-ui,-apple-system,"Segoe UI",Roboto,Arial,sans-serif}
.chart .name{fill:var(--ink);font-size:14px}
.chart .value{fill:var(--ink);font-size:14px;font-weight:600;white-space:pre}
.rule{stroke:var(--line);stroke-width:1}.rule.strong{stroke:var(--soft)}
.line{fill:none;stroke:var(--tone);stroke-width:2.2;stroke-linejoin:round}.line.side{stroke-dasharray:5 4;
stroke-width:1.6}
.band{fill:var(--tone);opacity:.13}.whisker{stroke:var(--tone);stroke-width:1.4;opacity:.55}
.interval{stroke:var(--tone);stroke-width:6;stroke-linecap:round;opacity:.38}
.dot{fill:var(--tone);stroke:var(--card);stroke-width:1.5}
.main{--tone:var(--main)}.side{--tone:var(--side)}.better{--tone:var(--better)}.worse{--tone:var(--worse)}
.wide{overflow-x:auto;background:var(--card);border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;padding:7px 14px;border-top:1px solid var(--line);vertical-align:top;
font-variant-numeric:tabular-nums}
td:not(:last-child){white-space:nowrap}td code{white-space:normal}
thead th{border-top:0;color:var(--soft);font-weight:500;font-size:12.5px;white-space:nowrap}
code{font:13px ui-monospace,"SF Mono",Menlo,Consolas,monospace;overflow-wrap:anywhere}
.strip{vertical-align:middle}.cell{fill:var(--main)}.cell.none{fill:none;stroke:var(--line)}
.up{color:var(--better)}.down{color:var(--worse)}.same{color:var(--soft)}
.measure{display:block;width:130px;height:9px;margin-top:6px;border-radius:9px;background:var(--wash)}
.measure i{display:block;height:100%;border-radius:9px;background:var(--side);min-width:3px}
summary{cursor:pointer;color:var(--soft);margin-bottom:8px}
footer{margin-top:40px;padding-top:16px;border-top:1px solid var(--line);color:var(--soft);font-size:13px}
footer p{max-width:100ch}
@media (max-width:560px){body{padding:20px 14px}.grid,.grid.small{grid-template-columns:1fr}
.verdict .big{font-size:46px}}
@media print{body{background:#fff;max-width:none}section{break-inside:avoid-page}}
"""

_OPENING = (
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    '<meta name="viewport" content="width=device-width, initial-scale=1">'
    '<meta name="referrer" content="no-referrer">'
    f"<title>{{title}}</title><style>{_STYLE}</style></head><body>"
)
_CLOSING = "</body></html>\n"
