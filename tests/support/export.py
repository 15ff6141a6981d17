"""Stores to export from: sessions as logs would give them, and rollouts that were graded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats import hf
from understudy.ingest import trace_store
from understudy.ingest.trace import (
    Message,
    PlainRenderer,
    RequestShape,
    Trace,
    TraceNode,
    TraceTurn,
    TurnSignals,
    tool_call,
)
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.trajectory.roles import ROLES, Role
from understudy.types import Call, Verdict

from support import calc_task
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} something.",
            "parameters": {"type": "object", "properties": {key: {"type": "string"} for key in keys}},
        },
    }
    for name, keys in (("Bash", ("command",)), ("Edit", ("path", "old", "new")))
]


def wait(future: Future[Any]) -> Any:
    return future.result(30)


class Log:
    """Makes a trace: what is said goes behind a node, an answer is a turn."""

    def __init__(self, name: str, *, project: str | None = "/home/ann/project", **more: Any) -> None:
        more = {"shape": RequestShape("You code.", TOOLS), **more}
        self.trace = Trace(
            trace_id=name,
            session_id=f"session-{name}",
            format="chat",
            source=f"/home/ann/{name}.jsonl",
            renderer=PlainRenderer(),
            project=project,
            **more,
        )

    def say(self, parent: int, message: Message) -> int:
        self.trace.nodes.append(TraceNode(parent, message))
        return len(self.trace.nodes) - 1

    def user(self, parent: int, content: Any) -> int:
        return self.say(parent, {"role": "user", "content": content})

    def result(self, parent: int, call_id: str, content: str = "ok") -> int:
        return self.say(parent, {"role": "tool", "tool_call_id": call_id, "content": content})

    def answer(
        self,
        parent: int,
        content: str | None = None,
        calls: Sequence[tuple[str, str, Any]] = (),
        *,
        thinking: str | None = None,
        signals: TurnSignals | None = None,
        model: str = "glm-5",
        **more: Any,
    ) -> int:
        message: Message = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [tool_call(*call) for call in calls]
        if thinking:
            message["reasoning_content"] = thinking
        node = self.say(parent, message)
        number = len(self.trace.turns)
        self.trace.turns.append(
            TraceTurn(
                message_id=f"m{number}", context=parent, action=(node,), model=model, signals=signals, **more
            )
        )
        return node


def session(name: str = "t", **more: Any) -> Trace:
    """Three turns: two tool calls with different arguments, and words; one branch off after the first."""
    log = Log(name, **more)
    ask = log.user(-1, f"Mend {name}.")
    first = log.answer(ask, "I look.", [("c1", "Bash", {"command": "ls -l"})], thinking="Where is it?")
    result = log.result(first, "c1", "a.py")
    edit = ("c2", "Edit", {"path": "a.py", "old": "x", "new": "y"})
    second = log.answer(
        result, None, [edit], signals=TurnSignals(tool_calls=1, edits=1, edits_survived=1, tests="passed")
    )
    done = log.result(second, "c2")
    log.answer(done, "Done ✓.", thinking="All good.", signals=TurnSignals(commits=1))
    other = log.user(result, "No, another way.")
    log.answer(other, "Then I stop.", signals=TurnSignals(interrupted=True))
    return log.trace


def export_hf(
    store: Store,
    output: Path,
    *,
    run_id: str | None = None,
    roles: Sequence[Role] = ROLES,
    include_suspicious: bool = False,
    **more: Any,
) -> ExportSummary:
    """The format "hf" with what it takes unless told otherwise."""
    suspicious = include_suspicious
    chosen = ExportSelection(origins=("rollouts",), run=run_id, roles=tuple(roles), include_suspicious=suspicious)
    return hf.export(Corpus(store, chosen), output, **more)


def put_sessions(directory: Path, traces: Sequence[Trace]) -> None:
    with Store.open(directory) as store:
        for trace in traces:
            wait(trace_store.store_trace(store.sessions, trace))


def converse(attempt_id: str, instruction: str, *, tokens: bool = True, answer_text: str = "Done.") -> Session:
    """Two turns with a tool between them; a request for a title beside them; a call that failed."""
    session = Session(attempt_id)
    ask = user(text(instruction))
    prompts = [list(range(20)), []]
    completions = [[100, 101, 102], [110, 111]]
    prompts[1] = prompts[0] + completions[0] + [5, 6, 7]
    messages = [[ask], [ask, assistant(text("I look."), tool_use("t1", command="ls")), user(tool_result("t1"))]]
    answers = [
        [{"type": "thinking", "thinking": "Hm."}, text("I look."), tool_use("t1", command="ls")],
        [text(answer_text)],
    ]
    for sent, answer, prompt, completion in zip(messages, answers, prompts, completions, strict=True):
        session.ask(
            sent,
            answer,
            prompt=prompt if tokens else None,
            completion=completion if tokens else None,
            logprobs=[-0.25] * len(completion) if tokens else None,
            policy="3",
        )
    session.ask(messages[1], None, status="error")
    return session


def put_rollouts(location: StoreLocation, *, tasks: int = 2, samples: int = 2, tokens: bool = True) -> None:
    """A run all of whose rollouts were graded: the first of each task 1, the others 0."""
    with Store.open(location) as store:
        created = [calc_task(n) for n in range(tasks)]
        wait(store.runs.create("run1", {"backend": "openai"}))
        wait(store.runs.add_tasks("run1", created))
        ids = [(f"{task.instance_id}-{n}", task.instance_id, n) for task in created for n in range(samples)]
        wait(store.runs.create_rollouts("run1", ids))
        by_id = {task.instance_id: task for task in created}
        for rollout_id, task_id, number in ids:
            attempt = wait(store.runs.start_attempt(rollout_id))
            wait(store.runs.mark_running(attempt.id))
            answer_text = "Done." if number == 0 else f"I give up {number}."
            for call in converse(
                attempt.id, by_id[task_id].instruction, tokens=tokens, answer_text=answer_text
            ).calls:
                wait(store.calls.append(call))
            verdict = Verdict(reward=1.0 - min(number, 1), reason="x", tests={"t.py::test": "passed"})
            wait(store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"+x\n", verdict=verdict))


def put_attempt(
    store: Store, calls: Iterable[Call], *, reward: float = 1.0, config: dict[str, Any] | None = None
) -> None:
    """A run of one rollout, which made these calls."""
    task = calc_task(0)
    wait(store.runs.create("run1", config or {"backend": "openai"}))
    wait(store.runs.add_tasks("run1", [task]))
    wait(store.runs.create_rollouts("run1", [("r0", task.instance_id, 0)]))
    attempt = wait(store.runs.start_attempt("r0"))
    wait(store.runs.mark_running(attempt.id))
    for call in calls:
        wait(store.calls.append(msgspec.structs.replace(call, attempt_id=attempt.id)))
    verdict = Verdict(reward=reward, reason="x")
    wait(store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"+x\n", verdict=verdict))


def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file of an export, JSON values decoded."""
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    import datasets

    return list(datasets.Dataset.from_parquet(str(path), cache_dir=str(path.parent / ".cache")))
