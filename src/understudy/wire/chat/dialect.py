"""OpenAI chat completions: what OpenCode, mini-swe-agent and most other agents speak."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from understudy.wire import openai
from understudy.wire.chat import request
from understudy.wire.chat.response import ChatWriter, event, mint, to_completion, to_events
from understudy.wire.decoding import peek
from understudy.wire.dialect import Branch, DialectRequest, DialectResponse, ErrorResponse, WireSession
from understudy.wire.errors import Fault
from understudy.wire.model import Generation


class OpenAIChat:
    """The chat completions dialect (see Dialect)."""

    name: ClassVar[str] = "openai-chat"

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        return openai.branch(headers)

    def peek(self, body: bytes) -> tuple[str, bool]:
        return peek(body, request.WHAT)

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        return request.parse(body, session, branch)

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        assert isinstance(incoming, request.ChatDialectRequest)
        ids = mint(generation.tool_calls, session)
        return to_completion(generation, incoming, message_id, int(time.time()), ids)

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ChatWriter:
        assert isinstance(incoming, request.ChatDialectRequest)
        return ChatWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return b": ping\n\n"

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def error(self, fault: Fault) -> ErrorResponse:
        return openai.error_reply(fault)

    def error_event(self, fault: Fault) -> bytes:
        return event({"error": openai.error(fault)})
