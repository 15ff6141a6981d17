"""Reads the figures of a run from its store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from statistics import fmean
from typing import Any, cast

from msgspec import Struct, structs

from understudy.grade.reports import current_reason
from understudy.report.figures import (
    SIGNIFICANT,
    AgentRow,
    BoundaryRow,
    Headline,
    Judgement,
    Point,
    SolveCounts,
    TaskRow,
    compare,
    compare_by_task,
    holm,
    mean_reward,
    rate,
)
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.store.outcomes import AttemptFault, RolloutOutcome, VersionUse
from understudy.types import Run
from understudy.util.statistics import mean_estimate

_SOLVED = 1.0
_REASONS = 12


class RunFigures(Struct, frozen=True, kw_only=True):
    """All figures of one run: its point, the counts of each task, and what is summed up over several runs. In
    `strict` no suspicious patch counts as solved.
    """

    point: Point
    agent: str = ""
    about: dict[str, str]
    tasks: dict[str, SolveCounts]
    strict: dict[str, SolveCounts]
    turns: dict[str, float]
    faults: list[AttemptFault]
    unsolved: Counter[str]
    versions: list[VersionUse]
    notes: tuple[str, ...] = ()


def read_run_figures(
    directory: StoreLocation,
    label: str,
    *,
    wave: str | None = None,
    step: int | None = None,
    version: str | None = None,
) -> RunFigures:
    """Return the figures of the newest run of a store, or of the run of step or evaluation `wave` in a loop's
    database.

    A store without a run gives a point without rollouts. Raises StoreError if there is no readable store.
    Nothing is written to it.
    """
    with Store.open(directory, create=False, read_only=True) as store:
        runs = store.runs.all() if wave is None else [run] if (run := store.runs.of_wave(wave)) else []
        run = runs[-1] if runs else None
        outcomes = store.outcomes.of_run(run.id) if run else []
        faults = store.outcomes.faults(run.id) if run else []
        versions = store.outcomes.versions(run.id) if run else []
        counts = store.outcomes.counts(run.id) if run else None
    graded = [outcome for outcome in outcomes if outcome.reward is not None]
    solved = [outcome for outcome in graded if _solves(outcome)]
    tasks = {task: _tried(outcomes, _solves) for task, outcomes in _by_task(graded)}
    named_versions = [use.version for use in versions if use.version is not None]
    notes = (
        [f"{directory}: the store holds {len(runs)} runs; this is the newest, {runs[-1].id}"] if runs[1:] else []
    )
    if run is None:
        notes.append(f"{directory}: the store holds no run yet")
    point = Point(
        label=label,
        step=step,
        version=version or (named_versions[-1] if named_versions else None),
        directory=str(directory),
        solved=len(solved),
        unsolved=len(graded) - len(solved),
        suspicious=sum(outcome.integrity not in (None, "clean") for outcome in graded),
        suspicious_solved=sum(outcome.integrity not in (None, "clean") for outcome in solved),
        failed=sum(outcome.status == "failed" and outcome.reward is None for outcome in outcomes),
        pending=sum(outcome.status not in ("succeeded", "failed", "cancelled") for outcome in outcomes),
        timeouts=sum(outcome.ended == "timeout" for outcome in graded),
        solve_rate=rate(list(tasks.values())),
        reward=mean_reward([outcome.reward for outcome in graded if outcome.reward is not None]),
        turns=mean_estimate([float(outcome.turns) for outcome in graded]),
        sampled=mean_estimate([float(outcome.completion_tokens) for outcome in graded]),
        seconds=mean_estimate([outcome.seconds for outcome in graded if outcome.seconds is not None]),
        calls=counts.calls if counts else 0,
        prompt_tokens=counts.prompt_tokens if counts else 0,
        completion_tokens=counts.completion_tokens if counts else 0,
        cost_usd=counts.cost_usd if counts else 0.0,
    )
    return RunFigures(
        point=point,
        agent=str(run.config.get("agent") or "") if run else "",
        about=_about(run) if run else {},
        tasks=tasks,
        strict={task: _tried(outcomes, _solves_cleanly) for task, outcomes in _by_task(graded)},
        turns={task: fmean(outcome.turns for outcome in outcomes) for task, outcomes in _by_task(graded)},
        faults=faults,
        unsolved=Counter(
            current_reason(outcome.reason or "no reason given") for outcome in graded if not _solves(outcome)
        ),
        versions=versions,
        notes=tuple(notes),
    )


def headline(first: RunFigures, last: RunFigures) -> Headline | None:
    """Return the comparison of the first run with the last; None if one of them has no graded rollout."""
    difference, strict = compare(first.tasks, last.tasks), compare(first.strict, last.strict)
    if difference is None or strict is None:
        return None
    return Headline(before=first.point, after=last.point, difference=difference, strict=strict)


def task_rows(gathered: Sequence[RunFigures]) -> tuple[TaskRow, ...]:
    """Return a row for each task of any of the runs, with its counts in each run; those with the largest gain
    first.
    """
    names = {task for run in gathered for task in run.tasks}
    rows = [
        TaskRow(
            task_id=task,
            tried=tuple(
                (run.tasks[task].solved, run.tasks[task].graded) if task in run.tasks else (0, 0)
                for run in gathered
            ),
            turns=gathered[-1].turns.get(task),
        )
        for task in names
    ]
    return tuple(sorted(rows, key=lambda row: (-gain(row), -_share(row.tried[-1]), row.task_id)))


def agent_rows(gathered: Sequence[RunFigures]) -> tuple[AgentRow, ...]:
    """Return a row for each run, compared with the first; empty if all runs have the same agent."""
    if len({run.agent for run in gathered}) < 2:
        return ()
    rows: list[AgentRow] = []
    for number, run in enumerate(gathered):
        common, difference, p = compare_by_task(gathered[0].tasks, run.tasks) if number else (0, None, None)
        rates = [counts.solved / counts.graded for counts in run.tasks.values()]
        rows.append(
            AgentRow(
                label=run.point.label,
                agent=run.agent,
                tasks=len(rates),
                solve_rate=fmean(rates) if rates else 0.0,
                common_tasks=common,
                difference=difference,
                p_by_task=p,
            )
        )
    tested = [number for number, row in enumerate(rows) if row.p_by_task is not None]
    adjusted = holm([p for row in rows if (p := row.p_by_task) is not None])
    for number, p in zip(tested, adjusted, strict=True):
        rows[number] = structs.replace(rows[number], p_adjusted=p, judgement=_judgement(rows[number], p))
    return tuple(rows)


def _judgement(row: AgentRow, p_adjusted: float) -> Judgement:
    difference = row.difference
    if difference is None or difference.low <= 0 <= difference.high or p_adjusted >= SIGNIFICANT:
        return "open"
    return "better" if difference.estimate > 0 else "worse"


def gain(row: TaskRow) -> float:
    """Return the gain in a task's solve rate from the first point to the last; 0.0 if one did not grade it."""
    first_counts, last_counts = row.tried[0], row.tried[-1]
    return _share(last_counts) - _share(first_counts) if first_counts[1] and last_counts[1] else 0.0


def boundary_rows(gathered: Iterable[RunFigures]) -> tuple[BoundaryRow, ...]:
    """Return the faults of several runs by boundary, the most frequent first."""
    met: Counter[str] = Counter()
    given_up: Counter[str] = Counter()
    messages: dict[str, Counter[str]] = {}
    for run in gathered:
        for fault in run.faults:
            boundary = fault.error.boundary
            met[boundary] += 1
            given_up[boundary] += fault.given_up
            messages.setdefault(boundary, Counter())[fault.error.message] += 1
    return tuple(
        BoundaryRow(
            boundary=boundary,
            attempts=number,
            given_up=given_up[boundary],
            example=messages[boundary].most_common(1)[0][0],
        )
        for boundary, number in met.most_common()
    )


def unsolved_reasons(gathered: Iterable[RunFigures]) -> dict[str, int]:
    """Return why graded rollouts were not solved, with counts, the most frequent first; rare reasons are summed up
    in one.
    """
    counted: Counter[str] = Counter()
    for run in gathered:
        counted.update(run.unsolved)
    common = dict(counted.most_common(_REASONS))
    rare_count = counted.total() - sum(common.values())
    return common | ({f"{len(counted) - len(common)} other reasons": rare_count} if rare_count else {})


def version_rows(gathered: Iterable[RunFigures]) -> tuple[VersionUse, ...]:
    """Return the versions of the weights that answered calls of several runs, in order of their first call."""
    uses: dict[str | None, VersionUse] = {}
    for use in (use for run in gathered for use in run.versions):
        if earlier := uses.get(use.version):
            use = structs.replace(
                use,
                calls=use.calls + earlier.calls,
                mixed=use.mixed + earlier.mixed,
                completion_tokens=use.completion_tokens + earlier.completion_tokens,
                first_at=min(use.first_at, earlier.first_at),
                last_at=max(use.last_at, earlier.last_at),
            )
        uses[use.version] = use
    return tuple(sorted(uses.values(), key=lambda row: row.first_at))


def _about(run: Run) -> dict[str, str]:
    """Return the main settings of a run as texts by name."""
    config = run.config
    high = _at(config, "gateway", "models", "high")
    purpose = str(config.get("purpose") or "")
    sampling = {
        key: value for key, value in _at(config, "gateway", "sampling", purpose).items() if value is not None
    }
    about: dict[str, Any] = {
        "run": run.id,
        "began": datetime.fromtimestamp(run.created_at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "purpose": purpose,
        "agent": config.get("agent"),
        "model": config.get("weights") or config.get("policy") or high.get("model"),
        "backend": high.get("backend"),
        "tasks": len(config.get("tasks") or ()) or None,
        "samples a task": config.get("samples"),
        "sampling": ", ".join(f"{key} {value}" for key, value in sampling.items()),
        "seed": config.get("seed"),
        "sandbox": config.get("sandbox"),
    }
    return {name: str(value) for name, value in about.items() if value not in (None, "")}


def _at(value: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the object at a path of keys; an empty one if there is none."""
    current = value
    for key in keys:
        inner: Any = current.get(key)
        current = cast("dict[str, Any]", inner) if isinstance(inner, dict) else {}
    return current


def _by_task(outcomes: Sequence[RolloutOutcome]) -> Iterable[tuple[str, list[RolloutOutcome]]]:
    grouped: dict[str, list[RolloutOutcome]] = {}
    for outcome in outcomes:
        grouped.setdefault(outcome.task_id, []).append(outcome)
    return grouped.items()


def _solves(outcome: RolloutOutcome) -> bool:
    return outcome.reward is not None and outcome.reward >= _SOLVED


def _solves_cleanly(outcome: RolloutOutcome) -> bool:
    return _solves(outcome) and outcome.integrity == "clean"


def _tried(outcomes: Sequence[RolloutOutcome], solves: Callable[[RolloutOutcome], bool]) -> SolveCounts:
    return SolveCounts(sum(map(solves, outcomes)), len(outcomes))


def _share(tried: tuple[int, int]) -> float:
    return tried[0] / tried[1] if tried[1] else 0.0
