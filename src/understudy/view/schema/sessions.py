"""Answers about logged sessions, their states, preference pairs, and redaction."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from understudy.view.schema.orders import VoteView
from understudy.view.schema.rollouts import BlockView


class SessionRow(Struct, frozen=True, kw_only=True):
    """A logged conversation. Signals are sums over its turns; `losses` count what its log does not hold."""

    trace_id: str
    session_id: str
    format: str
    source: str
    role: str
    project: str | None
    agent: str | None
    version: str | None
    states: int
    tool_calls: int
    tool_errors: int
    denied: int
    interrupted: int
    edits: int
    edits_survived: int | None
    commits: int
    tests: dict[str, int]
    feedback: dict[str, int]
    fidelity: dict[str, int]
    losses: dict[str, int]
    outcome: dict[str, Any] | None
    began: str | None = None


class SessionPage(Struct, frozen=True, kw_only=True):
    """Conversations, by project and order of reading."""

    sessions: tuple[SessionRow, ...]
    total: int
    next: str | None


class StateRow(Struct, frozen=True, kw_only=True):
    """A state: one turn of a logged conversation, with what became of it."""

    state_id: str
    trace_id: str
    position: int
    branch: str
    fidelity: str
    notes: str
    model: str | None
    timestamp: str | None
    tool_calls: int
    tool_errors: int
    denied: int
    interrupted: int
    tests: str | None
    edits: int
    edits_survived: int | None
    commits: int
    feedback: str | None


class StatePage(Struct, frozen=True, kw_only=True):
    """States in the order of their conversations."""

    states: tuple[StateRow, ...]
    total: int
    next: str | None


class StateView(Struct, frozen=True, kw_only=True):
    """A state with its messages, `first` of `total` on; `action` is what the model did."""

    state_id: str
    row: StateRow
    messages: tuple[BlockView, ...]
    action: tuple[BlockView, ...]
    first: int
    total: int


class PairView(Struct, frozen=True, kw_only=True):
    """A preference pair: what was asked, the chosen and the rejected answer, and the evidence."""

    id: str
    origin: Literal["replay", "rollouts"]
    prompt: tuple[BlockView, ...]
    prompt_messages: int
    chosen: tuple[BlockView, ...]
    rejected: tuple[BlockView, ...]
    evidence: dict[str, Any]
    votes: tuple[VoteView, ...] = ()


class PairPage(Struct, frozen=True, kw_only=True):
    """Pairs from `start` on. `compared` and `left_out` count what was looked at and why it gave no pair."""

    pairs: tuple[PairView, ...]
    start: int
    next: int | None
    compared: int
    left_out: dict[str, int]
