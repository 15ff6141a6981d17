"""A model request and how it is answered: translated for a chat backend, or relayed unchanged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from msgspec import Struct

from understudy.gateway.backends.base import Backend, NativeRequest, Relay
from understudy.gateway.session import GatewaySession
from understudy.wire.dialect import Branch, Dialect, DialectRequest, DialectResponse
from understudy.wire.errors import InvalidRequest
from understudy.wire.model import ChatRequest, Delta, Generation

Push = Callable[[bytes], None]
"""Receives the events of a stream that can be sent at once."""


class AgentRequest(Struct, frozen=True):
    """A request as an agent sent it, with its attempt.

    `target` is the path with its query. The names in `headers` are in lower case.
    """

    session: GatewaySession
    branch: Branch
    dialect: Dialect
    body: bytes
    target: str
    headers: Mapping[bytes, bytes]

    @property
    def retry_count(self) -> int:
        """How often the client says that it has sent this request before, as the SDKs of OpenAI and Anthropic
        do.
        """
        value = self.headers.get(b"x-stainless-retry-count", b"")
        return int(value) if value.isdigit() and len(value) < 10 else 0

    @property
    def idempotency_key(self) -> bytes:
        """The client's idempotency key, which is the same for all tries of one request; b"" if it sends none."""
        return self.headers.get(b"idempotency-key", b"")


class ResponseDraft(Struct, frozen=True):
    """A response that is not stored yet, and the events still to be sent; None means all of its events."""

    response: DialectResponse
    remaining_events: bytes | None = None


class PreparedRequest(Protocol):
    """A valid request, and the server that is to answer it."""

    agent_request: AgentRequest
    model: str
    stream: bool

    @property
    def server(self) -> Backend | Relay: ...

    @property
    def sampling(self) -> dict[str, object]: ...

    @property
    def max_tokens(self) -> int | None:
        """The token limit of the completion; None if the request sets none."""
        ...

    can_limit_tokens: bool
    """Whether `sampling["max_tokens"]` may be set before `generate`."""

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        """Have the server generate.

        With `push`, events that can be sent at once are pushed meanwhile. Raises BackendError.
        """
        ...

    def draft(self, generation: Generation, message_id: str) -> ResponseDraft:
        """Return the response for the agent.

        Raises BackendError if the generation cannot be expressed as a response.
        """
        ...

    def final_message(self, text: str, message_id: str) -> DialectResponse:
        """Return a response with a text of the gateway's own, after which the agent ends its turn."""
        ...

    async def count_tokens(self) -> bytes:
        """Return the JSON response to a request for a token count. Raises BackendError."""
        ...


class TranslatedRequest:
    """A PreparedRequest for a chat backend: the request and its generation are translated."""

    can_limit_tokens = True

    def __init__(self, agent_request: AgentRequest, dialect_request: DialectRequest, backend: Backend) -> None:
        self.agent_request = agent_request
        self.model = dialect_request.model
        self.stream = dialect_request.stream
        self.server = backend
        self.sampling: dict[str, object] = dialect_request.chat.sampling
        self._dialect_request = dialect_request
        self._finish_stream: Callable[[Generation], tuple[DialectResponse, bytes]] | None = None

    @property
    def max_tokens(self) -> int | None:
        limit = self.sampling.get("max_tokens")
        return limit if isinstance(limit, int) else None

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        if push is None:
            return await self.server.generate(self._dialect_request.chat)
        request = self.agent_request
        writer = request.dialect.writer(self._dialect_request, request.session, message_id)
        self._finish_stream = writer.finish

        def emit(delta: Delta) -> None:
            push(writer.feed(delta))

        return await self.server.generate(self._dialect_request.chat, emit)

    def draft(self, generation: Generation, message_id: str) -> ResponseDraft:
        if self._finish_stream is not None:
            return ResponseDraft(*self._finish_stream(generation))
        return ResponseDraft(self._message(generation, message_id))

    def final_message(self, text: str, message_id: str) -> DialectResponse:
        return self._message(Generation(model=self.model, text=text, finish_reason="stop"), message_id)

    async def count_tokens(self) -> bytes:
        return self.agent_request.dialect.token_count(await self.server.count_tokens(self._dialect_request.chat))

    def _message(self, generation: Generation, message_id: str) -> DialectResponse:
        request = self.agent_request
        return request.dialect.message(generation, self._dialect_request, request.session, message_id)


class RelayedRequest:
    """A PreparedRequest for a provider of the agent's own dialect. Raises InvalidRequest for other dialects."""

    can_limit_tokens = False

    def __init__(self, agent_request: AgentRequest, model: str, stream: bool, relay: Relay) -> None:
        if relay.dialect != agent_request.dialect.name:
            raise InvalidRequest(
                f"{agent_request.target[:200]}: unsupported: the {relay.name} backend takes requests of the "
                f"{relay.dialect} dialect only; point this agent at a chat backend (vllm, sglang, openai), "
                f"or use an agent that speaks {relay.dialect}"
            )
        self.agent_request = agent_request
        self.model = model
        self.stream = stream
        self.server = relay
        self.sampling: dict[str, object] = {}  # unknown: a relayed body is never parsed
        self._request = NativeRequest(
            path=agent_request.target,
            headers=agent_request.headers,
            body=agent_request.body,
            stream=stream,
            conversation=agent_request.session.conversation(agent_request.branch),
        )
        self._draft: ResponseDraft | None = None

    @property
    def max_tokens(self) -> int | None:
        return self.agent_request.dialect.requested_max_tokens(self.agent_request.body)

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        answer = await self.server.relay(self._request, push)
        self._draft = ResponseDraft(DialectResponse(answer.message, {}), answer.events)
        return Generation(model=answer.model, text="", finish_reason=answer.finish_reason, usage=answer.usage)

    def draft(self, generation: Generation, message_id: str) -> ResponseDraft:
        assert self._draft is not None
        return self._draft

    def final_message(self, text: str, message_id: str) -> DialectResponse:
        generation = Generation(model=self.model, text=text, finish_reason="stop")
        # The request was never parsed. The relayed dialects need no more of it to build a message.
        request = DialectRequest(self.model, self.stream, ChatRequest(model=self.model, messages=[]))
        return self.agent_request.dialect.message(generation, request, self.agent_request.session, message_id)

    async def count_tokens(self) -> bytes:
        return await self.server.relay_count(self._request)
