"""The summary of a loop, for a person or as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from understudy.cli.display.output import print_json
from understudy.util.text import visible

if TYPE_CHECKING:
    from understudy.train.loop.runtime import LoopSummary


def print_loop_summary(summary: LoopSummary, as_json: bool) -> None:
    """Print it to stdout."""
    if as_json:
        print_json(summary)
        return
    table = Table(show_header=False, title="loop", title_justify="left")
    rows: dict[str, object] = {
        "steps": f"{summary.steps} of {summary.of}",
        "rollouts": f"{summary.rollouts}, {summary.solved} solved",
        "updates": summary.updates,
        "version": summary.version,
        "weights": summary.weights,
        "wall clock": f"{summary.wall_s:.1f} s",
        "output": summary.output_dir,
    }
    for name, value in rows.items():
        table.add_row(name, Text(str(value)))
    for each in summary.evaluations:
        rate = each.rate
        text = f"{rate.estimate:.3f} ({rate.low:.3f} to {rate.high:.3f}): {each.solved} of {each.total}"
        table.add_row(f"held out, step {each.step}", Text(text))
    if summary.gain is not None:
        gain = summary.gain
        table.add_row("gain", Text(f"{gain.estimate:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"))
    for why, count in summary.skipped.items():
        table.add_row("skipped", Text(visible(f"{count} {why}")))
    for task, reason in summary.refused_tasks.items():
        table.add_row("refused task", Text(visible(f"{task}: {reason}")))
    Console().print(table)
