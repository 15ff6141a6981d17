"""OpenAI chat completions, as the gateway speaks it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from understudy.wire import openai
from understudy.wire.chat.request import (
    EXPECTED,
    CompletionRequest,
    decode_request,
    read_conversation,
    read_request,
)
from understudy.wire.chat.response import (
    ChatDialectRequest,
    ChatWriter,
    event,
    new_ids,
    read_response,
    to_completion,
    to_events,
)
from understudy.wire.decoding import peek
from understudy.wire.dialect import (
    Branch,
    DialectRequest,
    DialectResponse,
    ErrorResponse,
    WireSession,
    messages_for_model,
)
from understudy.wire.errors import Fault, InvalidRequest
from understudy.wire.model import Block, ChatRequest, Conversation, Generation

_PASSED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "reasoning_effort",
)
_REFUSED: dict[str, tuple[Sequence[object], str]] = {
    "n": ((1,), "unsupported: one request gets one response; for more samples send the request as often"),
    "best_of": ((1,), "unsupported: one request gets one response; for more samples send the request as often"),
    "top_logprobs": ((0,), "unsupported; only the logprobs of the sampled tokens are known, leave it out"),
    "modalities": ((["text"],), "unsupported; models answer with text here"),
    "audio": ((), "unsupported; models answer with text here"),
    "functions": (([],), "this older form is unsupported; send `tools`"),
    "function_call": (("auto", "none"), "this older form is unsupported; send `tool_choice`"),
    "web_search_options": ((), "unsupported; there are no tools that run at the server"),
}


class OpenAIChat:
    """The chat completions dialect (see Dialect)."""

    name: ClassVar[str] = "openai-chat"

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        return openai.branch(headers)

    def peek(self, body: bytes) -> tuple[str, bool]:
        return peek(body, EXPECTED)

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        return _parse(body, session, branch)

    def read_request(self, body: bytes) -> Conversation:
        return read_request(body)

    def read_response(self, body: bytes) -> tuple[Block, ...] | None:
        return read_response(body)

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        assert isinstance(incoming, ChatDialectRequest)
        ids = new_ids(generation.tool_calls, session)
        return to_completion(generation, incoming, message_id, int(time.time()), ids)

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ChatWriter:
        assert isinstance(incoming, ChatDialectRequest)
        return ChatWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return b": ping\n\n"

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def error(self, fault: Fault) -> ErrorResponse:
        return openai.error_reply(fault)

    def error_event(self, fault: Fault) -> bytes:
        return event({"error": openai.error(fault)})


def _parse(body: bytes, session: WireSession, branch: Branch) -> ChatDialectRequest:
    request = decode_request(body)
    for name, (harmless, why) in _REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: {why}")
    conversation, tool_choice = read_conversation(request)
    messages = messages_for_model(conversation, session)
    format_, template, options = request.response_format, request.chat_template_kwargs, request.stream_options
    return ChatDialectRequest(
        model=request.model,
        stream=bool(request.stream),
        chat=ChatRequest(
            model=request.model,
            messages=messages,
            tools=conversation.tools,
            tools_json=conversation.tools_json,
            tool_choice=tool_choice,
            parallel_tool_calls=request.parallel_tool_calls if conversation.tools else None,
            response_format=msgspec.to_builtins(format_) if format_ and format_.type != "text" else None,
            enable_thinking=template.enable_thinking if template else None,
            sampling=_sampling(request) | session.sampling,
            conversation=session.conversation(branch),
        ),
        logprobs=bool(request.logprobs),
        usage=not request.stream or bool(options and options.include_usage),
    )


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    requested: dict[str, Any] = {name: getattr(request, name) for name in _PASSED}
    limit = request.max_completion_tokens
    requested["max_tokens"] = request.max_tokens if limit is None else limit
    requested["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop or None
    return {name: value for name, value in requested.items() if value is not None}
