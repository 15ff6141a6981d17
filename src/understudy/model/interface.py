"""What the server asks of the model behind it, which is a scripted policy or weights, and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol

from msgspec import Struct

from understudy.model.hermes import Segment
from understudy.model.protocol import GenerateRequest, Message, ServedChatRequest, Tool
from understudy.model.vocabulary import Vocabulary


class WeightSpan(Struct, frozen=True):
    """The tokens of a completion from `start` up to `end` were sampled by this version of the weights."""

    version: str
    start: int
    end: int


class Completion(Struct, frozen=True):
    """A generated turn. `logprobs[i]` belongs to `ids[i]`.

    `stop_reason` is the stop string that was met, or the token that the request had chosen to stop at, if any.
    `weight_versions` are those of the weights, None where there are no weights. `cached_tokens` of the prompt did
    not have to be read.
    """

    ids: list[int]
    logprobs: list[float]
    segments: list[Segment]
    finish_reason: Literal["stop", "length", "abort"]
    stop_reason: str | int | None = None
    weight_versions: tuple[WeightSpan, ...] | None = None
    cached_tokens: int = 0


class Command(Struct, frozen=True):
    """What an operator asks: the query and the body of a request to one of the control paths."""

    query: Mapping[str, str]
    body: bytes


Control = Callable[[Command], Coroutine[Any, Any, dict[str, Any] | str | None]]
"""Carries a command out and says what there is to say: an object, a text, or nothing. Raises BackendError."""


class ServedModel(Protocol):
    """A model that can be served. `controls` are paths of its own, by path and method."""

    vocabulary: Vocabulary
    controls: Mapping[str, Mapping[str, Control]]

    def models(self) -> Sequence[str]:
        """The names of what it serves beside the model itself."""
        ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool = True
    ) -> tuple[list[int], int]:
        """The tokens of a conversation, and how many of the first of them were known from earlier ones.

        Raises BackendError when the model cannot read it.
        """
        ...

    async def chat(
        self, request: ServedChatRequest, prompt: list[int], known: int, limit: int, model: str
    ) -> Completion:
        """The answer to a conversation that was rendered as `prompt` and `known`, of at most `limit` tokens.

        `model` is one of its names. Raises BackendError.
        """
        ...

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> Completion:
        """How the tokens go on, by at most `limit` of them. Raises BackendError."""
        ...

    def close(self) -> None:
        """End what it has going."""
        ...
