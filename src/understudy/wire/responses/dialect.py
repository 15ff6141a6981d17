"""OpenAI Responses: what Codex CLI speaks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from understudy.wire import openai
from understudy.wire.decoding import peek
from understudy.wire.dialect import Branch, DialectRequest, DialectResponse, ErrorResponse, WireSession
from understudy.wire.errors import Fault
from understudy.wire.model import Generation
from understudy.wire.responses import request
from understudy.wire.responses.response import Events, response_id, to_events, to_response
from understudy.wire.responses.writer import ResponsesWriter


class OpenAIResponses:
    """The Responses dialect (see Dialect)."""

    name: ClassVar[str] = "openai-responses"

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        return openai.branch(headers)

    def peek(self, body: bytes) -> tuple[str, bool]:
        return peek(body, request.WHAT)

    def parse(self, body: bytes, session: WireSession, branch: Branch) -> DialectRequest:
        return request.parse(body, session, branch)

    def message(
        self, generation: Generation, incoming: DialectRequest, session: WireSession, message_id: str
    ) -> DialectResponse:
        assert isinstance(incoming, request.ResponsesDialectRequest)
        ids = [session.tool_id(call.id) for call in generation.tool_calls]
        message, _ = to_response(generation, incoming, message_id, int(time.time()), ids)
        return message

    def events(self, message: bytes) -> bytes:
        return to_events(message)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ResponsesWriter:
        assert isinstance(incoming, request.ResponsesDialectRequest)
        return ResponsesWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        # Not a comment: Codex takes a stream for dead that has no event for five minutes. And no other event: the
        # accumulators of OpenAI clients refuse a stream that begins with one; of this one they take any number.
        response: dict[str, Any] = {"object": "response", "status": "in_progress", "output": []}
        return Events().say("response.created", {"response": {"id": response_id(message_id)} | response})

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        return openai.models(names)

    def error(self, fault: Fault) -> ErrorResponse:
        return openai.error_reply(fault)

    def error_event(self, fault: Fault) -> bytes:
        error = openai.error(fault)
        told = {"code": error["code"] or error["type"], "message": error["message"]}
        return Events().say(
            "response.failed", {"response": {"object": "response", "status": "failed", "error": told}}
        )
