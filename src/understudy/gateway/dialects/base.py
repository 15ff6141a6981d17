"""The dialect protocol: one wire format that agents speak, kept apart from what answers them."""

from __future__ import annotations

from typing import ClassVar, Protocol

from msgspec import Struct

from understudy.gateway.backends.base import ChatRequest, Generation, ToolCall
from understudy.gateway.faults import Fault
from understudy.gateway.keys import Session


class Incoming(Struct, frozen=True):
    """A request as it was understood. `model` is the name that the agent asked for."""

    model: str
    stream: bool
    chat: ChatRequest


class Message(Struct, frozen=True):
    """An answer in a dialect: its exact JSON, and the tool calls in it by the ids that the agent sees."""

    body: bytes
    sampled: dict[str, ToolCall]


class ErrorReply(Struct, frozen=True):
    """A fault in a dialect: an HTTP status, extra headers and the JSON body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Dialect(Protocol):
    """Translates requests and answers, and says faults so that the agents that speak it do the right thing."""

    name: ClassVar[str]

    def parse(self, body: bytes, session: Session) -> Incoming:
        """Understand a request. Raises InvalidRequest naming the field."""
        ...

    def message(self, generation: Generation, incoming: Incoming, session: Session, message_id: str) -> Message:
        """The answer as one JSON message. Raises BackendError when the generation makes no sense."""
        ...

    def events(self, message: bytes) -> bytes:
        """A message as a complete event stream."""
        ...

    def ping(self) -> bytes:
        """An event that only says that the answer is being made."""
        ...

    def token_count(self, tokens: int) -> bytes:
        """The JSON answer to a request for a token count."""
        ...

    def error(self, fault: Fault) -> ErrorReply:
        """A fault as an HTTP answer."""
        ...

    def error_event(self, fault: Fault) -> bytes:
        """A fault as an event, for a stream that has begun."""
        ...
