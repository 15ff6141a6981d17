"""Small traces to look for signals in."""

from __future__ import annotations

from typing import Any

from understudy.ingest.signals.annotate import annotate
from understudy.ingest.trace import Message, PlainRenderer, Trace, TraceNode, TraceTurn, TurnSignals, tool_call

Step = tuple[str, dict[str, Any], str | None]


def trace_of(messages: list[Message], format: str = "codex") -> Trace:
    """A conversation of messages one after the other; each of the assistant is a turn."""
    trace = Trace(trace_id="t", session_id="t", format=format, source="log", renderer=PlainRenderer())
    for at, message in enumerate(messages):
        if message["role"] == "assistant":
            trace.turns.append(TraceTurn(message_id=f"m{at}", context=at - 1, action=(at,)))
        trace.nodes.append(TraceNode(at - 1, message))
    return trace


def turns(*steps: Step, format: str = "codex") -> Trace:
    """A turn for each call: the tool, its arguments, what it gave (None: nothing)."""
    messages: list[Message] = [{"role": "user", "content": "go"}]
    for at, (name, arguments, text) in enumerate(steps):
        messages.append(
            {"role": "assistant", "content": None, "tool_calls": [tool_call(f"c{at}", name, arguments)]}
        )
        if text is not None:
            messages.append({"role": "tool", "tool_call_id": f"c{at}", "content": text})
    return trace_of(messages, format)


def annotated(trace: Trace) -> list[TurnSignals]:
    """The signals of each turn, looked for now."""
    annotate(trace)
    signals = [turn.signals for turn in trace.turns]
    assert None not in signals
    return [one for one in signals if one is not None]


def signals(*steps: Step, format: str = "codex") -> list[TurnSignals]:
    """The signals of a turn for each call."""
    return annotated(turns(*steps, format=format))
