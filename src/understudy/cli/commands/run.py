"""`understudy run`: tasks in, scored rollouts out."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, ClassVar

import msgspec
import typer
from msgspec import Struct, field

from understudy.cli import EXIT_INTERRUPTED
from understudy.cli.interrupts import raise_file_limit, run_stoppable
from understudy.cli.options import command
from understudy.cli.output import Json, print_facts, print_json
from understudy.cli.progress import LiveStatus, live, short, time_left
from understudy.cli.settings import (
    DOCKER,
    DRAIN_TIMEOUT_S,
    LOCAL,
    AgentRunSettings,
    DrainTimeout,
    ModelSettings,
    SandboxSettings,
    TaskSettings,
    default_concurrency,
    embedded_server,
    run_gateway_config,
    sandbox_for,
)
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.model.directory import directory_of
from understudy.run.config import RunConfig, task_digests
from understudy.run.runner import RunMonitor, RunSummary, execute_run
from understudy.run.scheduler import Scheduler
from understudy.sandbox.base import Sandboxes, load_sandboxes
from understudy.store import Store
from understudy.store.outcomes import RunCounts
from understudy.tasks.load import load_tasks
from understudy.tasks.records import LoadedTasks
from understudy.types import Task
from understudy.util.settings import option

_log = logging.getLogger(__name__)


class RunSettings(Struct, frozen=True, kw_only=True):
    """All that `understudy run` can be told. What of it decides the results is resolved to a `RunConfig`."""

    table: ClassVar[str] = "run"
    needs_table: ClassVar[bool] = False
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    limit: Annotated[int, option("Only the first N tasks.", ge=1)] | None = None
    samples: Annotated[int, option("Rollouts per task.", "--samples", "-n", ge=1)] = 1
    concurrency: Annotated[int, option("Agents at a time [default: CPUs + 1].", "--concurrency", "-j", ge=1)] = (
        field(default_factory=default_concurrency)
    )
    cooldown_seconds: Annotated[
        float, option("Seconds that an agent's place stays empty before the next one.", ge=0)
    ] = 0.0
    seed: Annotated[int, option("Seed of everything random in the run.")] = 0
    agent: AgentRunSettings = AgentRunSettings()
    sandbox: SandboxSettings = SandboxSettings()
    output_dir: Annotated[
        Path | None, option("Store and outputs [default: runs/BACKEND-POLICY-ID].", "--output-dir", "-o")
    ] = None
    rewrite_reports: Annotated[
        bool, option("Write the files of rollouts that ended before once more.", "--rewrite-reports")
    ] = False
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S
    debug: Annotated[
        bool, option("Keep debug.log in the output directory, and Claude Code's own in logs/.", "--debug")
    ] = False


@command
def run(settings: RunSettings, json_: Json = False) -> None:
    """Run an agent on tasks, keep every call, grade every patch.

    The same command again continues the run where it ended: rollouts that ended are not repeated, those that
    failed for reasons of infrastructure are tried again. Ctrl-C lets the running rollouts finish, for
    --drain-timeout seconds; a second one stops at once.
    """
    if not settings.task.tasks:
        raise ConfigError(
            "say which tasks to run with --tasks or --dataset-path; to make some: "
            "understudy tasks make toolz --count 5 --output tasks.jsonl"
        )
    config = run_config_of(settings)
    raise_file_limit()
    with live(RunDisplay(), sys.stderr) as display:

        def drain() -> bool:
            scheduler = display.scheduler
            if scheduler is None or scheduler.draining:
                return False
            scheduler.drain()
            return True

        work = _run_tasks(config, settings, display)
        summary = run_stoppable(work, drain, drain_timeout_s=settings.drain_timeout)
    print_summary(summary, json_)
    if summary.pending:
        raise typer.Exit(EXIT_INTERRUPTED)
    if summary.infrastructure_failures or summary.refused_tasks:
        raise typer.Exit(1)


def run_config_of(settings: RunSettings) -> RunConfig:
    """What the run is, but for its sandboxes and tasks, which are known once the tasks are loaded.

    Raises ConfigError for settings that contradict each other.
    """
    model, agent = settings.model, settings.agent
    if model.weights is not None:
        model = msgspec.structs.replace(model, weights=directory_of(model.weights))
    gateway, frontend_high, frontend_low = run_gateway_config(model)
    policy, weights, version = embedded_server(gateway, model)
    return RunConfig(
        gateway=gateway,
        purpose="evaluation" if model.evaluation else "training",
        policy=policy,
        policy_args=model.policy_args,
        weights=weights,
        weights_version=version,
        frontend_high=frontend_high,
        frontend_low=frontend_low,
        agent=agent.agent,
        agent_options=agent.agent_options,
        samples=settings.samples,
        seed=settings.seed,
        max_turns=agent.max_turns,
        timeout_s=agent.timeout,
    )


async def _run_tasks(config: RunConfig, settings: RunSettings, display: RunDisplay) -> RunSummary:
    """Load the tasks, choose their sandboxes, and run."""
    display.stage("reading the tasks")
    chosen, images = settings.sandbox.sandbox, settings.sandbox.image_options
    kind = chosen or (DOCKER if images else LOCAL)
    sandboxes = _open_sandboxes(kind, settings.sandbox, display)
    try:
        loaded = await load_tasks(
            settings.task.tasks,
            sandboxes=sandboxes,
            cache=cache_dir(),
            images=settings.task.images,
            instance_ids=settings.task.ids,
        )
        tasks = _report_loaded(loaded, settings)[: settings.limit]
        if chosen is None and kind == LOCAL and sandbox_for(tasks) == DOCKER:
            sandboxes = _open_sandboxes(DOCKER, settings.sandbox, display)
        config = msgspec.structs.replace(config, sandbox=sandboxes.name, tasks=task_digests(tasks))
        summary = await _run_in(sandboxes, config, tasks, settings, display)
    finally:
        await sandboxes.aclose()
    absent = dict.fromkeys(loaded.unknown, f"there is no such instance in {', '.join(settings.task.tasks)}")
    return msgspec.structs.replace(summary, refused_tasks=summary.refused_tasks | absent)


async def _run_in(
    sandboxes: Sandboxes, config: RunConfig, tasks: list[Task], settings: RunSettings, display: RunDisplay
) -> RunSummary:
    if config.agent_options.get("run_method") == "python":
        from understudy.agents.claude_install import sdk_runtime

        display.stage("preparing the Python that drives Claude Code")
        await asyncio.to_thread(sdk_runtime, cache_dir())
    model = Path(config.weights).name if config.weights else config.gateway.models.high.model or config.model
    label = config.policy or model.replace("/", "-")
    directory = (settings.output_dir or Path("runs") / f"{config.backend}-{label}-{config.run_id}").absolute()
    with _debug_log(directory) if settings.debug else nullcontext():
        _log.debug("run %s: %d tasks in %s sandboxes", config.run_id, len(tasks), config.sandbox)
        return await execute_run(
            config,
            tasks,
            directory,
            sandboxes=sandboxes,
            concurrency=settings.concurrency,
            monitor=display,
            cooldown_s=settings.cooldown_seconds,
            rewrite=settings.rewrite_reports,
            agent_extras={"debug": "1"} if settings.debug and config.agent == "claude-code" else {},
        )


def _report_loaded(loaded: LoadedTasks, settings: RunSettings) -> list[Task]:
    """The tasks that were loaded; what was refused or not there goes to stderr. Raises TaskError for none."""
    for line in loaded.report():
        typer.echo(f"understudy: {line}", err=True)
    specs = ", ".join(settings.task.tasks)
    for id in loaded.unknown:
        typer.echo(f"understudy: there is no instance {id!r} in {specs}", err=True)
    if not loaded.tasks:
        raise TaskError(f"no task is left to run; look for the ids that {specs} has, and for refused rows above")
    return loaded.tasks


def _open_sandboxes(kind: str, settings: SandboxSettings, display: RunDisplay) -> Sandboxes:
    """Sandboxes of a kind. Raises ConfigError also for options that it does not have."""
    options = settings.image_options
    if kind == DOCKER:
        return load_sandboxes(kind, {**options, "progress": display.stage})
    if options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(f"{flags}: there are no container images in {kind} sandboxes; use --sandbox docker")
    return load_sandboxes(kind)


@contextmanager
def _debug_log(directory: Path) -> Generator[None]:
    """Keep all that Understudy logs in `debug.log` there; warnings go to stderr as ever."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(directory / "debug.log", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{directory}/debug.log cannot be written: {error.strerror}") from error
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    stderr = logging.StreamHandler()
    stderr.setLevel(logging.WARNING)
    logger = logging.getLogger("understudy")
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(file)
    logger.addHandler(stderr)
    try:
        yield
    finally:
        logger.removeHandler(file)
        logger.removeHandler(stderr)
        logger.setLevel(level)
        file.close()


_COUNTING_SHARE = 20
"""The store's counts are asked for again after this many times as long as asking took: it grows with the run."""


class RunDisplay(RunMonitor, LiveStatus):
    """What a run tells, as one line of text; thread-safe to read."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: Scheduler | None = None
        self._stage = "starting"
        self._reading = threading.Lock()
        self._store: Store | None = None
        self._began = time.monotonic()
        self._done_before = 0
        self._counts: RunCounts | None = None
        self._count_again = 0.0

    def stage(self, text: str) -> None:
        """Show a stage; one that only counts on is not worth a line of its own elsewhere than on a terminal."""
        # While rollouts run their counters are shown, and no stage is news.
        if self.scheduler is None and text.partition(":")[0] != self._stage.partition(":")[0]:
            self.changed.set()
        self._stage = text

    def running(self, scheduler: Scheduler, store: Store) -> None:
        """Show the rollouts' counters from now on."""
        self._store = store
        self._began = time.monotonic()
        self._done_before = scheduler.progress.done
        self.scheduler = scheduler
        self.changed.set()

    def stopped(self) -> None:
        """Read the store no more."""
        with self._reading:
            self._store = None
            self._stage = "finishing"

    def line(self) -> str:
        """Where the run stands: rollouts done, solved, calls, tokens, time left."""
        with self._reading:
            return self._line()

    def _line(self) -> str:
        if self.scheduler is None or self._store is None:
            return self._stage
        progress = self.scheduler.progress
        counts = self._fresh_counts(self._store, self.scheduler.run_id)
        parts = [
            f"{progress.done}/{progress.total} rollouts",
            f"{progress.solved} solved",
            f"{progress.running} running",
            f"{counts.calls} calls",
            f"{short(counts.prompt_tokens)}+{short(counts.completion_tokens)} tokens",
            self._time_left(progress.done, progress.total),
        ]
        if progress.failed or progress.retried:
            parts.append(f"{progress.failed} failed, {progress.retried} retried")
        if progress.last_error is not None:
            parts.append(f"last fault at the {progress.last_error.boundary}")
        if self.scheduler.draining:
            parts.append("finishing what runs; Ctrl-C again stops at once")
        return " · ".join(parts)

    def _fresh_counts(self, store: Store, run_id: str) -> RunCounts:
        began = time.monotonic()
        if self._counts is None or began >= self._count_again:
            self._counts = store.outcomes.counts(run_id)
            self._count_again = began + _COUNTING_SHARE * (time.monotonic() - began)
        return self._counts

    def _time_left(self, done: int, total: int) -> str:
        fresh = done - self._done_before
        if done == total:
            return "done"
        if fresh == 0:
            return "time left unknown"
        return time_left((time.monotonic() - self._began) / fresh * (total - done))


def print_summary(summary: RunSummary, as_json: bool) -> None:
    """Print the summary of a run to stdout."""
    if as_json:
        print_json(summary)
        return
    facts: list[tuple[str, object]] = [
        ("rollouts", summary.rollouts),
        ("solved", summary.solved),
        ("unsolved", summary.unsolved),
        ("infrastructure failures", summary.infrastructure_failures),
        ("left queued", summary.pending),
        ("calls", summary.calls),
        ("prompt tokens", summary.prompt_tokens),
        ("completion tokens", summary.completion_tokens),
        ("wall clock", f"{summary.wall_s:.1f} s"),
        ("output", summary.output_dir),
    ]
    if summary.suspicious:
        facts.append(("suspicious patches", f"{summary.suspicious}, left out of exports"))
    if summary.cost_usd:
        facts.append(("cost", f"{summary.cost_usd:.4f} US dollars"))
    facts += [("failure", f"{count} × {failure}") for failure, count in summary.failures.items()]
    facts += [("refused task", f"{task}: {reason}") for task, reason in summary.refused_tasks.items()]
    facts += [("note", note) for note in summary.notes]
    print_facts(f"run {summary.run_id}", facts)
    if summary.pending:
        typer.echo("Stopped early; run the same command again to continue.", err=True)
