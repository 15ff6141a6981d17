"""Anthropic Messages: what Claude Code speaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from understudy.wire.anthropic.request import (
    EXPECTED,
    AnthropicOutputFormat,
    AnthropicToolChoice,
    MessagesRequest,
    decode_request,
    read_conversation,
    read_request,
)
from understudy.wire.anthropic.response import read_response, to_message
from understudy.wire.anthropic.stream import AnthropicWriter, event, to_events
from understudy.wire.decoding import peek
from understudy.wire.dialect import (
    Branch,
    DialectRequest,
    DialectResponse,
    ErrorResponse,
    StreamWriter,
    WireSession,
    header_id,
    messages_for_model,
)
from understudy.wire.errors import Fault, FaultKind, InvalidRequest, too_deep
from understudy.wire.model import Block, ChatRequest, Conversation, Generation

# A bad key is 403, not 401: Claude Code tries ten times after a 401, and gives up at once after a 403. 529 is what
# it waits out, longer each time.
_STATUS: dict[FaultKind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "permission": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "timeout": (408, "timeout_error"),
    "too_large": (413, "request_too_large"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "internal": (500, "api_error"),
}
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"


class Anthropic:
    """The Messages dialect (see Dialect)."""

    name: ClassVar[str] = "anthropic"

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        return Branch(
            session_id=header_id(headers.get(b"x-claude-code-session-id")),
            agent_id=header_id(headers.get(b"x-claude-code-agent-id")),
        )

    def peek(self, body: bytes) -> tuple[str, bool]:
        return peek(body, EXPECTED)

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        request = decode_request(body)
        return DialectRequest(model=request.model, stream=request.stream, chat=_to_chat(request, session, branch))

    def read_request(self, body: bytes) -> Conversation:
        return read_request(body)

    def read_response(self, body: bytes) -> tuple[Block, ...] | None:
        return read_response(body)

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        return to_message(generation, incoming.model, session, message_id)

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> StreamWriter:
        return AnthropicWriter(incoming.model, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return event({"type": "ping"})

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        data = [{"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DATE} for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return msgspec.json.encode({"data": data, "has_more": False} | ends)

    def error(self, fault: Fault) -> ErrorResponse:
        headers: list[tuple[bytes, bytes]] = []
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
        should_retry = (
            fault.provider_error.should_retry if fault.provider_error else False if fault.final else None
        )
        if should_retry is not None:
            headers.append((b"x-should-retry", b"true" if should_retry else b"false"))
        status = fault.provider_error.status if fault.provider_error else _STATUS[fault.kind][0]
        return ErrorResponse(status, headers, msgspec.json.encode(_error(fault)))

    def error_event(self, fault: Fault) -> bytes:
        return event(_error(fault))


def _to_chat(request: MessagesRequest, session: WireSession, branch: Branch) -> ChatRequest:
    """A request made on a branch, for a chat backend. Raises InvalidRequest for what no such backend can do."""
    try:
        conversation = read_conversation(request)
        messages = messages_for_model(conversation, session)
    except RecursionError as error:
        raise too_deep() from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"messages: the input of a tool_use block is not UTF-8: {error}") from error
    choice = request.tool_choice if conversation.tools else None
    format_ = request.output_config.format if request.output_config else None
    return ChatRequest(
        model=request.model,
        messages=messages,
        tools=conversation.tools,
        tools_json=conversation.tools_json,
        tool_choice=_tool_choice(choice) if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(format_) if format_ else None,
        enable_thinking=False if request.thinking and request.thinking.type == "disabled" else None,
        sampling=_sampling(request) | session.sampling,
        conversation=session.conversation(branch),
    )


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    requested: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
    }
    return {name: value for name, value in requested.items() if value is not None}


def _tool_choice(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(format_: AnthropicOutputFormat) -> dict[str, Any]:
    if format_.type != "json_schema":
        raise InvalidRequest(
            f"output_config.format.type: unsupported value {format_.type!r}, expected json_schema"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.schema, "strict": True}}


def _error(fault: Fault) -> dict[str, Any]:
    message = fault.message
    if fault.overflow:
        # These words, and no others, make Claude Code compact the conversation.
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.overflow)
    kind = fault.provider_error.type if fault.provider_error else _STATUS[fault.kind][1]
    return {"type": "error", "error": {"type": kind, "message": message}}
