"""Anthropic's Messages API, which Claude Code uses: responses, event streams, and the dialect itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

import msgspec
from msgspec import Meta, Raw, Struct, field

from understudy.errors import BackendError
from understudy.types import Usage
from understudy.wire.anthropic_request import (
    EXPECTED,
    AnthropicOutputFormat,
    AnthropicToolChoice,
    MessageParam,
    MessagesRequest,
    decode_request,
    read_conversation,
    read_message,
    read_next,
    read_outer,
    read_request,
)
from understudy.wire.arguments import tool_input, unwrapped
from understudy.wire.decoding import decoded
from understudy.wire.dialect import (
    Branch,
    Dialect,
    DialectRequest,
    DialectResponse,
    ErrorResponse,
    StreamWriter,
    WireSession,
    chat_request,
    header_id,
)
from understudy.wire.errors import Fault, FaultKind, InvalidRequest, too_deep
from understudy.wire.model import Block, ChatRequest, Delta, Ending, Generation, ending

Part = Literal["reasoning", "text"] | int
"""A part of a generation that makes a block of its own; a tool call goes by its number."""

_STOP_REASONS: dict[Ending, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
_RESPONSE = msgspec.json.Decoder(MessageParam)


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """Return the blocks of a response, with tool calls as the model wrote them; None if it is not an assistant's
    message.

    Raises the exceptions in UNREADABLE.
    """
    message = decoded(_RESPONSE.decode, body)
    if message.role != "assistant":
        return None
    return tuple(
        msgspec.structs.replace(block, arguments=unwrapped(block.arguments)) if block.kind == "tool_use" else block
        for block in read_message(0, message)
    )


def _stop_reason(generation: Generation) -> str:
    end = ending(generation)
    return "stop_sequence" if end == "stop" and generation.stop is not None else _STOP_REASONS[end]


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens, 0),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


# --- a complete message -----------------------------------------------------------------------------------

# Fields that clients assemble from deltas, and that begin empty: block type → (field, its delta, the delta's
# field).
_DELTA_FIELDS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "text": (("text", "text_delta", "text"),),
    "thinking": (("thinking", "thinking_delta", "thinking"), ("signature", "signature_delta", "signature")),
    "tool_use": (("input", "input_json_delta", "partial_json"),),
    "server_tool_use": (("input", "input_json_delta", "partial_json"),),
}
_MESSAGE = msgspec.json.Decoder(dict[str, Raw])
_BLOCKS = msgspec.json.Decoder(list[dict[str, Raw]])


def event(data: dict[str, Any]) -> bytes:
    """Return one server-sent event, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


def to_events(body: bytes) -> bytes:
    """Return a complete message as the event stream from which a client assembles the same message."""
    message = _MESSAGE.decode(body)
    usage: dict[str, Any] = msgspec.json.decode(message.get("usage", b"{}"))
    stop_fields = {name: message.pop(name, None) for name in ("stop_reason", "stop_sequence")}
    blocks = _BLOCKS.decode(message["content"])
    start_fields = {"stop_reason": None, "stop_sequence": None, "usage": usage | {"output_tokens": 0}}
    events = [event({"type": "message_start", "message": message | {"content": []} | start_fields})]
    for index, block in enumerate(blocks):
        events += map(event, _whole_block(index, block))
    events.append(event({"type": "message_delta", "delta": stop_fields, "usage": usage}))
    events.append(event({"type": "message_stop"}))
    return b"".join(events)


def _whole_block(index: int, block: dict[str, Raw]) -> Iterator[dict[str, Any]]:
    start: dict[str, Any] = dict(block)
    deltas: list[dict[str, Any]] = []
    for name, kind, delta_field in _DELTA_FIELDS.get(msgspec.json.decode(block["type"], type=str), ()):
        value: Any = block.get(name)
        if value is None:
            continue
        if name == "input":
            # The model's own bytes, so that the agent's parser gets exactly what was sampled.
            value = bytes(value).decode()
        start[name] = {} if name == "input" else ""
        deltas.append({"type": kind, delta_field: value})
    yield {"type": "content_block_start", "index": index, "content_block": start}
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


# --- a message while it is generated --------------------------------------------------------------------

_EMPTY_BLOCKS: dict[str, dict[str, Any]] = {
    "reasoning": {"type": "thinking", "thinking": "", "signature": ""},
    "text": {"type": "text", "text": ""},
}
# Written without a loop or helper, because a stream consists mostly of these events.
_DELTA_TEMPLATE = (
    b"event: content_block_delta\ndata: "
    b'{"type":"content_block_delta","index":%%d,"delta":{"type":"%b","%b":%%b}}\n\n'
)
_DELTA_EVENTS = {
    "reasoning": _DELTA_TEMPLATE % (b"thinking_delta", b"thinking"),
    "text": _DELTA_TEMPLATE % (b"text_delta", b"text"),
    "arguments": _DELTA_TEMPLATE % (b"input_json_delta", b"partial_json"),
}


class _StoredEnding(msgspec.Struct):
    stop_reason: Raw
    stop_sequence: Raw
    usage: Raw


class AnthropicWriter(StreamWriter):
    """See StreamWriter. Blocks are opened and filled as they come, and all of them are closed at the end.

    Claude Code acts on every block that was closed, whatever happens to the stream afterwards: it takes a closed
    text as its answer and runs a closed tool call. It accepts blocks that are open at the same time.
    """

    def __init__(self, model: str, session: WireSession, message_id: str) -> None:
        super().__init__(session, message_id)
        self._model = model
        self._opened: dict[Part, int] = {}

    def feed(self, delta: Delta) -> bytes:
        events = b"" if self._started else self._begin()
        part: Part = delta.kind if delta.kind == "reasoning" or delta.kind == "text" else delta.index
        if part not in self._opened and (delta.text or delta.kind == "tool"):
            events += self._open(part, delta)
        if delta.text:
            events += _DELTA_EVENTS[delta.kind] % (self._opened[part], msgspec.json.encode(delta.text))
        return events

    def whole(self, generation: Generation) -> DialectResponse:
        """See StreamWriter. Thinking, text, then the tool calls, unless they were streamed in another order."""
        if not self._started:
            self._complete_ids(generation)
        blocks: dict[Part, dict[str, Any]] = {}
        if generation.reasoning:
            blocks["reasoning"] = {"type": "thinking", "thinking": generation.reasoning, "signature": ""}
        if generation.text:
            blocks["text"] = {"type": "text", "text": generation.text}
        sampled = dict(zip(self._ids, generation.tool_calls, strict=True))
        for number, (tool_id, call) in enumerate(sampled.items()):
            arguments = tool_input(call.arguments)
            blocks[number] = {"type": "tool_use", "id": tool_id, "name": call.name, "input": arguments}
        order = self._opened if self._started else blocks
        body = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [blocks[part] for part in order if part in blocks],
            "stop_reason": _stop_reason(generation),
            "stop_sequence": generation.stop,
            "usage": _usage(generation.usage),
        }
        return DialectResponse(msgspec.json.encode(body), sampled)

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        message = self.whole(generation)
        if not self._started:
            return message, to_events(message.body)
        closing_events: list[dict[str, Any]] = []
        for part, index in self._opened.items():
            if part == "reasoning":
                signature = {"type": "signature_delta", "signature": ""}
                closing_events.append({"type": "content_block_delta", "index": index, "delta": signature})
            closing_events.append({"type": "content_block_stop", "index": index})
        stored = msgspec.json.decode(message.body, type=_StoredEnding)
        stop_fields = {"stop_reason": stored.stop_reason, "stop_sequence": stored.stop_sequence}
        closing_events.append({"type": "message_delta", "delta": stop_fields, "usage": stored.usage})
        closing_events.append({"type": "message_stop"})
        return message, b"".join(map(event, closing_events))

    def _begin(self) -> bytes:
        self._started = True
        message: dict[str, Any] = {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            # Known only at the end; clients use the counts of the last event.
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return event({"type": "message_start", "message": message})

    def _open(self, part: Part, delta: Delta) -> bytes:
        index = self._opened[part] = len(self._opened)
        if isinstance(part, int):
            self._ids.append(self._session.tool_id(delta.id))
            block: dict[str, Any] = {"type": "tool_use", "id": self._ids[-1], "name": delta.name, "input": {}}
        else:
            block = _EMPTY_BLOCKS[part]
        return event({"type": "content_block_start", "index": index, "content_block": block})


# --- a message put together from its events --------------------------------------------------------------

CLOSING_EVENTS = frozenset({b"content_block_stop", b"message_delta", b"message_stop"})
"""Events that complete a block or a message. An agent acts on a completed block, whatever happens to the rest."""

# The field that each delta extends, and the block types that have it. Other deltas belong to block types that are
# not read here.
_EXTENDED_FIELDS = {
    "text_delta": ("text", {"text"}),
    "thinking_delta": ("thinking", {"thinking"}),
    "input_json_delta": ("partial_json", {"tool_use", "server_tool_use", "mcp_tool_use"}),
}
# By block type: the field that its deltas fill, also where none comes.
_ASSEMBLED_FIELDS = {
    "text": "text",
    "thinking": "thinking",
    "tool_use": "partial_json",
    "server_tool_use": "partial_json",
}
# By block type: the type of nearly all of its deltas.
_USUAL_DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
# Deltas whose fields replace those of the block, and the block type that has them.
_REPLACING_DELTAS = {"signature_delta": "thinking", "compaction_delta": "compaction"}

_Index = Annotated[int, Meta(ge=0, lt=100_000)]


class _MessageStart(Struct):
    message: dict[str, Any]


class _BlockStart(Struct):
    index: _Index
    content_block: dict[str, Any]


class _BlockDelta(Struct):
    index: _Index
    delta: dict[str, Any]


class _PlainDelta(Struct, gc=False, forbid_unknown_fields=True):
    """The content of nearly all deltas; one of another type, or with other fields, is read as a _BlockDelta."""

    type: str
    text: str | None = None
    thinking: str | None = None
    partial_json: str | None = None


class _PlainBlockDelta(Struct, gc=False, forbid_unknown_fields=True):
    index: _Index
    delta: _PlainDelta
    type: str = ""


_PLAIN_DELTA_DECODER = msgspec.json.Decoder(_PlainBlockDelta)


class _BlockStop(Struct):
    index: _Index


class _MessageDelta(Struct):
    delta: dict[str, Any] = field(default_factory=dict[str, Any])
    usage: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None


class _MessageStop(Struct):
    pass


def _invalid_stream(problem: str) -> BackendError:
    return BackendError(
        f"invalid stream from the provider: {problem}; check the address, or send the request again"
    )


class _StreamBlock:
    """A block while it is filled: its initial content, and the pieces that deltas add to each field."""

    def __init__(self, start: dict[str, Any]) -> None:
        self.type = str(start.get("type"))
        self.data = start
        self.pieces: dict[str, list[str]] = {}
        if field_name := _ASSEMBLED_FIELDS.get(self.type):
            self.pieces[field_name] = []
        self.plain = _USUAL_DELTAS.get(self.type)
        """The type of the deltas that nearly all of the block is made of, where there is one."""
        self.closed = False

    def add(self, delta: dict[str, Any]) -> None:
        kind = delta.get("type")
        if kind in _EXTENDED_FIELDS:
            name, block_types = _EXTENDED_FIELDS[kind]
            if self.type == "redacted_thinking" and kind == "thinking_delta":
                return
            piece = delta.get(name)
            if self.type not in block_types or not isinstance(piece, str):
                raise _invalid_stream(
                    f"a {kind} for a content block of type {self.type[:100]!r}, expected a block of type "
                    f"{' or '.join(sorted(block_types))}, and a string `{name}`"
                )
            self.pieces.setdefault(name, []).append(piece)
        elif kind == "citations_delta" and self.type == "text":
            self.data["citations"] = [*(self.data.get("citations") or ()), delta.get("citation")]
        elif kind in _REPLACING_DELTAS and self.type == _REPLACING_DELTAS[kind]:
            self.data |= {name: value for name, value in delta.items() if name != "type"}

    def close(self) -> None:
        self.closed = True
        for name, pieces in self.pieces.items():
            value = "".join(pieces)
            if name == "partial_json":
                self.data["input"] = tool_input(value)
            else:
                self.data[name] = value


class MessageAssembly:
    """Assembles a message from its events. `started` is set after the first one, `complete` after the last."""

    def __init__(self) -> None:
        self.complete = False
        self.streaming = False
        """Whether it was started and is not complete."""
        self._message: dict[str, Any] | None = None
        self._blocks: dict[int, _StreamBlock] = {}

    @property
    def started(self) -> bool:
        return self._message is not None

    def add(self, name: bytes, data: bytes) -> None:
        """Add an event; one that is not part of the message, or comes after its end, is ignored.

        Raises BackendError for an event that does not fit into a message.
        """
        handler = self._EVENTS.get(name)
        if handler is None or self.complete:
            return
        decoder, handle = handler
        try:
            decoded_event = decoder.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise _invalid_stream(f"{name.decode()}: {error}") from error
        handle(self, decoded_event)

    def add_delta(self, data: bytes) -> None:
        """Add a content_block_delta event to a message that is `streaming`; a faster way than `add`."""
        try:
            decoded_event = _PLAIN_DELTA_DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            return self.add(b"content_block_delta", data)
        delta, block = decoded_event.delta, self._blocks.get(decoded_event.index)
        if block is not None and delta.type == block.plain and not block.closed:
            name = _EXTENDED_FIELDS[delta.type][0]
            if (piece := getattr(delta, name)) is not None:
                block.pieces[name].append(piece)
                return None
        self.add(b"content_block_delta", data)
        return None

    def message(self) -> bytes:
        """Return the message as JSON. Raises BackendError while it is incomplete."""
        if self._message is None or not self.complete:
            raise _invalid_stream("it ended before its message_stop event")
        if not all(block.closed for block in self._blocks.values()):
            raise _invalid_stream("it ended without a content_block_stop event for each block")
        content = [block.data for _, block in sorted(self._blocks.items())]
        return msgspec.json.encode(self._message | {"content": content})

    # --- events -----------------------------------------------------------------------------------------

    def _message_start(self, event: _MessageStart) -> None:
        if self._message is None:
            self._message = event.message
            self.streaming = True
        elif event.message.get("id") != self._message.get("id"):
            raise _invalid_stream("a message_start event of a second message")

    def _block_start(self, event: _BlockStart) -> None:
        if self._message is None or event.index in self._blocks:
            raise _invalid_stream(
                f"content block {event.index} starts twice, or before message_start; expected once"
            )
        self._blocks[event.index] = _StreamBlock(event.content_block)

    def _block_delta(self, event: _BlockDelta) -> None:
        self._block(event.index).add(event.delta)

    def _block_stop(self, event: _BlockStop) -> None:
        self._block(event.index).close()

    def _message_delta(self, event: _MessageDelta) -> None:
        if self._message is None:
            raise _invalid_stream("a message_delta event before message_start")
        self._message |= event.delta
        if event.context_management is not None:
            self._message["context_management"] = event.context_management
        if event.usage is not None:
            reported = {name: value for name, value in event.usage.items() if value is not None}
            earlier = self._message.get("usage")
            self._message["usage"] = (
                cast("dict[str, Any]", earlier) | reported if isinstance(earlier, dict) else reported
            )

    def _message_stop(self, event: _MessageStop) -> None:
        self.complete = True
        self.streaming = False

    def _block(self, index: int) -> _StreamBlock:
        block = self._blocks.get(index)
        if block is None or block.closed:
            raise _invalid_stream(f"an event for content block {index}, which is not open")
        return block

    _EVENTS: ClassVar[dict[bytes, tuple[msgspec.json.Decoder[Any], Callable[[MessageAssembly, Any], None]]]] = {
        b"message_start": (msgspec.json.Decoder(_MessageStart), _message_start),
        b"content_block_start": (msgspec.json.Decoder(_BlockStart), _block_start),
        b"content_block_delta": (msgspec.json.Decoder(_BlockDelta), _block_delta),
        b"content_block_stop": (msgspec.json.Decoder(_BlockStop), _block_stop),
        b"message_delta": (msgspec.json.Decoder(_MessageDelta), _message_delta),
        b"message_stop": (msgspec.json.Decoder(_MessageStop), _message_stop),
    }


# An invalid key is reported as 403, not 401: Claude Code tries ten times after a 401, and stops at once after a
# 403. After a 529 it waits, longer each time.
_STATUS: dict[FaultKind, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "permission": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "timeout": (408, "timeout_error"),
    "too_large": (413, "request_too_large"),
    "unsupported_media": (415, "invalid_request_error"),
    "rate_limit": (429, "rate_limit_error"),
    "overloaded": (529, "overloaded_error"),
    "internal": (500, "api_error"),
}
_UNKNOWN_DATE = "1970-01-01T00:00:00Z"


class Anthropic(Dialect):
    """The Messages dialect (see Dialect)."""

    name = "anthropic"
    expected = EXPECTED
    read_request = staticmethod(read_request)
    read_outer = staticmethod(read_outer)
    read_next = staticmethod(read_next)
    read_response = staticmethod(read_response)
    events = staticmethod(to_events)

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        return Branch(
            session_id=header_id(headers.get(b"x-claude-code-session-id")),
            agent_id=header_id(headers.get(b"x-claude-code-agent-id")),
        )

    def parse(self, body: bytes, session: WireSession, branch: Branch, target: str = "") -> DialectRequest:
        request = decode_request(body)
        try:
            return DialectRequest(request.model, request.stream, _to_chat(request, session, branch))
        except RecursionError as error:
            raise too_deep() from error
        except UnicodeDecodeError as error:
            raise InvalidRequest(
                f"messages: the input of a tool_use block is not UTF-8: {error}; encode it as UTF-8"
            ) from error

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> StreamWriter:
        return AnthropicWriter(incoming.model, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return event({"type": "ping"})

    def models(self, names: Sequence[str]) -> bytes:
        data = [{"type": "model", "id": name, "display_name": name, "created_at": _UNKNOWN_DATE} for name in names]
        ends = {"first_id": names[0] if names else None, "last_id": names[-1] if names else None}
        return msgspec.json.encode({"data": data, "has_more": False} | ends)

    def error(self, fault: Fault) -> ErrorResponse:
        headers: list[tuple[bytes, bytes]] = []
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
        should_retry = (
            fault.provider_error.should_retry if fault.provider_error else False if fault.final else None
        )
        if should_retry is not None:
            headers.append((b"x-should-retry", b"true" if should_retry else b"false"))
        status = fault.provider_error.status if fault.provider_error else _STATUS[fault.kind][0]
        return ErrorResponse(status, headers, msgspec.json.encode(_error_body(fault)))

    def error_event(self, fault: Fault) -> bytes:
        return event(_error_body(fault))


def _to_chat(request: MessagesRequest, session: WireSession, branch: Branch) -> ChatRequest:
    """Return a request made on a branch as a request for a chat backend. Raises InvalidRequest for unsupported
    parts.
    """
    conversation = read_conversation(request)
    choice = request.tool_choice if conversation.tools else None
    format_ = request.output_config.format if request.output_config else None
    sampling = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
    }
    return chat_request(
        request.model,
        conversation,
        session,
        branch,
        sampling,
        tool_choice=_tool_choice(choice) if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(format_) if format_ else None,
        enable_thinking=False if request.thinking and request.thinking.type == "disabled" else None,
    )


def _tool_choice(choice: AnthropicToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(format_: AnthropicOutputFormat) -> dict[str, Any]:
    if format_.type != "json_schema":
        raise InvalidRequest(
            f"output_config.format.type: unsupported value {format_.type[:100]!r}, expected json_schema; send "
            "that, or leave it out"
        )
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.schema, "strict": True}}


def _error_body(fault: Fault) -> dict[str, Any]:
    message = fault.message
    if fault.overflow:
        # Only this exact wording makes Claude Code compact the conversation.
        message = "prompt is too long: {} tokens > {} maximum".format(*fault.overflow)
    kind = fault.provider_error.type if fault.provider_error else _STATUS[fault.kind][1]
    return {"type": "error", "error": {"type": kind, "message": message}}
