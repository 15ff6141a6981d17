"""Stores and loops with known outcomes, for reports: what is solved is said, and nothing is run."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import count, islice
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.store import Store
from understudy.store.tokens import TokenIds, pack_ids
from understudy.train.loop.state import Evaluation, LoopConfig, LoopDirectory, LoopState, StepState, version_name
from understudy.types import (
    Call,
    ErrorInfo,
    Evidence,
    Files,
    Integrity,
    PolicySpan,
    ScriptChecks,
    Task,
    Usage,
    Verdict,
)

CONFIG = {
    "purpose": "evaluation",
    "agent": "claude-code",
    "weights": "tiny",
    "samples": 1,
    "seed": 7,
    "sandbox": "local",
    "tasks": {"a": "1"},
    "gateway": {"models": {"high": {"backend": "embedded"}}, "sampling": {"evaluation": {"temperature": 0.7}}},
}


class End(Struct, frozen=True):
    """How a rollout ended. `reward` None: it failed at `boundary`, or is pending where there is none."""

    reward: float | None
    suspicious: bool = False
    boundary: str = ""
    turns: int = 2
    version: str | None = None
    spans: tuple[PolicySpan, ...] = ()
    reason: str = ""
    retried: bool = False


def put_run(
    directory: Path,
    ends: Mapping[str, Sequence[End]],
    *,
    run_id: str = "run1",
    version: str | None = None,
    agent: str = "claude-code",
) -> Path:
    """A run with these rollouts: task id → the end of each sample."""
    with Store.open(directory) as store:
        tasks = [_task(task_id) for task_id in ends]
        ids = [
            (f"{run_id}-{number}-{sample}", task_id, sample, end)
            for number, (task_id, of_task) in enumerate(ends.items())
            for sample, end in enumerate(of_task)
        ]
        store.runs.create(run_id, CONFIG | {"agent": agent}).result()
        store.runs.add_tasks(run_id, tasks).result()
        store.runs.create_rollouts(run_id, [row[:3] for row in ids]).result()
        started = [row for row in ids if row[3].reward is not None or row[3].boundary]
        if retried := [row for row in started if row[3].retried]:
            attempts = [store.runs.start_attempt(row[0]) for row in retried]
            lost = ErrorInfo("sandbox", "SandboxError", "the sandbox broke once")
            for future in attempts:
                store.runs.finish_attempt(future.result().id, "failed", "requeuing", error=lost).result()
        attempts = [store.runs.start_attempt(row[0]) for row in started]
        pairs = [(future.result().id, row[3]) for future, row in zip(attempts, started, strict=True)]
        done = [store.runs.mark_running(attempt_id) for attempt_id, _ in pairs]
        done += [
            store.calls.append(_call(attempt_id, turn, end, version))
            for attempt_id, end in pairs
            for turn in range(end.turns)
        ]
        done += [_finish(store, attempt_id, end) for attempt_id, end in pairs]
        for future in done:
            future.result()
    return directory


def solved(counts: Mapping[str, tuple[int, int]], **of_each: object) -> dict[str, list[End]]:
    """The ends of rollouts: of each task so many solved of so many."""
    return {
        task: [End(1.0 if sample < right else 0.0, **of_each) for sample in range(total)]  # type: ignore[arg-type]
        for task, (right, total) in counts.items()
    }


def put_many(directory: Path, *, tasks: int, samples: int, turns: int) -> Path:
    """A run of so many rollouts, two in three solved: copies of one, made by the database itself."""
    put_run(directory, {"task-0000": [End(1.0, turns=1)]})
    numbers = f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {tasks * samples - 1}) "
    with closing(sqlite3.connect(directory / "store.db")) as database, database:
        for table, changed in _COPIES.items():
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table})")]
            selected = ", ".join(changed.get(column, f"t.{column}") for column in columns)
            only = f"n.i < {tasks}" if table == "tasks" else "1"
            beside = f", (SELECT value AS turn FROM json_each('{list(range(turns))}'))" if table == "calls" else ""
            last = "WHERE t.sequence = 0 AND" if table == "calls" else "WHERE"
            selected = selected.replace("TASKS", str(tasks))
            database.execute(
                f"INSERT INTO {table} {numbers} SELECT {selected} FROM {table} t, n{beside} {last} {only}"
            )
    return directory


_COPIES = {
    "tasks": {"id": "printf('task-%04d', n.i)"},
    "rollouts": {
        "id": "'r' || n.i",
        "task_id": "printf('task-%04d', n.i % TASKS)",
        "sample_index": "n.i / TASKS",
    },
    "attempts": {"id": "'r' || n.i || '.1'", "rollout_id": "'r' || n.i"},
    "rewards": {"attempt_id": "'r' || n.i || '.1'", "reward": "n.i % 3 > 0"},
    "calls": {
        "key": "NULL",
        "id": "'r' || n.i || '.1-' || turn",
        "attempt_id": "'r' || n.i || '.1'",
        "sequence": "turn",
    },
}
"""What differs in the copy of a row, as SQL, by table and column."""


def put_loop(
    root: Path,
    evaluations: Sequence[Mapping[str, Sequence[End]]],
    steps: Sequence[Mapping[str, Sequence[End]]] = (),
    *,
    metrics: Iterable[Mapping[str, object]] = (),
    planned: int | None = None,
    asynchronous: bool = False,
) -> Path:
    """A loop that was evaluated before its first step, and after every one; asynchronous, its steps are stale."""
    directory = LoopDirectory(root)
    of_evaluations: list[Evaluation] = []
    for number, ends in enumerate(evaluations):
        evaluation, version = directory.evaluation(number), version_name(number)
        put_run(evaluation, ends, run_id=f"e{number}", version=version)
        tasks = {task: _counted(of_task) for task, of_task in ends.items()}
        of_evaluations.append(
            Evaluation(
                step=number,
                version=version,
                run=directory.relative(evaluation),
                solved=sum(right for right, _ in tasks.values()),
                total=sum(total for _, total in tasks.values()),
                tasks=tasks,
            )
        )
    of_steps: list[StepState] = []
    for number, ends in enumerate(steps, 1):
        put_run(directory.run(number), ends, run_id=f"s{number}", version=version_name(number - 1))
        rewards = [end.reward for of_task in ends.values() for end in of_task if end.reward is not None]
        of_steps.append(
            StepState(
                step=number,
                phase="published",
                run=directory.relative(directory.run(number)),
                sampled_by=version_name(number - 1),
                version=version_name(number),
                tasks=tuple(ends),
                collected=len(rewards),
                solved=sum(reward >= 1 for reward in rewards),
                staleness=int(asynchronous and number > 1),
            )
        )
    last = version_name(max(len(steps), 0))
    directory.enter(
        LoopConfig(
            model="tiny",
            model_digest="0",
            tasks={},
            steps=max(1, len(steps)) if planned is None else planned,
            groups=2,
            samples=4,
            rollout_settings={"temperature": 0.7},
            trainer={"learning_rate": 1e-4},
            asynchronous=asynchronous,
        )
    )
    state = LoopState(version=last, weights="w", steps=tuple(of_steps), evaluations=tuple(of_evaluations))
    directory.save(state)
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in metrics)
    (root / "metrics.jsonl").write_bytes(lines)
    return root


_COMPACTED = 50


def put_long(directory: Path, turns: int, *, characters: int = 20_000, tokens: int = 5_000) -> Path:
    """A run of one rollout with the calls of `long_calls`."""
    with Store.open(directory) as store:
        (attempt_id,) = begin_rollouts(store, ["long"])
        for turn, call in enumerate(islice(long_calls(attempt_id, characters, tokens), turns)):
            written = store.calls.append(call)
            if turn % _COMPACTED == _COMPACTED - 1:
                written.result()
    return directory


def begin_rollouts(store: Store, names: Sequence[str]) -> list[str]:
    """A run of rollouts of one task that are on their way; the ids of their attempts."""
    store.runs.create("run1", {}).result()
    store.runs.add_tasks("run1", [_task("calc-0")]).result()
    store.runs.create_rollouts("run1", [(name, "calc-0", n) for n, name in enumerate(names)]).result()
    attempts = [store.runs.start_attempt(name).result() for name in names]
    for attempt in attempts:
        store.runs.mark_running(attempt.id).result()
    return [attempt.id for attempt in attempts]


def long_calls(attempt_id: str, characters: int, tokens: int) -> Iterator[Call]:
    """Calls without end: a tool call with a long result in each, compactions between.

    Each turn adds so many characters and tokens to the prompt.
    """
    text = "".join(f"line {number} of what a tool has printed\n" for number in range(characters // 36))
    sampled = pack_ids(tuple(range(1_000, 1_100)))
    question = pack_ids(tuple(range(2_000, 2_000 + tokens)))
    tools = msgspec.json.encode(
        [{"name": f"tool{n}", "description": text[:2_000], "input_schema": {}} for n in range(20)]
    )
    messages: list[bytes] = []
    ids, length, parent = b"", 0, None
    for turn in count():
        if turn % _COMPACTED == 0:
            summary = f"This session is being continued from a previous conversation, part {turn}."
            messages = [msgspec.json.encode({"role": "user", "content": summary if turn else "Mend it."})]
            ids, length, parent = b"", 0, None
        use = {"type": "tool_use", "id": f"t{turn}", "name": "Bash", "input": {"command": f"cat part{turn}"}}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"I look at part {turn}."}, use]}
        ids, length = ids + question, length + tokens
        call = Call(
            id=f"{attempt_id}-c{turn}", attempt_id=attempt_id, sequence=turn, dialect="anthropic",
            requested_model="m", backend="b", backend_model="m",
            request=b'{"model":"m","system":"S","tools":%b,"messages":[%b]}' % (tools, b",".join(messages)),
            response=msgspec.json.encode({"id": f"m{turn}", "type": "message", **answer}), status="ok",
            started_at=float(turn), ended_at=turn + 0.5, parent_id=parent, session_id="s",
            prompt_token_ids=TokenIds(ids, length), completion_token_ids=TokenIds(sampled, 100),
            logprobs=(-0.5,) * 100,
        )  # fmt: skip
        yield call
        result = {"type": "tool_result", "tool_use_id": f"t{turn}", "content": f"part {turn}\n{text}"}
        messages += [msgspec.json.encode(answer), msgspec.json.encode({"role": "user", "content": [result]})]
        ids, length, parent = ids + sampled, length + 100, call.id


def _counted(ends: Sequence[End]) -> tuple[int, int]:
    rewards = [end.reward for end in ends if end.reward is not None]
    return sum(reward >= 1 for reward in rewards), len(rewards)


def _task(task_id: str) -> Task:
    checks = ScriptChecks(source=Files({"test.sh": "true"}))
    source = Files({"a.py": ""})
    return Task(instance_id=task_id, repo="r", instruction="Do it.", source=source, checks=checks, gold_patch="+")


def _call(attempt_id: str, turn: int, end: End, version: str | None) -> Call:
    return Call(
        id=f"{attempt_id}-{turn}",
        attempt_id=attempt_id,
        sequence=turn,
        dialect="anthropic",
        requested_model="m",
        backend="embedded",
        backend_model="m",
        request=b'{"model":"m","messages":[{"role":"user","content":"Do it."}]}',
        response=b'{"type":"message"}',
        status="ok",
        started_at=1000.0 + turn,
        ended_at=1000.5 + turn,
        policy_version=end.version or version,
        policy_spans=end.spans,
        usage=Usage(prompt_tokens=100, completion_tokens=10 + turn),
    )


def _finish(store: Store, attempt_id: str, end: End):
    if end.reward is None:
        error = ErrorInfo(end.boundary, "Error", end.reason or f"the {end.boundary} broke")
        return store.runs.finish_attempt(attempt_id, "failed", "failed", error=error)
    status = "suspicious" if end.suspicious else "clean"
    integrity = Integrity(status, "os._exit", (Evidence("exit"),)) if end.suspicious else Integrity()
    reason = end.reason or ("all tests pass" if end.reward >= 1 else "test_shift fails")
    verdict = Verdict(reward=end.reward, reason=reason, integrity=integrity)
    return store.runs.finish_attempt(attempt_id, "succeeded", "succeeded", patch=b"+x\n", verdict=verdict)
