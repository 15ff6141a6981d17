"""The interfaces of backends: they answer a neutral chat request, or pass a request on unchanged."""

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
    """A server of a model: `name` is its kind, `model` the model's name, `price` the price of its tokens, if
    known.
    """

    name: str
    model: str
    price: Price | None

    async def models(self) -> list[str]:
        """Return the names of the models that the server offers. Raises BackendError."""
        ...

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        ...


class Backend(UpstreamServer, Protocol):
    """A model server that answers chat requests."""

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """Answer a request, and return the whole generation.

        Raises BackendError. Cancelling it stops the generation.

        With `emit`, the answer is streamed, and each piece is passed to `emit` as it arrives; the return value is
        the sum of the pieces. A request that failed after the first byte of its response is never sent again.
        """
        ...

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens in the prompt of a request. Raises BackendError."""
        ...


@runtime_checkable
class RestorableBackend(Protocol):
    """A backend that keeps something of each call for later calls."""

    def restore(self, request: ChatRequest, generation: Generation) -> None:
        """Restore a call that was answered before this process began.

        The text, tool calls and tokens of `generation` are used; `request` must belong to a conversation.
        """
        ...


class NativeRequest(Struct, frozen=True, kw_only=True):
    """A request as the agent sent it. `path` includes the query; the names in `headers` are in lower case."""

    path: str
    headers: Mapping[bytes, bytes]
    body: bytes
    stream: bool
    conversation: ConversationHandle | None = None


class NativeResponse(Struct, frozen=True, kw_only=True):
    """A provider's answer: `message` as one JSON object, and the `events` of its stream that were not passed on
    yet.

    `events` is None if it was not a stream. `finish_reason` is in the terms of chat completions.
    """

    message: bytes
    events: bytes | None
    model: str
    finish_reason: str
    usage: Usage = Usage()


@runtime_checkable
class Relay(UpstreamServer, Protocol):
    """A provider that speaks the agent's own dialect: requests and answers are passed on byte for byte.

    Only the model name and the key are changed. `dialect` is the one dialect that it speaks.
    """

    dialect: str

    async def relay(self, request: NativeRequest, emit: Callable[[bytes], None] | None = None) -> NativeResponse:
        """Pass a request on, and return its whole answer. Raises BackendError, also for a stream without its end.

        With `emit`, events are passed back as they arrive, except those that complete the answer.
        """
        ...

    async def relay_count(self, request: NativeRequest) -> bytes:
        """Return the provider's answer to a request for a token count. Raises BackendError."""
        ...


def is_relay(server: Backend | Relay) -> TypeIs[Relay]:
    """Return whether a server is a Relay. `isinstance` with a protocol would take ten times as long."""
    return hasattr(server, "relay")
