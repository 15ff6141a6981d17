"""Collects rollouts for training, in waves on one model server, and has the server's weights changed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from msgspec import UNSET, Struct, field

from understudy.errors import ConfigError
from understudy.gateway.config import (
    OWN_SERVERS,
    BackendKind,
    GatewayConfig,
    ModelConfig,
    ModelsConfig,
    SamplingConfig,
    SamplingParameters,
    check_config,
)
from understudy.gateway.control import GenerationControl
from understudy.run.config import Purpose, RunConfig, ServedPolicy, task_digests
from understudy.run.engine_load import AgentSlots
from understudy.run.executors import RunEngine, RunInProgress, RunMonitor, WorkerFleet
from understudy.run.runner import RunSummary, SharedResources, execute_run
from understudy.run.scheduler import RunProgress
from understudy.sandbox.base import Sandboxes, sandbox_option
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.outcomes import TaskCounts
from understudy.types import ErrorInfo, Task

DRAIN_S = 120.0
"""How many seconds a weight update waits for generations in flight.

Those left continue through it, under two versions.
"""
_POLL_S = 0.1


class TrainedModelServer(Struct, frozen=True, kw_only=True):
    """The server of the model in training: its kind, addresses and model name.

    `tokenizer` is a directory with the model's tokenizer and chat template, `tool_format` the syntax of its tool
    calls; together they allow exact tokens. The addresses are not part of a wave's configuration.
    """

    backend: str = "embedded"
    urls: tuple[str, ...] = ()
    model: str | None = None
    tokenizer: str | None = None
    tool_format: str = "hermes"
    api_key_env: str | None = None


class RolloutSettings(Struct, frozen=True, kw_only=True):
    """How agents work in every wave, and how the model is sampled. `max_tokens` limits each answer."""

    agent: str = "claude-code"
    agent_options: dict[str, str] = field(default_factory=dict[str, str])
    max_turns: int = 30
    timeout_s: float = 1800.0
    temperature: float | None = 1.0
    evaluation_temperature: float | None = 1.0
    max_tokens: int | None = None


class WeightUpdate(Struct, frozen=True, kw_only=True):
    """A change of weights: `seconds` without generation, and how many calls continued through it."""

    version: str
    seconds: float
    cut: int


@dataclass(frozen=True)
class WaveStore:
    """The database that has the waves of a loop, the loop's id there, and who executes them."""

    location: StoreUrl
    loop: str
    engine: RunEngine | WorkerFleet = "local"


class RolloutCollector:
    """Collects waves, several at a time, in sandboxes of one kind, and has their model's weights changed.

    All waves share `concurrency` agent slots, unless workers execute them. Without a `database`, each wave has a
    store in its directory. Belongs to one event loop.
    """

    def __init__(
        self,
        server: TrainedModelServer,
        settings: RolloutSettings,
        *,
        sandboxes: Sandboxes,
        concurrency: int,
        version: str,
        database: WaveStore | None = None,
    ) -> None:
        """Raises ConfigError for a server that training does not support."""
        self._settings = settings
        self._sandboxes = sandboxes
        self._concurrency = concurrency
        self._database = database
        self._endpoints = server.urls
        self._control = GenerationControl(version)
        self._gateway = _gateway_config(msgspec.structs.replace(server, urls=()), settings)
        gateway = _gateway_config(server, settings)
        check_config(gateway)
        self._shared = SharedResources(gateway=gateway, control=self._control, agent_slots=AgentSlots(concurrency))
        self._waves: list[RolloutBatch] = []
        self._draining = False

    @property
    def version(self) -> str:
        """The version of the weights that generates now."""
        assert self._control.version is not None
        return self._control.version

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    def start(
        self,
        tasks: Sequence[Task],
        directory: Path,
        *,
        name: str = "",
        version: str | None = None,
        samples: int,
        seed: int,
        purpose: Purpose = "training",
        model: str | None = None,
    ) -> RolloutBatch:
        """Start a wave with `samples` rollouts of each task in `directory`, or continue the wave that is there.

        In a database, the wave is identified by its `name`. `version` is the policy that samples it at first,
        `model` the model name to request, if it is not the server's own.
        """
        settings, database = self._settings, self._database
        config = RunConfig(
            gateway=_with_model(self._gateway, model),
            purpose=purpose,
            agent=settings.agent,
            agent_options=settings.agent_options,
            sandbox=sandbox_option(self._sandboxes),
            samples=samples,
            seed=seed,
            max_turns=settings.max_turns,
            timeout_s=settings.timeout_s,
            tasks=task_digests(tasks),
            wave=UNSET if database is None else f"{database.loop}/{name}",
            served=UNSET if database is None else ServedPolicy(self._endpoints, version or self.version),
        )
        wave = RolloutBatch(config, tasks, directory if database is None else database.location)
        shared = replace(self._shared, gateway=_with_model(self._shared.gateway, model))
        wave.start(
            execute_run(
                config,
                tasks,
                directory,
                sandboxes=self._sandboxes,
                concurrency=self._concurrency,
                monitor=wave,
                shared=shared,
                location=None if database is None else database.location,
                engine="local" if database is None else database.engine,
            )
        )
        self._waves.append(wave)
        if self._draining:
            wave.drain()
        return wave

    async def update_weights(
        self, version: str, publish: Callable[[], Awaitable[None]], *, drain_s: float = DRAIN_S
    ) -> WeightUpdate:
        """Pause new calls, let those in flight end, change the weights with `publish`, and resume as `version`.

        Calls that do not end within `drain_s` seconds continue through the change. Raises whatever `publish`
        raises; the version then stays the same.
        """
        control, started = self._control, time.monotonic()
        control.pause()
        try:
            cut = await control.drain(drain_s)
            await publish()
            control.publish(version)
        finally:
            control.resume()
        return WeightUpdate(version=version, seconds=time.monotonic() - started, cut=cut)

    def drain(self) -> None:
        """Start no further rollouts. Running ones are finished, and their waves end with them."""
        self._draining = True
        for wave in self._waves:
            wave.drain()

    async def finish(self) -> None:
        """Drain, and wait until nothing runs."""
        self.drain()
        await asyncio.gather(*(wave.wait() for wave in self._waves), return_exceptions=True)

    async def close(self) -> None:
        """Stop every unfinished wave. `start` with the same directory continues it."""
        for wave in self._waves:
            wave.cancel()
        await asyncio.gather(*(wave.wait() for wave in self._waves), return_exceptions=True)


class RolloutBatch(RunMonitor):
    """A wave in progress: rollouts that are collected into a directory with its own store, or into a database."""

    def __init__(self, config: RunConfig, tasks: Sequence[Task], location: StoreLocation) -> None:
        self.location = location
        self.run_id = config.run_id
        self.samples = config.samples
        self.total = config.samples * len(tasks)
        self.status = "waiting"
        self._tasks = [task.instance_id for task in tasks]
        self._scheduler: RunInProgress | None = None
        self._store: Store | None = None
        self._work: asyncio.Task[RunSummary] | None = None
        self._reported = -1
        self._should_drain = False

    # --- called by the collector ------------------------------------------------------------------------

    def start(self, work: Awaitable[RunSummary]) -> None:
        """Start the work."""
        self._work = asyncio.ensure_future(work)

    def drain(self) -> None:
        """Start no further rollouts."""
        self._should_drain = True
        if self._scheduler is not None:
            self._scheduler.drain()

    def cancel(self) -> None:
        """Cancel the work. The wave has ended once everything is closed."""
        if self._work is not None:
            self._work.cancel()

    # --- events of the run (see RunMonitor) --------------------------------------------------------------

    def stage(self, text: str) -> None:
        """Use the stage as the status."""
        self.status = text

    def running(self, scheduler: RunInProgress, store: Store) -> None:
        """Keep the scheduler and the store, whose counts can be read from now on."""
        self._scheduler, self._store = scheduler, store
        self.status = "collecting"
        if self._should_drain:
            scheduler.drain()

    def waiting(self, reason: str) -> None:
        """Show why no worker takes it as the status."""
        self.status = reason or "collecting"

    def stopped(self) -> None:
        """Drop the store, which is about to be closed."""
        self._store = None
        self.status = "ended"

    # --- for the training loop -------------------------------------------------------------------------

    @property
    def ended(self) -> bool:
        """Whether the wave has ended. `wait` returns how."""
        return self._work is not None and self._work.done()

    @property
    def progress(self) -> RunProgress:
        """How many rollouts have ended, by result."""
        return RunProgress(total=self.total) if self._scheduler is None else self._scheduler.progress

    async def wait(self) -> RunSummary:
        """Wait for the end, and return the summary. Raises the error that ended the wave, if any.

        Cancelling the wait does not stop the wave.
        """
        assert self._work is not None
        return await asyncio.shield(self._work)

    async def changed(self) -> None:
        """Return when another rollout has ended since the last call, or when the wave has ended."""
        while not self.ended:
            ended_rollouts = self.progress.done
            if ended_rollouts != self._reported:
                self._reported = ended_rollouts
                return
            assert self._work is not None
            await asyncio.wait((self._work,), timeout=_POLL_S)

    async def task_counts(self) -> dict[str, TaskCounts]:
        """Return the counts of tasks whose rollouts have all ended. Raises StoreError.

        The store is read in a thread, because agents cannot proceed while the event loop is blocked.
        """
        return await asyncio.to_thread(self._read_task_counts, self._store)

    def _read_task_counts(self, store: Store | None) -> dict[str, TaskCounts]:
        if store is None:
            if isinstance(self.location, Path) and not (self.location / "store.db").exists():
                return {}
            with Store.open(self.location, create=False, waits=True) as opened:
                return self._read_task_counts(opened)
        counts = store.outcomes.by_task(self.run_id)
        return {task: count for task, count in counts.items() if count.graded + count.failed == self.samples}

    def last_error(self) -> ErrorInfo | None:
        """The last error of a rollout, or None."""
        return self.progress.last_error


def _with_model(gateway: GatewayConfig, model: str | None) -> GatewayConfig:
    if model is None:
        return gateway
    high = msgspec.structs.replace(gateway.models.high, model=model)
    return msgspec.structs.replace(gateway, models=msgspec.structs.replace(gateway.models, high=high))


def _gateway_config(server: TrainedModelServer, settings: RolloutSettings) -> GatewayConfig:
    """Return the gateway's configuration: exact tokens, with the sampling for training or evaluation."""
    try:
        kind = msgspec.convert(server.backend, BackendKind)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"backend: unsupported kind of server {server.backend[:80]!r}; give one of "
            f"{', '.join(sorted(OWN_SERVERS))}"
        ) from error
    model = ModelConfig(
        backend=kind,
        model=server.model,
        endpoints=server.urls,
        api_key_env=server.api_key_env,
        tokens="exact",
        tokenizer=server.tokenizer,
        tool_format=server.tool_format,
    )
    training = SamplingParameters(temperature=settings.temperature, max_tokens=settings.max_tokens)
    evaluation = SamplingParameters(temperature=settings.evaluation_temperature, max_tokens=settings.max_tokens)
    return GatewayConfig(
        models=ModelsConfig(high=model), sampling=SamplingConfig(training=training, evaluation=evaluation)
    )
