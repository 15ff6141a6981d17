"""Answers about whether a policy got better: the figures of a report, in words and as curves."""

from __future__ import annotations

from msgspec import Struct

from understudy.report.figures import Judgement, ReportFigures


class ReportReason(Struct, frozen=True):
    """A sentence that speaks for a difference beyond chance (`holds`), or against it."""

    holds: bool
    text: str


class ReportCurve(Struct, frozen=True, kw_only=True):
    """Values over whole numbers, with bounds where there are intervals. `main` is what matters more."""

    name: str
    main: bool
    x: tuple[float, ...]
    values: tuple[float, ...]
    low: tuple[float | None, ...]
    high: tuple[float | None, ...]


class ReportChart(Struct, frozen=True, kw_only=True):
    """Curves on one pair of axes. `share`: the values are shares of 1."""

    title: str
    caption: str
    x_name: str
    share: bool
    curves: tuple[ReportCurve, ...]


class ReportView(Struct, frozen=True, kw_only=True):
    """A report: what its figures come to (`verdict`, `sentence`, `reasons`), and the charts of it.

    `point_stores` are the ids of the stores of `figures.points`, None where one cannot be opened.
    """

    figures: ReportFigures
    verdict: str
    mood: Judgement
    sentence: str
    reasons: tuple[ReportReason, ...]
    charts: tuple[ReportChart, ...]
    training: tuple[ReportChart, ...]
    point_stores: tuple[str | None, ...]
