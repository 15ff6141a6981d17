"""Removes secrets, e-mail addresses and home directories from a trace before it leaves the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from understudy.ingest.trace import (
    Message,
    RequestShape,
    Trace,
    TraceNode,
    TraceRenderer,
    TraceTurn,
    TurnAction,
)

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor


def redact_trace(trace: Trace, redactor: Redactor, texts: Sequence[Any] | None = None) -> Trace:
    """Return a copy of the trace whose texts are redacted when they are rendered. `texts` are its `trace_texts`,
    if the caller has them.

    Nodes and turns stay the same in number.

    The whole trace is searched first: a secret is replaced everywhere in the trace, so that a state looks the same
    whichever other states are requested. Ids and model names stay unless they contain a secret.
    """
    scope = redactor.scoped_to(trace_texts(trace) if texts is None else texts)
    # A name that was replaced must not appear in the report.
    name = scope.name(trace.trace_id, "trace")

    def redact_name(text: str | None) -> str | None:
        return None if text is None else scope.name(text, name)

    def redact_shape(shape: RequestShape) -> RequestShape:
        return RequestShape(
            None if shape.system is None else scope.text(shape.system, f"{name} system"),
            None if shape.tools is None else scope.value(shape.tools, f"{name} tools"),
        )

    shapes: dict[int, RequestShape] = {}

    def redact_turn(turn: TraceTurn) -> TraceTurn:
        shape = turn.shape
        if shape is not None:
            shape = shapes.get(id(shape)) or shapes.setdefault(id(shape), redact_shape(shape))
        return replace(
            turn,
            message_id=redact_name(turn.message_id),
            model=redact_name(turn.model),
            timestamp=redact_name(turn.timestamp),
            notes=tuple(scope.name(note, name) for note in turn.notes),
            shape=shape,
        )

    parent, outcome = trace.parent, trace.outcome
    return replace(
        trace,
        trace_id=name,
        session_id=redact_name(trace.session_id),
        source=scope.text(trace.source, f"{name} source"),
        project=None if trace.project is None else scope.text(trace.project, f"{name} project"),
        renderer=_RedactedRenderer(trace.renderer, scope, name),
        nodes=[TraceNode(node.parent, (number, node.body)) for number, node in enumerate(trace.nodes)],
        turns=[redact_turn(turn) for turn in trace.turns],
        parent=parent
        and replace(
            parent, session_id=redact_name(parent.session_id), tool_use_id=redact_name(parent.tool_use_id)
        ),
        agent=redact_name(trace.agent),
        version=redact_name(trace.version),
        shape=redact_shape(trace.shape),
        outcome=outcome
        and replace(outcome, task=redact_name(outcome.task), exit_status=redact_name(outcome.exit_status)),
        losses=Counter({scope.name(loss, name): count for loss, count in trace.losses.items()}),
    )


class _RedactedRenderer:
    """Renders what another renderer does, and redacts it.

    A node's body here is its index and its original body.
    """

    def __init__(self, renderer: TraceRenderer, scope: Redactor, name: str) -> None:
        self._renderer = renderer
        self._scope = scope
        self._name = name

    def history(self, body: tuple[int, Any]) -> list[Message]:
        number, original_body = body
        return self._scope.value(self._renderer.history(original_body), f"{self._name} node {number}")

    def action(self, bodies: Sequence[tuple[int, Any]]) -> TurnAction:
        action = self._renderer.action([original_body for _, original_body in bodies])
        place = f"{self._name} node {bodies[0][0]}" if bodies else self._name
        fields: dict[str, Any] = {"content": action.content, "tool_calls": action.tool_calls}
        # Text and calls get the same place in the report as the history, which repeats them. Thinking occurs only
        # here.
        fields = self._scope.value(fields, place)
        thinking = action.thinking and self._scope.text(action.thinking, f"{place} thinking")
        return replace(action, thinking=thinking, **fields)


def trace_texts(trace: Trace) -> Iterator[Any]:
    """Yield all texts of a trace that its states would show."""
    yield [trace.source, trace.project, trace.agent, trace.version]
    shapes = {
        id(shape): shape for shape in (trace.shape, *(turn.shape for turn in trace.turns)) if shape is not None
    }
    for shape in shapes.values():
        yield [shape.system, shape.tools]
    for node in trace.nodes:
        yield trace.renderer.history(node.body)
    for turn in trace.turns:
        action = trace.renderer.action([trace.nodes[index].body for index in turn.action])
        yield [action.content, action.thinking, action.tool_calls]
