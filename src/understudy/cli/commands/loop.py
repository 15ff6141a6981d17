"""`understudy train loop`: repeatedly collects rollouts, grades them, updates the weights and publishes them."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import typer
from msgspec import Struct, field

from understudy.agents.base import MISSING_COMMAND
from understudy.cli import EXIT_INTERRUPTED
from understudy.cli.interrupts import run_stoppable
from understudy.cli.options import command
from understudy.cli.output import Json, print_facts, print_json
from understudy.cli.progress import LiveStatus, live, short
from understudy.cli.settings import DOCKER, DRAIN_TIMEOUT_S, LOCAL, AgentRunSettings, DrainTimeout, sandbox_for
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.model.directory import TINY, require_packages
from understudy.model.fetch import model_path
from understudy.run.collector import RolloutCollector, RolloutSettings
from understudy.run.config import digest, task_digests
from understudy.run.estimate import RunEstimate, estimate, measure
from understudy.sandbox.base import Sandboxes, load_sandboxes, sandbox_option
from understudy.tasks.load import load_tasks
from understudy.tasks.recipes import ImageChoice
from understudy.train.loop.loop import Loop, Watcher
from understudy.train.loop.runtime import LoopRuntime, LoopSummary, model_digest, run_loop
from understudy.train.loop.state import Evaluation, LoopConfig, LoopDirectory, LoopSchedule, StepState
from understudy.train.metrics import parse_trackers
from understudy.train.options import GRPOOptions
from understudy.train.weights import check_model
from understudy.types import Task
from understudy.util.garbage import collect_garbage_rarely
from understudy.util.processes import raise_file_limit
from understudy.util.settings import option

SERVERS = ("embedded", "vllm", "sglang")


class LoopSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy train loop`. Those that decide the results become a `LoopConfig`."""

    table: ClassVar[str] = "loop"
    model: Annotated[
        str,
        option(
            f"A model's directory, a GGUF file, a fetched model's name, or {TINY} for the model shipped with "
            "Understudy.",
            argument=True,
            metavar="MODEL",
        ),
    ]
    tasks: Annotated[
        tuple[str, ...],
        option("The training tasks, in any form that `understudy run` takes; repeatable.", "--tasks", "-t"),
    ] = ()
    eval_tasks: Annotated[
        tuple[str, ...],
        option("Held-out tasks for evaluation, never learned from; repeatable.", "--eval-tasks", "-e"),
    ] = ()
    schedule: LoopSchedule = LoopSchedule()
    output_dir: Annotated[
        Path | None, option("The loop's output directory [default: runs/loop-ID].", "--output-dir", "-o")
    ] = None
    eval_temperature: (
        Annotated[float, option("Temperature of evaluations [default: as --temperature].", ge=0)] | None
    ) = None
    answer_tokens: Annotated[int, option("Maximum number of tokens in an answer.", ge=1)] | None = None
    agent: AgentRunSettings = AgentRunSettings()
    sandbox: Annotated[
        str | None, option("The kind of sandbox: docker, local or unsafe-local [default: as for understudy run].")
    ] = None
    runtime: LoopRuntime = field(default_factory=LoopRuntime)
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S
    measured_by: Annotated[
        Path | None,
        option(
            "With --dry-run: the output directory of a similar loop or run to base the estimate on.", metavar="DIR"
        ),
    ] = None
    dry_run: Annotated[bool, option("Only estimate hours, tokens and dollars; run nothing.", "--dry-run")] = False
    config: Annotated[
        Path | None,
        option("A TOML file with options in a table [loop] and, for the trainer, [grpo].", metavar="FILE.toml"),
    ] = None
    track: Annotated[
        str, option("Also report metrics to tensorboard, wandb or mlflow.", metavar="auto|none|NAME,…")
    ] = "auto"
    trainer: GRPOOptions = GRPOOptions()


@command
def loop(settings: LoopSettings, json_: Json = False) -> None:
    """Improve a model with its own work: collect rollouts, grade them, update the weights, publish them, and
    repeat.

    The same command again continues the loop where it ended, even after kill -9. Ctrl-C lets running rollouts
    finish, for up to --drain-timeout seconds; a second Ctrl-C stops at once.
    """
    _check(settings)
    if settings.dry_run:
        print_loop_estimate(asyncio.run(_estimate(settings)), json_)
        return
    require_packages()
    runtime = msgspec.structs.replace(settings.runtime, trackers=parse_trackers(settings.track))
    settings = msgspec.structs.replace(settings, model=str(model_directory(settings.model)), runtime=runtime)
    raise_file_limit()
    collect_garbage_rarely()
    collectors: list[RolloutCollector] = []

    def drain() -> bool:
        if not collectors or collectors[0].draining:
            return False
        collectors[0].drain()
        return True

    with live(LoopDisplay(), sys.stderr) as display:
        work = _run_loop(settings, display, collectors)
        summary = run_stoppable(work, drain, drain_timeout_s=settings.drain_timeout)
    print_loop_summary(summary, json_)
    if summary.stopped:
        typer.echo("Stopped early; run the same command again to continue.", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


def _check(settings: LoopSettings) -> None:
    """Raise ConfigError for settings that contradict each other."""
    schedule, agent = settings.schedule, settings.agent
    if not settings.tasks:
        raise ConfigError(
            "missing option --tasks, the training tasks; give a file of tasks, made for example with: "
            "understudy tasks make functions --count 64 --output train.jsonl"
        )
    if agent.only_agent == "shell" and agent.agent_command is None:
        raise ConfigError(MISSING_COMMAND)
    if schedule.backend not in SERVERS:
        raise ConfigError(
            f"--backend {schedule.backend}: unsupported for training; give one of {', '.join(SERVERS)}"
        )
    if schedule.backend != "embedded" and not settings.runtime.urls:
        raise ConfigError(f"--backend {schedule.backend} needs --base-url, the address of its server; add it")
    if schedule.min_groups > schedule.groups:
        raise ConfigError(
            f"--min-groups {schedule.min_groups}: must not exceed --groups ({schedule.groups}); lower it, or "
            "raise --groups"
        )
    if schedule.min_groups and settings.runtime.teacher.teacher is not None:
        raise ConfigError(
            "--min-groups counts groups with differing rewards, but with a teacher every group is used; leave "
            "out --min-groups"
        )
    if schedule.min_groups and not settings.trainer.dynamic_sampling:
        raise ConfigError("--min-groups needs dynamic sampling; leave out --min-groups or --no-dynamic-sampling")


async def _run_loop(
    settings: LoopSettings, display: LoopDisplay, collectors: list[RolloutCollector]
) -> LoopSummary:
    """Load the tasks, choose their sandboxes, and run the loop. Its collector is appended to `collectors`."""
    display.stage("reading the tasks")
    sandboxes = load_sandboxes(settings.sandbox or LOCAL)
    try:
        tasks = await _load(settings.tasks, sandboxes)
        eval_tasks = await _load(settings.eval_tasks, sandboxes) if settings.eval_tasks else []
        if settings.sandbox is None and sandbox_for([*tasks, *eval_tasks]) == DOCKER:
            sandboxes = load_sandboxes(DOCKER)
        config = loop_config_of(settings, tasks, eval_tasks, sandbox_option(sandboxes))
        root = (settings.output_dir or Path("runs") / f"loop-{config.directory_id}").absolute()
        display.stage("starting the model and its trainer")
        return await run_loop(
            config,
            root,
            tasks,
            eval_tasks,
            sandboxes=sandboxes,
            runtime=settings.runtime,
            watcher=display,
            on_collector=collectors.append,
        )
    finally:
        await sandboxes.aclose()


class LoopEstimate(Struct, frozen=True, kw_only=True):
    """What a loop is likely to take. `update_hours` is None if nothing shows how long an update takes."""

    rollouts: RunEstimate
    update_hours: float | None
    hours: float
    cost_usd: float | None


async def _estimate(settings: LoopSettings) -> LoopEstimate:
    """Estimate hours, tokens and dollars from an earlier loop or run.

    Raises ConfigError if that has no measurements.
    """
    source = settings.measured_by
    if source is None:
        raise ConfigError(
            "--dry-run needs a measurement; give --measured-by DIR, the output of a similar loop with --steps 1, "
            "or of a run"
        )
    updates: list[float] = []
    directories = [source]
    if (state := LoopDirectory(source.absolute()).load()) is not None:
        published_steps = [step for step in state.steps if step.phase == "published"]
        updates = [step.seconds.get("update", 0.0) + step.seconds.get("publish", 0.0) for step in published_steps]
        runs = [*(step.run for step in published_steps), *(evaluation.run for evaluation in state.evaluations)]
        directories = [source.absolute() / run for run in runs]
    sandboxes = load_sandboxes(settings.sandbox or LOCAL)
    try:
        held_out = await _load(settings.eval_tasks, sandboxes) if settings.eval_tasks else []
    finally:
        await sandboxes.aclose()
    schedule = settings.schedule
    steps_between = schedule.eval_every
    evaluations = len(
        {0, schedule.steps, *(range(steps_between, schedule.steps, steps_between) if steps_between else ())}
    )
    count = schedule.steps * schedule.groups * schedule.samples
    count += evaluations * len(held_out) * schedule.eval_samples
    rollouts = estimate(measure(directories), count, settings.runtime.concurrency, None)
    update_hours = round(schedule.steps * sum(updates) / len(updates) / 3600, 3) if updates else None
    hours = rollouts.hours + (update_hours or 0.0)
    rate = settings.runtime.usd_per_hour
    return LoopEstimate(
        rollouts=rollouts,
        update_hours=update_hours,
        hours=round(hours, 3),
        cost_usd=None if rate is None else round(hours * rate, 2),
    )


def print_loop_estimate(result: LoopEstimate, as_json: bool) -> None:
    """Print an estimate to stdout."""
    if as_json:
        print_json(result)
        return
    updates = "unknown: measure by a loop" if result.update_hours is None else f"{result.update_hours:.2f}"
    facts: list[tuple[str, object]] = [
        ("rollouts", result.rollouts.rollouts),
        ("measured by", f"{result.rollouts.measured} rollouts"),
        ("prompt tokens", short(result.rollouts.prompt_tokens)),
        ("completion tokens", short(result.rollouts.completion_tokens)),
        ("hours of rollouts", f"{result.rollouts.hours:.2f}"),
        ("hours of updates", updates),
        ("hours", f"{result.hours:.2f}"),
        ("cost", "give --usd-per-hour" if result.cost_usd is None else f"{result.cost_usd:.2f} US dollars"),
    ]
    print_facts("estimate; nothing was run", facts)


async def _load(specs: tuple[str, ...], sandboxes: Sandboxes) -> list[Task]:
    loaded = await load_tasks(
        specs, sandboxes=sandboxes, cache=cache_dir(), images=ImageChoice(None, None), instance_ids=None
    )
    for line in loaded.report():
        typer.echo(f"understudy: {line}", err=True)
    if not loaded.tasks:
        raise TaskError(
            f"no usable task in {', '.join(specs)}, expected at least one; correct the rows that the lines above "
            "name, or give other tasks"
        )
    return loaded.tasks


def loop_config_of(settings: LoopSettings, tasks: list[Task], eval_tasks: list[Task], sandbox: str) -> LoopConfig:
    """Return the configuration of the loop.

    Raises ConfigError for tasks that it cannot learn from or be evaluated on.
    """
    training_digests = task_digests(tasks)
    # Tasks with the same content are the same task, even under another id: evaluating on training tasks proves
    # nothing.
    contents = {digest(_without_id(task)) for task in tasks}
    for task in eval_tasks:
        if task.instance_id in training_digests or digest(_without_id(task)) in contents:
            raise ConfigError(
                f"--eval-tasks: {task.instance_id} is also a training task (--tasks, with this id or this "
                "content); give other tasks for evaluation"
            )
    schedule, agent, trainer = settings.schedule, settings.agent, settings.trainer
    if settings.runtime.teacher.teacher is not None:
        trainer = settings.runtime.teacher.options(trainer)
    if schedule.groups > len(tasks):
        raise ConfigError(
            f"--groups {schedule.groups}: must not exceed the number of --tasks, {len(tasks)}, as each group is "
            "of another task; give more tasks, or fewer groups"
        )
    if not schedule.served_model and schedule.backend != "embedded":
        schedule = msgspec.structs.replace(schedule, served_model=settings.model)
    eval_temperature = settings.eval_temperature
    rollouts = RolloutSettings(
        agent=agent.only_agent,
        agent_options=agent.options_of(agent.only_agent),
        max_turns=agent.max_turns,
        timeout_s=agent.timeout,
        temperature=trainer.temperature,
        evaluation_temperature=trainer.temperature if eval_temperature is None else eval_temperature,
        max_tokens=settings.answer_tokens,
    )
    return LoopConfig(
        **msgspec.structs.asdict(schedule),
        model=settings.model,
        model_digest=model_digest(Path(settings.model)),
        tasks=training_digests,
        eval_tasks=task_digests(eval_tasks),
        seed=trainer.seed,
        sandbox=sandbox,
        rollout_settings=msgspec.to_builtins(rollouts),
        trainer=msgspec.to_builtins(trainer),
    )


def _without_id(task: Task) -> Task:
    return msgspec.structs.replace(task, instance_id="", meta={})


def model_directory(name: str) -> Path:
    """Return the directory of a model given by name. Raises ConfigError if there is none."""
    path = model_path(name, lambda text: typer.echo(text, err=True))
    check_model(path)
    return path


class LoopDisplay(Watcher, LiveStatus):
    """Shows the loop's progress as lines of text. Thread-safe to read."""

    plain_s = 15.0

    def __init__(self) -> None:
        super().__init__()
        self._loop: Loop | None = None
        self._stage = "starting"
        self._new_lines: list[str] = []
        self._lock = threading.Lock()

    def stage(self, text: str) -> None:
        """Show a stage before the loop begins."""
        self._stage = text
        self.changed.set()

    def began(self, loop: Loop) -> None:
        """See Watcher."""
        self._loop = loop
        if loop.state.steps:
            self._add_line(f"going on after step {loop.state.done} with {loop.state.version}")

    def stepped(self, step: StepState) -> None:
        """See Watcher."""
        report, parts = step.report, [f"step {step.step}: {step.solved}/{step.collected} solved"]
        if step.weights is not None:
            parts.append(f"{step.version}, loss {report.get('loss', 0):.4f}")
            parts.append(f"mismatch {report.get('mismatch_mean', 0):.1e}")
        elif step.held:
            parts.append(f"no update: it waits for more groups, {len(step.held)} so far")
        else:
            parts.append("no update: nothing to learn from")
        if step.staleness:
            parts.append(f"up to {step.staleness} versions old")
        if step.cut:
            parts.append(f"{step.cut} calls went on through the change of weights")
        parts += [f"{count} {why}" for why, count in step.skipped.items()]
        parts.append(" + ".join(f"{name} {took:.0f} s" for name, took in step.seconds.items()))
        self._add_line(" · ".join(parts))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Watcher."""
        rate = evaluation.rate
        self._add_line(
            f"held out after step {evaluation.step}: {evaluation.solved}/{evaluation.total} solved, "
            f"{rate.estimate:.3f} ({rate.low:.3f} to {rate.high:.3f})"
            + (f" · {evaluation.failed} failed" if evaluation.failed else "")
        )

    def line(self) -> str:
        """Return the loop's current status as a line."""
        return self._stage if self._loop is None else self._loop.line()

    def new_lines(self) -> list[str]:
        """Return the lines about steps and evaluations since the last call."""
        with self._lock:
            lines, self._new_lines = self._new_lines, []
        return lines

    def _add_line(self, text: str) -> None:
        with self._lock:
            self._new_lines.append(text)
        self.changed.set()


def print_loop_summary(summary: LoopSummary, as_json: bool) -> None:
    """Print the summary of a loop to stdout."""
    if as_json:
        print_json(summary)
        return
    facts: list[tuple[str, object]] = [
        ("steps", f"{summary.steps} of {summary.of}"),
        ("rollouts", f"{summary.rollouts}, {summary.solved} solved"),
        ("updates", summary.updates),
        ("version", summary.version),
        ("weights", summary.weights),
        ("wall clock", f"{summary.wall_s:.1f} s"),
        ("output", summary.output_dir),
    ]
    for evaluation in summary.evaluations:
        rate = f"{evaluation.rate.estimate:.3f} ({evaluation.rate.low:.3f} to {evaluation.rate.high:.3f})"
        facts.append((f"held out, step {evaluation.step}", f"{rate}: {evaluation.solved} of {evaluation.total}"))
    if (gain := summary.gain) is not None:
        facts.append(("gain", f"{gain.estimate:+.3f} ({gain.low:+.3f} to {gain.high:+.3f})"))
    facts += [("skipped", f"{count} {why}") for why, count in summary.skipped.items()]
    facts += [("refused task", f"{task}: {reason}") for task, reason in summary.refused_tasks.items()]
    print_facts("loop", facts)
