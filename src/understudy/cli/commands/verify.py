"""`understudy verify`: checks that a dataset or a run matches its store: rows, calls, weights and verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from understudy.cli.output import Json, print_json
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.export.verify import LineageReport

_STORE = "store.db"


def verify(
    path: Annotated[Path, typer.Argument(help="A run's output directory, an export, or a file of its rows.")],
    directory: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="The run that the dataset was exported from [default: the run whose directory contains it].",
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """Check the lineage of a dataset or a run: rows, calls, versions of the weights, verdicts, patches, tokens.

    For a run, every decided rollout and all datasets in its directory are checked. Exits with 1 if a row or a
    rollout has a gap in its lineage; each gap is reported with what was expected.
    """
    import msgspec

    from understudy.export.verify import LineageReport, verify_rows, verify_run
    from understudy.store import Store

    if not path.exists():
        raise ConfigError(
            f"{path}: no such file or directory; give a run's output directory, an export, or a file of its rows"
        )
    home = directory or _run_of(path)
    report = LineageReport()
    with Store.open(home, create=False) as store:
        if (path / _STORE).exists():
            verify_run(store, report)
        elif not list(_row_files(path)):
            raise ConfigError(
                f"{path}: has no rows, expected .jsonl or .parquet files; give an export, such as one of "
                "`export hf`"
            )
        for file in _row_files(path):
            verify_rows(store, _rows(file), report)
    if json_:
        print_json(msgspec.to_builtins(report))
    else:
        _print(report)
    if report.failures:
        raise typer.Exit(1)


def _print(report: LineageReport) -> None:
    from understudy.util.text import visible

    for problem in report.problems:
        typer.echo(visible(problem), err=True)
    if report.failures > len(report.problems):
        typer.echo(f"and {report.failures - len(report.problems)} more", err=True)
    counts = f"{report.rows} rows, {report.rollouts} rollouts, {report.calls} calls"
    if report.unversioned:
        counts += f" ({report.unversioned} of models whose server names no version of its weights)"
    end = f"{report.failures} failures" if report.failures else "ok"
    typer.echo(f"{counts}, token skew {report.skewed_tokens}: {end}")


def _run_of(path: Path) -> Path:
    """Return the nearest directory at or above `path` with a store. Raises ConfigError if there is none."""
    for folder in (path.absolute(), *path.absolute().parents):
        if (folder / _STORE).exists():
            return folder
    raise ConfigError(f"{path} is not inside a run's directory; name the run that it was exported from with --dir")


def _row_files(path: Path) -> Iterator[Path]:
    """Return the row files and the saved datasets at or below a path."""
    from understudy.tasks.rows import is_saved

    if path.is_file() or is_saved(path):
        yield path
        return
    for pattern in ("train.jsonl", "test.jsonl", "*.parquet", "data/*.parquet"):
        yield from sorted(path.glob(pattern))
    yield from (folder for folder in sorted(path.glob("dataset-*")) if is_saved(folder))


def _rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row with its location. Raises ConfigError or TaskError for unreadable data."""
    from understudy.tasks.rows import read_rows

    for where, row in read_rows(file):
        if not isinstance(row, dict):
            raise ConfigError(
                f"{where}: invalid row, expected a JSON object, got {str(row)[:100]!r}; export again, or remove "
                "the row"
            )
        yield where, row  # pyright: ignore[reportUnknownVariableType]
