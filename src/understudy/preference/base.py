"""What teachers proposed at a state, what they agree on, and the pairs that come of it."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from understudy.ingest.trace import Message, TurnAction


class Proposal(Struct, frozen=True, kw_only=True):
    """What a teacher would have done at a state. `cost_usd` is None where its price is not known."""

    ask_id: str
    replay_id: str
    teacher: str
    model: str
    family: str | None
    action: TurnAction
    cost_usd: float | None = None


class Consensus(Struct, frozen=True, kw_only=True):
    """What teachers agree on: the action of one of them that stands for all in `supporters`, out of `asked`.

    `by` tells what they agree in: the tools with their arguments, the text, or a judge's choice. `agreement` is
    the share of those asked, in [0, 1].
    """

    action: TurnAction
    teacher: str
    supporters: tuple[str, ...]
    asked: tuple[str, ...]
    by: Literal["tools", "text", "judge"]
    agreement: float


class Pair(Struct, frozen=True, kw_only=True):
    """Two actions behind the same messages, of which `chosen` is the better. `evidence` says why, in plain types.

    `origin` is "replay" (teachers against the student's turn; `state_id` names it) or "rollouts" (a solved attempt
    against an unsolved one). `group` is the project or the task: what a split must not cut through. `model` and
    `family` are those of the rejected action.
    """

    pair_id: str
    origin: Literal["replay", "rollouts"]
    group: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    chosen: TurnAction
    rejected: TurnAction
    state_id: str | None = None
    model: str | None = None
    family: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])
