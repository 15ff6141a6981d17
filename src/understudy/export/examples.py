"""What export formats write: conversations to learn from, whatever they came of."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct, field

from understudy.ingest.trace import Message


class Example(Struct, frozen=True, kw_only=True):
    """A conversation to learn from, messages in OpenAI form, the last one the assistant's.

    `trained` are the indexes in `messages` of the assistant's messages to learn, in order; the others are only
    read. `unit` is "turn" where only the last is learned, "conversation" where a whole path is. Thinking stands in
    `reasoning_content` of trained messages. `group` is the project or the task: what a split must not cut through.
    `desirable` is whether it is to be learned from or unlearned (KTO), None where nothing tells. `origin` is
    "session" or "rollout", `source` the log format or the dataset, `licence` of what it came of, None: not known.
    """

    example_id: str
    origin: Literal["session", "rollout"]
    unit: Literal["turn", "conversation"]
    group: str
    messages: list[Message]
    trained: tuple[int, ...]
    tools: list[dict[str, Any]] | None = None
    desirable: bool | None = None
    reward: float | None = None
    model: str | None = None
    family: str | None = None
    source: str = ""
    licence: str | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
