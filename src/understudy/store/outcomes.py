"""The one place that decides how a rollout ended: which attempt decides it, and whether it solved its task.

A rollout is *decided* if it has ended (succeeded or failed) and at least one of its attempts was graded; the last
graded attempt decides. It is *solved* if that attempt's reward says so (`types.is_solved`). Everything is computed
in SQL, with a number of queries that does not depend on the number of rollouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import (
    LABEL_STYLE_TABLENAME_PLUS_COL,
    ColumnElement,
    RowMapping,
    Select,
    Subquery,
    Text,
    and_,
    case,
    func,
    select,
    true,
    union,
)

from understudy.errors import ConfigError
from understudy.store.calls import USAGE, AttemptUsage
from understudy.store.database import Repository, read_error, row_reader
from understudy.store.runs import check_run_id, read_attempt, read_rollout, read_timings, read_verdicts
from understudy.store.schema import attempts, calls, rewards, rollouts, runs
from understudy.store.statements import json_array_length, json_values
from understudy.store.votes import VoteRepository
from understudy.types import (
    SOLVED_REWARD,
    AgentIdentity,
    Attempt,
    AttemptStatus,
    ErrorInfo,
    IntegrityStatus,
    Protection,
    Rollout,
    RolloutStatus,
    Verdict,
)


class RolloutOutcome(Struct, frozen=True, kw_only=True):
    """The current state of a rollout.

    `reward`, `reason`, `integrity` and `ended` are those of the attempt that decided it, None if there is none.
    `turns` (answered calls), tokens, `cost_usd` and `seconds` (duration) are also that attempt's or, if none
    decided, the last attempt's.
    """

    task_id: str
    sample_index: int
    status: RolloutStatus
    attempts: int
    reward: float | None = None
    reason: str | None = None
    integrity: IntegrityStatus | None = None
    ended: AttemptStatus | None = None
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float | None = None
    error: ErrorInfo | None = None


class ListedRollout(RolloutOutcome, frozen=True, kw_only=True):
    """A rollout as lists show it. `attempt_id` is the attempt that its figures belong to, None before the first.

    `reviewed`: a person decided whether that attempt's patch is clean. Times are Unix seconds.
    """

    id: str
    run_id: str
    agent: AgentIdentity
    created_at: float
    updated_at: float
    attempt_id: str | None = None
    reviewed: bool = False


class ChangeMark(Struct, frozen=True):
    """Up to where changes of rollouts were read: the time of the newest change, the newest verdict, and the
    count.
    """

    updated_at: float = 0.0
    verdict_id: int = 0
    rollouts: int = 0


class RunCounts(AttemptUsage, frozen=True, kw_only=True):
    """Counts over a run: rollouts by status, and those that are decided, as `solved` or `unsolved`.

    `suspicious` counts decided rollouts whose patch may deceive the grader. Calls, tokens and costs cover all
    attempts.
    """

    rollouts: dict[RolloutStatus, int]
    solved: int
    unsolved: int
    suspicious: int = 0


class TaskCounts(Struct, frozen=True):
    """The ended rollouts of a task: how many are `solved`, `graded`, or `failed` without a verdict.

    `differ`: some rollouts of the same agent ended differently, so that training has something to learn. A task
    that one agent always solves and another never does not differ. Only verdicts count, not what a trainer deducts
    for overlong rollouts.
    """

    solved: int
    graded: int
    failed: int
    differ: bool = False


class GradedRollout(Struct, frozen=True):
    """A decided rollout with the attempt that decided it."""

    rollout: Rollout
    attempt: Attempt
    verdict: Verdict


class GradedSelection(Struct, frozen=True):
    """The rollouts to learn from, by instance id, in order.

    `left_out` counts, by status, rollouts that are not decided, as `VOTED_OUT` those that people excluded, and as
    `TOO_LITTLE_PROTECTION` those whose reward twins do not confirm as demanded. `suspicious` counts, by instance,
    rollouts left out because of their patch. `refused_tasks` are the instances of decided rollouts that were left
    out.
    """

    rollouts: dict[str, list[GradedRollout]]
    left_out: dict[str, int]
    suspicious: dict[str, int]
    refused_tasks: frozenset[str] = frozenset()

    def groups(self) -> dict[tuple[str, AgentIdentity], list[GradedRollout]]:
        """Return the rollouts grouped by instance id and agent. Only those of one group may be compared."""
        groups: dict[tuple[str, AgentIdentity], list[GradedRollout]] = {}
        for task_id, members in self.rollouts.items():
            for graded in members:
                groups.setdefault((task_id, graded.rollout.agent), []).append(graded)
        return groups


VOTED_OUT = "excluded by votes"
"""The reason given for leaving out a rollout that people voted out."""

TOO_LITTLE_PROTECTION = "reward with less protection than demanded"
"""The reason given for leaving out a solved rollout whose reward twins do not confirm as demanded."""


class AttemptFault(Struct, frozen=True):
    """The error that ended an attempt, and whether the rollout finally failed because of it."""

    error: ErrorInfo
    given_up: bool


class VersionUse(Struct, frozen=True, kw_only=True):
    """The answered calls that ended with one version of the weights (None: unknown version).

    `mixed` counts calls during which the weights were updated, so that several versions sampled them. Times are
    Unix seconds.
    """

    version: str | None
    calls: int
    mixed: int
    completion_tokens: int
    first_at: float
    last_at: float


_START = ChangeMark()
_LATE_S = 5.0
"""A change may be stored this much later than its timestamp, because writes are queued."""


class OutcomeRepository(Repository):
    """`Store.outcomes`: how rollouts, tasks and runs ended. It only reads."""

    def of_run(self, run_id: str) -> list[RolloutOutcome]:
        """Return the outcome of each rollout of a run, ordered by task and sample index."""
        query = _outcomes(rollouts.c.run_id == run_id, rollouts.c.task_id, rollouts.c.sample_index)
        return self._read_all(query.order_by(rollouts.c.task_id, rollouts.c.sample_index), _outcome)

    def listed(self, rollout_ids: Sequence[str]) -> list[ListedRollout]:
        """Return rollouts by id, in no particular order. Unknown ids are left out."""
        reviewed = select(rewards.c.attempt_id).where(rewards.c.review.is_not(None))
        is_requested = rollouts.c.id.in_(json_values(rollout_ids, Text))
        columns = (column for column in rollouts.c if column.key not in ("status", "error"))
        query = _outcomes(is_requested, *columns, listed=True)
        with self._reading() as connection:
            by_person = set(connection.execute(reviewed).scalars())
            rows = connection.execute(query).mappings().all()
        return [_listed_rollout(row, by_person) for row in rows]

    def changed(self, since: ChangeMark = _START) -> tuple[list[str], ChangeMark]:
        """Return the ids of rollouts that may have changed since a mark, including unfinished ones, and the
        next mark.
        """
        newest = select(
            select(func.max(rollouts.c.updated_at)).scalar_subquery(),
            select(func.max(rewards.c.verdict_id)).scalar_subquery(),
            select(func.count()).select_from(rollouts).scalar_subquery(),
        )
        changed_rollouts = select(rollouts.c.id).where(
            (rollouts.c.updated_at >= since.updated_at - _LATE_S) | rollouts.c.status.in_(("preparing", "running"))
        )
        newly_judged = (
            select(attempts.c.rollout_id)
            .join(rewards, rewards.c.attempt_id == attempts.c.id)
            .where((rewards.c.verdict_id > since.verdict_id) | rewards.c.review.is_not(None))
        )
        with self._reading() as connection:
            updated_at, verdict_id, number = connection.execute(newest).one()
            ids = list(connection.execute(union(changed_rollouts, newly_judged)).scalars())
        return ids, ChangeMark(updated_at or 0.0, verdict_id or 0, number)

    def by_task(self, run_id: str) -> dict[str, TaskCounts]:
        """Return counts of the ended rollouts of each task of a run, over all its agents."""
        attempt = _attempt_that_counts(and_(rollouts.c.run_id == run_id, rollouts.c.status.in_(_ENDED)))
        query = (
            select(
                rollouts.c.task_id,
                _count(attempt.c.reward >= SOLVED_REWARD),
                func.count(attempt.c.reward),
                func.count(),
            )
            .join(attempt, attempt.c.rollout_id == rollouts.c.id)
            .group_by(rollouts.c.task_id, rollouts.c.agent, rollouts.c.agent_version)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
        counts: dict[str, TaskCounts] = {}
        for task_id, solved, graded, ended in rows:
            counts_before = counts.get(task_id, TaskCounts(0, 0, 0))
            counts[task_id] = TaskCounts(
                counts_before.solved + solved,
                counts_before.graded + graded,
                counts_before.failed + ended - graded,
                counts_before.differ or 0 < solved < graded,
            )
        return counts

    def counts(self, run_id: str) -> RunCounts:
        """Return counts over a run in its current state."""
        attempt = _attempt_that_counts(rollouts.c.run_id == run_id)
        decided = select(
            _count(attempt.c.reward >= SOLVED_REWARD).label("solved"),
            func.count(attempt.c.reward).label("graded"),
            func.coalesce(func.sum(case((attempt.c.integrity != "clean", 1), else_=0)), 0).label("suspicious"),
        )
        by_status = (
            select(rollouts.c.status, func.count().label("number"))
            .where(rollouts.c.run_id == run_id)
            .group_by(rollouts.c.status)
        )
        usage = (
            select(*USAGE)
            .join(attempts, attempts.c.id == calls.c.attempt_id)
            .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
        )
        with self._reading() as connection:
            statuses: dict[RolloutStatus, int] = {row.status: row.number for row in connection.execute(by_status)}
            solved, graded, suspicious = connection.execute(decided).one()
            return RunCounts(
                rollouts=statuses,
                solved=solved,
                unsolved=graded - solved,
                suspicious=suspicious,
                **connection.execute(usage).mappings().one(),
            )

    def decision(self, rollout_id: str) -> GradedRollout | None:
        """Return a rollout with the attempt that decided it; None if it has not ended or was not graded."""
        return next(iter(self._decisions(rollouts.c.id == rollout_id)), None)

    def decisions(self, run_id: str | None = None) -> list[GradedRollout]:
        """Return the decided rollouts of a run (or all), oldest first, then by task and sample index."""
        return self._decisions(true() if run_id is None else rollouts.c.run_id == run_id)

    def select_graded(
        self, run_id: str | None = None, *, include_suspicious: bool = False, protection: Protection = "none"
    ) -> GradedSelection:
        """Return the rollouts of a run (or all) to learn from, leaving out suspicious patches unless asked to
        include them, and rewards with less than this protection (`Verdict.has_protection`).

        Rollouts that people voted out (`VoteRepository.excluded_rollouts`) are always left out. Raises ConfigError
        if the store has no such run, or only clients of a gateway.
        """
        with self._reading() as connection:
            run_ids = connection.execute(select(runs.c.id).order_by(runs.c.created_at, runs.c.id)).scalars().all()
            clients = select(attempts.c.id).where(attempts.c.rollout_id.is_(None)).limit(1)
            has_clients = connection.execute(clients).first() is not None
            statuses = select(rollouts.c.id, rollouts.c.status)
            if run_id is not None:
                statuses = statuses.where(rollouts.c.run_id == run_id)
            by_rollout: dict[str, str] = {row.id: row.status for row in connection.execute(statuses)}
        check_run_id(run_id, run_ids)
        if not run_ids and has_clients:
            raise ConfigError(
                f"{self._name} is the store of a gateway, with calls but without runs, so it has no graded "
                "rollouts; expected the store of a run: give another directory, or use the calls of a key: "
                "understudy export hf DIR --key NAME --unredacted"
            )
        selected: dict[str, list[GradedRollout]] = {}
        suspicious: Counter[str] = Counter()
        refused: set[str] = set()
        excluded = VoteRepository(self._database).excluded_rollouts()
        for graded in self.decisions(run_id):
            rollout = graded.rollout
            by_rollout.pop(rollout.id, None)
            if rollout.id in excluded:
                by_rollout[rollout.id] = VOTED_OUT
            elif graded.verdict.integrity.status != "clean" and not include_suspicious:
                suspicious[rollout.task_id] += 1
            elif not graded.verdict.has_protection(protection):
                by_rollout[rollout.id] = TOO_LITTLE_PROTECTION
            else:
                selected.setdefault(rollout.task_id, []).append(graded)
                continue
            refused.add(rollout.task_id)
        return GradedSelection(
            dict(sorted(selected.items())),
            dict(Counter(by_rollout.values())),
            dict(suspicious),
            frozenset(refused),
        )

    def faults(self, run_id: str) -> list[AttemptFault]:
        """Return the errors that ended attempts of a run, retried or not, in order of the attempts."""
        query = (
            select(attempts.c.error, attempts.c.number, rollouts.c.status)
            .add_columns(func.max(attempts.c.number).over(partition_by=attempts.c.rollout_id).label("last"))
            .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
            .order_by(attempts.c.started_at, attempts.c.id)
        )
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return [
            AttemptFault(error, row.status == "failed" and row.number == row.last)
            for row in rows
            if (error := read_error(row.error)) is not None
        ]

    def timings(self, run_id: str) -> list[dict[str, float]]:
        """Return, for each ended attempt of a run, the seconds that each phase took, by phase name."""
        query = (
            select(attempts.c.timings)
            .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
            .where(attempts.c.ended_at.is_not(None))
        )
        with self._reading() as connection:
            return [read_timings(column) for column in connection.execute(query).scalars()]

    def versions(self, run_id: str) -> list[VersionUse]:
        """Return the versions of the weights that answered a run's calls, ordered by their first call."""
        mixed = case((json_array_length(calls.c.policy_spans) > 1, 1), else_=0)
        query = (
            select(
                calls.c.policy_version.label("version"),
                func.count().label("calls"),
                func.sum(mixed).label("mixed"),
                func.sum(calls.c.completion_tokens).label("completion_tokens"),
                func.min(calls.c.started_at).label("first_at"),
                func.max(calls.c.ended_at).label("last_at"),
            )
            .join(attempts, attempts.c.id == calls.c.attempt_id)
            .join(rollouts, and_(rollouts.c.id == attempts.c.rollout_id, rollouts.c.run_id == run_id))
            .where(calls.c.status == "ok")
            .group_by(calls.c.policy_version)
            .order_by(func.min(calls.c.started_at))
        )
        return self._read_all(query, _version_use)

    def _decisions(self, condition: ColumnElement[bool]) -> list[GradedRollout]:
        attempt = _attempt_that_counts(condition)
        query = (
            select(rollouts, attempts)
            .set_label_style(LABEL_STYLE_TABLENAME_PLUS_COL)
            .join(attempt, and_(attempt.c.rollout_id == rollouts.c.id, attempt.c.decides))
            .join(attempts, attempts.c.id == attempt.c.attempt_id)
            .order_by(rollouts.c.created_at, rollouts.c.run_id, rollouts.c.task_id, rollouts.c.sample_index)
        )
        with self._reading() as connection:
            rows = connection.execute(query).mappings().all()
            verdicts = read_verdicts(connection, select(attempt.c.attempt_id).where(attempt.c.decides))
        return [
            GradedRollout(
                read_rollout({column.key: row[f"rollouts_{column.key}"] for column in rollouts.c}),
                read_attempt({column.key: row[f"attempts_{column.key}"] for column in attempts.c}),
                verdicts[row["attempts_id"]],
            )
            for row in rows
        ]


def _outcomes(condition: ColumnElement[bool], *columns: ColumnElement[Any], listed: bool = False) -> Select[Any]:
    """Select the fields of RolloutOutcome for the rollouts that meet a condition, after the given columns.

    `listed` adds the `attempt_id` of the attempt that the figures belong to.
    """
    attempt = _attempt_that_counts(condition)
    usage = (
        select(
            calls.c.attempt_id,
            func.sum(case((calls.c.status == "ok", 1), else_=0)).label("turns"),
            func.sum(calls.c.prompt_tokens).label("prompt_tokens"),
            func.sum(calls.c.cached_tokens).label("cached_tokens"),
            func.sum(calls.c.completion_tokens).label("completion_tokens"),
            func.coalesce(func.sum(calls.c.cost_usd), 0.0).label("cost_usd"),
        )
        .where(calls.c.attempt_id.in_(select(attempt.c.attempt_id)))
        .group_by(calls.c.attempt_id)
        .subquery()
    )
    totals = [func.coalesce(column, 0).label(column.key) for column in usage.c if column.key != "attempt_id"]
    return (
        select(
            *columns,
            rollouts.c.status,
            rollouts.c.error,
            attempt.c.attempts,
            attempt.c.reward,
            attempt.c.reason,
            attempt.c.integrity,
            case((attempt.c.decides, attempt.c.status)).label("ended"),
            (attempt.c.ended_at - attempt.c.started_at).label("seconds"),
            *totals,
            *((attempt.c.attempt_id,) if listed else ()),
        )
        .join(attempt, attempt.c.rollout_id == rollouts.c.id)
        .join(usage, usage.c.attempt_id == attempt.c.attempt_id, isouter=True)
    )


def _listed_rollout(row: RowMapping, reviewed: set[str]) -> ListedRollout:
    fields: dict[str, Any] = {**row, "error": read_error(row["error"])}
    fields["agent"] = AgentIdentity(fields["agent"], fields.pop("agent_version"))
    return ListedRollout(**fields, reviewed=row["attempt_id"] in reviewed)


_outcome = row_reader(RolloutOutcome, error=read_error)
_version_use = row_reader(VersionUse)
_ENDED: tuple[RolloutStatus, ...] = ("succeeded", "failed")


def _attempt_that_counts(condition: ColumnElement[bool]) -> Subquery:
    """Select one row for each rollout that meets a condition: the attempt that decided it, else its last one, else
    NULLs.

    Columns: `rollout_id`; `attempts`, their number; `attempt_id`, `status`, `started_at` and `ended_at` of the
    attempt; `decides`; and `reward`, `reason`, `integrity`, which are NULL unless the attempt decides.
    """
    decides = and_(rollouts.c.status.in_(_ENDED), rewards.c.attempt_id.is_not(None))
    ranked = (
        select(
            rollouts.c.id.label("rollout_id"),
            func.count(attempts.c.id).over(partition_by=rollouts.c.id).label("attempts"),
            attempts.c.id.label("attempt_id"),
            attempts.c.status,
            attempts.c.started_at,
            attempts.c.ended_at,
            decides.label("decides"),
            *(case((decides, rewards.c[name])).label(name) for name in ("reward", "reason", "integrity")),
            func.row_number()
            .over(partition_by=rollouts.c.id, order_by=(decides.desc(), attempts.c.number.desc()))
            .label("rank"),
        )
        .join(attempts, attempts.c.rollout_id == rollouts.c.id, isouter=True)
        .join(rewards, rewards.c.attempt_id == attempts.c.id, isouter=True)
        .where(condition)
        .subquery()
    )
    return select(ranked).where(ranked.c.rank == 1).subquery()


def _count(condition: ColumnElement[bool]) -> ColumnElement[int]:
    """Count the rows that meet a condition."""
    return func.coalesce(func.sum(case((condition, 1), else_=0)), 0)
