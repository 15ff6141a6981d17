"""Carrying out what `understudy train loop` was told: tasks loaded, a sandbox chosen, signals heard."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import typer
from msgspec import Struct

from understudy.cli.display.loop_progress import LoopDisplay
from understudy.cli.display.output import print_json
from understudy.cli.interrupts import run_stoppable
from understudy.cli.selection import DOCKER, LOCAL, kind_for
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.run.collector import RolloutCollector, RolloutSettings
from understudy.run.config import digest, task_digests
from understudy.sandbox.base import Sandboxes, load_sandboxes
from understudy.tasks.datasets.images import ImageChoice
from understudy.tasks.load import load_tasks
from understudy.train.loop.runtime import LoopRuntime, LoopSummary, model_digest, run_loop
from understudy.train.loop.state import LoopConfig
from understudy.train.options import GRPOOptions
from understudy.types import Task


class LoopOrder(Struct, frozen=True, kw_only=True):
    """What a loop is to do. `sandbox` is None where it is chosen by the tasks."""

    model: Path
    tasks: tuple[str, ...]
    eval_tasks: tuple[str, ...]
    steps: int
    groups: int
    samples: int
    eval_every: int
    eval_samples: int
    seed: int
    asynchronous: bool
    max_staleness: int
    quorum: float
    min_groups: int
    keep: int
    backend: str
    served_model: str
    tool_format: str
    manner: RolloutSettings
    options: GRPOOptions
    means: LoopRuntime
    sandbox: str | None
    output_dir: Path | None


def run_trl_training(order: LoopOrder, shown: LoopDisplay) -> LoopSummary:
    """Run to the end; the first Ctrl-C or SIGTERM drains, the second stops at once."""
    # Every rollout holds some descriptors, and an agent may hold many of the gateway's.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    collectors: list[RolloutCollector] = []

    def drain() -> bool:
        if not collectors or collectors[0].draining:
            return False
        collectors[0].drain()
        return True

    return run_stoppable(_work(order, shown, collectors), drain)


async def _work(order: LoopOrder, shown: LoopDisplay, collectors: list[RolloutCollector]) -> LoopSummary:
    shown.stage("reading the tasks")
    sandboxes = load_sandboxes(order.sandbox or LOCAL)
    try:
        tasks = await _loaded(order.tasks, sandboxes)
        eval_tasks = await _loaded(order.eval_tasks, sandboxes) if order.eval_tasks else []
        if order.sandbox is None and kind_for([*tasks, *eval_tasks]) == DOCKER:
            sandboxes = load_sandboxes(DOCKER)
        config = _config(order, tasks, eval_tasks, sandboxes.name)
        root = (order.output_dir or Path("runs") / f"loop-{_id_of(config)}").absolute()
        shown.stage("starting the model and its trainer")
        return await run_loop(
            config,
            root,
            tasks,
            eval_tasks,
            sandboxes=sandboxes,
            means=order.means,
            watcher=shown,
            collects=collectors.append,
        )
    finally:
        await sandboxes.aclose()


async def _loaded(specs: tuple[str, ...], sandboxes: Sandboxes) -> list[Task]:
    loaded = await load_tasks(
        specs, sandboxes=sandboxes, cache=cache_dir(), images=ImageChoice(None, None), instance_ids=None
    )
    for line in loaded.report():
        typer.echo(f"understudy: {line}", err=True)
    if not loaded.tasks:
        raise TaskError(f"there is no task in {', '.join(specs)}; look for refused rows above")
    return loaded.tasks


def _config(order: LoopOrder, tasks: list[Task], eval_tasks: list[Task], sandbox: str) -> LoopConfig:
    learned, held_out = task_digests(tasks), task_digests(eval_tasks)
    # The same work under another name is the same work: what was learned from says nothing of what was learned.
    contents = {digest(_nameless(task)): task.instance_id for task in tasks}
    for task in eval_tasks:
        if task.instance_id in learned or digest(_nameless(task)) in contents:
            raise ConfigError(
                f"--eval-tasks: {task.instance_id} is among --tasks too; what is learned from cannot measure"
            )
    if order.groups > len(tasks):
        raise ConfigError(
            f"--groups {order.groups}: there are only {len(tasks)} tasks; give more tasks, or fewer groups"
        )
    served = order.served_model
    if not served and order.backend != "embedded":
        served = str(order.model)
    return LoopConfig(
        model=str(order.model),
        model_digest=model_digest(order.model),
        backend=order.backend,
        served_model=served,
        tool_format=order.tool_format,
        tasks=learned,
        eval_tasks=held_out,
        steps=order.steps,
        groups=order.groups,
        samples=order.samples,
        eval_every=order.eval_every,
        eval_samples=order.eval_samples,
        seed=order.seed,
        asynchronous=order.asynchronous,
        max_staleness=order.max_staleness,
        quorum=order.quorum,
        min_groups=order.min_groups,
        sandbox=sandbox,
        manner=msgspec.to_builtins(order.manner),
        trainer=msgspec.to_builtins(order.options),
        keep=order.keep,
    )


def _nameless(task: Task) -> Task:
    return msgspec.structs.replace(task, instance_id="", meta={})


def _id_of(config: LoopConfig) -> str:
    """Eight digits by which the same command finds its directory, also where it only asks for more steps."""
    return digest(msgspec.structs.replace(config, steps=0, keep=0, eval_every=0))[:8]


def print_summary(summary: LoopSummary, as_json: bool) -> None:
    """Print it to stdout."""
    if as_json:
        print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from understudy.util.text import visible

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
        words = f"{rate.estimate:.3f} ({rate.low:.3f} to {rate.high:.3f}): {each.solved} of {each.total}"
        table.add_row(f"held out, step {each.step}", Text(words))
    if summary.gain is not None:
        gain = summary.gain
        table.add_row("gain", Text(f"{gain.estimate:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"))
    for why, count in summary.skipped.items():
        table.add_row("skipped", Text(visible(f"{count} {why}")))
    for task, reason in summary.refused_tasks.items():
        table.add_row("refused task", Text(visible(f"{task}: {reason}")))
    Console().print(table)
