"""What a replay is estimated to cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from understudy.ingest.trace import TraceState, TurnAction
from understudy.replay.plan import ReplaySettings, TeachableState, ask_id, estimate, request_for
from understudy.replay.teachers import Teacher, TeacherConfig

CONFIG = TeacherConfig(backend="vllm", model="m", base_url="http://127.0.0.1:9/v1")
TEACHERS = tuple(Teacher(name=name, config=CONFIG, family="qwen") for name in ("a", "b"))
STATES = 150


def states() -> Iterator[TeachableState]:
    for number in range(STATES):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "x" * number}]
        state = TraceState(
            state_id=f"state-{number}",
            trace_id="t",
            session_id="s",
            message_id=f"m-{number}",
            messages=messages,
            student_action=TurnAction(content="done", thinking=None, thinking_hidden=False, tool_calls=[]),
            tools=None,
            source_model="claude",
            source_family="claude",
            fidelity="exact",
            notes=(),
            timestamp=None,
            project=None,
            branch="active",
            role="main",
            parent=None,
        )
        yield TeachableState(state, None, TEACHERS)


def test_asks_are_looked_up_for_many_states_at_once_and_each_counts() -> None:
    options = ReplaySettings(samples=2)
    first = next(states())
    answered = ask_id(options, first.state.state_id, TEACHERS[0], 1)
    lookups: list[int] = []

    def existing(ids: Iterable[str]) -> set[str]:
        wanted = set(ids)
        lookups.append(len(wanted))
        return wanted & {answered}

    shares = estimate(states(), options, existing)
    assert sum(lookups) == STATES * 2 * 2
    assert len(lookups) <= STATES / 50  # each is a query of the store
    assert {name: (share.asks, share.done) for name, share in shares.items()} == {"a": (300, 1), "b": (300, 0)}
    tokens = [2 * request_for(one, TEACHERS[0]).size.likely_tokens for one in states()]
    assert shares["b"].prompt_tokens == sum(tokens)
    assert shares["a"].prompt_tokens == sum(tokens) - tokens[0] // 2
