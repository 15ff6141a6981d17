"""The backend protocols: a neutral chat request in and a generation out, or a request passed on as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from msgspec import Struct

from understudy.gateway.prices import Price
from understudy.types import Usage
from understudy.wire.model import ChatRequest, ConversationHandle, Emit, Generation

if TYPE_CHECKING:
    from typing_extensions import TypeIs


class UpstreamServer(Protocol):
    """What answers: `name` is its kind, `model` the model that it has, `price` what its tokens cost, if known."""

    name: str
    model: str
    price: Price | None

    async def models(self) -> list[str]:
        """The names of the models that the server offers. Raises BackendError."""
        ...

    async def close(self) -> None:
        """Drop the connections. May be called twice."""
        ...


class Backend(UpstreamServer, Protocol):
    """A model server that answers chat requests."""

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """Answer a request, whole. Raises BackendError; cancelling it stops the generation.

        With `emit`, the answer is streamed from the server, and each piece of it is passed on as it comes; what is
        returned is the sum of the pieces. A server that failed after its first byte is never asked again.
        """
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """How many tokens the prompt of a request has. Raises BackendError."""
        ...


@runtime_checkable
class RestorableBackend(Protocol):
    """A backend that keeps something of each call for the calls that follow it."""

    def restore(self, request: ChatRequest, generation: Generation) -> None:
        """Take up a call that was answered before this process began. Of `generation` the text, tool calls and
        tokens count; `request` belongs to a conversation."""
        ...


class NativeRequest(Struct, frozen=True, kw_only=True):
    """A request as the agent sent it. `path` has its query; `headers` have lower-case names."""

    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    stream: bool
    conversation: ConversationHandle | None = None


class NativeResponse(Struct, frozen=True, kw_only=True):
    """A provider's answer: `message` as one JSON object, and of its stream the `events` not passed on yet.

    `events` is None when it was no stream. `finish_reason` is in the words of chat completions.
    """

    message: bytes
    events: bytes | None
    model: str
    finish_reason: str
    usage: Usage = Usage()


@runtime_checkable
class Relay(UpstreamServer, Protocol):
    """A provider that speaks an agent's own dialect: requests are passed on, and answers back, byte for byte.

    Only the model's name and the key are changed. `dialect` names the one dialect that it speaks.
    """

    dialect: str

    async def relay(self, request: NativeRequest, emit: Callable[[bytes], None] | None = None) -> NativeResponse:
        """Pass a request on and return its answer, whole. Raises BackendError, also for a stream without its end.

        With `emit`, whole events are passed back as they come, but for those that complete the answer.
        """
        ...

    async def relay_count(self, request: NativeRequest) -> bytes:
        """The provider's answer to a request for a token count. Raises BackendError."""
        ...


def is_relay(server: Backend | Relay) -> TypeIs[Relay]:
    """Whether it passes requests on as they are; `isinstance` takes ten times as long to say so."""
    return hasattr(server, "relay")
