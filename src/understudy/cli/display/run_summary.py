"""The summary of a run, for a person or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from understudy.cli.display.output import print_json

if TYPE_CHECKING:
    from understudy.run.runner import RunSummary


def print_summary(summary: RunSummary, as_json: bool) -> None:
    """Print it to stdout."""
    if as_json:
        print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from understudy.util.text import visible

    table = Table(show_header=False, title=f"run {summary.run_id}", title_justify="left")
    rows = {
        "rollouts": summary.rollouts,
        "solved": summary.solved,
        "unsolved": summary.unsolved,
        "infrastructure failures": summary.infrastructure_failures,
        "left queued": summary.pending,
        "calls": summary.calls,
        "prompt tokens": summary.prompt_tokens,
        "completion tokens": summary.completion_tokens,
        "wall clock": f"{summary.wall_s:.1f} s",
        "output": summary.output_dir,
    }
    if summary.suspicious:
        rows["suspicious patches"] = f"{summary.suspicious}, left out of exports"
    if summary.cost_usd:
        rows["cost"] = f"{summary.cost_usd:.4f} US dollars"
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    for failure, count in summary.failures.items():
        table.add_row("failure", Text(visible(f"{count} × {failure}")))
    for task, reason in summary.refused_tasks.items():
        table.add_row("refused task", Text(visible(f"{task}: {reason}")))
    for note in summary.notes:
        table.add_row("note", Text(visible(note)))
    Console().print(table)
    if summary.pending:
        typer.echo("Stopped early; run the same command again to continue.", err=True)
