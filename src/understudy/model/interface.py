"""What the server asks of the model behind it, which is a scripted policy or weights, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from understudy.model.hermes import CompletionSegment
from understudy.model.protocol import GenerateRequest, ModelChatRequest, ModelMessage, ModelTool
from understudy.model.vocabulary import Vocabulary


class ModelVersionSpan(Struct, frozen=True):
    """The tokens of a completion from `start` up to `end` were sampled by this version of the weights."""

    version: str
    start: int
    end: int


class ModelCompletion(Struct, frozen=True):
    """A generated turn. `logprobs[i]` belongs to `ids[i]`.

    `stop_reason` is the stop string that was met, or the token that the request had chosen to stop at, if any.
    `weight_versions` are those of the weights, None where there are no weights. `cached_tokens` of the prompt did
    not have to be read.
    """

    ids: list[int]
    logprobs: list[float]
    segments: list[CompletionSegment]
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None = None
    weight_versions: tuple[ModelVersionSpan, ...] | None = None
    cached_tokens: int = 0


class ControlRequest(Struct, frozen=True):
    """What an operator asks: the query and the body of a request to one of the control paths."""

    query: Mapping[str, str]
    body: bytes


ControlHandler = Callable[[ControlRequest], Coroutine[Any, Any, dict[str, Any] | str | None]]
"""Carries a command out and says what there is to say: an object, a text, or nothing. Raises BackendError."""


class ServedModel(Protocol):
    """A model that can be served. `controls` are paths of its own, by path and method."""

    vocabulary: Vocabulary
    controls: Mapping[str, Mapping[str, ControlHandler]]

    def models(self) -> Sequence[str]:
        """The names of what it serves beside the model itself."""
        ...

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], int]:
        """The tokens of a conversation, and how many of the first of them were known from earlier ones.

        Raises BackendError when the model cannot read it.
        """
        ...

    async def chat(
        self, request: ModelChatRequest, prompt: list[int], cached: int, limit: int, model: str
    ) -> ModelCompletion:
        """The answer to a conversation that was rendered as `prompt` and `known`, of at most `limit` tokens.

        `model` is one of its names. Raises BackendError.
        """
        ...

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> ModelCompletion:
        """How the tokens go on, by at most `limit` of them. Raises BackendError."""
        ...

    def close(self) -> None:
        """End what it has going."""
        ...
