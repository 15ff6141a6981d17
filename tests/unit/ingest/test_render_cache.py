"""What several ask a renderer for is rendered once, within bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from understudy.ingest import batch_reader
from understudy.ingest.batch_reader import RenderCache
from understudy.ingest.signals.annotate import annotate
from understudy.ingest.trace import Message, PlainRenderer, expand
from understudy.ingest.trace_store import trace_rows
from understudy.store.contents import Packer

from support.ingest import DATA, read


class Counting:
    """Renders as another does, and counts how often each body was asked for."""

    def __init__(self, renderer: Any) -> None:
        self.renderer = renderer
        self.asked: Counter[int] = Counter()

    def history(self, body: Any) -> list[Message]:
        self.asked[id(body)] += 1
        return self.renderer.history(body)

    def action(self, bodies: Sequence[Any]) -> Any:
        return self.renderer.action(bodies)


def test_signals_states_and_the_store_render_a_node_once() -> None:
    for trace in read(DATA / "claude_code"):
        own = trace.renderer
        expected = list(expand(trace))
        counting = Counting(own)
        trace.renderer = RenderCache(counting)
        annotate(trace)
        trace_rows(trace, Packer())
        states = list(expand(trace))
        assert [state.messages for state in states] == [state.messages for state in expected]
        assert [state.student_action for state in states] == [state.student_action for state in expected]
        assert set(counting.asked.values()) == {1}


def test_the_render_cache_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reader, "_CACHED_CHARACTERS", 5000)
    counting = Counting(PlainRenderer())
    remembering = RenderCache(counting)
    bodies = [{"role": "user", "content": "x" * 3000} for _ in range(5)]
    for _ in range(2):
        assert [remembering.history(body) for body in bodies] == [[body] for body in bodies]
    assert [counting.asked[id(body)] for body in bodies] == [1, 1, 2, 2, 2]
