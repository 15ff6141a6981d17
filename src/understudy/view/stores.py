"""Whole stores: what each contains, how its run is going, and comparisons of two runs by task."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

from understudy.errors import UnderstudyError
from understudy.report.figures import SolveCounts, compare
from understudy.store import Store
from understudy.store.outcomes import AttemptFault
from understudy.train.loop.state import LoopConfig, LoopDirectory
from understudy.train.loop.state import read_json as read_state
from understudy.types import RolloutStatus, Run, is_solved
from understudy.util.statistics import percentile, wilson
from understudy.view.faults import ViewRefused, to_view_error
from understudy.view.open_store import ViewedStore
from understudy.view.schema.rollouts import ComparedRuns, ComparedTask, RolloutRow
from understudy.view.schema.stores import (
    BoundaryFaults,
    OpenRollouts,
    PhaseTimes,
    StoreHealth,
    StoreKind,
    StoreSummary,
    WorkerView,
)

_PENDING: tuple[RolloutStatus, ...] = ("queuing", "preparing", "running", "requeuing")
_MAX_REASONS = 20
_MAX_RUN_IDS = 100


def summarise(viewed: ViewedStore) -> StoreSummary:
    """Return what a store contains. If it cannot be read or is gone, the summary says so."""
    try:
        if viewed.kind == "loop":
            return _loop_summary(viewed)
        with viewed.short_read() as store:
            return _store_summary(viewed, store)
    except ViewRefused as refused:
        return _unreadable(viewed, refused, "missing")
    except UnderstudyError as error:
        return _unreadable(viewed, to_view_error(error), "unreadable")


def _unreadable(viewed: ViewedStore, refused: ViewRefused, state: str) -> StoreSummary:
    return StoreSummary(
        id=viewed.id,
        name=viewed.name,
        path=str(viewed.location),
        kind="loop" if viewed.kind == "loop" else "empty",
        state="missing" if state == "missing" else "unreadable",
        parent_id=viewed.parent_id,
        error=refused.error,
    )


def _store_summary(viewed: ViewedStore, store: Store) -> StoreSummary:
    runs = store.runs.all()
    counts = [store.outcomes.counts(run.id) for run in runs]
    clients = store.keys.clients()
    states, conversations = store.sessions.count()
    rollouts = Counter[RolloutStatus]()
    for run_counts in counts:
        rollouts.update(run_counts.rollouts)
    usage = [*counts, *(store.calls.usage(client.id) for client in clients)]
    solved, graded = (
        sum(run_counts.solved for run_counts in counts),
        sum(run_counts.solved + run_counts.unsolved for run_counts in counts),
    )
    kind: StoreKind = "run" if runs else "sessions" if states else "gateway" if clients else "empty"
    return StoreSummary(
        id=viewed.id,
        name=viewed.name,
        path=str(viewed.location),
        kind=kind,
        state="ok",
        parent_id=viewed.parent_id,
        run_ids=tuple(run.id for run in runs[-_MAX_RUN_IDS:]),
        about=_run_settings(runs[-1]) if runs else {},
        tasks=sum(len(run.config.get("tasks") or ()) for run in runs),
        rollouts=dict(rollouts),
        solved=solved,
        graded=graded,
        suspicious=sum(run_counts.suspicious for run_counts in counts),
        solve_rate=wilson(solved, graded) if graded else None,
        calls=sum(usage_row.calls for usage_row in usage),
        prompt_tokens=sum(usage_row.prompt_tokens for usage_row in usage),
        completion_tokens=sum(usage_row.completion_tokens for usage_row in usage),
        cost_usd=sum(usage_row.cost_usd for usage_row in usage),
        clients=len(clients),
        conversations=conversations,
        states=states,
        created_at=runs[0].created_at if runs else None,
        changed_at=_changed_at(viewed),
        live=any(rollouts[status] for status in _PENDING),
    )


def _loop_summary(viewed: ViewedStore) -> StoreSummary:
    directory = LoopDirectory(viewed.directory)
    state = directory.load()
    config = read_state(viewed.directory / "loop.json", LoopConfig)
    steps = () if state is None else state.steps
    solved, graded = sum(step.solved for step in steps), sum(step.collected for step in steps)
    last_evaluation = state.evaluations[-1] if state is not None and state.evaluations else None
    about = (
        {} if config is None else {"model": config.model, "backend": config.backend, "steps": str(config.steps)}
    )
    if last_evaluation is not None:
        about["evaluation"] = (
            f"{last_evaluation.solved} of {last_evaluation.total} held-out rollouts solved after step "
            f"{last_evaluation.step}"
        )
    return StoreSummary(
        id=viewed.id,
        name=viewed.name,
        path=str(viewed.location),
        kind="loop",
        state="ok",
        about=about,
        tasks=0 if config is None else len(config.tasks),
        solved=solved,
        graded=graded,
        solve_rate=wilson(solved, graded) if graded else None,
        steps=len(steps),
        changed_at=_changed_at(viewed),
        live=any(step.phase != "published" for step in steps[-1:]),
    )


def _changed_at(viewed: ViewedStore) -> float | None:
    times = viewed.stamp()[2::3]
    return max(times) / 1e9 if any(times) else None


def _run_settings(run: Run) -> dict[str, str]:
    """Return the most interesting parts of a run's configuration."""
    config = run.config
    values = {
        "purpose": config.get("purpose"),
        "agent": config.get("agent"),
        "model": config.get("weights") or config.get("policy"),
        "samples": config.get("samples"),
        "sandbox": config.get("sandbox"),
    }
    return {name: str(value) for name, value in values.items() if value not in (None, "")}


def health(store: Store, rows: Sequence[RolloutRow]) -> StoreHealth:
    """Return how the runs of a store are going: queues, seconds by phase, faults by boundary, unsolved
    rollouts.
    """
    phases: dict[str, list[float]] = {}
    faults: list[AttemptFault] = []
    versions = Counter[str]()
    for run in store.runs.all():
        for timings in store.outcomes.timings(run.id):
            for phase, seconds in timings.items():
                phases.setdefault(phase, []).append(seconds)
        faults += store.outcomes.faults(run.id)
        for use in store.outcomes.versions(run.id):
            versions[use.version or "unknown"] += use.calls
    unsolved = Counter(row.reason or "" for row in rows if row.reward is not None and not is_solved(row.reward))
    return StoreHealth(
        open=_open_rollouts(rows),
        workers=tuple(
            WorkerView(
                id=worker.id,
                held=worker.held,
                capacity=worker.capacity,
                silent_s=worker.silent_s,
                alive=worker.alive,
            )
            for worker in store.leases.workers()
        ),
        phases=tuple(
            PhaseTimes(phase=phase, attempts=len(times), p50=percentile(times, 0.5), p99=percentile(times, 0.99))
            for phase, times in phases.items()
        ),
        faults=_by_boundary(faults),
        unsolved=dict(unsolved.most_common(_MAX_REASONS)),
        versions=dict(versions),
    )


def _open_rollouts(rows: Sequence[RolloutRow]) -> tuple[OpenRollouts, ...]:
    now, by_status = time.time(), dict[RolloutStatus, list[RolloutRow]]()
    for row in rows:
        by_status.setdefault(row.status, []).append(row)
    open_rollouts: list[OpenRollouts] = []
    for status in _PENDING:
        if members := by_status.get(status):
            oldest = min(members, key=lambda row: row.updated_at)
            age = max(0.0, now - oldest.updated_at)
            open_rollouts.append(
                OpenRollouts(status=status, rollouts=len(members), oldest_id=oldest.id, oldest_s=age)
            )
    return tuple(open_rollouts)


def _by_boundary(faults: Sequence[AttemptFault]) -> tuple[BoundaryFaults, ...]:
    by_boundary: dict[str, list[AttemptFault]] = {}
    for fault in faults:
        by_boundary.setdefault(fault.error.boundary, []).append(fault)
    return tuple(
        BoundaryFaults(
            boundary=boundary,
            attempts=len(members),
            given_up=sum(fault.given_up for fault in members),
            example=Counter(fault.error.message for fault in members).most_common(1)[0][0][:2_000],
        )
        for boundary, members in sorted(by_boundary.items(), key=lambda item: -len(item[1]))
    )


def compare_runs(
    before: ViewedStore, after: ViewedStore, first: Sequence[RolloutRow], second: Sequence[RolloutRow]
) -> ComparedRuns:
    """Compare two stores by task, with the greatest change first."""
    earlier, later = _by_task(first), _by_task(second)
    difference = compare(earlier, later)
    zero = SolveCounts(0, 0)
    tasks = [
        ComparedTask(
            task_id=task,
            before_solved=earlier.get(task, zero).solved,
            before_graded=earlier.get(task, zero).graded,
            after_solved=later.get(task, zero).solved,
            after_graded=later.get(task, zero).graded,
        )
        for task in sorted(earlier.keys() | later.keys())
    ]
    gain = {
        row.task_id: _solve_rate(later.get(row.task_id)) - _solve_rate(earlier.get(row.task_id)) for row in tasks
    }
    return ComparedRuns(
        before=before.id,
        after=after.id,
        tasks=tuple(sorted(tasks, key=lambda row: -abs(gain[row.task_id]))),
        difference=None if difference is None else difference.value,
        low=None if difference is None else difference.low,
        high=None if difference is None else difference.high,
        p_value=None if difference is None else difference.p_by_task,
        paired_tasks=0 if difference is None else difference.common_tasks,
    )


def _by_task(rows: Sequence[RolloutRow]) -> dict[str, SolveCounts]:
    counts: dict[str, SolveCounts] = {}
    for row in rows:
        if row.reward is not None:
            counted = counts.get(row.task_id, SolveCounts(0, 0))
            counts[row.task_id] = SolveCounts(counted.solved + is_solved(row.reward), counted.graded + 1)
    return counts


def _solve_rate(counts: SolveCounts | None) -> float:
    return counts.solved / counts.graded if counts is not None and counts.graded else 0.0


class _CachedSummary(Struct, frozen=True):
    """A summary, the stamp of the store that it was made of, and until when it may be shown although the store
    has changed since (by the monotonic clock).
    """

    stamp: tuple[int, ...]
    usable_until: float
    summary: StoreSummary


class SummaryCache:
    """Caches summaries of unchanged stores, and for a while those of large stores that change constantly."""

    def __init__(self) -> None:
        self._summaries: dict[str, _CachedSummary] = {}

    def of(self, viewed: ViewedStore) -> StoreSummary:
        """Return the summary of a store. It is at most ten times as old as the time that making it took."""
        stamp, now = viewed.stamp(), time.monotonic()
        cached = self._summaries.get(viewed.id)
        if cached is not None and (
            cached.stamp == stamp or (_is_same_file(cached.stamp, stamp) and now < cached.usable_until)
        ):
            return cached.summary
        summary = summarise(viewed)
        ended = time.monotonic()
        usable_until = ended + 10 * (ended - now) if summary.state == "ok" else ended
        self._summaries[viewed.id] = _CachedSummary(stamp, usable_until, summary)
        return summary


def _is_same_file(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Return whether two stamps are of one file. A store's file only grows: a different inode, or a smaller size,
    means that the store was replaced.
    """
    return before[:1] == after[:1] and before[1:2] <= after[1:2]
