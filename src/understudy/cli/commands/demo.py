"""`understudy demo`: everything from tasks to a better model on this machine, with the commands that a user
would type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from understudy.cli.demo.training import MODELS, DemoSize, demo_settings
from understudy.errors import ConfigError
from understudy.model.directory import TINY

_QUICK_TASKS = 10


def _default(field: str) -> str:
    """Return the help's words for the default of a field of DemoSize, which depends on the model."""
    values = {name: getattr(settings.size, field) for name, settings in MODELS.items()}
    if len(set(values.values())) == 1:
        return f"default: {values[TINY]}"
    return f"default: {', '.join(f'{value} for {name}' for name, value in values.items())}"


def demo(
    quick: Annotated[
        bool, typer.Option("--quick", help="Use scripted models in place of one that learns; needs no torch.")
    ] = False,
    agent: Annotated[
        str | None, typer.Option(help="With --quick: the agent that works, such as codex [default: claude-code].")
    ] = None,
    model: Annotated[str, typer.Option(help=f"The model that learns: {' or '.join(MODELS)}.")] = TINY,
    seed: Annotated[int, typer.Option(help="Seed of everything random in the demo.")] = 1,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Directory for all files [default: runs/demo/seed-N, or runs/demo/MODEL-seed-N; with --quick "
                "runs/demo-quick, or runs/demo-AGENT]."
            )
        ),
    ] = None,
    tasks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Training tasks [{_default('tasks')}; with --quick {_QUICK_TASKS} of each package].",
        ),
    ] = None,
    held_out_tasks: Annotated[
        int | None,
        typer.Option("--evaluated", min=1, help=f"Number of held-out tasks [{_default('held_out_tasks')}]."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=0, help=f"Number of GRPO steps; 0: no GRPO [{_default('steps')}].")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help=f"Tasks in each GRPO step [{_default('groups')}].")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=2, help=f"Rollouts of each task in a GRPO step [{_default('samples')}].")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Exit with 1 if the figures are not as expected.")
    ] = True,
) -> None:
    """Run everything once: a small model works through the real CLI, learns, and is measured before and after.

    Takes about ten minutes on two cores, with --quick one or two, with --model smollm2-135m over an hour. After an
    interruption the same command continues.
    """
    from understudy.cli.demo.quick import run_quick
    from understudy.cli.demo.training import run_training

    if agent and not quick:
        raise ConfigError(
            f"--agent {agent}: unsupported without --quick, because the demo's model only works with Claude Code; "
            "leave it out, or add --quick"
        )
    if quick:
        if model != TINY:
            raise ConfigError(
                "--model and --quick exclude each other: --quick uses scripted models; leave one of them out"
            )
        name = "demo-quick" if agent is None else f"demo-{agent}"
        directory = output_dir or Path("runs") / name
        as_expected = run_quick(directory, seed=seed, tasks=tasks or _QUICK_TASKS, agent=agent or "claude-code")
    else:
        size = demo_settings(model).size
        name = f"seed-{seed}" if model == TINY else f"{model}-seed-{seed}"
        directory = output_dir or Path("runs/demo") / name
        chosen = DemoSize(
            tasks=tasks or size.tasks,
            held_out_tasks=held_out_tasks or size.held_out_tasks,
            steps=size.steps if steps is None else steps,
            groups=groups or size.groups,
            samples=samples or size.samples,
        )
        as_expected = run_training(directory, model, seed=seed, size=chosen)
    if check and not as_expected:
        raise typer.Exit(1)
