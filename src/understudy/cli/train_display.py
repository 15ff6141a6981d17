"""What trainings tell on stderr: where they stand, and what they left out."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import typer


def tell_left_out(left_out: Mapping[str, int], how: str = "left out") -> None:
    """Say what was not learned from, a line for each reason."""
    for why, count in left_out.items():
        typer.echo(f"{how}: {count} {why}", err=True)


class Steps:
    """Progress on stderr: a line that is redrawn on a terminal, a line now and then elsewhere."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._terminal = sys.stderr.isatty()
        self._told = 0

    def __enter__(self) -> Steps:
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
        elif step == of or step * 20 // max(of, 1) > self._told:
            self._told = step * 20 // max(of, 1)
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
