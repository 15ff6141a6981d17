"""OpenAI Responses, as the gateway speaks it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from understudy.wire import openai
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
from understudy.wire.responses.request import (
    ResponsesRequest,
    TextFormat,
    decode_request,
    read_conversation,
    read_request,
)
from understudy.wire.responses.response import (
    ResponsesDialectRequest,
    read_response,
    response_id,
    to_response,
)
from understudy.wire.responses.stream import EventBuilder, ResponsesWriter, to_events
from understudy.wire.responses.tools import EXPECTED

_STATELESS = "unsupported; the gateway is stateless, send the complete conversation as `input`"
_REFUSED: dict[str, tuple[Sequence[object], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "background": ((False,), "unsupported; the request itself gets the response, leave it out"),
    "prompt": ((), "unsupported; there are no stored prompts, send `instructions` and `input`"),
    "top_logprobs": ((0,), "unsupported; leave it out"),
}


class OpenAIResponses:
    """The Responses dialect (see Dialect)."""

    name: ClassVar[str] = "openai-responses"

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
        assert isinstance(incoming, ResponsesDialectRequest)
        ids = [session.tool_id(call.id) for call in generation.tool_calls]
        message, _ = to_response(generation, incoming, message_id, int(time.time()), ids)
        return message

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ResponsesWriter:
        assert isinstance(incoming, ResponsesDialectRequest)
        return ResponsesWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        # Not a comment: Codex takes a stream for dead that has no event for five minutes. And no other event: the
        # accumulators of OpenAI clients refuse a stream that begins with one; of this one they take any number.
        response: dict[str, Any] = {"object": "response", "status": "in_progress", "output": []}
        return EventBuilder().event("response.created", {"response": {"id": response_id(message_id)} | response})

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def error(self, fault: Fault) -> ErrorResponse:
        return openai.error_reply(fault)

    def error_event(self, fault: Fault) -> bytes:
        error = openai.error(fault)
        reported = {"code": error["code"] or error["type"], "message": error["message"]}
        return EventBuilder().event(
            "response.failed", {"response": {"object": "response", "status": "failed", "error": reported}}
        )


def _parse(body: bytes, session: WireSession, branch: Branch) -> ResponsesDialectRequest:
    request = decode_request(body)
    for name, (harmless, why) in _REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: {why}")
    read = read_conversation(request)
    conversation = read.conversation
    messages = messages_for_model(conversation, session)
    format_ = request.text.format if request.text else None
    return ResponsesDialectRequest(
        model=request.model,
        stream=bool(request.stream),
        chat=ChatRequest(
            model=request.model,
            messages=messages,
            tools=conversation.tools,
            tools_json=conversation.tools_json,
            tool_choice=read.tool_choice,
            parallel_tool_calls=request.parallel_tool_calls if conversation.tools else None,
            response_format=_response_format(format_) if format_ else None,
            sampling=_sampling(request) | session.sampling,
            conversation=session.conversation(branch),
        ),
        origins=read.toolbox.origins,
        echo=_echo(request),
    )


def _sampling(request: ResponsesRequest) -> dict[str, Any]:
    requested: dict[str, Any] = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    return {name: value for name, value in requested.items() if value is not None}


def _response_format(format_: TextFormat) -> dict[str, Any] | None:
    if format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": format_.name or "output", "schema": format_.schema or {}, "strict": format_.strict}
    if format_.description is not None:
        schema["description"] = format_.description
    return {"type": "json_schema", "json_schema": schema}


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    requested: dict[str, Any] = {
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": request.reasoning,
        "temperature": request.temperature,
        "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else None,
        "top_p": request.top_p,
    }
    return {name: value for name, value in requested.items() if value is not None}
