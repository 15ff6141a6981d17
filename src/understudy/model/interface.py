"""The seam between the server and the model it serves: a scripted policy, or weights."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from understudy.model.protocol import ChatRequest, GenerateRequest, Message, Tool, check_chat
from understudy.model.scripted.action import Policy
from understudy.model.scripted.model import Completion, complete
from understudy.model.scripted.template import render
from understudy.model.scripted.tokenizer import Tokenizer, Vocabulary
from understudy.model.scripted.unrender import unrender


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
        self, request: ChatRequest, prompt: list[int], known: int, limit: int, model: str
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


class Scripted:
    """A policy as a model (see ServedModel). Its tokens are certain."""

    controls: Mapping[str, Mapping[str, Control]] = {}

    def __init__(self, policy: Policy, tokenizer: Tokenizer) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self.vocabulary: Vocabulary = tokenizer

    def models(self) -> Sequence[str]:
        """See ServedModel."""
        return ()

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool = True
    ) -> tuple[list[int], int]:
        """See ServedModel."""
        return self._tokenizer.encode_marked(render(messages, tools, add_generation_prompt=add_generation_prompt))

    async def chat(
        self, request: ChatRequest, prompt: list[int], known: int, limit: int, model: str
    ) -> Completion:
        """See ServedModel."""
        # The last prompt token is never taken from a cache: its logits are needed.
        return complete(self._policy, self._tokenizer, request, limit, cached=min(known, len(prompt) - 1))

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> Completion:
        """See ServedModel."""
        prompt = unrender(self._tokenizer, request.token_ids)
        chat = request.chat(prompt.messages, prompt.tools)
        check_chat(chat, len(self.vocabulary.token_bytes))
        return complete(self._policy, self._tokenizer, chat, limit)

    def close(self) -> None:
        """See ServedModel."""
