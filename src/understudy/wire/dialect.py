"""The gateway's interface to a wire format: the base class `Dialect`, and the types of its arguments and
results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol

import msgspec
from msgspec import Struct

from understudy.wire.decoding import peek
from understudy.wire.errors import Fault, InvalidRequest
from understudy.wire.layout import lay_out
from understudy.wire.model import (
    Block,
    ChatRequest,
    Conversation,
    ConversationHandle,
    Delta,
    Generation,
    ReadingState,
    ToolCall,
)

ID_CHARACTERS = 200
"""How much of a session's or a subagent's id counts, in characters; agents send 36."""


class Branch(Struct, frozen=True):
    """Identifies a main conversation or one of its subagents: the agent's session id and subagent id."""

    session_id: str | None
    agent_id: str | None


def header_id(value: bytes | None) -> str | None:
    """Return the id of a session or subagent from its header."""
    return value[:ID_CHARACTERS].decode("latin-1") if value else None


class WireSession(Protocol):
    """What a dialect needs to know about the attempt that a request belongs to."""

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling parameters that override those of each request."""
        ...

    def conversation(self, branch: Branch) -> ConversationHandle:
        """Return the handle by which backends know a branch: the same object for all calls of the branch."""
        ...

    def tool_id(self, offered: str) -> str:
        """Return a tool call id that no earlier response of the attempt used; `offered` if it is unused."""
        ...

    def sampled(self, tool_id: str) -> ToolCall | None:
        """Return the tool call as the model wrote it, by the id that the agent has; None for an unknown id."""
        ...


def chat_request(
    model: str,
    conversation: Conversation,
    session: WireSession,
    branch: Branch,
    sampling: dict[str, Any],
    **fields: Any,
) -> ChatRequest:
    """Return a conversation as a request for a chat backend; `sampling` has the agent's parameters, None where
    unset.

    `fields` are further fields of ChatRequest. Raises InvalidRequest for what no chat model can do.
    """
    if conversation.unsupported:
        raise InvalidRequest(conversation.unsupported[0])
    return ChatRequest(
        model=model,
        messages=lay_out(conversation.instructions, conversation.blocks, session.sampled),
        tools=conversation.tools,
        tools_json=conversation.tools_json,
        sampling={name: value for name, value in sampling.items() if value is not None} | session.sampling,
        conversation=session.conversation(branch),
        **fields,
    )


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
    """An error response: HTTP status, extra headers and JSON body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class StreamWriter(ABC):
    """Writes one response, as a stream of events while it is being generated or whole.

    What it writes before `finish` never is a complete response, nor a text or tool call that an agent could take
    for complete: the events that close a part belong to `finish`, which is sent after the call is durable.
    """

    def __init__(self, session: WireSession, message_id: str) -> None:
        self._session = session
        self._message_id = message_id
        self._started = False
        self._ids: list[str] = []  # ids of the tool calls, as the agent sees them

    def _complete_ids(self, generation: Generation) -> None:
        """Choose ids for the tool calls that have none yet."""
        self._ids += [self._session.tool_id(call.id) for call in generation.tool_calls[len(self._ids) :]]

    @abstractmethod
    def whole(self, generation: Generation) -> DialectResponse:
        """Return the response as one JSON message, under the requested model name.

        Raises BackendError when the generation did not end normally: an aborted one must not look like a short
        one.
        """

    @abstractmethod
    def feed(self, delta: Delta) -> bytes:
        """Return the events for a piece of the response; the first call adds the opening events."""

    @abstractmethod
    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        """Return the response, and the remaining events, including the opening ones if nothing was fed.

        All events together are exactly the response. Raises BackendError for an invalid generation.
        """


class _TokenLimit(Struct):
    max_tokens: int | None = None


_TOKEN_LIMIT = msgspec.json.Decoder(_TokenLimit)


class Dialect(ABC):
    """Translates requests and responses, and words errors so that the agents that speak it react correctly.

    `expected` names a request of the dialect in errors.
    """

    name: ClassVar[str]
    expected: ClassVar[str]

    def peek(self, body: bytes, target: str = "") -> tuple[str, bool]:
        """Return the requested model, and whether a stream is requested. Raises InvalidRequest.

        `target` is the path with its query, in which some dialects have both.
        """
        return peek(body, self.expected)

    def target(self, model: str) -> str:
        """Return the `target` of a request for a model, for dialects that have the model in the path; otherwise
        "".
        """
        return ""

    def requested_max_tokens(self, body: bytes) -> int | None:
        """Return the maximum number of completion tokens that a request asks for; None if it has none or is
        invalid.
        """
        try:
            return _TOKEN_LIMIT.decode(body).max_tokens
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return None

    @abstractmethod
    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        """Return the branch that a request belongs to, by its headers (names in lower case)."""

    @abstractmethod
    def parse(self, body: bytes, session: WireSession, branch: Branch, target: str = "") -> DialectRequest:
        """Parse a request; for `target` see `peek`. Raises InvalidRequest naming the field."""

    @staticmethod
    @abstractmethod
    def read_request(body: bytes) -> Conversation:
        """Return the conversation of a stored request. Raises the exceptions in UNREADABLE."""

    @staticmethod
    @abstractmethod
    def read_outer(body: bytes, instructions: tuple[str, ...]) -> Conversation:
        """Return the conversation of a stored request without its messages, which added these `instructions` to
        it.

        Raises the exceptions in UNREADABLE, also for a body that has messages.
        """

    @staticmethod
    @abstractmethod
    def read_next(state: ReadingState, body: bytes) -> tuple[list[Block], ReadingState]:
        """Return the blocks of the next message of a stored request, and the state after it.

        Raises the exceptions in UNREADABLE, also for a message that changes what was read before it: a request
        with such a message can only be read as a whole.
        """

    @staticmethod
    @abstractmethod
    def read_response(body: bytes) -> tuple[Block, ...] | None:
        """Return the blocks of a stored response, with tool calls as the model wrote them; None if it is no
        message of a model.

        Raises the exceptions in UNREADABLE.
        """

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        """Return the response to a parsed request as one JSON message. Raises BackendError for an invalid
        generation.
        """
        return self.writer(incoming, session, message_id).whole(generation)

    @staticmethod
    @abstractmethod
    def events(body: bytes) -> bytes:
        """Return a response as a complete event stream."""

    @abstractmethod
    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> StreamWriter:
        """Return a writer that writes the response while it is being generated."""

    @abstractmethod
    def ping(self, message_id: str) -> bytes:
        """Return an event or comment that keeps the connection alive while the response is being generated."""

    def token_count(self, tokens: int) -> bytes:
        """Return the JSON response to a request for a token count."""
        return msgspec.json.encode({"input_tokens": tokens})

    @abstractmethod
    def models(self, names: Sequence[str]) -> bytes:
        """Return the JSON list of the available models."""

    @abstractmethod
    def error(self, fault: Fault) -> ErrorResponse:
        """Return a fault as an HTTP error response."""

    @abstractmethod
    def error_event(self, fault: Fault) -> bytes:
        """Return a fault as an event, for a stream that has already started."""
