"""The backend protocol: a neutral chat request in, one whole generation out."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from msgspec import Struct, field

from understudy.errors import BackendError
from understudy.types import Usage


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What a model is asked, in the shapes of OpenAI chat completions.

    `model` is the name that the agent asked for; the backend decides what serves it. `sampling` holds the
    parameters to send (`max_tokens`, `temperature`, `top_p`, `top_k`, `stop`, `seed`, …), the attempt's own
    already laid over the agent's. None means: not said.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])


class ToolCall(Struct, frozen=True):
    """A tool call as it was sampled: `arguments` is the raw string, which need not be JSON. `id` may be empty."""

    id: str
    name: str
    arguments: str


class Generation(Struct, frozen=True, kw_only=True):
    """One whole answer of a model. `sampling` is what was really sent; what the server did not give is None.

    `logprobs[i]` belongs to `completion_token_ids[i]`. `stop` is the stop string that ended it, if one did.
    """

    model: str
    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    stop: str | None = None
    usage: Usage = Usage()
    prompt_token_ids: tuple[int, ...] | None = None
    completion_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    policy_version: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])


class ContextOverflow(BackendError):
    """A prompt of `prompt_tokens` that leaves no room for an answer in a context of `limit` tokens."""

    retryable = False

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, the model's context holds {limit}: shorten the prompt "
            "or serve the model with a longer context",
            status=400,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class Backend(Protocol):
    """A model server. `name` is its kind, `model` the model that answers."""

    name: ClassVar[str]

    @property
    def model(self) -> str: ...

    async def generate(self, request: ChatRequest) -> Generation:
        """Answer a request, whole. Raises BackendError; cancelling it stops the generation."""
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of a request has. Raises BackendError."""
        ...

    async def models(self) -> list[str]:
        """The names of the models that the server offers. Raises BackendError."""
        ...

    async def close(self) -> None:
        """Drop the connections. May be called twice."""
        ...
