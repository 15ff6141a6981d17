"""`understudy run`: runs an agent on tasks, and grades the rollouts."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections.abc import Generator
from contextlib import AsyncExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import msgspec
import typer
from msgspec import Struct, field

from understudy.cli import EXIT_INTERRUPTED
from understudy.cli.interrupts import run_stoppable
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
    unknown_task,
)
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.model.fetch import model_path
from understudy.run.config import RunConfig, task_digests
from understudy.run.estimate import RunEstimate, estimate, measure
from understudy.run.executors import RunInProgress, RunMonitor
from understudy.run.ray_cluster import RayOptions
from understudy.run.ray_workers import ray_fleet
from understudy.run.runner import RunLimits, RunSummary, check_prices, execute_run
from understudy.sandbox.base import Sandboxes, load_sandboxes, sandbox_option
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.store.outcomes import RunCounts
from understudy.store.turn_filters import sample_rank
from understudy.tasks.load import load_tasks
from understudy.tasks.records import LoadedTasks
from understudy.types import Task
from understudy.util.garbage import collect_garbage_rarely
from understudy.util.processes import raise_file_limit
from understudy.util.settings import option
from understudy.util.text import visible_line

_log = logging.getLogger(__name__)


class RunSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy run`. Those that decide the results are resolved to a `RunConfig`."""

    table: ClassVar[str] = "run"
    needs_table: ClassVar[bool] = False
    model: ModelSettings = ModelSettings()
    task: TaskSettings = TaskSettings()
    limit: Annotated[int, option("Only run a random sample of N tasks, drawn with --seed.", ge=1)] | None = None
    samples: Annotated[int, option("Rollouts per task.", "--samples", "-n", ge=1)] = 1
    concurrency: Annotated[
        int, option("Agents that run at a time [default: CPUs + 1].", "--concurrency", "-j", ge=1)
    ] = field(default_factory=default_concurrency)
    max_concurrency: (
        Annotated[
            int,
            option(
                "Let the number of agents follow the load of vLLM or SGLang, between --concurrency and this "
                "number [default: a fixed number].",
                ge=1,
            ),
        ]
        | None
    ) = None
    cooldown_seconds: Annotated[
        float, option("Seconds to wait before a finished agent's place is given to the next one.", ge=0)
    ] = 0.0
    seed: Annotated[int, option("Seed of everything random in the run.")] = 0
    agent: AgentRunSettings = AgentRunSettings()
    sandbox: SandboxSettings = SandboxSettings()
    output_dir: Annotated[
        Path | None,
        option(
            "The directory for the store and all outputs [default: runs/BACKEND-POLICY-ID].", "--output-dir", "-o"
        ),
    ] = None
    store: Annotated[
        str | None,
        option(
            "Keep the store in this database instead of the output directory: postgresql://USER@HOST/DATABASE."
        ),
    ] = None
    engine: Annotated[
        Literal["local", "workers", "detached", "ray"],
        option(
            "What executes the rollouts: local: this process; workers: processes of `understudy worker`, which "
            "this command waits for; detached: the same without waiting; ray: workers that a Ray cluster starts."
        ),
    ] = "local"
    ray: RayOptions = RayOptions()
    rewrite_reports: Annotated[
        bool, option("Write the report files of rollouts that have already ended again.", "--rewrite-reports")
    ] = False
    drain_timeout: DrainTimeout = DRAIN_TIMEOUT_S
    max_cost_usd: (
        Annotated[
            float,
            option(
                "Maximum cost of the run's calls in US dollars, over all invocations.",
                "--max-cost",
                gt=0,
                metavar="USD",
            ),
        ]
        | None
    ) = None
    measured_by: Annotated[
        Path | None,
        option("With --dry-run: the output directory of a similar run to base the estimate on.", metavar="DIR"),
    ] = None
    dry_run: Annotated[bool, option("Only estimate hours, tokens and dollars; run nothing.", "--dry-run")] = False
    debug: Annotated[
        bool,
        option("Write debug.log to the output directory, and Claude Code's own debug logs to logs/.", "--debug"),
    ] = False


@command
def run(settings: RunSettings, json_: Json = False) -> None:
    """Run an agent on tasks, store every call, and grade every patch.

    The same command again continues the run where it ended: rollouts that ended are not repeated, and those that
    failed because of the infrastructure are tried again. Ctrl-C lets running rollouts finish, for up to
    --drain-timeout seconds; a second Ctrl-C stops at once.
    """
    if not settings.task.tasks:
        raise ConfigError(
            "missing tasks; give them with --tasks or --dataset-path, or make some: understudy tasks make toolz "
            "--count 5 --output tasks.jsonl"
        )
    configs = [run_config_of(settings, agent) for agent in dict.fromkeys(settings.agent.agents)]
    if not configs:
        raise ConfigError(
            "--agent: expected the name of an agent, got none; leave it out for Claude Code, or list the "
            "names with: understudy run --help"
        )
    if settings.max_cost_usd is not None:
        for config in configs:
            check_prices(config.gateway)
    if settings.dry_run:
        print_estimate(asyncio.run(_estimate(configs, settings)), json_)
        return
    raise_file_limit()
    collect_garbage_rarely()
    summaries: list[RunSummary] = []
    for config in configs:
        spent = sum(summary.cost_usd for summary in summaries)
        summary = run_one(config, _settings_of(settings, config, configs, spent))
        print_summary(summary, json_)
        summaries.append(summary)
        if summary.pending and settings.engine != "detached":
            raise typer.Exit(EXIT_INTERRUPTED)
    if any(summary.infrastructure_failures or summary.refused_tasks for summary in summaries):
        raise typer.Exit(1)


def run_one(config: RunConfig, settings: RunSettings) -> RunSummary:
    """Execute one run with its progress on stderr. Raises typer.Exit when it was stopped before it could drain."""
    with live(RunDisplay(), sys.stderr) as display:
        work = _run_tasks(config, settings, display)
        return run_stoppable(work, display.drain, drain_timeout_s=settings.drain_timeout)


def _settings_of(
    settings: RunSettings, config: RunConfig, configs: list[RunConfig], spent_usd: float
) -> RunSettings:
    """Return the settings of one of several runs. Each run has a directory of its own.

    Earlier runs have already spent part of the common cost limit. Raises ConfigError if nothing is left.
    """
    if settings.max_cost_usd is not None:
        budget_left_usd = settings.max_cost_usd - spent_usd
        if budget_left_usd <= 0:
            raise ConfigError(
                f"--max-cost: the runs of other agents have spent {spent_usd:.4f} of {settings.max_cost_usd:g} US "
                f"dollars, so none are left for {config.agent}; run the same command again with a higher "
                "--max-cost"
            )
        settings = msgspec.structs.replace(settings, max_cost_usd=budget_left_usd)
    if settings.output_dir is None or len(configs) == 1:
        return settings
    return msgspec.structs.replace(
        settings, output_dir=settings.output_dir / re.sub(r"[^\w.-]+", "-", config.agent)
    )


def run_config_of(settings: RunSettings, agent_name: str) -> RunConfig:
    """Return the configuration of an agent's run, except its sandboxes and tasks, which are known once the tasks
    are loaded.

    Raises ConfigError for settings that contradict each other.
    """
    model, agent = settings.model, settings.agent
    if model.weights is not None:
        model = msgspec.structs.replace(model, weights=model_path(model.weights))
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
        agent=agent_name,
        agent_options=agent.options_of(agent_name),
        samples=settings.samples,
        seed=settings.seed,
        max_turns=agent.max_turns,
        timeout_s=agent.timeout,
    )


async def _estimate(configs: list[RunConfig], settings: RunSettings) -> RunEstimate:
    """Estimate what the runs of all agents are likely to take. Raises ConfigError without a measurement."""
    if settings.measured_by is None:
        raise ConfigError(
            "--dry-run needs a measurement; give --measured-by DIR, the output of a small run of the same kind, "
            "such as one with --limit 4"
        )
    measured = measure([settings.measured_by])
    sandboxes = load_sandboxes(settings.sandbox.sandbox or LOCAL)
    try:
        loaded = await load_tasks(
            settings.task.tasks,
            sandboxes=sandboxes,
            cache=cache_dir(),
            images=settings.task.images,
            instance_ids=settings.task.ids,
        )
    finally:
        await sandboxes.aclose()
    rollouts = len(tasks_to_run(loaded, settings)) * settings.samples
    price = configs[0].gateway.models.high.effective_price
    return estimate(measured, rollouts * len(configs), settings.concurrency, price)


def print_estimate(result: RunEstimate, as_json: bool) -> None:
    """Print an estimate to stdout."""
    if as_json:
        print_json(result)
        return
    dollars = "no price is known" if result.cost_usd is None else f"{result.cost_usd:.2f} US dollars"
    facts: list[tuple[str, object]] = [
        ("rollouts", result.rollouts),
        ("measured by", f"{result.measured} rollouts"),
        ("calls", result.calls),
        ("prompt tokens", short(result.prompt_tokens)),
        ("completion tokens", short(result.completion_tokens)),
        ("hours", f"{result.hours:.2f}"),
        ("cost", dollars),
    ]
    print_facts("estimate; nothing was run", facts)


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
        tasks = tasks_to_run(loaded, settings)
        if chosen is None and kind == LOCAL and sandbox_for(tasks) == DOCKER:
            sandboxes = _open_sandboxes(DOCKER, settings.sandbox, display)
        config = msgspec.structs.replace(config, sandbox=sandbox_option(sandboxes), tasks=task_digests(tasks))
        summary = await _run_in(sandboxes, config, tasks, settings, display)
    finally:
        await sandboxes.aclose()
    absent = dict.fromkeys(loaded.unknown, f"there is no such instance in {', '.join(settings.task.tasks)}")
    return msgspec.structs.replace(summary, refused_tasks=summary.refused_tasks | absent)


async def _run_in(
    sandboxes: Sandboxes, config: RunConfig, tasks: list[Task], settings: RunSettings, display: RunDisplay
) -> RunSummary:
    if config.agent_options.get("run_method") == "python":
        from understudy.agents.claude_install import sdk_directories

        display.stage("preparing the Python that drives Claude Code")
        await asyncio.to_thread(sdk_directories, cache_dir())
    model = Path(config.weights).name if config.weights else config.gateway.models.high.model or config.model
    label = config.policy or model.replace("/", "-")
    directory = (settings.output_dir or Path("runs") / f"{config.backend}-{label}-{config.run_id}").absolute()
    async with AsyncExitStack() as stack:
        stack.enter_context(_debug_log(directory) if settings.debug else nullcontext())
        engine, store = settings.engine, None if settings.store is None else parse_location(settings.store)
        if engine == "ray":
            display.stage("asking the Ray cluster")
            engine = await stack.enter_async_context(ray_fleet(store, settings.ray))
        _log.debug("run %s: %d tasks in %s sandboxes", config.run_id, len(tasks), config.sandbox)
        return await execute_run(
            config,
            tasks,
            directory,
            sandboxes=sandboxes,
            concurrency=settings.concurrency,
            monitor=display,
            limits=RunLimits(
                cooldown_s=settings.cooldown_seconds,
                max_cost_usd=settings.max_cost_usd,
                max_concurrency=settings.max_concurrency,
            ),
            rewrite=settings.rewrite_reports,
            location=store,
            engine=engine,
            agent_extras={"debug": "1"} if settings.debug and config.agent == "claude-code" else {},
        )


def tasks_to_run(loaded: LoadedTasks, settings: RunSettings) -> list[Task]:
    """Return the tasks to run.

    Rejected and unavailable tasks are reported on stderr. Raises TaskError if none is left.
    """
    for line in loaded.report():
        typer.echo(f"understudy: {line}", err=True)
    for id in loaded.unknown:
        typer.echo(f"understudy: {unknown_task(id, settings.task)}; it is left out", err=True)
    if not loaded.tasks:
        raise TaskError(
            f"--instance-ids: none of the ids is a usable task of {', '.join(settings.task.tasks)}; correct the "
            "ids or the rows that the lines above name"
        )
    ids = sorted((task.instance_id for task in loaded.tasks), key=lambda id: sample_rank(id, settings.seed))
    chosen = set(ids[: settings.limit])
    return [task for task in loaded.tasks if task.instance_id in chosen]


def _open_sandboxes(kind: str, settings: SandboxSettings, display: RunDisplay) -> Sandboxes:
    """Open sandboxes of a kind. Raises ConfigError, also for options that the kind does not support."""
    options = settings.image_options
    if kind == DOCKER:
        return load_sandboxes(kind, {**options, "progress": display.stage})
    if options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in options)
        raise ConfigError(
            f"{flags}: only applies to container images, which {kind} sandboxes do not use; use --sandbox docker"
        )
    return load_sandboxes(kind)


@contextmanager
def _debug_log(directory: Path) -> Generator[None]:
    """Write all log messages of Understudy to `debug.log` in this directory.

    Warnings also go to stderr as usual.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = logging.FileHandler(directory / "debug.log", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--debug: {directory}/debug.log cannot be written: {error.strerror}; choose another --output-dir, or "
            "leave out --debug"
        ) from error
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
"""The store's counts are read again after this many times as long as reading them took, which grows with the
run.
"""


class RunDisplay(RunMonitor, LiveStatus):
    """Shows a run's progress as one line of text. Thread-safe to read."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler: RunInProgress | None = None
        self._stage = "starting"
        self._wait_reason = ""
        self._reading = threading.Lock()
        self._store: Store | None = None
        self._began = time.monotonic()
        self._done_before = 0
        self._counts: RunCounts | None = None
        self._next_count_at = 0.0

    def stage(self, text: str) -> None:
        """Show a stage. A stage that only counts up gets its own line only on a terminal."""
        # While rollouts run, their counters are shown instead of stages.
        if self.scheduler is None and text.partition(":")[0] != self._stage.partition(":")[0]:
            self.changed.set()
        self._stage = text

    def running(self, scheduler: RunInProgress, store: Store) -> None:
        """Show the rollouts' counters from now on."""
        self._store = store
        self._began = time.monotonic()
        self._done_before = scheduler.progress.done
        self.scheduler = scheduler
        self.changed.set()

    def waiting(self, reason: str) -> None:
        """Show why no worker works on the run."""
        reason = visible_line(reason)
        if reason != self._wait_reason:
            self._wait_reason = reason
            if reason:
                self.changed.set()

    def drain(self) -> bool:
        """Start no more rollouts. Returns False if none was started yet, or if this was called before."""
        if self.scheduler is None or self.scheduler.draining:
            return False
        self.scheduler.drain()
        return True

    def stopped(self) -> None:
        """Stop reading the store."""
        with self._reading:
            self._store = None
            self._stage = "finishing"

    def line(self) -> str:
        """Return the run's status as a line: rollouts done, solved, calls, tokens, time left."""
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
        if self._wait_reason:
            parts.append(self._wait_reason)
        if self.scheduler.draining:
            parts.append("finishing what runs; Ctrl-C again stops at once")
        return " · ".join(parts)

    def _fresh_counts(self, store: Store, run_id: str) -> RunCounts:
        began = time.monotonic()
        if self._counts is None or began >= self._next_count_at:
            self._counts = store.outcomes.counts(run_id)
            self._next_count_at = began + _COUNTING_SHARE * (time.monotonic() - began)
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
