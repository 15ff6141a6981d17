"""Answers about whether a policy got better: a report's figures, as text and as curves."""

from __future__ import annotations

from msgspec import Struct

from understudy.report.figures import Judgement, ReportFigures


class ReportReason(Struct, frozen=True):
    """A sentence that supports a real difference (`holds`), or speaks against it."""

    holds: bool
    text: str


class ReportCurve(Struct, frozen=True, kw_only=True):
    """Values over integers, with bounds if there are intervals. `main` marks the more important curves."""

    name: str
    main: bool
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


class ReportChart(Struct, frozen=True, kw_only=True):
    """Curves on one pair of axes. `share`: the values are between 0 and 1."""

    title: str
    caption: str
    x_name: str
    share: bool
    curves: tuple[ReportCurve, ...]


class ReportView(Struct, frozen=True, kw_only=True):
    """A report: its conclusion (`verdict`, `sentence`, `reasons`), figures and charts.

    `point_stores` are the ids of the stores of `figures.points`, None for a store that cannot be opened.
    """

    figures: ReportFigures
    verdict: str
    mood: Judgement
    sentence: str
    reasons: tuple[ReportReason, ...]
    charts: tuple[ReportChart, ...]
    training: tuple[ReportChart, ...]
    point_stores: tuple[str | None, ...]
    next: str | None = None
