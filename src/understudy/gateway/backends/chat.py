"""Servers of chat completions: vLLM, SGLang, the embedded server, OpenAI and compatible providers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import msgspec
from msgspec import Struct, structs

from understudy.errors import BackendError
from understudy.gateway.backends.chat_response import (
    ChatResponse,
    PromptIdCache,
    ResponseAssembly,
    StreamError,
    read_answer,
)
from understudy.gateway.backends.chunks import ChunkReader
from understudy.gateway.backends.fields import is_overflow, reported_context_length, reported_prompt_tokens
from understudy.gateway.backends.http import ANSWER_TIMEOUT_S, HttpClient, naming
from understudy.gateway.prices import Price
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, ConversationHandle, Emit, Generation

_NO_ARGS: Mapping[str, Any] = MappingProxyType({})


class TokenCount(Struct):
    """What a server counted: the tokens of a prompt, and the context length of its model."""

    count: int
    max_model_len: int | None = None


class ChatBackend(ABC):
    """A server at `base_url` (with its `/v1`) that answers as `model`.

    No connection is opened before the first use.

    A name and password in `base_url` are sent as basic authorization if there is no `api_key`. `template_args` go
    to the chat template of a server that applies one. `timeout_s` bounds a whole answer. For `resend` see
    HttpClient.
    """

    name: str
    _applies_template: ClassVar[bool] = True
    _reasoning_field: str | None = "reasoning"
    """The field for the reasoning of an earlier turn; None if it is not sent back."""
    _says_remedies: ClassVar[bool] = False
    """Whether the server's error responses say what to do (see HttpClient)."""

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        template_args: Mapping[str, Any] = _NO_ARGS,
        price: Price | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
    ) -> None:
        self.model = model
        self.price = price
        self._http = HttpClient(
            base_url, api_key, timeout_s=timeout_s, resend=resend, says_remedies=self._says_remedies
        )
        self._template_args = dict(template_args)
        self._prompts = PromptIdCache()

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """See Backend. If the prompt and `max_tokens` together exceed the context, `max_tokens` is reduced."""
        try:
            return await self._complete(request, request.sampling, emit)
        except BackendError as error:
            stream_started = isinstance(error, StreamError)
            if not (stream_started or error.status == 400) or not is_overflow(str(error)):
                raise
            prompt, limit = await self._measure(request, error)
        max_tokens = request.sampling.get("max_tokens")
        if stream_started or prompt >= limit or (max_tokens is not None and prompt + max_tokens <= limit):
            raise ContextOverflow(prompt, limit)
        return await self._complete(request, request.sampling | {"max_tokens": limit - prompt}, emit)

    async def count_tokens(self, request: ChatRequest) -> int:
        """See Backend."""
        return (await self._tokenize(request)).count

    async def models(self) -> list[str]:
        """See Backend."""
        return await self._http.models(f"{self._http.base}/models")

    async def close(self) -> None:
        """See Backend."""
        await self._http.close()

    # --- what differs between servers ------------------------------------------------------------------

    @abstractmethod
    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        """Return fields that request more than the response: token ids and logprobs."""

    def _adapt_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a request in the form that this server accepts."""
        return fields

    # --- requests ---------------------------------------------------------------------------------------

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        """Return the part of a request that determines its prompt tokens."""
        messages = request.messages
        if self._reasoning_field != "reasoning":
            messages = [_renamed(message, "reasoning", self._reasoning_field) for message in messages]
        prompt: dict[str, Any] = {"model": self.model, "messages": messages}
        if request.tools:
            prompt["tools"] = request.tools_json or request.tools
        if self._applies_template:
            thinking = request.enable_thinking
            args = self._template_args | ({} if thinking is None else {"enable_thinking": thinking})
            if args:
                prompt["chat_template_kwargs"] = args
        return prompt

    async def _complete(self, request: ChatRequest, sampling: dict[str, Any], emit: Emit | None) -> Generation:
        body = sampling | self._prompt(request) | self._extra_fields(stream=emit is not None)
        body["stream"] = emit is not None
        if emit is not None:
            body["stream_options"] = {"include_usage": True}
        if request.tools and request.tool_choice is not None:
            body["tool_choice"] = request.tool_choice
        if request.parallel_tool_calls is not None:
            body["parallel_tool_calls"] = request.parallel_tool_calls
        if request.response_format is not None:
            body["response_format"] = request.response_format
        with naming(f"POST {self._http.base}/chat/completions"):
            assembly = await self._send(self._adapt_fields(body), request.conversation, emit)
            return assembly.generation(self.model, self._adapt_fields(sampling))

    async def _send(
        self, body: dict[str, Any], conversation: ConversationHandle | None, emit: Emit | None
    ) -> ResponseAssembly:
        url = f"{self._http.base}/chat/completions"
        assembly = ResponseAssembly(emit, partial(self._prompts.read, conversation=conversation))
        if emit is None:
            data = await self._http.send("POST", url, msgspec.json.encode(body))
            assembly.add_whole(read_answer(data, partial(self._http.decode, f"POST {url}", expected=ChatResponse)))
            return assembly
        ended, chunks = False, ChunkReader(self._http.clean)

        def take(data: list[bytes]) -> bool:
            nonlocal ended
            if b"[DONE]" in data:
                ended, data = True, data[: data.index(b"[DONE]")]
            try:
                if data:
                    assembly.add_chunks(chunks.read_all(data))
            finally:
                assembly.flush()  # chunks that arrived together are passed on together
            return ended

        await self._http.stream_data("POST", url, msgspec.json.encode(body), take)
        if not ended:
            raise StreamError(
                f"POST {url}: incomplete stream, expected `data: [DONE]` at its end; see the model server's log, "
                "then retry the request"
            )
        return assembly

    async def _tokenize(self, request: ChatRequest) -> TokenCount:
        # Servers have this path beside /v1, not below it.
        url = f"{self._http.base.removesuffix('/v1')}/tokenize"
        return await self._http.call("POST", url, self._prompt(request), TokenCount)

    async def _measure(self, request: ChatRequest, refusal: BackendError) -> tuple[int, int]:
        """Return the token counts of a rejected prompt and of the model's context.

        The server is asked to count; failing that, the numbers come from the error message, because vLLM stops
        counting early and then reports only "at least". Raises the original error if it has no numbers.
        """
        try:
            tokens = await self._tokenize(request)
        except BackendError:
            tokens = None
        limit = tokens.max_model_len if tokens and tokens.max_model_len else reported_context_length(str(refusal))
        prompt = tokens.count if tokens else reported_prompt_tokens(str(refusal))
        if limit is None or prompt is None:
            raise refusal
        return prompt, limit


def _renamed(message: dict[str, Any], old: str, new: str | None) -> dict[str, Any]:
    """Return a message with one key renamed, or removed."""
    if old not in message:
        return message
    other_fields = {key: value for key, value in message.items() if key != old}
    return other_fields if new is None else other_fields | {new: message[old]}


# --- self-hosted servers, which also return token ids and logprobs ----------------------------------------

_VLLM_EXTRAS = {"logprobs": True, "top_logprobs": 0, "return_token_ids": True, "return_weight_versions": True}
_SGLANG_EXTRAS = {"logprobs": True, "return_token_ids": True}
# In a stream the token ids come with the last chunk, and only if requested with these names.
_SGLANG_STREAM_EXTRAS = {"logprobs": True, "return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}


class VLLMBackend(ChatBackend):
    """A vLLM server (see ChatBackend)."""

    name = "vllm"

    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        return _VLLM_EXTRAS


class EmbeddedBackend(VLLMBackend):
    """Our own server for the embedded model."""

    name = "embedded"
    _says_remedies = True


class SGLangBackend(ChatBackend):
    """An SGLang server (see ChatBackend)."""

    name = "sglang"
    _reasoning_field = "reasoning_content"

    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        return _SGLANG_STREAM_EXTRAS if stream else _SGLANG_EXTRAS


# --- providers --------------------------------------------------------------------------------------------

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
"""Parameters that may be left out if a provider rejects them.

Without any other parameter, the answer would be to another question.
"""


class _ProviderLimits(Struct, frozen=True):
    """What a provider does not accept, its field for the answer's token limit, and its field for earlier
    reasoning.
    """

    unsupported: frozenset[str] = frozenset()
    max_tokens_field: str = "max_tokens"
    reasoning_field: str | None = None


class OpenAIBackend(ChatBackend):
    """A provider of chat completions (see ChatBackend). It returns no token ids, so its logprobs cannot be used.

    A parameter that it rejects is left out from then on, and `max_tokens` is sent under the other name if
    necessary. The `sampling` of a generation holds what was really sent.
    """

    name = "openai"
    _applies_template = False
    _reasoning_field = None
    _learned = _ProviderLimits()

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
                # Only a rejected request is sent again. Any other may have been generated and billed, whatever
                # other requests have learned meanwhile.
                if error.status not in (400, 422):
                    raise
                self._learned = _learn_from_refusal(self._learned, str(error))
                self._reasoning_field = self._learned.reasoning_field
                # If many requests run at once, the first rejection updates the limits, and the others find them
                # updated.
                if self._learned == learned_before:
                    raise

    async def _tokenize(self, request: ChatRequest) -> TokenCount:
        raise BackendError(
            f"unsupported: the provider of {self.model} does not count tokens; use a model server that does",
            status=404,
        )


def _learn_from_refusal(learned: _ProviderLimits, refusal: str) -> _ProviderLimits:
    """Return the limits updated by a rejection; the same limits if it names no other parameter."""
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
