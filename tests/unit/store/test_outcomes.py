"""What became of rollouts: which attempt decides, what counts as solved, and how many queries that takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from understudy.store import Store
from understudy.store.outcomes import TaskCounts
from understudy.types import AgentIdentity, ErrorInfo, Files, Integrity, PytestChecks, Task, Verdict, is_solved

RUN = "run"


def task(name: str) -> Task:
    source, checks = Files({"a.py": ""}), PytestChecks({}, ("test",))
    return Task(instance_id=name, repo="r", instruction="i", source=source, checks=checks, gold_patch="")


def attempt(store: Store, rollout_id: str, reward: float | None, rollout_status: Any, **verdict: Any) -> None:
    """One more attempt of a rollout, graded where it has a reward."""
    started = store.runs.start_attempt(rollout_id).result()
    store.runs.mark_running(started.id).result()
    graded = None if reward is None else Verdict(reward=reward, reason="r", **verdict)
    error = ErrorInfo("sandbox", "SandboxError", "gone") if reward is None else None
    status = "failed" if reward is None else "succeeded"
    store.runs.finish_attempt(started.id, status, rollout_status, verdict=graded, error=error).result()


def fill(store: Store, count: int) -> None:
    """`count` tasks of three rollouts: solved after a fault, unsolved and suspicious, failed without a verdict."""
    store.runs.create(RUN, {}).result()
    names = [f"t{number:02}" for number in range(count)]
    store.runs.add_tasks(RUN, [task(name) for name in names]).result()
    rollouts = [(f"{name}-{index}", name, index) for name in names for index in range(3)]
    store.runs.create_rollouts(RUN, rollouts).result()
    for name in names:
        attempt(store, f"{name}-0", None, "requeuing")
        attempt(store, f"{name}-0", 1.0, "succeeded")
        attempt(store, f"{name}-1", 0.0, "succeeded", integrity=Integrity("suspicious", "odd"))
        attempt(store, f"{name}-2", None, "failed")


@contextmanager
def queries(store: Store) -> Iterator[list[str]]:
    """The statements that are executed inside."""
    statements: list[str] = []

    def note(*arguments: Any) -> None:
        statements.append(arguments[2])

    engine = store._database.engine
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", note)


@pytest.mark.parametrize("count", [1, 12])
def test_counts_take_the_same_few_queries_however_many_rollouts_there_are(tmp_path: Path, count: int) -> None:
    with Store.open(tmp_path) as store:
        fill(store, count)
        with queries(store) as statements:
            by_task = store.outcomes.by_task(RUN)
        assert len(statements) == 1
        assert by_task == {f"t{number:02}": TaskCounts(1, 2, 1, differ=True) for number in range(count)}
        with queries(store) as statements:
            counts = store.outcomes.counts(RUN)
        assert len(statements) == 3
        assert (counts.solved, counts.unsolved, counts.suspicious) == (count, count, count)
        with queries(store) as statements:
            outcomes = store.outcomes.of_run(RUN)
        assert len(statements) == 1
        assert [outcome.attempts for outcome in outcomes] == [2, 1, 1] * count
        assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, None] * count
        with queries(store) as statements:
            decisions = store.outcomes.decisions(RUN)
        assert len(statements) == 3
        assert [is_solved(graded.verdict.reward) for graded in decisions] == [True, False] * count


def test_an_attempt_decides_only_when_its_rollout_has_ended(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store:
        store.runs.create(RUN, {}).result()
        store.runs.add_tasks(RUN, [task("t")]).result()
        store.runs.create_rollouts(RUN, [("r", "t", 0)]).result()
        assert store.outcomes.decision("r") is None
        attempt(store, "r", 0.0, "requeuing")
        assert store.outcomes.decision("r") is None
        assert store.outcomes.by_task(RUN) == {}
        attempt(store, "r", 1.0, "failed")
        attempt_of = store.outcomes.decision("r")
        assert attempt_of is not None and (attempt_of.attempt.number, attempt_of.verdict.reward) == (2, 1.0)
        assert store.outcomes.by_task(RUN) == {"t": TaskCounts(1, 1, 0)}
        store.runs.requeue_failed(RUN).result()
        attempt(store, "r", None, "failed")
        last_graded = store.outcomes.decision("r")
        assert last_graded is not None and last_graded.attempt.number == 2
        (outcome,) = store.outcomes.of_run(RUN)
        assert (outcome.reward, outcome.attempts, outcome.ended) == (1.0, 3, "succeeded")


def test_two_agents_on_one_task_are_two_groups(tmp_path: Path) -> None:
    claude, shell = AgentIdentity("claude-code", "2.1.197"), AgentIdentity("shell")
    with Store.open(tmp_path) as store:
        store.runs.create(RUN, {}).result()
        store.runs.add_tasks(RUN, [task("t")]).result()
        for agent, reward in ((claude, 1.0), (shell, 0.0)):
            ids = [(f"{agent.name}-{index}", "t", index) for index in range(2)]
            store.runs.create_rollouts(RUN, ids, agent).result()
            for rollout_id, _, _ in ids:
                attempt(store, rollout_id, reward, "succeeded")
        groups = store.outcomes.select_graded(RUN).groups()
        assert {key: [each.rollout.id for each in members] for key, members in groups.items()} == {
            ("t", claude): ["claude-code-0", "claude-code-1"],
            ("t", shell): ["shell-0", "shell-1"],
        }
        # The task is solved at times, yet by no agent at times: there is nothing to learn.
        assert store.outcomes.by_task(RUN) == {"t": TaskCounts(2, 4, 0, differ=False)}
