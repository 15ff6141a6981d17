"""Executes a run from its configuration to its summary: store, validation, model server, gateway, scheduler."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from msgspec import UNSET, Struct, structs
from msgspec.structs import replace

from understudy import __version__
from understudy.agents.base import Agent
from understudy.agents.registry import make_agent
from understudy.checks.protection import protection_of
from understudy.config import cache_dir
from understudy.errors import ConfigError, GraderError, SandboxError, StoreError, TaskError, UnderstudyError
from understudy.gateway.budget import CostCeiling
from understudy.gateway.config import EMBEDDED_MODEL, GatewayConfig
from understudy.gateway.control import GenerationControl
from understudy.gateway.factory import build_models, open_gateway
from understudy.gateway.keys import Keys
from understudy.grade.verdict import validate
from understudy.model.process import start_server
from understudy.run.attempt import RunContext, execute_attempt, prepare_rollout
from understudy.run.config import RunConfig
from understudy.run.engine_load import AgentSlots, ConcurrencyController
from understudy.run.executors import (
    LEASE_S,
    RunEngine,
    RunMonitor,
    WatchServer,
    WorkerFleet,
    executing_alone,
    finish_by_workers,
    run_progress,
    wait_for_leases,
    worker_name,
)
from understudy.run.rollout_files import RolloutFiles
from understudy.run.scheduler import Scheduler
from understudy.run.store_reads import read_stored
from understudy.sandbox.base import Sandboxes
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.leases import executed_elsewhere
from understudy.store.runs import Lease
from understudy.tasks.environment import TaskEnvironment, environment_for
from understudy.tasks.prepare import prepare
from understudy.tasks.records import dump, remember
from understudy.types import AgentIdentity, Attempt, Protection, Rollout, Task, Verdict
from understudy.util.files import locked

_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})

_log = logging.getLogger(__name__)


class RunSummary(Struct, frozen=True, kw_only=True):
    """The final figures of a run, over all its invocations. `wall_s` is this invocation's duration in seconds.

    `suspicious` counts rollouts, solved or not, whose patch may deceive the grader. `cost_usd` sums the calls with
    a known price; `pending` counts rollouts left queued (after draining); `failures` counts infrastructure
    failures by message; `refused_tasks` maps tasks that failed validation to the reason; `notes` are remarks about
    the written files.
    """

    agent: str
    run_id: str
    output_dir: str
    rollouts: int
    solved: int
    unsolved: int
    suspicious: int = 0
    infrastructure_failures: int
    pending: int
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float
    wall_s: float
    failures: dict[str, int]
    refused_tasks: dict[str, str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SharedResources:
    """What several runs that are executed at the same time share. Whoever creates it owns it.

    `gateway` has the addresses of a model's servers, which are not part of a run's identity. `control` pauses the
    gateways of all runs, and their agents share the `agent_slots`.
    """

    gateway: GatewayConfig
    control: GenerationControl
    agent_slots: AgentSlots


class ValidatedTasks(Struct, frozen=True):
    """The usable tasks in their original order, and the refused ones with the reason.

    `protection` says for each usable task whether its verdicts are also checked with twins (rewritten copies of
    its tests, see docs/grading.md), fully, partly or not, and the reason if not fully.
    """

    accepted: list[Task]
    refused: dict[str, str]
    protection: dict[str, tuple[Protection, str]] = {}


async def validate_tasks(
    tasks: Sequence[Task],
    *,
    cache: Path,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    concurrency: int,
    progress: Callable[[int, int], None] = lambda done, total: None,
    forget_failures: bool = False,
) -> ValidatedTasks:
    """Validate every task: its gold patch must score 1 and the empty patch 0.

    Earlier results are cached; with `forget_failures`, tasks that failed are validated again. `progress` gets how
    many are done, and the total. A task that twice cannot be validated because of its sandbox or its checks is
    refused too, so that one task's requirements do not stop the others. Raises other errors.
    """
    slots = asyncio.Semaphore(concurrency)
    refused: dict[str, str] = {}
    protection: dict[str, tuple[Protection, str]] = {}
    done = 0

    async def refusal_of(task: Task) -> UnderstudyError | None:
        """Return why a task cannot be used, or None if it can."""
        try:
            prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
            prepared = await validate(
                prepared,
                sandboxes=sandboxes,
                environment=environment,
                cache=cache,
                forget_failure=forget_failures,
            )
            protection[task.instance_id] = protection_of(task, prepared.options)
        except (TaskError, SandboxError, GraderError) as error:
            return error
        return None

    async def validate_one(task: Task) -> None:
        nonlocal done
        async with slots:
            refusal = await refusal_of(task)
            if refusal is not None and not isinstance(refusal, TaskError):
                refusal = await refusal_of(task)
            if refusal is not None:
                refused[task.instance_id] = str(refusal)
        done += 1
        progress(done, len(tasks))

    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                group.create_task(validate_one(task))
    except* UnderstudyError as errors:
        raise errors.exceptions[0] from None
    accepted = [task for task in tasks if task.instance_id not in refused]
    return ValidatedTasks(accepted, refused, protection)


class RunLimits(Struct, frozen=True, kw_only=True):
    """Limits of a run: seconds that a slot stays empty after an agent, and the maximum cost of all calls.

    With `max_concurrency` so many agents may work at a time as the model servers bear, up to that.
    """

    cooldown_s: float = 0.0
    max_cost_usd: float | None = None
    max_concurrency: int | None = None


_NO_LIMITS = RunLimits()


async def execute_run(
    config: RunConfig,
    tasks: Sequence[Task],
    output_dir: Path,
    *,
    sandboxes: Sandboxes,
    concurrency: int,
    monitor: RunMonitor,
    limits: RunLimits = _NO_LIMITS,
    rewrite: bool = False,
    agent_extras: Mapping[str, str] = _NO_OPTIONS,
    shared: SharedResources | None = None,
    location: StoreLocation | None = None,
    engine: RunEngine | WorkerFleet = "local",
) -> RunSummary:
    """Execute a run, or continue it where an earlier invocation ended.

    An agent's slot stays empty for `limits.cooldown_s` seconds after it. `rewrite` writes the files of already
    ended rollouts again. `agent_extras` are options of the agent that are not part of the run's identity.

    With `shared`, the run is one of several, as in a training loop: it uses their resources and writes no files
    beside the store. Failed rollouts are not tried again, because their group may have been used already, and it
    is no error if none of the tasks is usable.

    With `limits.max_cost_usd`, the calls of all invocations together cost no more than that. If the next call
    could exceed it, ConfigError is raised, and the rollouts in progress are requeued.

    The store is in `output_dir`, or at another `location`. With an `engine` other than `local`, workers execute
    the rollouts (`run.worker`); this process waits for them and writes the files, or returns at once if
    `detached`. A `fleet` is workers that are started for the run.

    Everything that it starts is stopped when it returns, raises or is cancelled. Raises ConfigError, TaskError,
    StoreError, or the error that made continuing pointless.
    """
    if limits.max_cost_usd is not None:
        check_prices(config.gateway)
        if engine != "local":
            raise ConfigError(
                "--max-cost: unsupported with workers, which do not share a cost limit; leave it out, or run "
                "without workers"
            )
    high = limits.max_concurrency
    if high is not None:
        check_max_concurrency(config, concurrency, high, engine)
    started = time.monotonic()
    cache = cache_dir()
    agent = make_agent(config.agent, {**config.agent_options, **agent_extras})
    if problems := agent.problems():
        raise ConfigError("\n".join(problems))
    if not config.starts_server:
        # Validation may take hours, so first check that the models can be used at all.
        monitor.stage("asking for the models")
        await (await build_models(shared.gateway if shared else config.gateway)).close()
    location = output_dir if location is None else location
    lock = locked(
        output_dir / ".lock",
        busy=f"another run is using {output_dir}; wait for it, or give another --output-dir",
        remedy="give an --output-dir that you can write",
    )
    # What is one of several runs goes on with a database that was there before: it waits for its server.
    with lock, ExitStack() as store_lock, Store.open(location, waits=shared is not None) as store:
        if isinstance(location, Path) and not _is_same(location, output_dir):
            busy = f"another run is using the store in {location}; wait for it, or give another --store"
            store_lock.enter_context(locked(location / ".lock", busy=busy))
        await read_stored(store.bucket.check)
        if shared is not None and isinstance(location, StoreUrl):
            await wait_for_leases(store, config.run_id, engine, monitor)
        if engine == "local" and (holders := await read_stored(store.leases.holders, config.run_id)):
            raise StoreError(f"{store.location}: {executed_elsewhere(config.run_id, holders)}")
        monitor.stage("preparing the tasks' environment")
        environment = await asyncio.to_thread(environment_for, sandboxes, cache)
        monitor.stage(f"validating {len(tasks)} tasks")
        validated = await validate_tasks(
            tasks,
            cache=cache,
            sandboxes=sandboxes,
            environment=environment,
            concurrency=concurrency,
            progress=lambda done, total: monitor.stage(f"validating tasks: {done} of {total}"),
        )
        identity = AgentIdentity(config.agent, agent.version)
        await _register_tasks(store, config, validated, exclusive=shared is None)
        # In a directory, a lock keeps other processes out and ends with this process, so its lease expires at
        # once.
        lease = Lease(worker_name(), LEASE_S if isinstance(location, StoreUrl) else 0.0)
        async with AsyncExitStack() as stack:
            # A second process is refused here, before anything of the first one's rollouts is changed.
            lease_watch = None
            if engine == "local":
                lease_watch = await stack.enter_async_context(executing_alone(store, config.run_id, lease))
            else:
                await asyncio.wrap_future(store.leases.open_to_workers(config.run_id, __version__))
            await _register_rollouts(store, config, validated, identity, exclusive=shared is None)
            if not validated.accepted or engine != "local":
                notes: tuple[str, ...] = ()
                if validated.accepted:
                    store_lock.close()
                    outputs = None if shared else RolloutFiles(store, config, output_dir, rewrite=rewrite)
                    notes = await finish_by_workers(store, config.run_id, outputs, monitor, engine)
                wall_s = time.monotonic() - started
                summary = await read_stored(summarize_run, store, config, output_dir, wall_s, validated.refused)
                return replace(summary, notes=notes)
            monitor.stage("starting the model and the gateway")
            ceiling = None
            if limits.max_cost_usd is not None:
                counts = await read_stored(store.outcomes.counts, config.run_id)
                ceiling = CostCeiling(limits.max_cost_usd, counts.cost_usd)
            context, watch = await stack.enter_async_context(
                open_run(
                    config,
                    store,
                    validated.accepted,
                    output_dir,
                    agent=agent,
                    sandboxes=sandboxes,
                    environment=environment,
                    shared=shared,
                    ceiling=ceiling,
                )
            )
            outputs = None if shared else RolloutFiles(store, config, output_dir, rewrite=rewrite)
            if outputs is not None:
                monitor.stage("writing the files of rollouts that ended before")
                await outputs.catch_up()
            progress = await read_stored(run_progress, store, config.run_id)
            slots = shared.agent_slots if shared else AgentSlots(concurrency)
            controller = None
            if high is not None:
                controller = ConcurrencyController(slots, config.gateway.models.high.urls, high=high)
            scheduler = Scheduler(
                store,
                config.run_id,
                partial(_execute_and_write, context, outputs),
                high or concurrency,
                progress,
                cooldown_s=limits.cooldown_s,
                prepare=partial(prepare_rollout, context),
                shared_slots=slots,
                lease=lease if isinstance(location, StoreUrl) else None,
            )
            monitor.running(scheduler, store)
            try:
                await _run_while_serving(
                    scheduler.run(),
                    watch,
                    lease_watch,
                    partial(_watch_ceiling, ceiling) if ceiling else None,
                    controller.watch if controller else None,
                )
                if outputs is not None:
                    await outputs.finish()
            except (asyncio.CancelledError, UnderstudyError) as error:
                if not isinstance(error, StoreError):
                    # Requeue what was interrupted, so that it does not appear to be running.
                    await asyncio.wrap_future(store.leases.give_back(lease))
                    await asyncio.wrap_future(store.runs.recover(config.run_id))
                raise
            finally:
                monitor.stopped()
        wall_s = time.monotonic() - started
        summary = await read_stored(summarize_run, store, config, output_dir, wall_s, validated.refused)
        return summary if outputs is None else replace(summary, notes=outputs.notes())


def _is_same(first: Path, second: Path) -> bool:
    return first.resolve() == second.resolve()


@asynccontextmanager
async def open_run(
    config: RunConfig,
    store: Store,
    tasks: Sequence[Task],
    directory: Path,
    *,
    agent: Agent,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    shared: SharedResources | None = None,
    ceiling: CostCeiling | None = None,
) -> AsyncGenerator[tuple[RunContext, WatchServer | None]]:
    """Open what a run's attempts need: its model server, if it starts one, and a gateway on a Unix socket.

    Yields it with a function that raises when the model server ends. Raises BackendError if the server does not
    start.
    """
    async with _model_server(config, shared, tasks, directory) as (gateway_config, watch):
        keys = Keys(ceiling)
        control = shared.control if shared else None
        if control is None and config.served is not UNSET:
            control = GenerationControl(config.served.version)
        async with open_gateway(gateway_config, store.calls, lambda _: keys, control=control) as parts:
            gateway_socket = directory / "gateway.sock"
            await parts.gateway.start_unix(gateway_socket)
            yield (
                RunContext(
                    config=config,
                    store=store,
                    keys=keys,
                    agent=agent,
                    sandboxes=sandboxes,
                    environment=environment,
                    cache=cache_dir(),
                    gateway_socket=gateway_socket,
                    tasks={task.instance_id: task for task in tasks},
                ),
                watch,
            )


async def _execute_and_write(
    context: RunContext,
    outputs: RolloutFiles | None,
    rollout: Rollout,
    attempt: Attempt,
    final: bool,
    release_slot: Callable[[], None],
) -> Verdict:
    """Carry out an attempt, and write the files of its rollout once that has ended."""
    name = f"{rollout.task_id}, sample {rollout.sample_index}, attempt {attempt.number}"
    _log.debug("%s begins", name)
    try:
        verdict = await execute_attempt(context, rollout, attempt, final, release_slot)
    except UnderstudyError as error:
        _log.debug("%s met a fault at the %s: %s", name, error.boundary, error)
        raise
    _log.debug("%s has reward %g: %s", name, verdict.reward, verdict.reason)
    if outputs is not None:
        await outputs.write(rollout.id)
    return verdict


def summarize_run(
    store: Store, config: RunConfig, output_dir: Path, wall_s: float, refused: dict[str, str]
) -> RunSummary:
    """Return the current summary of a run from its store."""
    figures = structs.asdict(store.outcomes.counts(config.run_id))
    by_status: dict[str, int] = figures.pop("rollouts")
    errors = [rollout.error for rollout in store.runs.rollouts(config.run_id) if rollout.status == "failed"]
    return RunSummary(
        agent=config.agent,
        **figures,
        run_id=config.run_id,
        output_dir=str(output_dir),
        rollouts=sum(by_status.values()),
        infrastructure_failures=by_status.get("failed", 0),
        pending=by_status.get("queuing", 0) + by_status.get("requeuing", 0),
        wall_s=round(wall_s, 3),
        failures=Counter(f"{error.boundary}: {error.message}" for error in errors if error),
        refused_tasks=refused,
    )


async def _register_tasks(store: Store, config: RunConfig, validated: ValidatedTasks, *, exclusive: bool) -> None:
    """Write the run and its tasks to the store. Raises TaskError if an `exclusive` run has no tasks."""
    if exclusive and not validated.accepted:
        reasons = "\n".join(f"  {task}: {reason}" for task, reason in list(validated.refused.items())[:5])
        raise TaskError(
            f"none of the {len(validated.refused)} tasks passed validation; correct them (`understudy tasks "
            f"check` validates them again), or give other --tasks:\n{reasons}"
        )
    await asyncio.wrap_future(store.runs.create(config.run_id, config.record()))
    await asyncio.wrap_future(store.runs.add_tasks(config.run_id, validated.accepted))


async def _register_rollouts(
    store: Store, config: RunConfig, validated: ValidatedTasks, agent: AgentIdentity, *, exclusive: bool
) -> None:
    """Store a run's rollouts, and requeue what an earlier invocation left over and, if `exclusive`, what
    failed.
    """
    run_id = config.run_id
    rollouts = [
        (config.rollout_id(task.instance_id, index), task.instance_id, index)
        for index in range(config.samples)
        for task in validated.accepted
    ]
    await asyncio.wrap_future(store.runs.recover(run_id))
    if exclusive:
        await asyncio.wrap_future(store.runs.requeue_failed(run_id))
    # This comes last, because queued rollouts take the version of the agent that works on them from now on.
    await asyncio.wrap_future(store.runs.create_rollouts(run_id, rollouts, agent))


async def _watch_ceiling(ceiling: CostCeiling) -> None:
    """Wait until the next call could cost too much, then raise ConfigError."""
    await ceiling.reached.wait()
    raise ConfigError(
        f"--max-cost: {ceiling.spent_usd:.4f} of {ceiling.limit_usd:g} US dollars are spent, and the next call "
        "could exceed the limit; to continue, run the same command again with a higher --max-cost (finished "
        "rollouts are not repeated)"
    )


def check_max_concurrency(config: RunConfig, concurrency: int, high: int, engine: RunEngine | WorkerFleet) -> None:
    """Raise ConfigError where the number of agents cannot follow the load of model servers."""
    if engine != "local":
        raise ConfigError(
            "--max-concurrency: unsupported with workers; leave it out, and set --capacity of each worker"
        )
    if config.backend not in ("vllm", "sglang"):
        raise ConfigError(
            f"--max-concurrency: the {config.backend} backend does not report its load, by which "
            "concurrency is adapted; use vllm or sglang, or a fixed --concurrency"
        )
    if high < concurrency:
        raise ConfigError(
            f"--max-concurrency: got {high}, expected at least --concurrency ({concurrency}); raise it, or lower "
            "--concurrency"
        )


def check_prices(config: GatewayConfig) -> None:
    """Raise ConfigError unless every model has a price, with which the cost of calls can be computed."""
    for role, model in config.models.by_role().items():
        if model.effective_price is None:
            raise ConfigError(
                f"--max-cost needs the price of {model.model or 'every model'}, which is missing; give "
                f"`price = {{ input = X, output = Y }}`, in US dollars per million tokens, below [models.{role}] "
                "in the file of --config"
            )


async def _run_while_serving(work: Coroutine[Any, Any, None], *watches: WatchServer | None) -> None:
    """Run the work to its end, unless what it depends on ends first, which raises."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in (work, *(watch() for watch in watches if watch))]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _model_server(
    config: RunConfig, shared: SharedResources | None, tasks: Sequence[Task], output_dir: Path
) -> AsyncGenerator[tuple[GatewayConfig, WatchServer | None]]:
    """Start a model server if the run needs one, and yield the gateway's configuration with its address.

    Also yields a function that raises when that server ends. Raises BackendError if it does not start.
    """
    if shared is not None or not config.starts_server:
        gateway = shared.gateway if shared else config.gateway
        if shared is None and config.served is not UNSET:
            high = replace(gateway.models.high, endpoints=config.served.endpoints)
            gateway = replace(gateway, models=replace(gateway.models, high=high))
        yield gateway, None
        return
    high, tasks_file = config.gateway.models.high, output_dir / "tasks.jsonl"
    dump(tasks, tasks_file)
    remember(tasks)
    async with start_server(
        config.policy,
        weights=Path(config.weights) if config.weights else None,
        version=config.weights_version,
        tasks=None if config.weights else tasks_file,
        policy_args=config.policy_args,
        model_name=high.model or EMBEDDED_MODEL,
    ) as server:
        high = replace(high, base_url=f"{server.url}/v1")
        yield replace(config.gateway, models=replace(config.gateway.models, high=high)), server.watch
