"""Progress and results of a training."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

import typer

from understudy.cli.display.output import print_json

if TYPE_CHECKING:
    from understudy.train.algorithms.trl import TrainingSummary
    from understudy.train.algorithms.updater import GRPOSummary
    from understudy.train.engines.llamafactory import LlamaFactorySummary


def print_training(
    result: TrainingSummary | GRPOSummary | LlamaFactorySummary,
    text: str,
    as_json: bool,
    skipped: Mapping[str, int] | None = None,
) -> None:
    """Print the result to stdout, as JSON or as `text`; with the text, what was not learned from, to stderr."""
    if as_json:
        print_json(result)
        return
    for how, reasons in (("left out", result.left_out), ("skipped", skipped or {})):
        for why, count in reasons.items():
            typer.echo(f"{how}: {count} {why}", err=True)
    typer.echo(text)


class StepProgress:
    """Progress on stderr: a line that is redrawn on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._reported = 0

    def __enter__(self) -> StepProgress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal:
            sys.stderr.write("\n")

    def __call__(self, step: int, of: int, numbers: dict[str, float]) -> None:
        """Show a step."""
        shown = " · ".join(
            f"{name} {numbers[name]:.4g}" for name in ("reward", "loss", "grad_norm") if name in numbers
        )
        line = f"{self._name}: step {step} of {of} · {shown}"
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{line}")
            sys.stderr.flush()
        elif step == of or step * 20 // max(of, 1) > self._reported:
            self._reported = step * 20 // max(of, 1)
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
