"""What the gateway needs of a wire format: the `Dialect` protocol, and the types that go in and out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

from msgspec import Struct

from understudy.wire.errors import Fault, InvalidRequest
from understudy.wire.layout import lay_out
from understudy.wire.model import (
    Block,
    ChatRequest,
    Conversation,
    ConversationHandle,
    Delta,
    Generation,
    Message,
    ToolCall,
)

ID_LIMIT = 200
"""How much of a session's or a subagent's id counts, in characters; agents send 36."""


class Branch(Struct, frozen=True):
    """What tells a main conversation from its subagents: the agent's session id and subagent id."""

    session_id: str | None
    agent_id: str | None


def header_id(value: bytes | None) -> str | None:
    """The id of a session or of a subagent from its header."""
    return value[:ID_LIMIT].decode("latin-1") if value else None


class WireSession(Protocol):
    """What a dialect needs to know of the attempt that a request belongs to."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that are laid over those of each request."""
        ...

    def conversation(self, branch: Branch) -> ConversationHandle:
        """The branch as backends know it: the same object for all calls of a branch."""
        ...

    def tool_id(self, offered: str) -> str:
        """A tool call id that no earlier response of the attempt used: the offered one if it will do."""
        ...

    def sampled(self, tool_id: str) -> ToolCall | None:
        """The tool call as the model wrote it, by the id that the agent has; None for an unknown id."""
        ...


def messages_for_model(conversation: Conversation, session: WireSession) -> list[Message]:
    """The chat messages that a model is shown. Raises InvalidRequest for what no chat model can do."""
    if conversation.unsupported:
        raise InvalidRequest(conversation.unsupported[0])
    return lay_out(conversation.instructions, conversation.blocks, session.sampled)


class DialectRequest(Struct, frozen=True):
    """A request that was parsed. `model` is the name that the agent asked for."""

    model: str
    stream: bool
    chat: ChatRequest


class DialectResponse(Struct, frozen=True):
    """A response in a dialect: its exact JSON, and the tool calls in it by the ids that the agent sees."""

    body: bytes
    sampled: dict[str, ToolCall]


class ErrorResponse(Struct, frozen=True):
    """A fault as an error response: an HTTP status, extra headers and the JSON body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class StreamWriter(Protocol):
    """Writes one response as a stream of events while it is being generated.

    What it writes before `finish` never is a complete response, nor a text or tool call that an agent could take
    for complete: the events that close a part belong to `finish`, which is sent after the call is durable.
    """

    def feed(self, delta: Delta) -> bytes:
        """The events of a piece of the response; the first call adds the opening ones."""
        ...

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        """The response, and the events that are still to be sent, the opening ones too if nothing was fed.

        All events together are exactly the response. Raises BackendError for an invalid generation.
        """
        ...


class Dialect(Protocol):
    """Translates requests and responses, and words errors so that the agents that speak it react correctly."""

    name: ClassVar[str]

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        """The branch that a request belongs to, by its headers (names in lower case)."""
        ...

    def peek(self, body: bytes) -> tuple[str, bool]:
        """The model that a request asks for, and whether it wants a stream. Raises InvalidRequest."""
        ...

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        """Parse a request. Raises InvalidRequest naming the field."""
        ...

    def read_request(self, body: bytes) -> Conversation:
        """The conversation of a stored request, with all that is known of it. Raises what UNREADABLE lists."""
        ...

    def read_response(self, body: bytes) -> tuple[Block, ...] | None:
        """The blocks of a stored response, tool calls as the model wrote them; None when it is no model's message.

        Raises what UNREADABLE lists.
        """
        ...

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        """The response to a parsed request, as one JSON message. Raises BackendError for an invalid generation."""
        ...

    def events(self, message: bytes) -> bytes:
        """A response as a complete event stream."""
        ...

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> StreamWriter:
        """A writer of the response while it is being generated."""
        ...

    def ping(self, message_id: str) -> bytes:
        """An event, or a comment, that keeps the connection alive while the response is being generated."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """The JSON response to a request for a token count."""
        ...

    def models(self, names: Sequence[str]) -> bytes:
        """The JSON list of the models that may be asked for."""
        ...

    def error(self, fault: Fault) -> ErrorResponse:
        """A fault as an HTTP response."""
        ...

    def error_event(self, fault: Fault) -> bytes:
        """A fault as an event, for a stream that has started."""
        ...
