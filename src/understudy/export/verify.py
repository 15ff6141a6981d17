"""Checks that an export matches the store: each row's calls, weights, verdict, patch and tokens.

The chain is: a row of a dataset → the calls whose tokens it has → the version of the weights that sampled them →
the verdict on their attempt, with the grader's version → the hash of the graded patch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

from msgspec import Struct, field

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.outcomes import GradedRollout
from understudy.tasks.records import task_digest
from understudy.trajectory.samples import usable
from understudy.trajectory.tree import build
from understudy.types import Call

_MAX_REPORTED = 100
_REGRADE = "grade it anew: understudy grade --regrade RUN"


class LineageReport(Struct):
    """What was checked, and what is wrong.

    `skewed_tokens` counts tokens of rows that differ from those of their calls. `unversioned` counts calls of
    models whose server names no version of its weights: no call of these models in the store has one. `problems`
    are the first hundred, each with the rollout or row and what was expected; `failures` counts all of them.
    """

    rollouts: int = 0
    calls: int = 0
    rows: int = 0
    skewed_tokens: int = 0
    unversioned: int = 0
    failures: int = 0
    problems: list[str] = field(default_factory=list[str])

    def add(self, where: str, problem: str) -> None:
        """Count a failure."""
        self.failures += 1
        if len(self.problems) < _MAX_REPORTED:
            self.problems.append(f"{where}: {problem}")


def verify_run(store: Store, report: LineageReport) -> None:
    """Check every decided rollout in a store: the weights of its calls, its verdict, its task and patch."""
    versioned = store.calls.versioned_models()
    for graded in store.outcomes.decisions():
        where = f"rollout {graded.rollout.id}"
        report.rollouts += 1
        for problem in _verdict_problems(store, graded):
            report.add(where, problem)
        for call in store.calls.of_attempt(graded.attempt.id):
            _check_call(call, versioned, where, report)


def verify_rows(store: Store, rows: Iterable[tuple[str, dict[str, Any]]], report: LineageReport) -> None:
    """Check rows of an export, each with its location, against a store.

    Rows of `hf` and `trl-tokens` are compared token by token. Of other rows, which name the call of their answer,
    the calls, weights and verdicts are checked.
    """
    versioned = store.calls.versioned_models()
    decisions = {graded.attempt.id: graded for graded in store.outcomes.decisions()}
    clients = {attempt.id for attempt in store.keys.clients()}

    @lru_cache(maxsize=8)
    def calls_of(attempt_id: str) -> list[Call]:
        return list(store.calls.of_attempt(attempt_id))

    @lru_cache(maxsize=8)
    def verdict_problems(attempt_id: str) -> list[str]:
        return list(_verdict_problems(store, decisions[attempt_id]))

    for where, row in rows:
        if row.get("origin") == "session":
            continue
        report.rows += 1
        if not {"attempt_id", "example_id"} & row.keys():
            report.add(
                where,
                "has neither attempt_id nor example_id, expected one of them; export in a format "
                "that writes it, such as hf, trl-tokens or trl-sft",
            )
            continue
        attempt_id = _attempt_of_row(store, row)
        if attempt_id in decisions:
            verdict = decisions[attempt_id].verdict
            expected: dict[str, Any] = {"reward": verdict.reward, "integrity": verdict.integrity.status}
            for problem in verdict_problems(attempt_id):
                report.add(where, problem)
        elif attempt_id in clients:
            expected = {"reward": None, "integrity": None}
        else:
            report.add(
                where,
                "names no call or attempt that decided a rollout of this store, nor one of a gateway's key; give "
                "its own run, or its gateway's directory",
            )
            continue
        calls = calls_of(attempt_id)
        for key, value in expected.items():
            if key in row and row[key] != value:
                report.add(where, f"{key} is {row[key]!r}, the verdict's is {value!r}; export again")
        if not (row_calls := _calls_of_row(row, calls)):
            report.add(
                where,
                f"none of the {len(calls)} calls of attempt {attempt_id} is the row's, expected those that its "
                "call_ids, example_id or turn names; export again",
            )
            continue
        for call in row_calls:
            _check_call(call, versioned, where, report)
        version = row_calls[-1].policy_version
        if "policy_version" in row and row["policy_version"] not in (None, version):
            report.add(
                where, f"policy_version is {row['policy_version']!r}, the call's is {version!r}; export again"
            )
        tokens = _tokens_of_row(row)
        if tokens is not None and (skew := _differing_tokens(tokens, row_calls)):
            report.skewed_tokens += skew
            report.add(where, f"{skew} tokens are not those that were sent and sampled; export again")


def _verdict_problems(store: Store, graded: GradedRollout) -> Iterator[str]:
    """Return what is wrong with a verdict as evidence."""
    rollout, attempt, verdict = graded.rollout, graded.attempt, graded.verdict
    if not verdict.grader:
        yield f"its verdict names no grader's version; {_REGRADE}"
        return
    patch = hashlib.sha256(store.runs.patch(attempt.id) or b"").hexdigest()
    if verdict.patch_digest != patch:
        yield f"its verdict is on patch {verdict.patch_digest[:12]}, the stored one is {patch[:12]}; {_REGRADE}"
    task = task_digest(store.runs.task(rollout.run_id, rollout.task_id))
    if verdict.task_digest != task:
        yield (
            f"its verdict is on version {verdict.task_digest[:12]} of the task, the stored one is {task[:12]}; "
            f"{_REGRADE}"
        )


def _check_call(call: Call, versioned: Collection[str], where: str, report: LineageReport) -> None:
    """Check a call's tokens, and the version of the weights that sampled them.

    Without tokens it trains nothing.
    """
    report.calls += 1
    if call.status != "ok" or not call.completion_token_ids:
        return
    if call.policy_version is None and call.backend_model in versioned:
        report.add(
            f"{where}, call {call.id}",
            f"has no version of the weights, expected one, as other calls of {call.backend_model} have; its "
            "server reported none, so leave it out of training",
        )
    report.unversioned += call.policy_version is None and call.backend_model not in versioned
    if call.logprobs is not None and len(call.logprobs) != len(call.completion_token_ids):
        report.add(
            f"{where}, call {call.id}",
            f"has {len(call.logprobs)} logprobs for {len(call.completion_token_ids)} tokens, expected one for "
            "each; its server reported them, so leave it out of training",
        )


def _attempt_of_row(store: Store, row: dict[str, Any]) -> str:
    """Return the attempt that a row names, directly or by its call; "" if it names none."""
    if isinstance(attempt_id := row.get("attempt_id"), str):
        return attempt_id
    try:
        return store.calls.get(str(row.get("example_id", ""))).attempt_id
    except StoreError:
        return ""


def _calls_of_row(row: dict[str, Any], calls: Sequence[Call]) -> list[Call]:
    """Return the calls that a row was made from, in order: those it names, or those at its `turn`."""
    if "call_ids" in row or "example_id" in row:
        named: Sequence[str] = row.get("call_ids") or [row.get("example_id", "")]
        by_id = {call.id: call for call in calls}
        return [by_id[id] for id in named if id in by_id] if all(id in by_id for id in named) else []
    turns = [node.call for node in filter(usable, build(calls).nodes)]
    turn = row.get("turn")
    return [turns[turn]] if isinstance(turn, int) and 0 <= turn < len(turns) else []


def _tokens_of_row(row: dict[str, Any]) -> list[int] | None:
    if "prompt_ids" in row:
        return [*row["prompt_ids"], *row["gold_completion_ids"]]
    return row.get("input_ids")


def _differing_tokens(tokens: Sequence[int], calls: Sequence[Call]) -> int:
    """Return how many tokens of a row differ from its calls: the prompt and completion of each call must be the
    beginning of the row, and those of the last call the whole row.
    """
    tokens_of_calls = [[*(call.prompt_token_ids or ()), *(call.completion_token_ids or ())] for call in calls]
    differing: set[int] = set()
    for expected in tokens_of_calls:
        pairs = zip(tokens, expected, strict=False)
        differing.update(position for position, (stored, token) in enumerate(pairs) if stored != token)
    return len(differing) + abs(len(tokens) - len(tokens_of_calls[-1]))
