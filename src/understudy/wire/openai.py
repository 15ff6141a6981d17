"""What OpenAI's two dialects share: branches, model lists, errors, and reading contents into blocks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from understudy.wire.decoding import RequestTools
from understudy.wire.dialect import Branch, Dialect, ErrorResponse, header_id
from understudy.wire.errors import Fault, FaultKind, InvalidRequest
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, BlockKind, Conversation, Part, ReadingState

# Status, type and code. The status is what clients go by: 408, 429 and 5xx they try again; a bad key they do not.
_ERRORS: dict[FaultKind, tuple[int, str, str | None]] = {
    "invalid_request": (400, "invalid_request_error", None),
    "too_long": (400, "invalid_request_error", "context_length_exceeded"),
    "permission": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "timeout": (408, "invalid_request_error", "request_timeout"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "unsupported_media": (415, "invalid_request_error", "unsupported_content_encoding"),
    "rate_limit": (429, "rate_limit_error", "rate_limit_exceeded"),
    "overloaded": (503, "server_error", "service_unavailable"),
    "internal": (500, "server_error", "server_error"),
}
# The headers of new and of older versions of Codex, of OpenCode, and the common name.
_SESSION_HEADERS = (b"session-id", b"session_id", b"x-session-affinity", b"x-session-id")
_THREAD_HEADERS = (b"thread-id", b"conversation_id")


class OpenAIDialect(Dialect):
    """The base of OpenAI's dialects."""

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        """Return the branch by the headers that agents send: a subagent has a thread id of its own within the
        session (Codex), or a session that names its parent (OpenCode).
        """
        session, thread = _first_id(headers, _SESSION_HEADERS), _first_id(headers, _THREAD_HEADERS)
        branch_id = thread or session
        main = _first_id(headers, (b"x-parent-session-id",)) or session or branch_id
        return Branch(session_id=main, agent_id=None if branch_id == main else branch_id)

    def models(self, names: Sequence[str]) -> bytes:
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "understudy"} for name in names]
        return msgspec.json.encode({"object": "list", "data": data})

    def error(self, fault: Fault) -> ErrorResponse:
        headers: list[tuple[bytes, bytes]] = []
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
        if fault.final:
            headers.append((b"x-should-retry", b"false"))
        body = msgspec.json.encode({"error": self.error_object(fault)})
        return ErrorResponse(_ERRORS[fault.kind][0], headers, body)

    def error_object(self, fault: Fault) -> dict[str, Any]:
        """Return a fault as OpenAI's error object."""
        _, type_, code = _ERRORS[fault.kind]
        message = fault.message
        if fault.overflow:
            message = (
                "This model's maximum context length is {1} tokens. However, your messages resulted in {0} "
                "tokens. Please reduce the length of the messages."
            ).format(*fault.overflow)
        return {"message": message, "type": type_, "param": None, "code": code}


def _first_id(headers: Mapping[bytes, bytes], names: Sequence[bytes]) -> str | None:
    return next((id_ for name in names if (id_ := header_id(headers.get(name)))), None)


RefusedFields = Mapping[str, tuple[Sequence[object], str]]
"""Unsupported fields, by name: the values that have no effect, and the error for all others."""


def refuse_fields(request: Struct, fields: RefusedFields, where: str = "") -> None:
    """Raise InvalidRequest when a request has one of the fields with a value that would change something.

    `where` precedes the name of the field in the error.
    """
    for name, (harmless, problem) in fields.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            shown = f" = {json.dumps(value)[:80]}" if isinstance(value, int | float | str) else ""
            raise InvalidRequest(f"{where}{sent_name(request, name)}{shown}: {problem}")


def sent_name(request: Struct, name: str) -> str:
    """Return the name of a field as clients send it."""
    return request.__struct_encode_fields__[request.__struct_fields__.index(name)]


# --- contents -------------------------------------------------------------------------------------------


class OpenAIPart(Struct, gc=False):
    """The fields of a content part that both dialects have."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[Any] | None
"""A content: a text, or a list of the dialect's own OpenAIParts."""


class OpenAIReader:
    """Reads the messages of a request, or a `response`, into blocks; each dialect adds what only it has.

    `field` is the request's field with the messages, for error messages.
    """

    field: ClassVar[str]
    text_parts: ClassVar[frozenset[str]]
    expected_parts: ClassVar[str]

    def __init__(self, unsupported: Sequence[str] = (), *, response: bool = False) -> None:
        self.instructions: list[str] = []
        self.blocks: list[Block] = []
        self.unsupported = list(unsupported)
        self._response = response
        self._index = 0
        self._turn = -1
        self._stage = 0

    def read_after(self, state: ReadingState, message: Any) -> tuple[list[Block], ReadingState]:
        """Return the blocks of a request's next message, and the state after it; for a reader that has read
        nothing yet.
        """
        self._turn, self._stage = state.turn, state.stage
        self.read(state.messages, message)
        return self.blocks, ReadingState(
            messages=state.messages + 1,
            turn=self._turn,
            stage=self._stage,
            instructions=(*state.instructions, *self.instructions),
            unsupported=(*state.unsupported, *self.unsupported),
        )

    def read(self, index: int, message: Any) -> None:
        """Read the next message, which is number `index` of the request."""
        raise NotImplementedError

    def conversation(self, tools: RequestTools, offered: list[dict[str, Any]]) -> Conversation:
        """Return everything that was read, as a conversation that offers these of its tools."""
        return Conversation(
            instructions=tuple(self.instructions),
            blocks=tuple(self.blocks),
            tools=offered,
            tools_json=tools.json if offered is tools.functions else None,
            unsupported=tuple(self.unsupported),
        )

    def image(self, part: Any) -> Part | None:
        """Return the image in a content part, in the format of chat completions; None for any other part."""
        raise NotImplementedError

    def add_user(self, content: Content) -> None:
        """Add the blocks of a user's message; at least one, also for an empty message."""
        if not content or isinstance(content, str):
            self.add("user", "text", content if isinstance(content, str) else "")
            return
        for part in content:
            text, image = self.part(part)
            if image is not None:
                self.add("user", "other", text, name="image", images=(image,))
            elif part.type in self.text_parts:
                self.add("user", "text", text)
            else:
                self.add("user", "other", text, name=part.type, source=part)

    def add_result(self, call_id: str, content: Content) -> None:
        """Add the result of a tool call."""
        parts = self.parts(content)
        images = tuple(image for _, image in parts if image is not None)
        self.add("user", "tool_result", TEXT_SEPARATOR.join(text for text, _ in parts), id=call_id, images=images)

    def text(self, content: Content) -> str:
        """Return the texts of a content, without its images."""
        return TEXT_SEPARATOR.join(text for text, image in self.parts(content) if image is None)

    def parts(self, content: Content) -> list[tuple[str, Part | None]]:
        """Return what a model is shown of each content part."""
        if isinstance(content, str):
            return [(content, None)]
        return [self.part(part) for part in content or ()]

    def part(self, part: OpenAIPart) -> tuple[str, Part | None]:
        """Return what a model is shown of a content part: a text, and the image that it stands for."""
        if part.type in self.text_parts:
            return (part.refusal if part.type == "refusal" else part.text) or "", None
        if (image := self.image(part)) is not None:
            return IMAGE, {"type": "image_url", "image_url": image}
        self.refuse(
            f"content: unsupported part of type {part.type[:100]!r}, expected {self.expected_parts}; leave it out"
        )
        return f"[{part.type}]", None

    def add(self, role: str, kind: BlockKind, text: str = "", **fields: Any) -> None:
        """Add a block to the current turn."""
        self.blocks.append(Block(self._turn, role, kind, text, **fields))

    def refuse(self, problem: str) -> None:
        """Record that the current message contains something that no chat model can do."""
        self.unsupported.append(f"{self.field}[{self._index}].{problem}")
