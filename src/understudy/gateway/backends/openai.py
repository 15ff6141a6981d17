"""OpenAI, and providers with its API: parameters that a strict one rejects are learned and left out."""

from __future__ import annotations

import re
from typing import Any

from msgspec import Struct, structs

from understudy.errors import BackendError
from understudy.gateway.backends.chat import ChatBackend, TokenCount
from understudy.gateway.backends.chat_response import StreamError
from understudy.wire.model import ChatRequest, Emit, Generation

_NOT_TAKEN = re.compile(
    r"unsupported|unknown|unrecognized|unexpected|not (supported|permitted|allowed)|does not support",
    re.IGNORECASE,
)
_NAMED = re.compile(r"['\"`](?:body\.)?([a-z_]+)['\"`]|(?:supplied|parameter|argument|field): ([a-z_]+)")
_DISPENSABLE = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
        *("repetition_penalty", "reasoning_effort", "parallel_tool_calls", "stream_options"),
    }
)
"""What may be left out where it is refused; without anything else, the answer would be one to another question."""


class _ProviderLimits(Struct, frozen=True):
    """What a provider does not take, what it calls the limit of an answer, and an earlier turn's reasoning."""

    unsupported: frozenset[str] = frozenset()
    max_tokens_field: str = "max_tokens"
    reasoning_field: str | None = None


class OpenAIBackend(ChatBackend):
    """A provider of chat completions (see ChatBackend); it tells no token ids, and so no logprobs of any use.

    A parameter that it does not take is left out from then on, and `max_tokens` said in the other way where it
    must be; the `sampling` of a generation is what was really sent.
    """

    _learned = _ProviderLimits()

    @property
    def name(self) -> str:
        """The kind of the server."""
        return "openai"

    @property
    def _reasoning_field(self) -> str | None:
        return self._learned.reasoning_field

    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        return {}

    def _adapt_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        adapted = {name: value for name, value in fields.items() if name not in self._learned.unsupported}
        if "max_tokens" in adapted:
            adapted[self._learned.max_tokens_field] = adapted.pop("max_tokens")
        return adapted

    async def _complete(self, request: ChatRequest, sampling: dict[str, Any], emit: Emit | None) -> Generation:
        while True:
            learned_before = self._learned
            try:
                return await super()._complete(request, sampling, emit)
            except StreamError:
                raise
            except BackendError as error:
                # Only a refused request is sent again: any other may have been generated, and billed, whatever
                # other requests have learned meanwhile.
                if error.status not in (400, 422):
                    raise
                self._learned = _learn_from_refusal(self._learned, str(error))
                # Of many requests at once, the first refusal teaches; the others find that it was learned.
                if self._learned == learned_before:
                    raise

    async def _tokenize(self, request: ChatRequest) -> TokenCount:
        raise BackendError(f"unsupported: the provider of {self.model} does not count tokens", status=404)


def _learn_from_refusal(learned: _ProviderLimits, refusal: str) -> _ProviderLimits:
    """What is known after a refusal; the same when that says nothing new of a parameter. It only ever grows."""
    if "max_completion_tokens" in refusal and learned.max_tokens_field == "max_tokens":
        return structs.replace(learned, max_tokens_field="max_completion_tokens")
    if "reasoning_content" in refusal and learned.reasoning_field is None:
        return structs.replace(learned, reasoning_field="reasoning_content")
    if _NOT_TAKEN.search(refusal):
        for quoted, plain in _NAMED.findall(refusal):
            name = quoted or plain
            if name in _DISPENSABLE - learned.unsupported:
                return structs.replace(learned, unsupported=learned.unsupported | {name})
    return learned
