"""Examples of sessions: of a trace's turns, one by one, or a path of the trace at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.export.examples import Example
from understudy.export.matching import flaw, same, textual
from understudy.ingest.model_families import model_family
from understudy.ingest.normalise import normalise_messages
from understudy.ingest.trace import (
    SYSTEM_PROMPT,
    Message,
    RequestShape,
    Trace,
    TraceOutcome,
    TraceState,
    TraceTurn,
    TurnSignals,
    expand,
    state_id,
)
from understudy.preference.checks import message_of

_AT = "understudy_at"
"""Under this key a message bears its place on the path while it is put in order."""


def trace_examples(trace: Trace, unit: str, left_out: Counter[str], notes: Counter[str]) -> Iterator[Example]:
    """The examples of the turns that a trace has; other answers on its paths are only read.

    Of a path are learned the turns on it that no earlier path had; paths begin with the newest turn, and each turn
    that is on none so far ends another one. What is left out is counted by why.
    """
    return _turns(trace, left_out) if unit == "turn" else _paths(trace, left_out, notes)


def desirable(signals: TurnSignals | None, outcome: TraceOutcome | None = None) -> bool | None:
    """Whether a turn is to be learned from (True) or unlearned (False); None where nothing tells.

    False: the user denied a call, interrupted it, said that it was wrong, or an edit of it was undone later. True:
    otherwise, if tests that it ran passed, it made a commit, or the user praised it. Where the turn itself tells
    nothing, what became of the whole conversation does: whether its task was solved.
    """
    if signals is not None:
        undone = signals.edits_survived is not None and signals.edits_survived < signals.edits
        if signals.denied or signals.interrupted or undone or signals.feedback == "negative":
            return False
        if signals.tests == "passed" or signals.commits or signals.feedback == "positive":
            return True
    return None if outcome is None else outcome.resolved


def group_of(trace: Trace) -> str:
    """The project of a trace, or its task; else the session, with its subagents."""
    task = trace.outcome.task if trace.outcome else None
    return trace.project or task or (trace.parent.session_id if trace.parent else trace.session_id)


def _turns(trace: Trace, left_out: Counter[str]) -> Iterator[Example]:
    for state in expand(trace):
        answer = textual(message_of(state.student_action))
        if reason := flaw(answer):
            left_out[reason] += 1
            continue
        messages = [*map(textual, state.messages), answer]
        yield _example(trace, state, messages, (len(messages) - 1,), "turn", state.tools)


def _paths(trace: Trace, left_out: Counter[str], notes: Counter[str]) -> Iterator[Example]:
    rendered: dict[int, list[Message]] = {}
    waiting: dict[int, TraceTurn] = {}
    answers: dict[int, Message] = {}
    at: dict[int, list[int]] = {}
    for index, turn in enumerate(trace.turns):
        action = trace.renderer.action([trace.nodes[node].body for node in turn.action])
        answer = textual(message_of(action))
        if reason := flaw(answer):
            left_out[reason] += 1
            continue
        waiting[index], answers[index] = turn, answer
        at.setdefault(turn.context, []).append(index)
    for last in sorted(waiting, reverse=True):
        if last not in waiting:
            continue
        turn = waiting.pop(last)
        shape = turn.shape or trace.shape
        path = _path(trace, turn.context)
        history: list[Message] = []
        answered: list[int] = []  # places on the path where an answer stands
        for where, node in enumerate(path):
            if node not in rendered:
                rendered[node] = trace.renderer.history(trace.nodes[node].body)
            history += [{**message, _AT: where} for message in rendered[node]]
            if any(message["role"] == "assistant" and _says(message) for message in rendered[node]):
                answered.append(where)
        system = SYSTEM_PROMPT if shape.system is None else shape.system
        messages: list[Message] = [{"role": "system", "content": system}]
        places: dict[int, int] = {}
        for message in normalise_messages(history):
            where = message.pop(_AT, -1)
            if message["role"] == "assistant":
                places.setdefault(where, len(messages))
            messages.append(textual(message))
        trained: list[int] = []
        taken: set[int] = set()
        for where, node in enumerate((-1, *path), start=-1):
            for index in at.get(node, ()):
                if index not in waiting or not _alike(waiting[index].shape or trace.shape, shape):
                    continue
                follows = bisect_right(answered, where)
                found = places.get(answered[follows]) if follows < len(answered) else None
                if found is not None and found not in taken and same(messages[found], answers[index]):
                    messages[found] = answers[index]
                    trained.append(found)
                    taken.add(found)
                    del waiting[index]
        messages.append(answers[last])
        trained.sort()
        trained.append(len(messages) - 1)
        notes["paths"] += 1
        yield _example(trace, _Leaf(trace, turn), messages, tuple(trained), "conversation", shape.tools)


def _path(trace: Trace, end: int) -> list[int]:
    path: list[int] = []
    while end >= 0:
        path.append(end)
        end = trace.nodes[end].parent
    return path[::-1]


def _says(message: Message) -> bool:
    return bool(message.get("content") or message.get("tool_calls"))


def _alike(one: RequestShape, other: RequestShape) -> bool:
    return one is other or one == other


class _Leaf:
    """Of a turn, what `_example` needs of a state."""

    def __init__(self, trace: Trace, turn: TraceTurn) -> None:
        self.state_id = state_id(trace.trace_id, turn.message_id)
        self.source_model = turn.model
        self.source_family = model_family(turn.model)
        self.fidelity = turn.fidelity
        self.branch = turn.branch
        self.timestamp = turn.timestamp
        self.signals = turn.signals


def _example(
    trace: Trace,
    state: TraceState | _Leaf,
    messages: list[Message],
    trained: tuple[int, ...],
    unit: Any,
    tools: list[dict[str, Any]] | None,
) -> Example:
    outcome = trace.outcome
    reward = outcome.reward if outcome else None
    if reward is None and outcome and outcome.resolved is not None:
        reward = float(outcome.resolved)
    return Example(
        example_id=state.state_id,
        origin="session",
        unit=unit,
        group=group_of(trace),
        messages=messages,
        trained=trained,
        tools=tools,
        desirable=desirable(state.signals if unit == "turn" else None, outcome),
        reward=reward,
        model=state.source_model,
        family=state.source_family,
        source=trace.format,
        meta={
            "session_id": trace.session_id,
            "trace_id": trace.trace_id,
            "role": trace.role,
            "branch": state.branch,
            "fidelity": state.fidelity,
            "timestamp": state.timestamp,
        },
    )
