"""What the two OpenAI dialects share: branches, the list of models, and error responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from understudy.wire.dialect import Branch, ErrorResponse, header_id
from understudy.wire.errors import Fault, FaultKind

# Status, type and code. The status is what clients go by: 408, 429 and 5xx they try again; a bad key they do not.
_ERRORS: dict[FaultKind, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "permission": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "timeout": (408, "invalid_request_error", "request_timeout"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "overloaded": (503, "server_error", "service_unavailable"),
    "internal": (500, "server_error", "server_error"),
}
# What Codex sends, with hyphens now and underscores before, then what OpenCode sends, then the common name.
_SESSION_HEADERS = (b"session-id", b"session_id", b"x-session-affinity", b"x-session-id")
_THREAD_HEADERS = (b"thread-id", b"conversation_id")


def branch(headers: Mapping[bytes, bytes]) -> Branch:
    """The branch by the headers that agents send.

    A subagent has a thread of its own within the session (Codex), or a session that names its parent (OpenCode).
    """
    session, thread = _first(headers, _SESSION_HEADERS), _first(headers, _THREAD_HEADERS)
    own = thread or session
    main = _first(headers, (b"x-parent-session-id",)) or session or own
    return Branch(session_id=main, agent_id=None if own == main else own)


def _first(headers: Mapping[bytes, bytes], names: Sequence[bytes]) -> str | None:
    return next((id_ for name in names if (id_ := header_id(headers.get(name)))), None)


def models(names: Sequence[str]) -> bytes:
    """The JSON list of models."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "understudy"} for name in names]
    return msgspec.json.encode({"object": "list", "data": data})


def error_reply(fault: Fault) -> ErrorResponse:
    """A fault as an HTTP answer."""
    headers: list[tuple[bytes, bytes]] = []
    if fault.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
    if fault.final:
        headers.append((b"x-should-retry", b"false"))
    return ErrorResponse(_ERRORS[fault.kind][0], headers, msgspec.json.encode({"error": error(fault)}))


def error(fault: Fault) -> dict[str, Any]:
    """A fault as OpenAI's error object."""
    _, type_, code = _ERRORS[fault.kind]
    message = fault.message
    if fault.overflow:
        tokens, limit = fault.overflow
        message = (
            f"This model's maximum context length is {limit} tokens. However, your messages resulted in {tokens} "
            "tokens. Please reduce the length of the messages."
        )
    return {"message": message, "type": type_, "param": None, "code": code}
