"""`understudy demo`: everything from tasks to a better model on this machine, with the commands that a user
would type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.demo.training import DemoSize
from understudy.errors import ConfigError

_SIZE = DemoSize()
_QUICK_TASKS = 10


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use scripted models in place of one that learns; needs no torch.")
    ] = False,
    agent: Annotated[
        str | None, typer.Option(help="With --quick: the agent that works, such as codex [default: claude-code].")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of everything random in the demo.")] = 1,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Directory for all files [default: runs/demo/seed-N; with --quick runs/demo-quick, or "
                "runs/demo-AGENT]."
            )
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Training tasks [default: {_SIZE.tasks}; with --quick {_QUICK_TASKS} of each package].",
        ),
    ] = None,
    evaluated: Annotated[int, typer.Option(min=1, help="Number of held-out tasks.")] = _SIZE.evaluated,
    steps: Annotated[int, typer.Option(min=1, help="Number of GRPO steps.")] = _SIZE.steps,
    groups: Annotated[int, typer.Option(min=1, help="Tasks in each GRPO step.")] = _SIZE.groups,
    samples: Annotated[int, typer.Option(min=2, help="Rollouts of each task in a GRPO step.")] = _SIZE.samples,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Exit with 1 if the figures are not as expected.")
    ] = True,
) -> None:
    """Run everything once: a small model works through the real CLI, learns, and is measured before and after.

    Takes about ten minutes on two cores, with --quick one or two. After an interruption the same command
    continues.
    """
    from understudy.cli.demo.quick import run_quick
    from understudy.cli.demo.training import run_training

    if agent and not quick:
        raise ConfigError("--agent: the demo's model only works with Claude Code; use --quick for other agents")
    if quick:
        name = "demo-quick" if agent is None else f"demo-{agent}"
        directory = output_dir or Path("runs") / name
        as_expected = run_quick(directory, seed=seed, tasks=tasks or _QUICK_TASKS, agent=agent or "claude-code")
    else:
        directory = output_dir or Path("runs/demo") / f"seed-{seed}"
        size = DemoSize(
            tasks=tasks or _SIZE.tasks, evaluated=evaluated, steps=steps, groups=groups, samples=samples
        )
        as_expected = run_training(directory, seed=seed, size=size)
    if check and not as_expected:
        raise typer.Exit(1)
