"""`understudy report`: the results of a run or a loop, as a page, a picture, or text in the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.report.figures import ReportFigures
    from understudy.store.address import StoreLocation

_PAGE, _PICTURE = "report.html", ".png"


def report(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="The directory of a run or a loop, or a database; several are compared."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.html",
            help=f"The file to write [default: RUN/{_PAGE}; for a database ./{_PAGE}].",
        ),
    ] = None,
    png: Annotated[
        bool, typer.Option("--png", help="Also write a picture (PNG) beside the page, with the same name.")
    ] = False,
    label: Annotated[
        list[str] | None,
        typer.Option("--label", help="A run's name in the report; give one for each run, in order."),
    ] = None,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Do not redact secrets, names and paths in the page.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Report whether the policy got better, and whether the difference is more than chance.

    Writes one HTML file with the viewer's pages: solve rates and rewards with 95 % intervals, tokens, turns,
    tasks, failures by boundary, policy versions, the trainer's numbers, a loop's curves. If there are several
    runs, the first is the baseline. An unfinished run is reported in its current state.
    """
    from contextlib import closing

    from understudy.cli.output import print_json
    from understudy.redact.redactor import Redactor
    from understudy.report.formatting import describe_judgement
    from understudy.report.picture import draw
    from understudy.report.read import read_figures, run_locations
    from understudy.store.address import parse_location
    from understudy.view.export import export_report

    locations = run_locations([*map(parse_location, runs)])
    figures = read_figures(locations, label or [])
    target = output if output is not None else _output_directory(figures, locations[-1]) / _PAGE
    if target.is_dir():
        raise ConfigError(f"--output: {target} is a directory; name a file, such as {target / _PAGE}")
    if png and target.suffix == _PICTURE:
        raise ConfigError(
            f"--output: {target} is the file that --png writes; name the page, such as "
            f"{target.with_suffix('.html')}"
        )
    redactor = None if unredacted else Redactor.from_user_key()
    answers, start = export_report(figures, locations)
    with closing(answers.api):
        page = answers.page(start, f"{figures.title}: {describe_judgement(figures)[0]}", redactor)
    page.write(target)
    if png:
        draw(figures, target.with_suffix(_PICTURE))
    if json_:
        print_json(figures)
        return
    show(figures)
    typer.echo(f"\nwritten: {target}" + (f", {target.with_suffix(_PICTURE)}" if png else ""))


def _output_directory(figures: ReportFigures, location: StoreLocation) -> Path:
    """Return the default directory of the page.

    It is never a model's directory, whose files count as part of the model.
    """
    from understudy.report.read import metrics_file

    if not isinstance(location, Path):
        return Path()  # a database has no directory of its own
    metrics = metrics_file(location) if figures.kind == "training" else None
    return location if metrics is None else metrics.parent


def show(figures: ReportFigures) -> None:
    """Print a report's figures in the width of the terminal."""
    from understudy.cli.output import console
    from understudy.report.terminal import terminal

    out = console()
    out.print(terminal(figures, width=max(20, min(60, (out.width if out.is_terminal else 100) - 56))))
