"""Answers about stores, whole runs, and loops; and the body of every error."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from understudy.types import (
    RolloutStatus,
)
from understudy.util.statistics import ConfidenceInterval

# --- errors ----------------------------------------------------------------------------------------------


class ViewError(Struct, frozen=True):
    """What went wrong: a `type` for programs, a `message` for people, and the `remedy`."""

    type: str
    message: str
    remedy: str


class ErrorAnswer(Struct, frozen=True):
    """The body of every response with a status of 400 or more."""

    error: ViewError


# --- stores ----------------------------------------------------------------------------------------------

StoreKind = Literal["run", "loop", "gateway", "sessions", "empty"]
StoreState = Literal["ok", "missing", "unreadable"]


class StoreSummary(Struct, frozen=True, kw_only=True):
    """A store, or a loop with the stores of its waves (whose `parent_id` is the loop's id).

    `name` is the path relative to the given directory; `id` is the same as long as the path is. `run_ids` are
    those of the newest runs. `rollouts` counts by status. `solve_rate` has a 95 % interval and is None if nothing
    is graded. `live`: some rollouts are in progress. `error` says why a store whose `state` is not ok cannot be
    read.
    """

    id: str
    name: str
    path: str
    kind: StoreKind
    state: StoreState
    parent_id: str | None = None
    error: ViewError | None = None
    run_ids: tuple[str, ...] = ()
    about: dict[str, str] = field(default_factory=dict[str, str])
    tasks: int = 0
    rollouts: dict[RolloutStatus, int] = field(default_factory=dict[RolloutStatus, int])
    solved: int = 0
    graded: int = 0
    suspicious: int = 0
    solve_rate: ConfidenceInterval | None = None
    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    clients: int = 0
    conversations: int = 0
    states: int = 0
    steps: int = 0
    created_at: float | None = None
    changed_at: float | None = None
    live: bool = False


class StoreList(Struct, frozen=True, kw_only=True):
    """The stores below the given directories, newest first. `may_write` is false with --read-only."""

    stores: tuple[StoreSummary, ...]
    directories: tuple[str, ...]
    may_write: bool
    version: str
    next: str | None = None


class PhaseTimes(Struct, frozen=True, kw_only=True):
    """How long a phase of attempts took, in seconds: the median and the 99th percentile over `attempts`."""

    phase: str
    attempts: int
    p50: float
    p99: float


class BoundaryFaults(Struct, frozen=True, kw_only=True):
    """Faults at one boundary: the attempts that met one, the rollouts given up because of it, and a sample
    message.
    """

    boundary: str
    attempts: int
    given_up: int
    example: str


class OpenRollouts(Struct, frozen=True, kw_only=True):
    """Rollouts of one status that have not ended; the oldest has had it for `oldest_s` seconds."""

    status: RolloutStatus
    rollouts: int
    oldest_id: str
    oldest_s: float


class WorkerView(Struct, frozen=True, kw_only=True):
    """A process that executes rollouts, `held` of them now; heard of `silent_s` seconds ago."""

    id: str
    held: int
    capacity: int
    silent_s: float
    alive: bool


class StoreHealth(Struct, frozen=True, kw_only=True):
    """How a run is going: queues, workers, phases, faults by boundary, and why graded rollouts were not solved."""

    open: tuple[OpenRollouts, ...]
    workers: tuple[WorkerView, ...]
    phases: tuple[PhaseTimes, ...]
    faults: tuple[BoundaryFaults, ...]
    unsolved: dict[str, int]
    versions: dict[str, int]
    next: str | None = None


# --- loops -----------------------------------------------------------------------------------------------


class FunnelStage(Struct, frozen=True, kw_only=True):
    """How many are left at one stage of a step, and why the others were dropped."""

    stage: Literal["rollouts", "graded", "groups", "groups with signal", "groups used", "tokens"]
    count: int
    lost: dict[str, int] = field(default_factory=dict[str, int])


class LoopStep(Struct, frozen=True, kw_only=True):
    """A step of a loop. `store_id` is the store of its wave, None if it is gone.

    `values` are the trainer's metrics by name (loss, mismatch, entropy, clip fraction, …).
    """

    step: int
    phase: str
    version: str
    sampled_by: str
    store_id: str | None
    collected: int
    solved: int
    solve_rate: ConfidenceInterval | None
    reward: float
    groups: int
    used: int
    dropped: int
    held: int
    staleness: int
    trained: bool
    skipped: dict[str, int]
    values: dict[str, float]
    seconds: dict[str, float]
    funnel: tuple[FunnelStage, ...]


class LoopEvaluation(Struct, frozen=True, kw_only=True):
    """How many held-out tasks a version solved."""

    step: int
    version: str
    store_id: str | None
    solved: int
    total: int
    failed: int
    rate: ConfidenceInterval


class LoopView(Struct, frozen=True, kw_only=True):
    """A loop: its curves and, for each step, why collected rollouts did or did not reach the update."""

    store_id: str
    version: str
    planned_steps: int
    asynchronous: bool
    steps: tuple[LoopStep, ...]
    evaluations: tuple[LoopEvaluation, ...]
    refused: dict[str, str]
    next: str | None = None
