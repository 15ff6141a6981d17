"""Carrying out what `understudy run` was told: tasks loaded, a sandbox chosen, signals heard, logs kept."""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import typer
from msgspec import Struct

from understudy.cli.display.run_progress import Display
from understudy.cli.interrupts import run_stoppable
from understudy.cli.selection import DOCKER, LOCAL, kind_for
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.run.config import RunConfig, task_digests
from understudy.run.runner import RunSummary, execute_run
from understudy.sandbox.base import Sandboxes, load_sandboxes
from understudy.tasks.datasets.images import ImageChoice
from understudy.tasks.load import load_tasks
from understudy.tasks.records import LoadedTasks
from understudy.types import Task

_log = logging.getLogger(__name__)


class Order(Struct, frozen=True, kw_only=True):
    """What a run is to do, besides what it is.

    `sandbox` is None where it is chosen by the tasks; `image_options` are those of sandboxes that run images.
    """

    config: RunConfig
    specs: tuple[str, ...]
    instance_ids: tuple[str, ...] | None
    limit: int | None
    images: ImageChoice
    sandbox: str | None
    image_options: dict[str, Any]
    output_dir: Path | None
    concurrency: int
    cooldown_s: float
    rewrite: bool
    debug: bool


def carry_out(order: Order, monitor: Display) -> RunSummary:
    """Run to the end; the first Ctrl-C or SIGTERM drains, the second stops at once."""
    # Every rollout holds some descriptors, and an agent may hold many of the gateway's.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def drain() -> bool:
        scheduler = monitor.scheduler
        if scheduler is None or scheduler.draining:
            return False
        scheduler.drain()
        return True

    return run_stoppable(_work(order, monitor), drain)


async def _work(order: Order, monitor: Display) -> RunSummary:
    monitor.stage("reading the tasks")
    kind = order.sandbox or (DOCKER if order.image_options else LOCAL)
    sandboxes = _opened(kind, order, monitor)
    try:
        loaded = await load_tasks(
            order.specs,
            sandboxes=sandboxes,
            cache=cache_dir(),
            images=order.images,
            instance_ids=order.instance_ids,
        )
        tasks = _chosen(loaded, order)
        if order.sandbox is None and kind == LOCAL and kind_for(tasks) == DOCKER:
            sandboxes = _opened(DOCKER, order, monitor)
        return await _conducted(order, tasks, sandboxes, monitor, loaded.unknown)
    finally:
        await sandboxes.aclose()


async def _conducted(
    order: Order, tasks: list[Task], sandboxes: Sandboxes, monitor: Display, unknown: tuple[str, ...]
) -> RunSummary:
    config = msgspec.structs.replace(order.config, sandbox=sandboxes.name, tasks=task_digests(tasks))
    if config.agent_options.get("run_method") == "python":
        from understudy.agents.claude_sdk import runtime

        monitor.stage("preparing the Python that drives Claude Code")
        await asyncio.to_thread(runtime, cache_dir())
    model = Path(config.weights).name if config.weights else config.gateway.models.high.model or config.model
    label = config.policy or model.replace("/", "-")
    directory = (order.output_dir or Path("runs") / f"{config.backend}-{label}-{config.run_id}").absolute()
    with _debug_log(directory) if order.debug else nullcontext():
        _log.debug("run %s: %d tasks in %s sandboxes", config.run_id, len(tasks), config.sandbox)
        summary = await execute_run(
            config,
            tasks,
            directory,
            sandboxes=sandboxes,
            concurrency=order.concurrency,
            monitor=monitor,
            cooldown_s=order.cooldown_s,
            rewrite=order.rewrite,
            agent_extras={"debug": "1"} if order.debug and config.agent == "claude-code" else {},
        )
    absent = dict.fromkeys(unknown, f"there is no such instance in {', '.join(order.specs)}")
    return msgspec.structs.replace(summary, refused_tasks=summary.refused_tasks | absent)


def _chosen(loaded: LoadedTasks, order: Order) -> list[Task]:
    """The tasks to run. Raises TaskError when there is none."""
    for line in loaded.report():
        typer.echo(f"understudy: {line}", err=True)
    given = ", ".join(order.specs)
    for id in loaded.unknown:
        typer.echo(f"understudy: there is no instance {id!r} in {given}", err=True)
    if not loaded.tasks:
        raise TaskError(f"no task is left to run; look for the ids that {given} has, and for refused rows above")
    return loaded.tasks[: order.limit]


def _opened(kind: str, order: Order, monitor: Display) -> Sandboxes:
    """The kind of sandbox called `kind`. Raises ConfigError also for options that it does not have."""
    if kind == DOCKER:
        return load_sandboxes(kind, {**order.image_options, "progress": monitor.stage})
    if order.image_options:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in order.image_options)
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
    said = logging.StreamHandler()
    said.setLevel(logging.WARNING)
    ours = logging.getLogger("understudy")
    before = ours.level
    ours.setLevel(logging.DEBUG)
    ours.addHandler(file)
    ours.addHandler(said)
    try:
        yield
    finally:
        ours.removeHandler(file)
        ours.removeHandler(said)
        ours.setLevel(before)
        file.close()
