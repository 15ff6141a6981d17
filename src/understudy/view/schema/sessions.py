"""Answers about logged sessions, their states, preference pairs, and redaction."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from understudy.store.session_lists import SessionRow, StateRow
from understudy.view.schema.rollouts import BlockView


class SessionPage(Struct, frozen=True, kw_only=True):
    """Conversations, by project and in the order in which they were read."""

    sessions: tuple[SessionRow, ...]
    total: int
    next: str | None


class StatePage(Struct, frozen=True, kw_only=True):
    """States in the order of their conversations."""

    states: tuple[StateRow, ...]
    total: int
    next: str | None


class StateView(Struct, frozen=True, kw_only=True):
    """A state with its messages from number `first` on, of `total`; `next` is the number to continue with, None at
    the end. `action` is what the model did.
    """

    state_id: str
    row: StateRow
    messages: tuple[BlockView, ...]
    action: tuple[BlockView, ...]
    first: int
    total: int
    next: int | None


class PairView(Struct, frozen=True, kw_only=True):
    """A preference pair: the last messages of the prompt, the chosen and the rejected answer, and the evidence."""

    id: str
    origin: Literal["replay", "rollouts"]
    prompt: tuple[BlockView, ...]
    prompt_messages: int
    chosen: tuple[BlockView, ...]
    rejected: tuple[BlockView, ...]
    evidence: dict[str, Any]


class PairPage(Struct, frozen=True, kw_only=True):
    """Pairs from `start` on. `compared` counts the comparisons, and `left_out` why they gave no pair."""

    pairs: tuple[PairView, ...]
    start: int
    next: int | None
    compared: int
    left_out: dict[str, int]
