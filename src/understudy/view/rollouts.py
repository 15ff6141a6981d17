"""A rollout's head, patch and logs, and all rollouts of a task side by side."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from msgspec import Struct

from understudy.errors import NotInStore
from understudy.store import Store
from understudy.store.keys import CLIENT
from understudy.types import Attempt, PytestChecks, Rollout, SuiteChecks, Task, Verdict, is_solved
from understudy.util.sequences import common_prefix_length
from understudy.view.faults import not_found
from understudy.view.schema.actions import VoteView
from understudy.view.schema.rollouts import (
    AttemptView,
    GradedTest,
    GroupMember,
    GroupTurn,
    IntegrityView,
    PatchView,
    ReusedVerdict,
    RolloutHead,
    RolloutRow,
    TaskGroup,
    TaskView,
    TextRange,
    VerdictView,
)
from understudy.view.transcripts import MAX_ACTIONS, Transcript, segment_views, text_range

_MAX_TEXT_CHARACTERS = 20_000
MAX_COMPARED_ROLLOUTS = 64
"""How many rollouts of a task are compared."""


class ShownAttempt(Struct, frozen=True):
    """A rollout, or a gateway's client without one, with its attempts and the one that is shown."""

    rollout: Rollout | None
    attempts: list[Attempt]
    attempt: Attempt | None


def shown_attempt(store: Store, name: str, attempt_id: str | None) -> ShownAttempt:
    """Return a rollout or client by its id, with the named attempt, else the one that decided it, else the last.

    Raises ViewRefused if the attempt belongs to another rollout, StoreError if there is no such rollout.
    """
    if name.startswith(CLIENT):
        client = store.runs.attempt(name)
        return ShownAttempt(None, [client], client)
    rollout = store.runs.rollout(name)
    attempts = store.runs.attempts(rollout.id)
    if attempt_id is not None:
        for attempt in attempts:
            if attempt.id == attempt_id:
                return ShownAttempt(rollout, attempts, attempt)
        raise not_found(
            f"rollout {name} has no attempt {attempt_id[:100]!r}", "give an id from the rollout's `attempts`"
        )
    decision = store.outcomes.decision(rollout.id)
    if decision is not None:
        return ShownAttempt(rollout, attempts, decision.attempt)
    return ShownAttempt(rollout, attempts, attempts[-1] if attempts else None)


def rollout_head(
    store: Store,
    shown: ShownAttempt,
    row: RolloutRow | None,
    transcript: Transcript | None,
    votes: Sequence[VoteView],
) -> RolloutHead:
    """Return everything about a rollout except its turns, tokens, patch and raw bodies."""
    attempt, rollout = shown.attempt, shown.rollout
    task = None if rollout is None else store.runs.task(rollout.run_id, rollout.task_id)
    verdicts = {attempt.id: store.runs.verdict(attempt.id) for attempt in shown.attempts}
    verdict = None if attempt is None else verdicts[attempt.id]
    logs = {} if attempt is None else store.runs.logs(attempt.id)
    return RolloutHead(
        id=attempt.id if rollout is None and attempt is not None else rollout.id if rollout else "",
        row=row,
        attempt_id=None if attempt is None else attempt.id,
        attempts=tuple(_attempt_view(attempt, verdicts[attempt.id] is not None) for attempt in shown.attempts),
        task=None if task is None else _task_view(task),
        verdict=None if verdict is None else _verdict_view(store, verdict, task, row),
        has_patch=attempt is not None and store.runs.patch(attempt.id) is not None,
        logs={name: len(content.decode(errors="replace")) for name, content in logs.items()},
        turns=0 if transcript is None else transcript.total,
        unread=0 if transcript is None else transcript.unread,
        branches=() if transcript is None else transcript.branches,
        segments=() if transcript is None else segment_views(transcript),
        segment_calls=() if transcript is None else transcript.segment_calls,
        segment_reasons={} if transcript is None else transcript.outlined.reasons,
        votes=tuple(votes),
    )


def _attempt_view(attempt: Attempt, graded: bool) -> AttemptView:
    return AttemptView(
        id=attempt.id,
        number=attempt.number,
        status=attempt.status,
        started_at=attempt.started_at,
        ended_at=attempt.ended_at,
        timings=attempt.timings,
        graded=graded,
        findings=attempt.findings,
        error=attempt.error,
    )


def _task_view(task: Task) -> TaskView:
    return TaskView(
        task_id=task.instance_id,
        repo=task.repo,
        instruction=task.instruction[:_MAX_TEXT_CHARACTERS],
        gold_patch=task.gold_patch[:_MAX_TEXT_CHARACTERS],
    )


def _verdict_view(store: Store, verdict: Verdict, task: Task | None, row: RolloutRow | None) -> VerdictView:
    earlier = verdict.earlier[-1].tests if verdict.earlier else {}
    checks = None if task is None else task.checks
    mended, preserved = (
        (set(checks.fail_to_pass), set(checks.pass_to_pass))
        if isinstance(checks, PytestChecks | SuiteChecks)
        else (set[str](), set[str]())
    )
    tests = tuple(
        GradedTest(
            id=test[:500],
            outcome=outcome,
            unpatched="failed" if test in mended else "passed" if test in preserved else None,
            regraded=earlier.get(test),
        )
        for test, outcome in verdict.tests.items()
    )
    integrity = verdict.integrity
    return VerdictView(
        reward=verdict.reward,
        reason=verdict.reason,
        applied=verdict.applied,
        checks_s=verdict.checks_s,
        protection=verdict.protection,
        unprotected=verdict.unprotected,
        grader=verdict.grader,
        tests=tests,
        integrity=IntegrityView(
            status=integrity.status,
            reason=integrity.reason,
            evidence=integrity.evidence,
            reviewed=row is not None and row.reviewed,
        ),
        log=verdict.log[-_MAX_TEXT_CHARACTERS:],
        commands=verdict.commands,
        reused_from=_reused_verdict(store, verdict.reused_from) if verdict.reused_from else None,
    )


def _reused_verdict(store: Store, attempt_id: str) -> ReusedVerdict:
    try:
        rollout = store.runs.rollout(store.runs.attempt(attempt_id).rollout_id or "")
    except NotInStore:
        return ReusedVerdict(attempt_id=attempt_id)
    return ReusedVerdict(attempt_id=attempt_id, rollout_id=rollout.id, sample_index=rollout.sample_index)


def patch_view(store: Store, shown: ShownAttempt, offset: int, length: int) -> PatchView:
    """Return part of the shown attempt's patch."""
    content = None if shown.attempt is None else store.runs.patch(shown.attempt.id)
    part = None if content is None else text_range(content.decode(errors="replace"), offset, length)
    return PatchView(attempt_id=None if shown.attempt is None else shown.attempt.id[:500], patch=part)


def log_range(store: Store, shown: ShownAttempt, name: str, offset: int, length: int) -> TextRange:
    """Return part of a log file of the shown attempt. Raises ViewRefused if there is no log with that name."""
    logs = {} if shown.attempt is None else store.runs.logs(shown.attempt.id)
    if name not in logs:
        raise not_found(
            f"the attempt has no log {name[:100]!r}",
            f"give one of its logs: {', '.join(sorted(logs))}"
            if logs
            else "it has no logs; choose another attempt",
        )
    return text_range(logs[name].decode(errors="replace"), offset, length)


# --- groups --------------------------------------------------------------------------------------------


def task_group(task_id: str, members: Sequence[tuple[RolloutRow, tuple[GroupTurn, ...]]], total: int) -> TaskGroup:
    """Return some of the `total` rollouts of a task side by side: what each did, and the first turn where solved
    and unsolved differ.
    """
    rewards = [row.reward for row, _ in members if row.reward is not None]
    mean = fmean(rewards) if rewards else 0.0
    members_shown: list[GroupMember] = []
    cut = False
    for row, turns in members:
        cut = cut or len(turns) > MAX_ACTIONS
        members_shown.append(
            GroupMember(
                row=row,
                advantage=None if row.reward is None else row.reward - mean,
                turns=turns[:MAX_ACTIONS],
            )
        )
    return TaskGroup(
        task_id=task_id,
        members=tuple(members_shown),
        total=total,
        parting=_first_difference(members_shown),
        cut=cut,
    )


def _first_difference(members: Sequence[GroupMember]) -> int | None:
    """Return the first turn that no solved and unsolved rollout have in common; None if nothing differs."""
    solved = [member for member in members if member.row.reward is not None and is_solved(member.row.reward)]
    unsolved = [member for member in members if member.row.reward is not None and not is_solved(member.row.reward)]
    common_turns = [
        common_prefix_length(
            [turn.digest for turn in candidate.turns], [turn.digest for turn in unsolved_rollout.turns]
        )
        for candidate in solved
        for unsolved_rollout in unsolved
    ]
    return max(common_turns) if common_turns else None
