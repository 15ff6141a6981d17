"""How a request gets its answer: translated for a backend that speaks chat, or relayed as it is."""

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


class AgentRequest(Struct, frozen=True):
    """A request with everything that decides its call. `target` is the path with its query."""

    session: GatewaySession
    branch: Branch
    dialect: Dialect
    body: bytes
    target: str
    headers: Mapping[bytes, bytes]


class ResponseDraft(Struct, frozen=True):
    """An answer: `message` is what it says, `tail` the events still to be said, None when that is all of them."""

    message: DialectResponse
    tail: bytes | None = None


class PreparedRequest(Protocol):
    """A request that was understood, and what will answer it."""

    asked: AgentRequest
    model: str
    stream: bool

    @property
    def answerer(self) -> Backend | Relay: ...

    @property
    def sampling(self) -> dict[str, object]: ...

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        """Have it answered; what is known of the answer. `push` takes the events that can be said at once."""
        ...

    def produce(self, generation: Generation, message_id: str) -> ResponseDraft:
        """The answer as the agent gets it. Raises BackendError when the generation makes no sense."""
        ...

    def last_words(self, text: str, message_id: str) -> DialectResponse:
        """A message that says `text` and ends the turn, though no model said it."""
        ...

    async def count(self) -> bytes:
        """The JSON answer to a request for a token count. Raises BackendError."""
        ...


class TranslatedRequest:
    """A request for a backend that speaks chat: it and its answer are translated."""

    def __init__(self, asked: AgentRequest, incoming: DialectRequest, backend: Backend) -> None:
        self.asked = asked
        self.model = incoming.model
        self.stream = incoming.stream
        self.answerer = backend
        self.sampling: dict[str, object] = incoming.chat.sampling
        self._incoming = incoming
        self._finish: Callable[[Generation], tuple[DialectResponse, bytes]] | None = None

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        if push is None:
            return await self.answerer.generate(self._incoming.chat)
        writer = self.asked.dialect.writer(self._incoming, self.asked.session, message_id)
        self._finish = writer.finish

        def emit(delta: Delta) -> None:
            push(writer.feed(delta))

        return await self.answerer.generate(self._incoming.chat, emit)

    def produce(self, generation: Generation, message_id: str) -> ResponseDraft:
        if self._finish is not None:
            return ResponseDraft(*self._finish(generation))
        dialect, session = self.asked.dialect, self.asked.session
        return ResponseDraft(dialect.message(generation, self._incoming, session, message_id))

    def last_words(self, text: str, message_id: str) -> DialectResponse:
        words = Generation(model=self.model, text=text, finish_reason="stop")
        return self.asked.dialect.message(words, self._incoming, self.asked.session, message_id)

    async def count(self) -> bytes:
        return self.asked.dialect.token_count(await self.answerer.count_tokens(self._incoming.chat))


class RelayedRequest:
    """A request for a provider that speaks the agent's own dialect."""

    def __init__(self, asked: AgentRequest, model: str, stream: bool, relay: Relay) -> None:
        if relay.dialect != asked.dialect.name:
            raise InvalidRequest(
                f"{asked.target[:200]}: the {relay.name} backend answers the {relay.dialect} dialect only; "
                "point this agent at a chat backend (vllm, sglang, openai), or use an agent that speaks it"
            )
        self.asked = asked
        self.model = model
        self.stream = stream
        self.answerer = relay
        self.sampling: dict[str, object] = {}
        self._request = NativeRequest(
            path=asked.target,
            headers=asked.headers,
            body=asked.body,
            stream=stream,
            conversation=asked.session.conversation(asked.branch),
        )
        self._produced: ResponseDraft | None = None

    async def generate(self, message_id: str, push: Push | None) -> Generation:
        answer = await self.answerer.relay(self._request, push)
        self._produced = ResponseDraft(DialectResponse(answer.message, {}), answer.events)
        return Generation(model=answer.model, text="", finish_reason=answer.finish_reason, usage=answer.usage)

    def produce(self, generation: Generation, message_id: str) -> ResponseDraft:
        assert self._produced is not None
        return self._produced

    def last_words(self, text: str, message_id: str) -> DialectResponse:
        words = Generation(model=self.model, text=text, finish_reason="stop")
        # The request was passed on unread. Only Anthropic's dialect is relayed: its messages need no more of it.
        incoming = DialectRequest(self.model, self.stream, ChatRequest(model=self.model, messages=[]))
        return self.asked.dialect.message(words, incoming, self.asked.session, message_id)

    async def count(self) -> bytes:
        return await self.answerer.relay_count(self._request)
