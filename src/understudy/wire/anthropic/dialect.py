"""Anthropic Messages: what Claude Code speaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from understudy.wire.anthropic.request import to_chat
from understudy.wire.anthropic.response import event, to_events, to_message
from understudy.wire.anthropic.schema import WHAT, decode_request
from understudy.wire.anthropic.writer import AnthropicWriter
from understudy.wire.decoding import peek
from understudy.wire.dialect import (
    Branch,
    DialectRequest,
    DialectResponse,
    ErrorResponse,
    StreamWriter,
    WireSession,
    header_id,
)
from understudy.wire.errors import Fault, FaultKind
from understudy.wire.model import Generation

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
        return peek(body, WHAT)

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        request = decode_request(body)
        return DialectRequest(model=request.model, stream=request.stream, chat=to_chat(request, session, branch))

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


def _error(fault: Fault) -> dict[str, Any]:
    message = fault.message
    if fault.overflow:
        # These words, and no others, make Claude Code compact the conversation.
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.overflow)
    kind = fault.provider_error.type if fault.provider_error else _STATUS[fault.kind][1]
    return {"type": "error", "error": {"type": kind, "message": message}}
