"""What a loop is and where it stands: `loop.json` and `state.json` in its directory, each replaced as a whole.

loop.json                      what the loop is; the same command again goes on with it
state.json                     where it stands, after every change of it
metrics.jsonl                  the numbers of every update, one line a step
steps/step-0001/run/           the wave that the step began, with a store of its own
steps/step-0001/groups.msgpack what its update learned from
steps/step-0001/weights/       what came of it, while it is kept
evaluations/step-0000/         the held-out tasks, as the policy of that step solved them
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
"""How far a step has come: its wave goes on; its groups are written; its weights are; they answer."""

MAY_CHANGE = frozenset({"steps", "keep", "eval_every"})
"""What of a loop's configuration may differ when it goes on."""

DECAY = 0.7
"""What a task's earlier rollouts count when it is tried again: the policy that made them is another one now."""

_OTHERS = {"store.db": "a run", "config.json": "a model", "training": "a training"}
"""What a directory of another kind has. Whoever overwrites that one would remove the loop with it."""


class LoopSchedule(Struct, frozen=True, kw_only=True):
    """How a loop goes, as its command says it; a part of what the loop is.

    Each step begins as many groups of `samples` rollouts as make `groups` with those that are carried over. An
    asynchronous loop updates as soon as a `quorum` (a share) of the groups of a step has ended; groups whose
    oldest token is from more than `max_staleness` versions ago are dropped. Every update but the last step's has
    at least `min_groups` groups whose rewards differ. Of the weights, those of `keep` steps stay.
    """

    steps: Annotated[
        int, option("Waves of rollouts, each with an update of the policy where something can be learned.", ge=1)
    ] = 10
    groups: Annotated[int, option("Tasks that a step learns from.", ge=1)] = 8
    samples: Annotated[int, option("Rollouts a task.", "--samples", "-n", ge=2)] = 8
    eval_every: Annotated[
        int, option("Evaluate after every so many steps; 0: at the beginning and the end.", ge=0)
    ] = 0
    eval_samples: Annotated[int, option("Rollouts a held-out task.", ge=1)] = 1
    asynchronous: Annotated[bool, option("Collect the next groups while the policy is updated.", "--async")] = (
        False
    )
    max_staleness: Annotated[int, option("Async: groups older than this many versions are dropped.", ge=0)] = 2
    quorum: Annotated[
        float, option("Async: the share of a step's groups that an update waits for.", ge=0, le=1)
    ] = 0.75
    min_groups: Annotated[
        int,
        option("Update only with so many groups whose rewards differ, but for the last step; 0: with any.", ge=0),
    ] = 0
    keep: Annotated[int, option("Steps whose weights are kept: the best and the last.", ge=1)] = 3
    backend: Annotated[str, option("What serves the model: embedded, vllm or sglang.")] = "embedded"
    served_model: Annotated[str, option("The model's name at that server [default: its directory].")] = ""
    tool_format: Annotated[str, option("The syntax of the model's tool calls.")] = "hermes"


class LoopConfig(LoopSchedule, frozen=True, kw_only=True):
    """All that decides a loop's results.

    `tasks` and `eval_tasks` map instance ids to the digests of their records. `trainer` are the options of the
    updates, `manner` those of the agents and of sampling (`run.collector.RolloutSettings`), as JSON.
    """

    model: str
    model_digest: str
    tasks: dict[str, str]
    eval_tasks: dict[str, str] = field(default_factory=dict[str, str])
    seed: int = 0
    sandbox: str = "local"
    manner: dict[str, Any] = field(default_factory=dict[str, Any])
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def directory_id(self) -> str:
        """Eight digits by which the same command finds its directory, also where it only asks for more steps."""
        values = to_builtins(replace(self, steps=0, keep=0, eval_every=0))
        # A digest of JSON depends on the order of the fields: it must stay that of the first release.
        encoded = {name: Raw(msgspec.json.encode(values[name], order="deterministic")) for name in _DIGEST_ORDER}
        return hashlib.sha256(msgspec.json.encode(encoded)).hexdigest()[:8]


_DIGEST_ORDER = (
    "model", "model_digest", "backend", "served_model", "tool_format", "tasks", "eval_tasks", "steps", "groups",
    "samples", "eval_every", "eval_samples", "seed", "asynchronous", "max_staleness", "quorum", "min_groups",
    "sandbox", "manner", "trainer", "keep",
)  # fmt: skip


class GroupRef(Struct, frozen=True, array_like=True, order=True):
    """The rollouts of a task in the wave that a step began: as many groups as agents worked on it."""

    wave: int
    task: str


class StepState(Struct, frozen=True, kw_only=True):
    """One step. `version` is the one that its update made, or the one there was where it made none.

    `tasks` are those of its wave, collected under `sampled_by` at first. Its update `used` groups; those
    `dropped` were too old, or nothing of them could be learned from; those `held` were too few, and wait for
    the next step. `collected` rollouts with a verdict, of which `solved` earned the whole reward, were in
    those used or held, each counted in the first step that had it, and `reward` is their mean. `groups` counts
    what the update was given, `staleness` is how many versions the oldest of it was behind, `skipped` counts
    by reason what was not learned from. `report` is what the trainer said, `seconds` what took how long. `cut`
    calls did not end in the time that the change of weights waits: they began under one version and ended
    under another.
    """

    step: int
    phase: Phase
    run: str
    sampled_by: str
    tasks: tuple[str, ...]
    version: str = ""
    weights: str | None = None
    used: tuple[GroupRef, ...] = ()
    dropped: tuple[GroupRef, ...] = ()
    held: tuple[GroupRef, ...] = ()
    collected: int = 0
    solved: int = 0
    reward: float = 0.0
    groups: int = 0
    staleness: int = 0
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    report: dict[str, Any] = field(default_factory=dict[str, Any])
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    cut: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.solved <= self.collected:
            raise ValueError(f"step {self.step}: solved is {self.solved}, and collected {self.collected}")


class Evaluation(Struct, frozen=True, kw_only=True):
    """What a policy version solved of the held-out tasks: `solved` of `total` graded rollouts.

    `run` is the run's directory, relative to the loop's. `tasks` maps each task to solved and graded rollouts;
    `failed` rollouts, for reasons of infrastructure, are not in the total.
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
        """The solve rate with Wilson's interval."""
        return wilson(self.solved, self.total)


class Rate(Struct, frozen=True, kw_only=True):
    """How often a task was solved of late: `solved` of `tried`, both fading, and the step that tried it last."""

    tried: float = 0.0
    solved: float = 0.0
    step: int = 0

    @property
    def expected(self) -> float:
        """The solve rate to expect: one half for a task that was never tried."""
        return (self.solved + 0.5) / (self.tried + 1.0)

    def after(self, tried: int, solved: int, step: int) -> Rate:
        """The rate with further rollouts in it."""
        return Rate(tried=DECAY * self.tried + tried, solved=DECAY * self.solved + solved, step=step)


class WaveDatabase(Struct, frozen=True):
    """The database that has the waves of a loop: its `url` without a password, and the `loop`'s id there."""

    url: str
    loop: str


class WaveLocation(Struct, frozen=True):
    """The store that has a wave; in a database the run whose configuration has it as its `wave`."""

    store: StoreLocation
    wave: str | None = None

    def __str__(self) -> str:
        return str(self.store)


class LoopState(Struct, frozen=True, kw_only=True):
    """Where a loop stands. `weights` are those of `version`, relative to the loop's directory or absolute.

    `refused` maps tasks that did not pass validation, held-out ones too, to the reason. Without a `database` each
    wave has a store in its own directory.
    """

    version: str
    weights: str
    steps: tuple[StepState, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    rates: dict[str, Rate] = field(default_factory=dict[str, Rate])
    refused: dict[str, str] = field(default_factory=dict[str, str])
    database: WaveDatabase | None = None

    def __post_init__(self) -> None:
        if any(step.step != number for number, step in enumerate(self.steps, 1)):
            raise ValueError("expected steps numbered from 1 on")

    @property
    def done(self) -> int:
        """How many steps are over: their weights answer."""
        return len(self.published())

    def published(self) -> tuple[StepState, ...]:
        """The steps that are over."""
        return tuple(step for step in self.steps if step.phase == "published")

    @property
    def trained(self) -> str | None:
        """The last weights that an update made, which may wait to be published; None where none did."""
        return next((step.weights for step in reversed(self.steps) if step.weights is not None), None)

    def behind(self, number: int) -> int:
        """How many versions were published after that of step `number`."""
        return sum(step.weights is not None and step.step > number for step in self.published())

    def step(self, number: int) -> StepState | None:
        """A step by its number, which counts from 1; None where it has not begun."""
        return self.steps[number - 1] if 0 < number <= len(self.steps) else None

    def with_step(self, step: StepState) -> LoopState:
        """The state with a step that is new, or further than it was. Raises ValueError for one out of turn."""
        if not 0 < step.step <= len(self.steps) + 1:
            raise ValueError(f"step {step.step} cannot follow {len(self.steps)} steps")
        return replace(self, steps=(*self.steps[: step.step - 1], step, *self.steps[step.step :]))

    def pending(self) -> tuple[GroupRef, ...]:
        """The groups that were begun, and neither used nor dropped nor refused, the oldest first."""
        over = {ref for step in self.steps for ref in (*step.used, *step.dropped)}
        started = (GroupRef(step.step, task) for step in self.steps for task in step.tasks)
        return tuple(ref for ref in started if ref not in over and ref.task not in self.refused)

    def skipped(self) -> dict[str, int]:
        """What could not be learned from, over all steps, by reason."""
        total = Counter[str]()
        for step in self.steps:
            total.update(step.skipped)
        return dict(total)


def version_name(step: int) -> str:
    """The policy version that a step makes; that of the model at the start is of step 0."""
    return f"step-{step:04}"


def step_number(version: str | None) -> int | None:
    """The step that made a version; None for one that is none of a loop's."""
    name, dash, digits = (version or "").rpartition("-")
    return int(digits) if name == "step" and dash and digits.isdecimal() else None


class LoopDirectory:
    """The files of a loop. Its waves may be in a `database`, whose URL with the password no file has."""

    def __init__(self, root: Path, database: StoreUrl | None = None) -> None:
        self.root = root
        self._database = database

    @property
    def lock(self) -> Path:
        """What the process that works in it holds."""
        return self.root / ".lock"

    def step(self, number: int) -> Path:
        """The directory of a step."""
        return self.root / "steps" / version_name(number)

    def run(self, number: int) -> Path:
        """The output directory of the wave that a step began."""
        return self.step(number) / "run"

    def groups(self, number: int) -> Path:
        """What the update of a step learned from."""
        return self.step(number) / "groups.msgpack"

    def token_values(self, number: int) -> Path:
        """What the trainer computed for its tokens, until that is in the stores of the waves."""
        return self.step(number) / "token_values.msgpack"

    def weights(self, number: int) -> Path:
        """What came of it."""
        return self.step(number) / "weights"

    def evaluation(self, number: int) -> Path:
        """The output directory of the evaluation after a step."""
        return self.root / "evaluations" / version_name(number)

    def relative(self, path: Path) -> str:
        """A path as the state has it: relative to the directory where it is in it."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)

    def absolute(self, path: str) -> Path:
        """The path that the state has."""
        return self.root / path

    def wave(self, state: LoopState, run: str) -> WaveLocation:
        """Where the rollouts of a step or an evaluation are, by the `run` that the state has of it."""
        if state.database is None:
            return WaveLocation(self.absolute(run))
        url = self._database or StoreUrl(state.database.url)
        return WaveLocation(url, f"{state.database.loop}/{run}")

    # --- loop.json and state.json ----------------------------------------------------------------------

    def enter(self, config: LoopConfig) -> None:
        """Write what the loop is. Raises ConfigError when the directory holds another one, or a run or a model."""
        path = self.root / "loop.json"
        existing = read(path, LoopConfig)
        if existing is None and (other := next((name for name in _OTHERS if (self.root / name).exists()), None)):
            raise ConfigError(f"{self.root} holds {_OTHERS[other]} ({other}); give another --output-dir")
        if existing is not None:
            before, now = (msgspec.to_builtins(each) for each in (existing, config))
            differing = [key for key in now if key not in MAY_CHANGE and before.get(key) != now[key]]
            if differing:
                raise ConfigError(
                    f"{self.root} holds another loop (it differs in {_named(differing, before, now)}); give the "
                    "same options to go on with it, or another --output-dir"
                )
        write(path, config)

    def load(self) -> LoopState | None:
        """Where the loop stands; None where it has not begun. Raises StoreError for a damaged file."""
        return read(self.root / "state.json", LoopState)

    def save(self, state: LoopState) -> None:
        """Replace the state, durably, and the metrics that follow from it. Raises StoreError."""
        write(self.root / "state.json", state)
        over = [step for step in state.steps if step.phase in ("updated", "published")]
        lines = [msgspec.json.encode(metrics_of(step)) + b"\n" for step in over]
        replace_file(self.root / "metrics.jsonl", b"".join(lines))


def metrics_of(step: StepState) -> dict[str, Any]:
    """The line of a step in metrics.jsonl: what its update reported, beside what went into it."""
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


def read(path: Path, kind: type[_T]) -> _T | None:
    """What a JSON file holds; None where there is none. Raises StoreError when it holds something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise StoreError(
            f"{path}: invalid content ({error}); restore it, or start again in another --output-dir"
        ) from error


def write(path: Path, value: Any) -> None:
    """Replace a JSON file as a whole, durably. Raises StoreError."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n")


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file as a whole: whoever reads it, after a power cut too, finds the old or the new one.

    Raises StoreError.
    """
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, content, fsync=True, temporary=path.with_name(f".{path.name}.new"))


def make_durable(path: Path) -> None:
    """Have a file, or a directory with all that is in it, outlive a power cut. Raises StoreError."""
    with _writing(path):
        sync_tree(path)


@contextlib.contextmanager
def _writing(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        reason = f"cannot be written: {error.strerror}; make room, then run the same command again"
        raise StoreError(f"{path}: {reason}") from error


def _named(keys: list[str], before: dict[str, Any], now: dict[str, Any]) -> str:
    """The keys that differ, each with what it was and is where that is short."""
    parts: list[str] = []
    for key in keys:
        if key == "model_digest":
            if "model" not in keys:
                parts.append(f"what is in {now['model']}, which has changed since")
        elif isinstance(now[key], dict) and isinstance(before.get(key), dict):
            old: dict[str, Any] = before[key]
            new: dict[str, Any] = now[key]
            inner = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
            parts.append(f"{key}: {', '.join(inner[:4])}{', …' if len(inner) > 4 else ''}")
        else:
            parts.append(f"{key}: {before.get(key)!r} before, {now[key]!r} now")
    return "; ".join(parts)


def removable(directory: LoopDirectory, state: LoopState, keep: int) -> list[Path]:
    """All weights but those that answer, those that did best, and the last ones, `keep` in all.

    What waits to be published is not among them. What a kill left of something that was being written is: nobody
    may be writing.
    """
    trained = {step.version: step.step for step in state.published() if step.weights is not None}
    ranked = [state.version]
    tried = [each for each in state.evaluations if each.version in trained and each.total]
    if tried:
        ranked.append(max(tried, key=lambda each: (each.solved / each.total, each.step)).version)
    ranked += sorted(trained, key=lambda version: -trained[version])
    retained = list(dict.fromkeys(ranked))[: max(1, keep)]
    weights = (directory.weights(number) for version, number in trained.items() if version not in retained)
    leftovers = (path for end in ("new", "old") for path in directory.root.glob(f"steps/*/.*.{end}"))
    return [path for path in (*weights, *leftovers) if path.exists()]


def prune(directory: LoopDirectory, state: LoopState, keep: int) -> None:
    """Remove what is `removable`."""
    for path in removable(directory, state, keep):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()
