"""OpenAI Responses: responses, event streams, and the dialect as the gateway uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct, structs

from understudy.types import Usage
from understudy.wire.decoding import decoded
from understudy.wire.dialect import (
    Branch,
    DialectRequest,
    DialectResponse,
    ErrorResponse,
    StreamWriter,
    WireSession,
    chat_request,
)
from understudy.wire.errors import Fault
from understudy.wire.model import Block, Delta, Generation, ToolCall, ending
from understudy.wire.openai import OpenAIDialect, RefusedFields, refuse_fields
from understudy.wire.responses_request import (
    EXPECTED,
    Item,
    TextFormat,
    ToolOrigin,
    call_item,
    decode_request,
    read_conversation,
    read_items,
    read_next,
    read_outer,
    read_request,
)

Part = Literal["reasoning", "text"] | int
"""A part of a response: its reasoning, its text, or its tool call of that number."""

OutputItem = dict[str, Any]

_INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}


class ResponsesDialectRequest(DialectRequest, frozen=True):
    """A Responses request, with what only its response needs. `echo` are the fields that the response repeats."""

    origins: Mapping[str, ToolOrigin]
    echo: dict[str, Any]


class _ReadResponse(Struct):
    output: list[Item]


_RESPONSE = msgspec.json.Decoder(_ReadResponse)
_RATE_LIMIT_PAUSE_S = 3.0
"""The pause before a retry where the model server names none; Codex retries five times."""


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """Return the blocks of a response, with tool calls as the model wrote them. Raises the exceptions in
    UNREADABLE.
    """
    return tuple(read_items(decoded(_RESPONSE.decode, body).output))


def response_id(message_id: str) -> str:
    """Return the id of the response for a call's message id."""
    return f"resp_{_bare_id(message_id)}"


def _bare_id(message_id: str) -> str:
    return message_id.removeprefix("msg_")


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the token counts. No backend reports the number of reasoning tokens, which clients require: it is
    always 0.
    """
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


class EventBuilder:
    """Builds and numbers the events of one stream."""

    def __init__(self) -> None:
        self._number = -1

    def event(self, type_: str, fields: Mapping[str, Any]) -> bytes:
        """Return one server-sent event, named by its type."""
        self._number += 1
        data = {"type": type_, "sequence_number": self._number, **fields}
        return b"event: %b\ndata: %b\n\n" % (type_.encode(), msgspec.json.encode(data))

    def begin(self, frame: dict[str, Any]) -> bytes:
        """Return the events that open a stream."""
        opening = {"response": frame}
        return self.event("response.created", opening) + self.event("response.in_progress", opening)

    def open(self, index: int, item: OutputItem) -> bytes:
        """Return the events that start an item, still empty."""
        empty_fields: dict[str, Any] = {
            "status": "in_progress",
            _TEXT_FIELDS[item["type"]]: [] if _part_of(item) else "",
        }
        empty = item | empty_fields
        events = self.event("response.output_item.added", {"output_index": index, "item": empty})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events += self.event("response.content_part.added", at | {"part": part | {"text": ""}})
        return events

    def add(self, index: int, item: OutputItem, text: str) -> bytes:
        """Return the event that adds to an item's text."""
        return self.event(f"{_TEXT_EVENTS[item['type']]}.delta", _position(index, item) | {"delta": text})

    def close(self, index: int, item: OutputItem) -> bytes:
        """Return the events that complete an item."""
        position, name = _position(index, item), _TEXT_EVENTS[item["type"]]
        if item["type"] == "function_call":
            position["name"] = item["name"]
        events = self.event(f"{name}.done", position | {_DONE_EVENT_FIELDS[item["type"]]: text_of(item)})
        if part := _part_of(item):
            at = {"item_id": item["id"], "output_index": index, "content_index": 0}
            events += self.event("response.content_part.done", at | {"part": part})
        return events + self.event("response.output_item.done", {"output_index": index, "item": item})

    def end(self, response: dict[str, Any]) -> bytes:
        """Return the event that ends a stream."""
        return self.event(f"response.{response['status']}", {"response": response})


def to_events(body: bytes) -> bytes:
    """Return one of our responses as the event stream from which a client assembles the same response."""
    return b"".join(_events(msgspec.json.decode(body)))


def _events(response: dict[str, Any]) -> Iterator[bytes]:
    events = EventBuilder()
    unfinished: dict[str, Any] = {"status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield events.begin(response | unfinished)
    for index, item in enumerate(response["output"]):
        yield events.open(index, item)
        if text := text_of(item):
            yield events.add(index, item, text)
        yield events.close(index, item)
    yield events.end(response)


# By the type of an item: the events of its text, the field that is empty at first, and the field of all text
# in the event that ends it.
_TEXT_EVENTS = {
    "reasoning": "response.reasoning_text",
    "message": "response.output_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}
_TEXT_FIELDS = {
    "reasoning": "content",
    "message": "content",
    "function_call": "arguments",
    "custom_tool_call": "input",
}
_DONE_EVENT_FIELDS = {
    "reasoning": "text",
    "message": "text",
    "function_call": "arguments",
    "custom_tool_call": "input",
}


def _part_of(item: OutputItem) -> dict[str, Any] | None:
    """Return the one content part of a message or of reasoning; None for a call."""
    content: list[dict[str, Any]] | None = item.get("content")
    return content[0] if content else None


def text_of(item: OutputItem) -> str:
    """Return the text of an item: of a message or reasoning, or the arguments of a call."""
    part = _part_of(item)
    return part["text"] if part else item[_TEXT_FIELDS[item["type"]]]


def _position(index: int, item: OutputItem) -> dict[str, Any]:
    position: dict[str, Any] = {"item_id": item["id"], "output_index": index}
    if item["type"] in ("message", "reasoning"):
        position["content_index"] = 0
    if item["type"] == "message":
        position["logprobs"] = []
    return position


class ResponsesWriter(StreamWriter):
    """See StreamWriter. Items are opened and filled as they come, and all of them are closed at the end.

    Codex runs a tool as soon as its item is closed. The input of a custom tool is sent at the end: the model
    writes it as a JSON string, which cannot be decoded before it is complete.
    """

    def __init__(self, incoming: ResponsesDialectRequest, session: WireSession, message_id: str) -> None:
        super().__init__(session, message_id)
        self._incoming = incoming
        self._created = int(time.time())
        self._events = EventBuilder()
        self._items: dict[Part, OutputItem] = {}
        self._sent_characters: dict[Part, int] = {}
        self._calls: list[ToolCall] = []

    def feed(self, delta: Delta) -> bytes:
        events = self._begin()
        part: Part = delta.kind if delta.kind == "reasoning" or delta.kind == "text" else delta.index
        if delta.kind == "tool":
            self._calls.append(ToolCall(delta.id, delta.name, ""))
            self._ids.append(self._session.tool_id(delta.id))
        if part not in self._items and (delta.text or delta.kind == "tool"):
            events += self._open(part)
        if delta.text and self._items[part]["type"] != "custom_tool_call":
            events += self._events.add(self._index(part), self._items[part], delta.text)
            self._sent_characters[part] += len(delta.text)
        return events

    def whole(self, generation: Generation) -> DialectResponse:
        return self._response(generation)[0]

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        message, response = self._response(generation)
        tail = self._begin()
        sent = list(self._sent_characters.values())
        for index, item in enumerate(response["output"]):
            if index >= len(sent):
                tail += self._events.open(index, item)
            if unsent := text_of(item)[sent[index] if index < len(sent) else 0 :]:
                tail += self._events.add(index, item, unsent)
        for index, item in enumerate(response["output"]):
            tail += self._events.close(index, item)
        return message, tail + self._events.end(response)

    def _begin(self) -> bytes:
        if self._started:
            return b""
        self._started = True
        return self._events.begin(self._frame())

    def _open(self, part: Part) -> bytes:
        so_far = Generation(model="", text="", finish_reason="", tool_calls=tuple(self._calls))
        item = self._items[part] = self._item(part, so_far, "in_progress")
        self._sent_characters[part] = 0
        return self._events.open(self._index(part), item)

    def _frame(self) -> dict[str, Any]:
        """Return a response that has only started.

        Instructions and tools are not repeated in it: they would be most of the response, three times in a stream.
        """
        defaults: dict[str, Any] = {
            "id": response_id(self._message_id),
            "object": "response",
            "created_at": self._created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": None,
            "metadata": {},
            "model": self._incoming.model,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "truncation": "disabled",
            "usage": None,
        }
        return defaults | self._incoming.echo

    def _response(self, generation: Generation) -> tuple[DialectResponse, dict[str, Any]]:
        """Return the response as JSON and as a value. Items that were streamed come first, in the order of the
        stream.
        """
        self._complete_ids(generation)
        incomplete = _INCOMPLETE_REASONS.get(ending(generation))
        status = "incomplete" if incomplete else "completed"
        parts: list[Part] = [*self._items]
        if generation.reasoning:
            parts.append("reasoning")
        if generation.text:
            parts.append("text")
        parts += range(len(generation.tool_calls))
        output = [self._item(part, generation, "completed") for part in dict.fromkeys(parts)]
        if output and incomplete:
            output[-1]["status"] = status
        body = self._frame() | {
            "status": status,
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": output,
            "usage": _usage(generation.usage),
        }
        sampled = dict(zip(self._ids, generation.tool_calls, strict=True))
        return DialectResponse(msgspec.json.encode(body), sampled), body

    def _item(self, part: Part, generation: Generation, status: str) -> OutputItem:
        """Return the output item for a part of the response."""
        bare = _bare_id(self._message_id)
        match part:
            case "reasoning":
                content = {"type": "reasoning_text", "text": generation.reasoning or ""}
                item = {"id": f"rs_{bare}", "type": "reasoning", "summary": [], "content": [content]}
                return item | {"status": status}
            case "text":
                text: dict[str, Any] = {
                    "type": "output_text",
                    "text": generation.text,
                    "annotations": [],
                    "logprobs": [],
                }
                item = {"id": f"msg_{bare}", "type": "message", "role": "assistant", "status": status}
                return item | {"content": [text]}
            case index:
                call, origins = generation.tool_calls[index], self._incoming.origins
                return call_item(origins, call, item_id=f"{bare}_{index}", call_id=self._ids[index], status=status)

    def _index(self, part: Part) -> int:
        return list(self._items).index(part)


# --- the dialect ----------------------------------------------------------------------------------------

_STATELESS_ERROR = "unsupported: the gateway is stateless; send the complete conversation as `input`"
_REFUSED_FIELDS: RefusedFields = {
    "previous_response_id": ((), _STATELESS_ERROR),
    "conversation": ((), _STATELESS_ERROR),
    "background": ((False,), "unsupported, expected false: the request itself gets the response; leave it out"),
    "prompt": ((), "unsupported: there are no stored prompts; send `instructions` and `input`"),
    "top_logprobs": ((0,), "unsupported, expected 0: only logprobs of sampled tokens are known; leave it out"),
}


class OpenAIResponses(OpenAIDialect):
    """The Responses dialect (see Dialect)."""

    name = "openai-responses"
    expected = EXPECTED
    read_request = staticmethod(read_request)
    read_outer = staticmethod(read_outer)
    read_next = staticmethod(read_next)
    read_response = staticmethod(read_response)
    events = staticmethod(to_events)

    def parse(
        self, body: bytes, session: WireSession, branch: Branch, target: str = ""
    ) -> ResponsesDialectRequest:
        request = decode_request(body)
        refuse_fields(request, _REFUSED_FIELDS)
        conversation, tool_choice, toolbox = read_conversation(request)
        format_ = request.text.format if request.text else None
        sampling = {
            "max_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        }
        chat = chat_request(
            request.model,
            conversation,
            session,
            branch,
            sampling,
            tool_choice=tool_choice,
            parallel_tool_calls=request.parallel_tool_calls if conversation.tools else None,
            response_format=_response_format(format_) if format_ else None,
        )
        echo = {name: value for name in _REPEATED_FIELDS if (value := getattr(request, name)) is not None}
        if isinstance(request.tool_choice, str):
            echo["tool_choice"] = request.tool_choice
        return ResponsesDialectRequest(request.model, bool(request.stream), chat, toolbox.origins, echo)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ResponsesWriter:
        assert isinstance(incoming, ResponsesDialectRequest)
        return ResponsesWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        # An event, not a comment, because Codex gives up a stream without an event for five minutes. This event,
        # because OpenAI's clients require it at the beginning of a stream, and accept it several times.
        response: dict[str, Any] = {"object": "response", "status": "in_progress", "output": []}
        return EventBuilder().event("response.created", {"response": {"id": response_id(message_id)} | response})

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"object": "response.input_tokens", "input_tokens": tokens})

    def error(self, fault: Fault) -> ErrorResponse:
        """See Dialect. Codex takes a rate limit without a retry-after as final, so the response has one."""
        if fault.kind == "rate_limit" and fault.retry_after_s is None:
            fault = structs.replace(fault, retry_after_s=_RATE_LIMIT_PAUSE_S)
        return super().error(fault)

    def error_event(self, fault: Fault) -> bytes:
        error = self.error_object(fault)
        reported = {"code": error["code"] or error["type"], "message": error["message"]}
        response = {"object": "response", "status": "failed", "error": reported}
        return EventBuilder().event("response.failed", {"response": response})


_REPEATED_FIELDS = ("max_output_tokens", "parallel_tool_calls", "reasoning", "temperature", "top_p")
"""Fields that a response repeats from its request."""


def _response_format(format_: TextFormat) -> dict[str, Any] | None:
    if format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": format_.name or "output", "schema": format_.schema or {}, "strict": format_.strict}
    if format_.description is not None:
        schema["description"] = format_.description
    return {"type": "json_schema", "json_schema": schema}
