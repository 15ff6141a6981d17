"""The configuration and the state of a loop: `loop.json` and `state.json` in its directory, each replaced
atomically.

    loop.json                        the configuration; the same command again resumes the loop
    state.json                       the progress, written after every change
    metrics.jsonl                    the metrics of every update, one line per step
    steps/step-0001/run/             the wave that the step started, with a store of its own
    steps/step-0001/groups.msgpack   the groups that its update learned from
    steps/step-0001/weights/         the new weights, while they are kept
    evaluations/step-0000/           the held-out tasks, as the policy of that step solved them
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Raw, Struct, field, to_builtins
from msgspec.structs import replace

from understudy.errors import ConfigError, StoreError
from understudy.store.address import StoreLocation, StoreUrl
from understudy.util.files import atomic_write, sync_tree
from understudy.util.settings import option
from understudy.util.statistics import ConfidenceInterval, check_share, wilson

_T = TypeVar("_T")

Phase = Literal["collecting", "collected", "updated", "published"]
"""What a step is doing or has done: its rollouts run, its groups are written, it was trained, it is published."""

CHANGEABLE_SETTINGS = frozenset({"steps", "keep", "eval_every"})
"""Settings that may be changed when a loop is resumed."""

RATE_DECAY = 0.7
"""The factor by which earlier counts of a task shrink with each step, because an older policy made them."""

_OTHER_CONTENTS = {"store.db": "a run", "config.json": "a model", "training": "a training"}
"""Files that show that a directory is not a loop's. Overwriting the run or model there would delete the loop."""


class LoopSchedule(Struct, frozen=True, kw_only=True):
    """The schedule of a loop, a part of its configuration.

    Each step starts new groups of `samples` rollouts, so that there are `groups` with the unused ones of earlier
    steps. An asynchronous loop updates as soon as the share `quorum` of a step's groups has ended, and drops
    groups whose oldest token is more than `max_staleness` versions old. Every update except the last step's needs
    at least `min_groups` groups whose rewards differ. The weights of `keep` steps are kept on disk.
    """

    steps: Annotated[
        int,
        option(
            "Training steps; each collects rollouts and updates the policy, unless nothing can be "
            "learned from them.",
            ge=1,
        ),
    ] = 10
    groups: Annotated[int, option("Groups (tasks) in each step.", ge=1)] = 8
    samples: Annotated[int, option("Rollouts of each task in a step.", "--samples", "-n", ge=2)] = 8
    eval_every: Annotated[
        int,
        option(
            "Number of steps between evaluations on the held-out tasks; 0: only before the first and after "
            "the last step.",
            ge=0,
        ),
    ] = 0
    eval_samples: Annotated[int, option("Rollouts of each held-out task in an evaluation.", ge=1)] = 1
    asynchronous: Annotated[bool, option("Collect the next groups while the policy is updated.", "--async")] = (
        False
    )
    max_staleness: Annotated[
        int, option("With --async: drop groups whose oldest token is more versions old than this.", ge=0)
    ] = 2
    quorum: Annotated[
        float, option("With --async: update as soon as this share of a step's groups has ended.", ge=0, le=1)
    ] = 0.75
    min_groups: Annotated[
        int,
        option(
            "Wait with an update for at least this many groups with differing rewards, except at the last step.",
            ge=0,
        ),
    ] = 0
    keep: Annotated[
        int, option("Steps to keep the weights of: the current ones, the best evaluated, then the latest.", ge=1)
    ] = 3
    backend: Annotated[str, option("The kind of model server: embedded, vllm or sglang.")] = "embedded"
    served_model: Annotated[str, option("The model's name at that server [default: its directory].")] = ""
    tool_format: Annotated[str, option("The syntax of the model's tool calls.")] = "hermes"


class LoopConfig(LoopSchedule, frozen=True, kw_only=True, rename={"rollout_settings": "manner"}):
    """Everything that decides a loop's results.

    `tasks` and `eval_tasks` map instance ids to digests of the task records. `trainer` holds the options of the
    updates and `rollout_settings` those of agents and sampling (`run.collector.RolloutSettings`), both as JSON
    values. In files it is called `manner`, as in the first release, so that older loops continue.
    """

    model: str
    model_digest: str
    tasks: dict[str, str]
    eval_tasks: dict[str, str] = field(default_factory=dict[str, str])
    seed: int = 0
    sandbox: str = "local"
    rollout_settings: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def directory_id(self) -> str:
        """Return eight hex digits that identify the loop's directory; they do not depend on `steps`, `keep` and
        `eval_every`.
        """
        values = to_builtins(replace(self, steps=0, keep=0, eval_every=0))
        # The digest depends on the order of the fields, which must stay as in the first release: else existing
        # loops are not found.
        encoded = {name: Raw(msgspec.json.encode(values[name], order="deterministic")) for name in _DIGEST_ORDER}
        return hashlib.sha256(msgspec.json.encode(encoded)).hexdigest()[:8]


_DIGEST_ORDER = (
    "model", "model_digest", "backend", "served_model", "tool_format", "tasks", "eval_tasks", "steps", "groups",
    "samples", "eval_every", "eval_samples", "seed", "asynchronous", "max_staleness", "quorum", "min_groups",
    "sandbox", "manner", "trainer", "keep",
)  # fmt: skip


class GroupRef(Struct, frozen=True, array_like=True, order=True):
    """Identifies the rollouts of a task in a step's wave. If several agents worked on the task, it has a group for
    each.
    """

    wave: int
    task: str


class StepState(Struct, frozen=True, kw_only=True):
    """The record of one step."""

    step: int
    phase: Phase
    run: str
    """The directory of its wave, the rollouts that it started, relative to the loop's."""
    sampled_by: str
    """The policy version under which the collection of its wave began."""
    tasks: tuple[str, ...]
    """The tasks of its wave."""
    version: str = ""
    """The policy version after the step: a new one if its update changed the weights."""
    weights: str | None = None
    used: tuple[GroupRef, ...] = ()
    """The groups that the update learned from."""
    dropped: tuple[GroupRef, ...] = ()
    """The groups that were too old or had nothing to learn from."""
    held: tuple[GroupRef, ...] = ()
    """The groups that wait for the next step, because too few groups had differing rewards."""
    collected: int = 0
    """How many graded rollouts are in used or held groups; a group counts only in the first step that has it."""
    solved: int = 0
    """How many of the collected rollouts got the full reward."""
    reward: float = 0.0
    """The mean reward of the collected rollouts."""
    groups: int = 0
    """The number of groups that the update got."""
    staleness: int = 0
    """How many versions the oldest group of the update was behind."""
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    """How many items were not learned from, by reason."""
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    """The trainer's UpdateReport."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """The duration of each phase."""
    cut: int = 0
    """The number of calls that ran while the weights changed, so that they began under one version and ended under
    another.
    """

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.collected:
            raise ValueError(
                f"step {self.step}: solved is {self.solved}, expected 0 to {self.collected}, the number of "
                "collected rollouts"
            )


class Evaluation(Struct, frozen=True, kw_only=True):
    """How well a policy version solved the held-out tasks: `solved` of `total` graded rollouts.

    `run` is the run's directory, relative to the loop's. `tasks` maps each task to its solved and graded rollouts.
    `failed` rollouts ended by an infrastructure failure and are not in `total`.
    """

    step: int
    version: str
    run: str
    solved: int
    total: int
    failed: int = 0
    tasks: dict[str, tuple[int, int]] = {}
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for solved, total in ((self.solved, self.total), *self.tasks.values()):
            check_share(solved, total)

    @property
    def rate(self) -> ConfidenceInterval:
        """Return the solve rate with Wilson's 95 % interval."""
        return wilson(self.solved, self.total)


class TaskSolveRate(Struct, frozen=True, kw_only=True):
    """A task's recent solve rate: `solved` of `tried` rollouts, weighted by age, and the step that tried
    it last.
    """

    tried: float = 0.0
    solved: float = 0.0
    step: int = 0

    @property
    def expected(self) -> float:
        """Return the expected solve rate: one half for a task that was never tried."""
        return (self.solved + 0.5) / (self.tried + 1.0)

    def after(self, tried: int, solved: int, step: int) -> TaskSolveRate:
        """Return the rate after further rollouts; earlier ones are weighted down by RATE_DECAY."""
        return TaskSolveRate(
            tried=RATE_DECAY * self.tried + tried, solved=RATE_DECAY * self.solved + solved, step=step
        )


class WaveDatabase(Struct, frozen=True):
    """The database that has the rollouts of a loop: its `url` without a password, and the `loop`'s id there."""

    url: str
    loop: str


class WaveLocation(Struct, frozen=True):
    """The store of the rollouts of a step or an evaluation (a wave); in a database, the run whose configuration
    has it as its `wave`.
    """

    store: StoreLocation
    wave: str | None = None

    def __str__(self) -> str:
        return str(self.store)


class LoopState(Struct, frozen=True, kw_only=True):
    """The progress of a loop.

    `weights` are those of `version`, relative to the loop's directory or absolute. `refused` maps tasks that did
    not pass validation, including held-out ones, to the reason. Without a `database`, each step and each
    evaluation has a store in its own directory.
    """

    version: str
    weights: str
    steps: tuple[StepState, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    rates: dict[str, TaskSolveRate] = field(default_factory=dict[str, TaskSolveRate])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    database: WaveDatabase | None = None

    def __post_init__(self) -> None:
        if any(step.step != number for number, step in enumerate(self.steps, 1)):
            raise ValueError(
                f"the steps have the numbers {[step.step for step in self.steps]}, expected 1 to "
                f"{len(self.steps)}, in this order"
            )

    @property
    def done(self) -> int:
        """Return the number of steps that have ended, with their weights published."""
        return len(self.published())

    def published(self) -> tuple[StepState, ...]:
        """Return the steps that have ended, with their weights published."""
        return tuple(step for step in self.steps if step.phase == "published")

    @property
    def trained(self) -> str | None:
        """Return the newest weights that an update made, even if they are not published yet; None before the first
        update.
        """
        return next((step.weights for step in reversed(self.steps) if step.weights is not None), None)

    def behind(self, number: int) -> int:
        """Return how many versions were published after that of step `number`."""
        return sum(step.weights is not None and step.step > number for step in self.published())

    def step(self, number: int) -> StepState | None:
        """Return a step by its number, which counts from 1; None if it has not begun."""
        return self.steps[number - 1] if 0 < number <= len(self.steps) else None

    def with_step(self, step: StepState) -> LoopState:
        """Return the state with `step` added or replaced. Raises ValueError when an earlier step is missing."""
        if not 0 < step.step <= len(self.steps) + 1:
            raise ValueError(
                f"internal error: step {step.step} cannot be added to {len(self.steps)} steps; expected a "
                f"number from 1 to {len(self.steps) + 1}"
            )
        return replace(self, steps=(*self.steps[: step.step - 1], step, *self.steps[step.step :]))

    def pending(self) -> tuple[GroupRef, ...]:
        """Return the groups that were started but not used, dropped or refused, the oldest first."""
        finished_groups = {ref for step in self.steps for ref in (*step.used, *step.dropped)}
        started = (GroupRef(step.step, task) for step in self.steps for task in step.tasks)
        return tuple(ref for ref in started if ref not in finished_groups and ref.task not in self.refused)

    def skipped(self) -> dict[str, int]:
        """Return how many items were not learned from, by reason, over all steps."""
        total = Counter[str]()
        for step in self.steps:
            total.update(step.skipped)
        return dict(total)


def version_name(step: int) -> str:
    """Return the name of the policy version that a step makes; step 0 is the initial model."""
    return f"step-{step:04}"


def step_number(version: str | None) -> int | None:
    """Return the number of the training step in a policy version's name (`step-0007`); None for another name."""
    name, dash, digits = (version or "").rpartition("-")
    return int(digits) if name == "step" and dash and digits.isdecimal() else None


class LoopDirectory:
    """The paths of a loop's files. Its waves may be in a `database`, whose URL is stored without its password."""

    def __init__(self, root: Path, database: StoreUrl | None = None) -> None:
        self.root = root
        self._database = database

    @property
    def lock(self) -> Path:
        """Return the path of the lock file of the process that runs the loop."""
        return self.root / ".lock"

    def step(self, number: int) -> Path:
        """Return the directory of a step."""
        return self.root / "steps" / version_name(number)

    def run(self, number: int) -> Path:
        """Return the output directory of the rollouts that a step started."""
        return self.step(number) / "run"

    def groups(self, number: int) -> Path:
        """Return the file with the groups that a step's update learns from."""
        return self.step(number) / "groups.msgpack"

    def token_values(self, number: int) -> Path:
        """Return the temporary file of the values that the trainer computed for tokens. They are moved to the
        rollouts' stores later.
        """
        return self.step(number) / "token_values.msgpack"

    def weights(self, number: int) -> Path:
        """Return the directory of the weights that a step's update made."""
        return self.step(number) / "weights"

    def evaluation(self, number: int) -> Path:
        """Return the output directory of the evaluation after a step."""
        return self.root / "evaluations" / version_name(number)

    def relative(self, path: Path) -> str:
        """Return a path as the state stores it: relative to the loop's directory if it is inside."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def absolute(self, path: str) -> Path:
        """Return the path for a path that the state stores."""
        return self.root / path

    def wave(self, state: LoopState, run: str) -> WaveLocation:
        """Return where the rollouts of a step or an evaluation are stored. `run` is the state's name for them."""
        if state.database is None:
            return WaveLocation(self.absolute(run))
        url = self._database or StoreUrl(state.database.url)
        return WaveLocation(url, f"{state.database.loop}/{run}")

    # --- loop.json and state.json ----------------------------------------------------------------------

    def enter(self, config: LoopConfig) -> None:
        """Write loop.json. Raises ConfigError when the directory holds another loop, a run or a model."""
        path = self.root / "loop.json"
        existing = read_json(path, LoopConfig)
        if existing is None and (
            foreign_file := next((name for name in _OTHER_CONTENTS if (self.root / name).exists()), None)
        ):
            raise ConfigError(
                f"{self.root} holds {_OTHER_CONTENTS[foreign_file]} ({foreign_file}), not a loop; give another "
                "--output-dir"
            )
        if existing is not None:
            before, now = (msgspec.to_builtins(settings) for settings in (existing, config))
            differing = [key for key in now if key not in CHANGEABLE_SETTINGS and before.get(key) != now[key]]
            if differing:
                differences = _describe_differences(differing, before, now)
                raise ConfigError(
                    f"{self.root} holds another loop (it differs in {differences}); give "
                    "the same options to resume it, or another --output-dir"
                )
        write_json(path, config)

    def load(self) -> LoopState | None:
        """Return the saved state; None if the loop has not begun. Raises StoreError for a damaged file."""
        return read_json(self.root / "state.json", LoopState)

    def save(self, state: LoopState) -> None:
        """Replace state.json and metrics.jsonl, durably. Raises StoreError."""
        write_json(self.root / "state.json", state)
        updated_steps = [step for step in state.steps if step.phase in ("updated", "published")]
        lines = [msgspec.json.encode(metrics_of(step)) + b"\n" for step in updated_steps]
        replace_file(self.root / "metrics.jsonl", b"".join(lines))


def metrics_of(step: StepState) -> dict[str, Any]:
    """Return the line of a step in metrics.jsonl: its update's report, with figures about the groups."""
    return {
        **step.report,
        "step": step.step,
        "version": step.version,
        "reward": step.reward,
        "collected": step.collected,
        "solved": step.solved,
        "groups": step.groups,
        "staleness": step.staleness,
        "skipped": step.skipped,
        "seconds": step.seconds.get("update", 0.0),
    }


def read_json(path: Path, kind: type[_T]) -> _T | None:
    """Return the content of a JSON file; None if the file does not exist. Raises StoreError when it is invalid."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be read: {error.strerror}; check its permissions, then run the same command again"
        ) from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path}: invalid content ({error}); restore it from a copy, or start again in another --output-dir"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file, atomically and durably. Raises StoreError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file atomically and durably: after a power cut it has the old or the new content.

    Raises StoreError.
    """
    with _explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content, fsync=True, temporary=path.with_name(f".{path.name}.new"))


def make_durable(path: Path) -> None:
    """Flush a file, or a directory with all its content, to disk. Raises StoreError."""
    with _explain_write_errors(path):
        sync_tree(path)


@contextlib.contextmanager
def _explain_write_errors(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = (
            f"cannot be written: {error.strerror}; check the free disk space and the permissions of its "
            "directory, then run the same command again"
        )
        raise StoreError(f"{path}: {reason}") from error


def _describe_differences(keys: list[str], before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the keys that differ, with the values before and now where these are short."""
    parts: list[str] = []
    for key in keys:
        if key == "model_digest":
            if "model" not in keys:
                parts.append(f"what is in {now['model']}, which has changed since")
        elif isinstance(now[key], dict) and isinstance(before.get(key), dict):
            old: dict[str, Any] = before[key]
            new: dict[str, Any] = now[key]
            differing_names = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            parts.append(f"{key}: {', '.join(differing_names[:4])}{', …' if len(differing_names) > 4 else ''}")
        else:
            parts.append(f"{key}: {before.get(key)!r} before, {now[key]!r} now")
    return "; ".join(parts)


def removable(directory: LoopDirectory, state: LoopState, keep: int) -> list[Path]:
    """Return the weights to delete: all but the `keep` that are current, evaluated best, or latest, in this order.

    Weights that are not published yet are never among them. Leftovers of interrupted writes are, so this must be
    called only while nothing is being written.
    """
    trained = {step.version: step.step for step in state.published() if step.weights is not None}
    ranked = [state.version]
    tried = [evaluation for evaluation in state.evaluations if evaluation.version in trained and evaluation.total]
    if tried:
        ranked.append(
            max(tried, key=lambda evaluation: (evaluation.solved / evaluation.total, evaluation.step)).version
        )
    ranked += sorted(trained, key=lambda version: -trained[version])
    retained = list(dict.fromkeys(ranked))[: max(1, keep)]
    weights = (directory.weights(number) for version, number in trained.items() if version not in retained)
    leftovers = (path for end in ("new", "old") for path in directory.root.glob(f"steps/*/.*.{end}"))
    return [path for path in (*weights, *leftovers) if path.exists()]


def prune(directory: LoopDirectory, state: LoopState, keep: int) -> None:
    """Delete what `removable` returns."""
    for path in removable(directory, state, keep):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
