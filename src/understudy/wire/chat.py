"""OpenAI chat completions: responses, event streams, and the dialect as the gateway uses it."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from understudy.types import Usage
from understudy.wire.chat_request import (
    EXPECTED,
    ChatMessage,
    CompletionRequest,
    decode_request,
    read_conversation,
    read_message,
    read_next,
    read_outer,
    read_request,
)
from understudy.wire.decoding import decoded
from understudy.wire.dialect import (
    Branch,
    DialectRequest,
    DialectResponse,
    StreamWriter,
    WireSession,
    chat_request,
)
from understudy.wire.errors import Fault
from understudy.wire.model import Block, Delta, Generation, ending
from understudy.wire.openai import OpenAIDialect, RefusedFields, refuse_fields

STREAM_END = b"data: [DONE]\n\n"


class ChatDialectRequest(DialectRequest, frozen=True):
    """A chat completions request, with what only its response needs to know."""

    logprobs: bool
    usage: bool


class _ReadChoice(Struct):
    message: ChatMessage


class _ReadCompletion(Struct):
    choices: list[_ReadChoice]


class _WrittenChoice(Struct):
    message: dict[str, Any]
    finish_reason: str
    logprobs: dict[str, Any] | None = None


class _WrittenCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[_WrittenChoice]
    usage: dict[str, Any] | UnsetType = UNSET


_WRITTEN_RESPONSE = msgspec.json.Decoder(_WrittenCompletion)
_RESPONSE = msgspec.json.Decoder(_ReadCompletion)


def read_response(body: bytes) -> tuple[Block, ...] | None:
    """Return the blocks of a response's first choice, with tool calls as the model wrote them; None if there is no
    choice.

    Raises the exceptions in UNREADABLE.
    """
    choices = decoded(_RESPONSE.decode, body).choices
    if not choices or choices[0].message.role != "assistant":
        return None
    return tuple(read_message(choices[0].message))


def completion_id(message_id: str) -> str:
    """Return the id of the completion for a call's message id."""
    return f"chatcmpl-{message_id.removeprefix('msg_')}"


def _logprobs(generation: Generation) -> dict[str, Any] | None:
    """Return the logprobs of all sampled tokens, including thinking and tool calls, as the backend gave them.

    A token is named by its id, as in vLLM, because only the tokenizer knows its text.
    """
    ids, logprobs = generation.completion_token_ids, generation.logprobs
    if ids is None or logprobs is None:
        return None
    tokens = zip(ids, logprobs, strict=True)
    return {
        "content": [
            {"token": f"token_id:{id_}", "bytes": None, "logprob": logprob, "top_logprobs": []}
            for id_, logprob in tokens
        ]
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


# --- the event stream ----------------------------------------------------------------------------------


def event(data: object) -> bytes:
    """Return one server-sent event."""
    return b"data: %b\n\n" % msgspec.json.encode(data)


def to_events(body: bytes) -> bytes:
    """Return one of our completions as the event stream from which a client assembles the same one."""
    completion = _WRITTEN_RESPONSE.decode(body)
    chunks = _Chunks(completion.id, completion.model, completion.created, completion.usage is not UNSET)
    message = completion.choices[0].message
    events = chunks.begin()
    for name in ("reasoning_content", "content"):
        if message.get(name):
            events += chunks.event({name: message[name]})
    for index, call in enumerate(message.get("tool_calls", ())):
        events += chunks.event({"tool_calls": [{"index": index, **call}]})
    return events + chunks.end(completion)


class _Chunks:
    """The chunks of one completion."""

    def __init__(self, id_: str, model: str, created: int, usage: bool) -> None:
        self._frame: dict[str, Any] = {
            "id": id_,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        # If usage was requested, every chunk has the field, which is null in all but the last.
        self._usage: dict[str, Any] = {"usage": None} if usage else {}

    def begin(self) -> bytes:
        return self.event({"role": "assistant", "content": ""})

    def event(
        self, delta: dict[str, Any], finish_reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return event(self._frame | {"choices": [choice]} | self._usage)

    def end(self, completion: _WrittenCompletion) -> bytes:
        choice = completion.choices[0]
        events = self.event({}, choice.finish_reason, choice.logprobs)
        if completion.usage is not UNSET:
            usage_chunk: dict[str, Any] = {"choices": [], "usage": completion.usage}
            events += event(self._frame | usage_chunk)
        return events + STREAM_END


class ChatWriter(StreamWriter):
    """See StreamWriter. Clients treat a chat completion as complete only when it has a finish reason."""

    def __init__(self, incoming: ChatDialectRequest, session: WireSession, message_id: str) -> None:
        super().__init__(session, message_id)
        self._incoming = incoming
        self._created = int(time.time())
        self._chunks = _Chunks(completion_id(message_id), incoming.model, self._created, incoming.usage)

    def feed(self, delta: Delta) -> bytes:
        events = b"" if self._started else self._chunks.begin()
        self._started = True
        match delta.kind:
            case "reasoning":
                events += self._chunks.event({"reasoning_content": delta.text})
            case "text":
                events += self._chunks.event({"content": delta.text})
            case "tool":
                self._ids.append(self._session.tool_id(delta.id))
                call_head = {"id": self._ids[-1], "type": "function"}
                events += self._tool_chunk(
                    delta.index, call_head | {"function": {"name": delta.name, "arguments": ""}}
                )
            case "arguments":
                events += self._tool_chunk(delta.index, {"function": {"arguments": delta.text}})
        return events

    def whole(self, generation: Generation) -> DialectResponse:
        """See StreamWriter. A streamed response has `usage` only if `stream_options.include_usage` is true."""
        if not self._started:
            self._complete_ids(generation)
        calls = generation.tool_calls
        sampled = dict(zip(self._ids, calls, strict=True))
        message: dict[str, Any] = {"role": "assistant", "content": generation.text or (None if calls else "")}
        if generation.reasoning:
            message["reasoning_content"] = generation.reasoning
        if calls:
            message["tool_calls"] = [
                {"id": id_, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for id_, call in sampled.items()
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": _logprobs(generation) if self._incoming.logprobs else None,
            "finish_reason": ending(generation),
        }
        body: dict[str, Any] = {
            "id": completion_id(self._message_id),
            "object": "chat.completion",
            "created": self._created,
            "model": self._incoming.model,
            "choices": [choice],
        }
        if self._incoming.usage:
            body["usage"] = _usage(generation.usage)
        return DialectResponse(msgspec.json.encode(body), sampled)

    def finish(self, generation: Generation) -> tuple[DialectResponse, bytes]:
        message = self.whole(generation)
        if not self._started:
            return message, to_events(message.body)
        return message, self._chunks.end(_WRITTEN_RESPONSE.decode(message.body))

    def _tool_chunk(self, index: int, call: dict[str, Any]) -> bytes:
        return self._chunks.event({"tool_calls": [{"index": index, **call}]})


# --- the dialect ----------------------------------------------------------------------------------------

_PASSED_PARAMETERS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "reasoning_effort",
)
_ONE_RESPONSE_ERROR = (
    "unsupported, expected 1, as a request gets one response; for more samples send it several times"
)
_TEXT_ONLY_ERROR = "unsupported: models answer with text only; leave it out"
_REFUSED_FIELDS: RefusedFields = {
    "n": ((1,), _ONE_RESPONSE_ERROR),
    "best_of": ((1,), _ONE_RESPONSE_ERROR),
    "top_logprobs": ((0,), "unsupported, expected 0: only logprobs of sampled tokens are known; leave it out"),
    "modalities": ((["text"],), _TEXT_ONLY_ERROR),
    "audio": ((), _TEXT_ONLY_ERROR),
    "functions": (([],), "this older form is unsupported; send `tools`"),
    "function_call": (("auto", "none"), "this older form is unsupported; send `tool_choice`"),
    "web_search_options": ((), "unsupported: no tools run at the server; leave it out"),
}


class OpenAIChat(OpenAIDialect):
    """The chat completions dialect (see Dialect)."""

    name = "openai-chat"
    expected = EXPECTED
    read_request = staticmethod(read_request)
    read_outer = staticmethod(read_outer)
    read_next = staticmethod(read_next)
    read_response = staticmethod(read_response)
    events = staticmethod(to_events)

    def parse(self, body: bytes, session: WireSession, branch: Branch, target: str = "") -> ChatDialectRequest:
        request = decode_request(body)
        refuse_fields(request, _REFUSED_FIELDS)
        conversation, tool_choice = read_conversation(request)
        format_, template, options = request.response_format, request.chat_template_kwargs, request.stream_options
        chat = chat_request(
            request.model,
            conversation,
            session,
            branch,
            _sampling(request),
            tool_choice=tool_choice,
            parallel_tool_calls=request.parallel_tool_calls if conversation.tools else None,
            response_format=msgspec.to_builtins(format_) if format_ and format_.type != "text" else None,
            enable_thinking=template.enable_thinking if template else None,
        )
        usage = not request.stream or bool(options and options.include_usage)
        return ChatDialectRequest(request.model, bool(request.stream), chat, bool(request.logprobs), usage)

    def writer(self, incoming: DialectRequest, session: WireSession, message_id: str) -> ChatWriter:
        assert isinstance(incoming, ChatDialectRequest)
        return ChatWriter(incoming, session, message_id)

    def ping(self, message_id: str) -> bytes:
        return b": ping\n\n"

    def error_event(self, fault: Fault) -> bytes:
        return event({"error": self.error_object(fault)})


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    limit = request.max_completion_tokens
    sampling: dict[str, Any] = {name: getattr(request, name) for name in _PASSED_PARAMETERS}
    sampling["max_tokens"] = request.max_tokens if limit is None else limit
    sampling["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop or None
    return sampling
