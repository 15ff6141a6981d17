"""Anthropic Messages: what Claude Code speaks."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import msgspec

from understudy.gateway.backends.base import Generation
from understudy.gateway.dialects.anthropic_request import decode, to_chat
from understudy.gateway.dialects.anthropic_response import event, to_events, to_message
from understudy.gateway.dialects.base import ErrorReply, Incoming, Message
from understudy.gateway.faults import Fault, Kind
from understudy.gateway.keys import Session

# A bad key is 403, not 401: Claude Code tries ten times after a 401, and gives up at once after a 403. 529 is what
# it waits out, longer each time.
_STATUS: dict[Kind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "permission": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "too_large": (413, "request_too_large"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "internal": (500, "api_error"),
}


class Anthropic:
    """The Messages dialect (see Dialect)."""

    name: ClassVar[str] = "anthropic"

    def parse(self, body: bytes, session: Session) -> Incoming:
        request = decode(body)
        return Incoming(model=request.model, stream=request.stream, chat=to_chat(request, session))

    def message(self, generation: Generation, incoming: Incoming, session: Session, message_id: str) -> Message:
        return to_message(generation, incoming.model, session, message_id)

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def ping(self) -> bytes:
        return event({"type": "ping"})

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def error(self, fault: Fault) -> ErrorReply:
        headers: list[tuple[bytes, bytes]] = []
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
        if fault.final:
            headers.append((b"x-should-retry", b"false"))
        return ErrorReply(_STATUS[fault.kind][0], headers, msgspec.json.encode(_error(fault)))

    def error_event(self, fault: Fault) -> bytes:
        return event(_error(fault))


def _error(fault: Fault) -> dict[str, Any]:
    message = fault.message
    if fault.overflow:
        # These words, and no others, make Claude Code compact the conversation.
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.overflow)
    return {"type": "error", "error": {"type": _STATUS[fault.kind][1], "message": message}}
