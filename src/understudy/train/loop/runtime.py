"""Opens and closes everything that a loop works with: its directory, server, trainer and collector."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from understudy.errors import ConfigError
from understudy.model.process import start_server
from understudy.run.collector import RolloutCollector, RolloutSettings, TrainedModelServer, WaveStore
from understudy.run.ray_cluster import RayOptions
from understudy.run.ray_workers import ray_fleet
from understudy.sandbox.base import Sandboxes
from understudy.store import Store
from understudy.store.address import StoreUrl, parse_location
from understudy.train.loop.loop import Loop, LoopStopped, Watcher, publishable_path, running_tasks
from understudy.train.loop.state import (
    Evaluation,
    LoopConfig,
    LoopDirectory,
    LoopState,
    StepState,
    WaveDatabase,
    metrics_of,
    version_name,
)
from understudy.train.loop.trainer_process import TrainerProcess, start_trainer
from understudy.train.metrics import Trackers
from understudy.train.options import GRPOOptions, read_options
from understudy.train.publish.base import PathMapping, Publisher
from understudy.train.publish.choice import make_publisher
from understudy.train.teacher import TeacherSettings, open_teacher
from understudy.types import Task
from understudy.util.files import atomic_write, locked
from understudy.util.processes import available_cpus
from understudy.util.settings import option
from understudy.util.statistics import ConfidenceInterval, newcombe

_log = logging.getLogger(__name__)

_SAMPLE_BYTES = 1 << 20
_DIGESTED_FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "tokenizer_config.json")


class LoopRuntime(Struct, frozen=True, kw_only=True):
    """The settings of a loop that do not influence its results.

    Without `urls` the embedded server is started, on `device`. `publish` is how weights get to a server (see
    `make_publisher`); `seen_as` is the loop's directory as that server sees it. `threads` is the number of CPU
    threads of the trainer (0: torch's default). With `token_values_mb`, each wave's store keeps what the trainer
    computed for the tokens of its calls, up to this many MiB; values of the oldest updates are removed first.
    `trackers` are names from `metrics.TRACKERS`, to which the metrics are sent.
    """

    concurrency: Annotated[int, option("Agents at a time [default: CPUs + 1].", "--concurrency", "-j", ge=1)] = (
        field(default_factory=lambda: available_cpus() + 1)
    )
    urls: Annotated[
        tuple[str, ...],
        option("The URL of a running model server, in place of the embedded one; repeatable.", "--base-url"),
    ] = ()
    publish: Annotated[
        str, option("How weights get to the server: disk or lora; for vllm also sleep or transfer.")
    ] = "disk"
    seen_as: Annotated[
        str | None, option("The path of the loop's directory on the server's machine [default: the same].")
    ] = None
    api_key_env: Annotated[str | None, option("The environment variable that holds the server's API key.")] = None
    device: Annotated[
        Literal["cpu", "cuda"],
        option("The device of the embedded server; the trainer always takes a GPU where there is one."),
    ] = "cpu"
    threads: Annotated[int, option("CPU threads of the trainer; 0: torch's default.", ge=0)] = 0
    token_values_mb: Annotated[
        int,
        option(
            "MiB of logprobs, ratios and advantages of learned tokens to keep in each wave's store; 0: none.",
            ge=0,
        ),
    ] = 0
    teacher: TeacherSettings = TeacherSettings()
    usd_per_hour: (
        Annotated[
            float,
            option(
                "The cost of one hour of these machines in US dollars, for --dry-run and --max-cost.",
                ge=0,
                metavar="USD",
            ),
        ]
        | None
    ) = None
    max_cost_usd: (
        Annotated[
            float,
            option(
                "Stop before the loop's hours cost more than this many US dollars, over all invocations.",
                "--max-cost",
                gt=0,
                metavar="USD",
            ),
        ]
        | None
    ) = None
    trackers: tuple[str, ...] = ()
    store: Annotated[
        str | None,
        option(
            "A database for the rollouts of all waves [default: a store in each wave's directory]: "
            "postgresql://USER@HOST/DATABASE."
        ),
    ] = None
    engine: Annotated[
        Literal["local", "workers", "ray"],
        option(
            "Who executes rollouts: this process; workers on the --store (see understudy worker); or ray: workers "
            "that a Ray cluster starts."
        ),
    ] = "local"
    ray: RayOptions = RayOptions()


class EvaluationSummary(Struct, frozen=True, kw_only=True):
    """The results of one evaluation: counts of rollouts, and the solve rate with its 95 % interval."""

    step: int
    version: str
    solved: int
    total: int
    failed: int
    rate: ConfidenceInterval


class LoopSummary(Struct, frozen=True, kw_only=True):
    """The results of a loop over all its invocations; only `wall_s` is this one's. `weights` are those of
    `version`.

    `gain` is the difference between the held-out solve rates of the last and the first evaluated policy.
    """

    output_dir: str
    steps: int
    of: int
    version: str
    weights: str
    rollouts: int
    solved: int
    updates: int
    skipped: dict[str, int]
    refused_tasks: dict[str, str]
    evaluations: tuple[EvaluationSummary, ...]
    gain: ConfidenceInterval | None
    stopped: bool
    wall_s: float


async def run_loop(
    config: LoopConfig,
    root: Path,
    tasks: Sequence[Task],
    eval_tasks: Sequence[Task],
    *,
    sandboxes: Sandboxes,
    runtime: LoopRuntime,
    watcher: Watcher,
    on_collector: Callable[[RolloutCollector], None] = lambda collector: None,
    open_trainer: Callable[..., AbstractAsyncContextManager[TrainerProcess]] = start_trainer,
) -> LoopSummary:
    """Start a loop in the directory `root`, or resume the one there, and run it to its end or until it is drained.

    `on_collector` is called with the collector, by which the loop can be told to drain; `open_trainer` opens the
    trainer.
    Raises ConfigError when the directory holds another loop or when a model, server or option cannot be used,
    otherwise the error that the loop cannot continue after; calling it again with the same arguments resumes.
    """
    started = time.monotonic()
    if runtime.max_cost_usd is not None and not runtime.usd_per_hour:
        raise ConfigError(
            "--max-cost needs --usd-per-hour, because a loop's own server is paid by time; give both"
        )
    rollout_settings = msgspec.convert(config.rollout_settings, RolloutSettings)
    options = read_options(config.trainer)
    _check_publish_method(config, runtime, options)
    database = _database_of(config, runtime)
    directory = LoopDirectory(root, database)
    lock = locked(
        directory.lock,
        busy=f"another loop is using {root}; wait for it, or give another --output-dir",
        remedy="give an --output-dir that you can write",
    )
    with lock:
        directory.enter(config)
        async with contextlib.AsyncExitStack() as stack:
            state = directory.load()
            waves = None if database is None else stack.enter_context(Store.open(database))
            if state is None:
                state = LoopState(version=version_name(0), weights=config.model)
                if database is not None:
                    state = replace(state, database=WaveDatabase(str(database), uuid.uuid4().hex[:12]))
                directory.save(state)
            elif (current_state := _with_current_database(state, waves, root)) != state:
                directory.save(state := current_state)
            if waves is not None and state.database is not None:
                busy = f"another process executes the loop of {root}; wait for it, or stop it"
                stack.enter_context(waves.hold(f"loop {state.database.loop}", busy=busy))
            weights = _existing_weights(directory, state.weights)
            # The trainer resumes from its newest weights, even if they are not published yet.
            resume = None if state.trained is None else _existing_weights(directory, state.trained)
            tracking_watcher = stack.enter_context(TrackingWatcher(watcher, root, runtime.trackers))
            trainer = await stack.enter_async_context(
                open_trainer(Path(config.model), options, resume=resume, threads=runtime.threads)
            )
            served, publisher, watch = await stack.enter_async_context(
                serving(config, directory, runtime, weights, state.version, fresh=not state.steps)
            )
            engine = runtime.engine
            if engine == "ray":
                loop_id = "" if state.database is None else state.database.loop
                engine = await stack.enter_async_context(ray_fleet(database, runtime.ray, loop=loop_id))
            collector = RolloutCollector(
                served,
                rollout_settings,
                sandboxes=sandboxes,
                concurrency=runtime.concurrency,
                version=state.version,
                database=None
                if database is None or state.database is None
                else WaveStore(database, state.database.loop, engine),
            )
            stack.push_async_callback(collector.close)
            on_collector(collector)
            teacher = None
            if runtime.teacher.teacher is not None:
                teacher = await stack.enter_async_context(open_teacher(runtime.teacher, Path(config.model)))
            loop = Loop(
                config,
                directory,
                state,
                tasks={task.instance_id: task for task in tasks},
                eval_tasks=eval_tasks,
                collector=collector,
                trainer=trainer,
                publisher=publisher,
                watcher=tracking_watcher,
                token_values_bytes=runtime.token_values_mb << 20,
                teacher=teacher,
            )
            clock = CostClock(directory.root / "hours.json", runtime.usd_per_hour, runtime.max_cost_usd)
            stopped = await _run_to_end(loop, watch, clock.watch)
            return summary_of(config, directory, loop.state, stopped=stopped, wall_s=time.monotonic() - started)


def _database_of(config: LoopConfig, runtime: LoopRuntime) -> StoreUrl | None:
    """Return the database for the rollouts of all steps; None if each step has a store of its own. Raises
    ConfigError if the options do not fit.
    """
    location = None if runtime.store is None else parse_location(runtime.store)
    if isinstance(location, Path):
        raise ConfigError(
            f"--store {location}: expected the URL of a database, postgresql://USER@HOST/DATABASE; leave it "
            "out to keep the rollouts in the loop's directory"
        )
    if runtime.engine == "local":
        return location
    if location is None:
        raise ConfigError(
            f"--engine {runtime.engine} needs the database that the workers serve; give it with --store "
            "postgresql://USER@HOST/DATABASE"
        )
    if not runtime.urls:
        raise ConfigError(
            f"--engine {runtime.engine} needs a model server that every worker reaches, because the embedded "
            "server "
            "of the loop answers this machine only; give its address with --base-url"
        )
    if config.asynchronous:
        raise ConfigError(
            f"--engine {runtime.engine}: unsupported with --async, as weights would change while workers' "
            "gateways do not pause; leave out one of them"
        )
    return location


def _with_current_database(state: LoopState, waves: Store | None, root: Path) -> LoopState:
    """Return the state of a loop that is resumed, with the URL of its database as it is now. Raises ConfigError if
    its rollouts are elsewhere.
    """
    if state.database is None:
        if waves is not None:
            raise ConfigError(
                f"--store: the loop in {root} keeps its rollouts in that directory; leave out --store"
            )
        return state
    if waves is None:
        raise ConfigError(
            f"the loop in {root} keeps its rollouts in a database; give --store '{state.database.url}', with "
            "the password where it needs one"
        )
    started_runs = [
        *(evaluation.run for evaluation in state.evaluations),
        *(step.run for step in state.published()),
    ]
    if started_runs and waves.runs.of_wave(f"{state.database.loop}/{started_runs[0]}") is None:
        raise ConfigError(
            f"--store: {waves.location} has no rollouts of the loop in {root}; give the database that has "
            f"them, {state.database.url}"
        )
    return replace(state, database=WaveDatabase(str(waves.location), state.database.loop))


def summary_of(
    config: LoopConfig, directory: LoopDirectory, state: LoopState, *, stopped: bool = False, wall_s: float = 0.0
) -> LoopSummary:
    """Return the summary of a loop from its state."""
    finished = [step for step in state.steps if step.phase == "published"]
    evaluated = [evaluation for evaluation in state.evaluations if evaluation.total]
    gain = None
    if len(evaluated) > 1:
        first_evaluation, last_evaluation = evaluated[0], evaluated[-1]
        gain = newcombe(
            (first_evaluation.solved, first_evaluation.total), (last_evaluation.solved, last_evaluation.total)
        )
    return LoopSummary(
        output_dir=str(directory.root),
        steps=len(finished),
        of=max(config.steps, len(finished)),  # --steps may be lowered below the number of steps already made
        version=state.version,
        weights=str(directory.absolute(state.weights)),
        rollouts=sum(step.collected for step in finished),
        solved=sum(step.solved for step in finished),
        updates=sum(step.weights is not None for step in finished),
        skipped=state.skipped(),
        refused_tasks=state.refused,
        evaluations=tuple(
            msgspec.convert(evaluation, EvaluationSummary, from_attributes=True)
            for evaluation in state.evaluations
        ),
        gain=gain,
        stopped=stopped,
        wall_s=round(wall_s, 3),
    )


def model_digest(model: Path) -> str:
    """Return a digest that identifies a model: of its config files, and of the beginning and end of each weights
    file.

    Whole weights files would take too long to hash. Raises ConfigError when they cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(entry for entry in model.iterdir() if entry.is_file()):
            if path.name in _DIGESTED_FILES:
                digest.update(path.name.encode() + path.read_bytes())
            elif path.suffix in (".safetensors", ".bin"):
                with path.open("rb") as file:
                    size = file.seek(0, os.SEEK_END)
                    file.seek(0)
                    digest.update(f"{path.name} {size}".encode() + file.read(_SAMPLE_BYTES))
                    file.seek(max(0, size - _SAMPLE_BYTES))
                    digest.update(file.read())
    except OSError as error:
        raise ConfigError(
            f"{error.filename or model}: cannot be read: {error.strerror}; check its permissions, or give the "
            "directory of another model"
        ) from error
    return digest.hexdigest()[:16]


def _check_publish_method(config: LoopConfig, runtime: LoopRuntime, options: GRPOOptions) -> None:
    """Raise ConfigError for combinations of options whose publishing would fail only after the first update."""
    if runtime.publish == "lora" and options.lora is None:
        raise ConfigError("--publish lora: no adapter is trained, so there is none to publish; add --lora")
    if runtime.publish == "sleep" and config.asynchronous:
        raise ConfigError(
            "--publish sleep: --async collects while the policy is updated, when a sleeping server "
            "cannot answer; leave out --async, or give --publish disk"
        )


def _existing_weights(directory: LoopDirectory, weights: str) -> Path:
    """Return the path of weights that the state names. Raises ConfigError when they are gone."""
    path = directory.absolute(weights)
    if not path.is_dir():
        raise ConfigError(
            f"{path}, the weights that the loop continues from, is missing; restore it, or start again in another "
            "--output-dir"
        )
    return path


@asynccontextmanager
async def serving(
    config: LoopConfig, directory: LoopDirectory, runtime: LoopRuntime, weights: Path, version: str, *, fresh: bool
) -> AsyncGenerator[tuple[TrainedModelServer, Publisher, Callable[[], Awaitable[None]] | None]]:
    """Run or use a server that samples from `weights` as `version`.

    Yields the server, the publisher of new weights, and for the embedded server a coroutine function that raises
    when it ends (otherwise None).
    """
    key = os.environ.get(runtime.api_key_env) if runtime.api_key_env else None
    if runtime.api_key_env and not key:
        raise ConfigError(
            f"--api-key-env: the environment variable {runtime.api_key_env} is not set; set it to the server's "
            "API key, or leave the option out"
        )
    seen_as = PathMapping(directory.root, Path(runtime.seen_as)) if runtime.seen_as else None
    served = TrainedModelServer(
        backend=config.backend,
        urls=runtime.urls,
        model=config.served_model or None,
        tokenizer=config.model,
        tool_format=config.tool_format,
        api_key_env=runtime.api_key_env,
    )
    if runtime.urls:
        publisher = make_publisher(
            config.backend, runtime.urls, method=runtime.publish, api_key=key, seen_as=seen_as
        )
        await _sync_server(publisher, weights, version, fresh=fresh)
        yield served, publisher, None
        return
    lora = runtime.publish == "lora"
    # An adapter is applied to the model that it was trained on, so the server starts with that one.
    base, served_version = (Path(config.model), version_name(0)) if lora else (weights, version)
    async with start_server(weights=base, version=served_version, device=runtime.device) as server:
        url = f"{server.url}/v1"
        served = msgspec.structs.replace(served, urls=(url,), model=config.served_model or server.model)
        publisher = make_publisher("embedded", url, method=runtime.publish)
        if lora:
            await _sync_server(publisher, weights, version, fresh=fresh)
        yield served, publisher, server.watch


async def _sync_server(publisher: Publisher, weights: Path, version: str, *, fresh: bool) -> None:
    """Make an external server sample from the loop's weights, whatever it has loaded.

    At a fresh start, a server that was never given a version is assumed to serve the initial model. Otherwise the
    weights are published even if the server has this version: an interrupted publishing may have left it paused.
    """
    lora = publisher.capabilities.kind == "lora"
    if (fresh and await publisher.current() is None) or (lora and version == version_name(0)):
        return
    await publisher.publish(publishable_path(publisher, weights), version)


class CostClock:
    """Counts the hours of a loop over all its invocations, in a file that is written every `every_s` seconds.

    When an invocation is killed, the time since the last write, at most `every_s` seconds, is not counted.
    """

    def __init__(
        self, path: Path, usd_per_hour: float | None, max_cost_usd: float | None, *, every_s: float = 10.0
    ) -> None:
        self._path = path
        self._rate = usd_per_hour or 0.0
        self._limit = max_cost_usd
        self._every_s = every_s

    async def watch(self) -> None:
        """Count until cancelled. Raises ConfigError when the next interval would cost more than is left of the
        limit.
        """
        seconds = self.seconds()
        while True:
            if self._limit is not None and (seconds + self._every_s) * self._rate / 3600 > self._limit:
                raise ConfigError(
                    f"--max-cost: {seconds / 3600:.2f} hours at {self._rate:g} US dollars an hour have used up "
                    f"{self._limit:g} US dollars; to continue, run the same command again with a higher --max-cost"
                )
            before = time.monotonic()
            try:
                await asyncio.sleep(self._every_s)
            finally:
                seconds += time.monotonic() - before
                atomic_write(self._path, msgspec.json.encode({"seconds": round(seconds, 1)}))

    def seconds(self) -> float:
        """Return the seconds of all invocations so far. Raises ConfigError for a damaged file."""
        try:
            return float(msgspec.json.decode(self._path.read_bytes(), type=dict[str, float])["seconds"])
        except FileNotFoundError:
            return 0.0
        except (OSError, msgspec.MsgspecError, KeyError) as error:
            raise ConfigError(
                f"{self._path}: cannot be read ({error}); restore it, or remove it: the hours so far then no "
                "longer count towards --max-cost"
            ) from error


async def _run_to_end(loop: Loop, *watches: Callable[[], Awaitable[None]] | None) -> bool:
    """Run the loop with its watches; return whether it was stopped early.

    Raises the error that ended the loop, its server or its cost limit.
    """
    async with running_tasks(loop.run(), *(watch() for watch in watches if watch is not None)) as tasks:
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except LoopStopped:
            return True
    return False


class TrackingWatcher(Watcher):
    """A watcher that passes events on to another one and sends metrics to trackers. Used as a context manager.

    The trackers are called in a thread of their own, because they may be slow servers; the first failure is logged
    once, and the loop continues without them.
    """

    def __init__(self, inner: Watcher, directory: Path, names: Sequence[str]) -> None:
        self._inner = inner
        self._trackers = Trackers(directory, names, "understudy-loop")
        self._thread = ThreadPoolExecutor(1, "trackers")
        self._open = bool(names)

    def __enter__(self) -> Self:
        self._submit(self._trackers.__enter__)
        return self

    def __exit__(self, *_: object) -> None:
        self._submit(self._trackers.__exit__)
        self._thread.shutdown()

    def began(self, loop: Loop) -> None:
        """See Watcher."""
        self._inner.began(loop)

    def stepped(self, step: StepState) -> None:
        """See Watcher."""
        self._inner.stepped(step)
        self._submit(lambda: self._trackers.log(step.step, metrics_of(step)))

    def evaluated(self, evaluation: Evaluation) -> None:
        """See Watcher."""
        self._inner.evaluated(evaluation)
        rate = evaluation.rate
        metrics = {"solve_rate": rate.estimate, "low": rate.low, "high": rate.high, "rollouts": evaluation.total}
        self._submit(lambda: self._trackers.log(evaluation.step, {"held_out": metrics}))

    def _submit(self, work: Callable[[], Any]) -> None:
        if self._open:
            self._thread.submit(work).add_done_callback(self._log_failure)

    def _log_failure(self, finished_call: Future[Any]) -> None:
        if (error := finished_call.exception()) is not None and self._open:
            self._open = False
            _log.warning("tracking stopped, because a tracker failed: %s; metrics.jsonl is still written", error)
