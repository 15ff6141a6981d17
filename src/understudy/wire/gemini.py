"""Gemini generateContent: responses, event streams, and the dialect as the gateway uses it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec
from msgspec import Raw, Struct

from understudy.types import Usage
from understudy.wire.arguments import tool_input
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
from understudy.wire.gemini_request import (
    EXPECTED,
    GeminiContent,
    GenerateContentRequest,
    GenerationConfig,
    decode_request,
    json_schema,
    read_candidate,
    read_conversation,
    read_next,
    read_outer,
    read_request,
)
from understudy.wire.model import Block, Delta, Ending, Generation, ending
from understudy.wire.openai import RefusedFields, refuse_fields

Method = Literal["generateContent", "streamGenerateContent", "countTokens"]

_TARGET = re.compile(
    r"/v1(?:beta|alpha)?/models/(?P<model>[^?]+):(?P<method>generateContent|streamGenerateContent|countTokens)"
    r"(?:\?(?P<query>.*))?",
    re.DOTALL,
)

_FINISH_REASONS: dict[Ending, str] = {
    "stop": "STOP",
    "tool_calls": "STOP",
    "length": "MAX_TOKENS",
    "content_filter": "SAFETY",
}


class GeminiTarget(Struct, frozen=True):
    """What the path of a request contains: the model, the method, and whether an event stream is requested."""

    model: str
    method: Method
    stream: bool
    sse: bool


def read_target(target: str) -> GeminiTarget | None:
    """Return the model and the method of a path with its query; None for a path that is not of this dialect."""
    match = _TARGET.fullmatch(target)
    if match is None:
        return None
    method: Any = match["method"]
    sse = parse_qs(match["query"] or "").get("alt") == ["sse"]
    return GeminiTarget(match["model"], method, method == "streamGenerateContent", sse)


def target_of(model: str, method: Method = "generateContent") -> str:
    """Return the path of a request for a model."""
    return f"/v1beta/models/{model}:{method}" + ("?alt=sse" if method == "streamGenerateContent" else "")


# --- responses ------------------------------------------------------------------------------------------


_Part = Mapping[str, Any]


class _ReadCandidate(Struct):
    content: GeminiContent | None = None


class _ReadGemini(Struct):
    candidates: list[_ReadCandidate] = []


class _WrittenContent(Struct):
    parts: list[dict[str, Raw]]


class _WrittenCandidate(Struct, rename="camel"):
    content: _WrittenContent
    finish_reason: str
    index: int


class _WrittenGemini(Struct, rename="camel"):
    candidates: list[_WrittenCandidate]
    usage_metadata: dict[str, Any]
    model_version: str
    response_id: str


_RESPONSE = msgspec.json.Decoder(_ReadGemini)
_WRITTEN_RESPONSE = msgspec.json.Decoder(_WrittenGemini)


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """Return the blocks of a response's first candidate, with tool calls as the model wrote them; None without a
    candidate.

    Raises the exceptions in UNREADABLE.
    """
    candidates = decoded(_RESPONSE.decode, body).candidates
    if not candidates or candidates[0].content is None:
        return None
    return tuple(read_candidate(candidates[0].content))


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the token counts. No backend reports the number of thinking tokens: they count among the candidates'
    tokens.
    """
    counts = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.completion_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    return counts | ({"cachedContentTokenCount": usage.cached_tokens} if usage.cached_tokens else {})


def _event(value: object) -> bytes:
    # Arguments keep the line breaks that the model wrote between values, which would end the line of the event.
    # For Google's own JavaScript client the two separators, which only strings have, end it too.
    line = msgspec.json.encode(value).replace(b"\n", b" ").replace(b"\r", b" ")
    return b"data: %b\n\n" % line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


def to_events(body: bytes) -> bytes:
    """Return one of our responses as an event stream: one event for each text, then one that ends the stream."""
    response = _WRITTEN_RESPONSE.decode(body)
    chunks = _GeminiChunks(response.model_version, response.response_id)
    candidate = response.candidates[0]
    texts, calls = _split_parts(candidate.content.parts)
    events = b"".join(chunks.event(text) for text in texts)
    return events + chunks.end(calls, candidate.finish_reason, response.usage_metadata)


def _split_parts(parts: Sequence[_Part]) -> tuple[list[_Part], list[_Part]]:
    """Return the parts with texts and thinking, and the function calls."""
    return [part for part in parts if "text" in part], [part for part in parts if "text" not in part]


class _GeminiChunks:
    """The events of one response."""

    def __init__(self, model: str, response_id: str) -> None:
        self.frame = {"modelVersion": model, "responseId": response_id}

    def event(self, part: _Part) -> bytes:
        content = {"parts": [part], "role": "model"}
        return _event({"candidates": [{"content": content, "index": 0}], **self.frame})

    def end(self, calls: Sequence[_Part], finish_reason: str, usage: dict[str, Any]) -> bytes:
        content = {"parts": list(calls) or [{"text": ""}], "role": "model"}
        candidate = {"content": content, "finishReason": finish_reason, "index": 0}
        return _event({"candidates": [candidate], "usageMetadata": usage, **self.frame})


class GeminiWriter(StreamWriter):
    """See StreamWriter. Function calls are sent at the end: a part has complete arguments, which must be JSON.

    Thinking has no signature: only the provider that made a signature can read it.
    """

    def __init__(self, model: str, session: WireSession, message_id: str) -> None:
        super().__init__(session, message_id)
        self._model = model
        self._chunks = _GeminiChunks(model, message_id.removeprefix("msg_"))
        self._order: list[str] = []

    def feed(self, delta: Delta) -> bytes:
        if delta.kind not in ("reasoning", "text") or not delta.text:
            return b""
        self._started = True
        if delta.kind not in self._order:
            self._order.append(delta.kind)
        return self._chunks.event(_text_part(delta.kind, delta.text))

    def whole(self, generation: Generation) -> DialectResponse:
        return self._response(generation)[0]

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        message, parts = self._response(generation)
        if not self._started:
            return message, to_events(message.body)
        _, calls = _split_parts(parts)
        reason = _FINISH_REASONS[ending(generation)]
        return message, self._chunks.end(calls, reason, _usage(generation.usage))

    def _response(self, generation: Generation) -> tuple[DialectResponse, list[_Part]]:
        """Return the response and its parts. Parts that were streamed come first, in the order of the stream."""
        self._complete_ids(generation)
        texts = {"reasoning": generation.reasoning or "", "text": generation.text}
        kinds = dict.fromkeys([*self._order, *texts])
        parts: list[_Part] = [_text_part(kind, texts[kind]) for kind in kinds if texts[kind]]
        sampled = dict(zip(self._ids, generation.tool_calls, strict=True))
        for id_, call in sampled.items():
            arguments: Raw = tool_input(call.arguments)
            parts.append({"functionCall": {"id": id_, "name": call.name, "args": arguments}})
        candidate = {
            "content": {"parts": parts or [{"text": ""}], "role": "model"},
            "finishReason": _FINISH_REASONS[ending(generation)],
            "index": 0,
        }
        usage = _usage(generation.usage)
        body = {"candidates": [candidate], "usageMetadata": usage, **self._chunks.frame}
        return DialectResponse(msgspec.json.encode(body), sampled), parts


def _text_part(kind: str, text: str) -> dict[str, Any]:
    return {"text": text, "thought": True} if kind == "reasoning" else {"text": text}


# --- the dialect ----------------------------------------------------------------------------------------

_CACHED_CONTENT_ERROR = (
    "unsupported: the gateway has no stored contents; send the complete conversation in `contents`"
)
_REFUSED_FIELDS: RefusedFields = {
    "cached_content": (("",), _CACHED_CONTENT_ERROR),
    "snake_system": ((), "names in snake case are unsupported; send this field as `systemInstruction`"),
    "snake_tool_config": ((), "names in snake case are unsupported; send this field as `toolConfig`"),
    "snake_config": ((), "names in snake case are unsupported; send this field as `generationConfig`"),
    "snake_cached": ((), "names in snake case are unsupported; send this field as `cachedContent`"),
}
_TEXT_ONLY_ERROR = "unsupported: models answer with text only; leave it out"
_REFUSED_CONFIG_FIELDS: RefusedFields = {
    "candidate_count": ((1,), "unsupported, expected 1, as a request gets one response; send it several times"),
    "response_modalities": ((["TEXT"], []), _TEXT_ONLY_ERROR),
    "response_logprobs": ((False,), "unsupported, expected false: no logprobs are returned; leave it out"),
    "speech_config": ((), _TEXT_ONLY_ERROR),
}
# Status and name. Clients try again after 408, 429 and 5xx.
_ERRORS: dict[FaultKind, tuple[int, str]] = {
    "invalid_request": (400, "INVALID_ARGUMENT"),
    "too_long": (400, "INVALID_ARGUMENT"),
    "permission": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "timeout": (408, "DEADLINE_EXCEEDED"),
    "too_large": (413, "INVALID_ARGUMENT"),
    "unsupported_media": (415, "INVALID_ARGUMENT"),
    "rate_limit": (429, "RESOURCE_EXHAUSTED"),
    "overloaded": (503, "UNAVAILABLE"),
    "internal": (500, "INTERNAL"),
}
_FINAL_ERROR = (400, "FAILED_PRECONDITION")
"""In place of a status after which clients would try again."""


class Gemini(Dialect):
    """The dialect of the Gemini Developer API (see Dialect). Model and method are in the path."""

    name = "gemini"
    expected = EXPECTED
    read_request = staticmethod(read_request)
    read_outer = staticmethod(read_outer)
    read_next = staticmethod(read_next)
    read_response = staticmethod(read_response)
    events = staticmethod(to_events)

    def peek(self, body: bytes, target: str = "") -> tuple[str, bool]:
        parsed_target = _read_target(target)
        return parsed_target.model, parsed_target.stream

    def branch(self, headers: Mapping[bytes, bytes]) -> Branch:
        """Return the branch named by the header x-session-id, which Gemini's clients send if configured to."""
        return Branch(header_id(headers.get(b"x-session-id")), None)

    def target(self, model: str) -> str:
        return target_of(model)

    def parse(self, body: bytes, session: WireSession, branch: Branch, target: str = "") -> DialectRequest:
        parsed_target = _read_target(target)
        request = decode_request(body, count=parsed_target.method == "countTokens")
        refuse_fields(request, _REFUSED_FIELDS)
        try:
            return DialectRequest(
                parsed_target.model, parsed_target.stream, _to_chat(parsed_target.model, request, session, branch)
            )
        except RecursionError as error:
            raise too_deep() from error
        except (UnicodeDecodeError, msgspec.DecodeError) as error:
            raise InvalidRequest(
                f"contents: the arguments of a functionCall, or a functionResponse, cannot be read: {error}; "
                "expected a JSON object in UTF-8: correct it"
            ) from error

    def requested_max_tokens(self, body: bytes) -> int | None:
        try:
            return decode_request(body).generation_config.max_output_tokens
        except InvalidRequest:
            return None  # the provider will refuse it

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> GeminiWriter:
        return GeminiWriter(incoming.model, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return b": ping\n\n"

    def token_count(self, tokens: int) -> bytes:
        return msgspec.json.encode({"totalTokens": tokens})

    def models(self, names: Sequence[str]) -> bytes:
        methods = ["generateContent", "countTokens"]
        listed = [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods}
            for name in names
        ]
        return msgspec.json.encode({"models": listed})

    def error(self, fault: Fault) -> ErrorResponse:
        headers: list[tuple[bytes, bytes]] = []
        if fault.retry_after_s is not None:
            headers.append((b"retry-after", str(math.ceil(fault.retry_after_s)).encode()))
        error = _error(fault)
        return ErrorResponse(error["code"], headers, msgspec.json.encode({"error": error}))

    def error_event(self, fault: Fault) -> bytes:
        return _event({"error": _error(fault)})


def _read_target(target: str) -> GeminiTarget:
    """Return what a path asks for. Raises InvalidRequest for a stream that is not one of server-sent events."""
    parsed_target = read_target(target)
    if parsed_target is None:
        raise InvalidRequest(
            f"{target[:200]}: no such path, expected one like {target_of('MODEL')}; check the client's base URL"
        )
    if parsed_target.stream and not parsed_target.sse:
        raise InvalidRequest(
            f"{target[:200]}: unsupported without alt=sse, expected a stream of server-sent events; add ?alt=sse "
            "to the path"
        )
    return parsed_target


def _to_chat(model: str, request: GenerateContentRequest, session: WireSession, branch: Branch) -> Any:
    """Return a request made on a branch as a request for a chat backend. Raises InvalidRequest for unsupported
    parts.
    """
    config = request.generation_config
    refuse_fields(config, _REFUSED_CONFIG_FIELDS, "generationConfig.")
    conversation, tool_choice = read_conversation(request)
    thinking = config.thinking_config
    level = thinking.thinking_level if thinking else None
    sampling = {
        "max_tokens": config.max_output_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": None if config.top_k is None else int(config.top_k),
        "stop": config.stop_sequences or None,
        "seed": config.seed,
        "presence_penalty": config.presence_penalty,
        "frequency_penalty": config.frequency_penalty,
        "reasoning_effort": level.lower() if level and level != "THINKING_LEVEL_UNSPECIFIED" else None,
    }
    return chat_request(
        model,
        conversation,
        session,
        branch,
        sampling,
        tool_choice=tool_choice,
        response_format=_response_format(config),
        enable_thinking=False if thinking and thinking.thinking_budget == 0 else None,
    )


def _response_format(config: GenerationConfig) -> dict[str, Any] | None:
    schema = config.response_json_schema
    if schema is None and config.response_schema is not None:
        schema = json_schema(config.response_schema)
    if schema is not None:
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": schema, "strict": True}}
    if config.response_mime_type == "application/json":
        return {"type": "json_object"}
    if config.response_mime_type not in (None, "", "text/plain"):
        raise InvalidRequest(
            f"generationConfig.responseMimeType: unsupported value {config.response_mime_type[:100]!r}, "
            "expected text/plain or application/json; send one of these"
        )
    return None


def _error(fault: Fault) -> dict[str, Any]:
    """Return a fault as Google's error object."""
    status, name = _FINAL_ERROR if fault.final else _ERRORS[fault.kind]
    if fault.provider_error is not None:
        status, name = fault.provider_error.status, fault.provider_error.type
    message = fault.message
    if fault.overflow:
        message = "The input token count ({}) exceeds the maximum number of tokens allowed ({}).".format(
            *fault.overflow
        )
    error: dict[str, Any] = {"code": status, "message": message, "status": name}
    if fault.retry_after_s is not None:
        retry = {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": f"{fault.retry_after_s:g}s"}
        error["details"] = [retry]
    return error
