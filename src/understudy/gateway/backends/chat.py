"""Chat completions over HTTP: what all servers with that API have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.backends.chat_response import (
    ChatResponse,
    ResponseAssembly,
    StreamError,
    read_answer,
    read_chunk,
)
from understudy.gateway.backends.http import ANSWER_TIMEOUT_S, HttpClient
from understudy.gateway.backends.overflow import is_overflow, reported_context_length, reported_prompt_tokens
from understudy.gateway.backends.prompt_ids import PromptIdCache
from understudy.gateway.prices import Price
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, ConversationHandle, Emit, Generation


class TokenCount(Struct):
    """What a server counted: the tokens of a prompt, and how many its model's context holds."""

    count: int
    max_model_len: int | None = None


class ChatBackend(ABC):
    """A server at `base_url` (with its `/v1`) that answers as `model`. Opens no connection before it is used.

    A name and password in `base_url` are sent as basic authorization where there is no `api_key`. `timeout_s`
    bounds a whole answer; for `resend` see HttpClient.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        api_key: str | None = None,
        *,
        price: Price | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
        resend: bool = True,
    ) -> None:
        self._http = HttpClient(base_url, api_key, timeout_s=timeout_s, resend=resend)
        self._model = model
        self._price = price
        self._prompts = PromptIdCache()

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind of the server."""

    @property
    def model(self) -> str:
        """The model that answers, whatever the agent calls it."""
        return self._model

    @property
    def price(self) -> Price | None:
        """What its tokens cost."""
        return self._price

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """See Backend. When prompt and `max_tokens` do not fit together, `max_tokens` gives way."""
        try:
            return await self._complete(request, request.sampling, emit)
        except BackendError as error:
            stream_started = isinstance(error, StreamError)
            if not (stream_started or error.status == 400) or not is_overflow(str(error)):
                raise
            prompt, limit = await self._measure(request, error)
        asked = request.sampling.get("max_tokens")
        if stream_started or prompt >= limit or (asked is not None and prompt + asked <= limit):
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

    # --- what differs -----------------------------------------------------------------------------------

    @property
    def _reasoning_field(self) -> str | None:
        """What the reasoning of an earlier turn is called, None where it is not sent back."""
        return "reasoning"

    def _prompt(self, request: ChatRequest) -> dict[str, Any]:
        """The part of a request that decides its prompt tokens."""
        messages = request.messages
        if self._reasoning_field != "reasoning":
            messages = [_renamed(message, "reasoning", self._reasoning_field) for message in messages]
        prompt: dict[str, Any] = {"model": self._model, "messages": messages}
        if request.tools:
            prompt["tools"] = request.tools_json or request.tools
        return prompt

    @abstractmethod
    def _extra_fields(self, *, stream: bool) -> dict[str, Any]:
        """What is asked for beyond the answer itself."""

    def _adapt_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a request as this server takes them."""
        return fields

    # --- requests ---------------------------------------------------------------------------------------

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
        assembly = await self._send(self._adapt_fields(body), request.conversation, emit)
        return assembly.generation(self._model, self._adapt_fields(sampling))

    async def _send(
        self, body: dict[str, Any], conversation: ConversationHandle | None, emit: Emit | None
    ) -> ResponseAssembly:
        url = f"{self._http.base}/chat/completions"
        assembly = ResponseAssembly(emit, partial(self._prompts.read, conversation=conversation))
        if emit is None:
            data = await self._http.send("POST", url, msgspec.json.encode(body))
            assembly.add_whole(read_answer(data, partial(self._http.decode, f"POST {url}", expected=ChatResponse)))
            return assembly
        async with aclosing(self._http.stream("POST", url, msgspec.json.encode(body))) as events:
            async for batch in events:
                try:
                    for event in batch:
                        if event.data == b"[DONE]":
                            return assembly
                        if event.data:
                            assembly.add_chunk(read_chunk(event.data, self._http.clean))
                finally:
                    assembly.flush()  # what came together is said together
        raise StreamError(f"POST {url}: the stream broke off before its end")

    async def _tokenize(self, request: ChatRequest) -> TokenCount:
        # Servers have it beside /v1, not below it.
        url = f"{self._http.base.removesuffix('/v1')}/tokenize"
        return await self._http.call("POST", url, self._prompt(request), TokenCount)

    async def _measure(self, request: ChatRequest, refusal: BackendError) -> tuple[int, int]:
        """The tokens of a refused prompt and of the model's context, counted if possible, else as it was told.

        The message comes second because vLLM stops counting early and then says only "at least". Raises the
        refusal itself when it says nothing.
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
    """A message with one key under another name, or without it."""
    if old not in message:
        return message
    rest = {key: value for key, value in message.items() if key != old}
    return rest if new is None else rest | {new: message[old]}
