"""The report of a run, a loop or several runs, as the page shows it."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from understudy.report import charts, formatting
from understudy.report.charts import Dot, LineChart, Series
from understudy.report.directories import store_id
from understudy.report.figures import Headline, Point, ReportFigures
from understudy.store.address import location_name, parse_location
from understudy.view.schema.report import ReportChart, ReportCurve, ReportReason, ReportView

_MAX_POINTS = 500
"""How many points of a curve are drawn, about: charts are less wide than that in pixels."""


def report_view(figures: ReportFigures, stores: Collection[str]) -> ReportView:
    """Return a report with its charts.

    `stores` are the ids of the stores that the page can open; paths are left out.
    """
    judgement_text, judgement = formatting.describe_judgement(figures)
    store_ids = [store_id(parse_location(point.directory)) for point in figures.points]
    headline = figures.headline
    return ReportView(
        figures=msgspec.structs.replace(
            figures,
            directory=location_name(parse_location(figures.directory)),
            points=_without_paths(figures.points),
            collected=_without_paths(figures.collected),
            headline=None if headline is None else _headline(headline),
        ),
        verdict=judgement_text,
        mood=judgement,
        sentence=formatting.sentence(figures),
        reasons=()
        if headline is None
        else tuple(ReportReason(*reason) for reason in formatting.reasons(headline)),
        charts=tuple(map(_chart, charts.loop_charts(figures))),
        training=tuple(map(_chart, charts.training_charts(figures))),
        point_stores=tuple(store_id if store_id in stores else None for store_id in store_ids),
    )


def _headline(headline: Headline) -> Headline:
    before, after = _without_paths((headline.before, headline.after))
    return msgspec.structs.replace(headline, before=before, after=after)


def _without_paths(points: tuple[Point, ...]) -> tuple[Point, ...]:
    return tuple(msgspec.structs.replace(point, directory="") for point in points)


def _chart(chart: LineChart) -> ReportChart:
    """Return a chart. Of curves with very many points, only every second, third … one is drawn."""
    step = 1 + max((len(series.dots) for series in chart.series), default=0) // _MAX_POINTS
    caption = chart.caption if step == 1 else f"{chart.caption} (one point of {step})".strip()
    return ReportChart(
        title=chart.title,
        caption=caption,
        x_name=chart.x_name,
        share=chart.is_share,
        curves=tuple(
            ReportCurve(
                name=series.name,
                main=series.style == "main",
                x=tuple(dot.x for dot in dots),
                values=tuple(dot.y for dot in dots),
                low=tuple(dot.low for dot in dots),
                high=tuple(dot.high for dot in dots),
            )
            for series in chart.series
            for dots in (_thinned(series, step),)
        ),
    )


def _thinned(series: Series, step: int) -> list[Dot]:
    """Return one dot of `every`, and the last."""
    return [*series.dots[:-1:step], *series.dots[-1:]]
