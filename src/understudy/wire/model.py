"""What a model is asked and what it generates: the neutral shapes that all dialects are translated to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Raw, Struct, field

from understudy.types import PolicySpan, Usage


class ConversationHandle:
    """A line of calls as a backend may remember it: one branch of one attempt.

    What a backend remembers of a conversation, it keeps in a `WeakKeyDictionary` by this object, which dies with
    the attempt's session. `key` is the same for all branches of one agent session: calls with the same key go to
    the same endpoint, for its prefix cache.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What a model is asked, in the shapes of OpenAI chat completions.

    `model` is the name that the agent asked for; the backend decides what serves it. `sampling` holds the
    parameters to send (`max_tokens`, `temperature`, `top_p`, `top_k`, `stop`, `seed`, …), the attempt's own
    already laid over the agent's. `conversation` is the branch it belongs to. None means that the request does not
    say. `tools` may be shared with other requests, so never change them; `tools_json` is the same as JSON, where
    that is at hand.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tools_json: Raw | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    conversation: ConversationHandle | None = None


class ToolCall(Struct, frozen=True):
    """A tool call as it was sampled: `arguments` is the raw string, which need not be JSON. `id` may be empty."""

    id: str
    name: str
    arguments: str


class Generation(Struct, frozen=True, kw_only=True):
    """One complete output of a model. `sampling` is what was really sent; what the server did not give is None.

    `logprobs[i]` belongs to `completion_token_ids[i]`. `stop` is the stop string that ended it, if one did.
    `policy_spans` are the versions of the weights as the server reports them. For `audit` see Call.
    """

    model: str
    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    stop: str | None = None
    usage: Usage = Usage()
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: tuple[float, ...] | None = None
    policy_spans: tuple[PolicySpan, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    audit: dict[str, Any] = field(default_factory=dict[str, Any])


class Delta(Struct, frozen=True, gc=False):
    """A piece of a generation while it is being sampled.

    `tool` opens the tool call number `index` with its `name` and the server's `id` (which may be empty), and
    `arguments` adds `text` to the argument string of that call.
    """

    kind: Literal["reasoning", "text", "tool", "arguments"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


Emit = Callable[[Delta], None]
"""Receives the pieces of a generation as they come."""
