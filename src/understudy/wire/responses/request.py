"""OpenAI Responses requests, understood and translated to the neutral chat request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from understudy.wire.arguments import same_arguments
from understudy.wire.decoding import decode
from understudy.wire.dialect import Branch, DialectRequest, WireSession
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import Part, Transcript, plain, text_part
from understudy.wire.model import ChatRequest
from understudy.wire.responses.tools import (
    Choice,
    Origin,
    Tool,
    choose,
    custom_arguments,
    flat,
    toolbox,
)

WHAT = "an OpenAI Responses request"


class ResponsesDialectRequest(DialectRequest, frozen=True):
    """A Responses request, with what only its answer needs to know. `echo` are fields that it repeats."""

    origins: dict[str, Origin]
    echo: dict[str, Any]


class Content(Struct):
    """A part of a content, of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(Struct):
    """An input item of any type; a field that its type does not have keeps the default."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[Content] | None = None
    summary: list[Content] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | list[Content] | None = None
    tools: list[Tool] = field(default_factory=list[Tool])


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class Text(Struct):
    format: TextFormat | None = None


class Reasoning(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(Struct):
    """The fields that change what is asked of a model, and those that ask for what cannot be given.

    All others (`store`, `include`, `truncation`, `metadata`, `user`, `service_tier`, `prompt_cache_key`,
    `max_tool_calls`, `text.verbosity`, `stream_options`, `client_metadata`, …) are left aside, whatever they hold.
    """

    model: str
    input: str | list[Item]
    instructions: str | None = None
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Refused, but for what says nothing.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None


_DECODER = msgspec.json.Decoder(ResponsesRequest)

_STATELESS = "nothing is kept here between requests; send the whole conversation as `input`"
_REFUSED: dict[str, tuple[Sequence[object], str]] = {
    "previous_response_id": ((), _STATELESS),
    "conversation": ((), _STATELESS),
    "background": ((False,), "an answer is given to the request itself; leave it out"),
    "prompt": ((), "there are no stored prompts here; send `instructions` and `input`"),
    "top_logprobs": ((0,), "only the logprobs of the sampled tokens are kept; leave it out"),
}


def parse(body: bytes, session: WireSession, branch: Branch) -> ResponsesDialectRequest:
    """Understand a request. Raises InvalidRequest naming the field."""
    request = decode(body, _DECODER, WHAT)
    for name, (harmless, why) in _REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: {why}")
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    added = [tool for item in items if item.type == "additional_tools" for tool in item.tools]
    box = toolbox([*(request.tools or ()), *added])
    functions, choice = choose(box, request.tool_choice)
    format_ = request.text.format if request.text else None
    return ResponsesDialectRequest(
        model=request.model,
        stream=bool(request.stream),
        chat=ChatRequest(
            model=request.model,
            messages=_messages(request.instructions, items, session),
            tools=functions,
            tool_choice=choice,
            parallel_tool_calls=request.parallel_tool_calls if functions else None,
            response_format=_response_format(format_) if format_ else None,
            sampling=_sampling(request) | session.sampling,
            conversation=session.conversation(branch),
        ),
        origins=box.origins,
        echo=_echo(request),
    )


def _sampling(request: ResponsesRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "max_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _response_format(format_: TextFormat) -> dict[str, Any] | None:
    if format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "json_object"}
    schema = {"name": format_.name or "output", "schema": format_.schema or {}, "strict": format_.strict}
    if format_.description is not None:
        schema["description"] = format_.description
    return {"type": "json_schema", "json_schema": schema}


def _echo(request: ResponsesRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "max_output_tokens": request.max_output_tokens,
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning": request.reasoning,
        "temperature": request.temperature,
        "tool_choice": request.tool_choice if isinstance(request.tool_choice, str) else None,
        "top_p": request.top_p,
    }
    return {name: value for name, value in asked.items() if value is not None}


# --- items ---------------------------------------------------------------------------------------------


def _messages(instructions: str | None, items: Sequence[Item], session: WireSession) -> list[dict[str, Any]]:
    reader = _Reader(session)
    if instructions:
        reader.transcript.instruct(instructions)
    for index, item in enumerate(items):
        take = _ITEMS.get(item.type)
        if take is None:
            raise InvalidRequest(
                f"input[{index}].type: {item.type!r} is not known here; expected one of {', '.join(_ITEMS)}"
            )
        try:
            take(reader, item)
        except InvalidRequest as error:
            raise InvalidRequest(f"input[{index}].{error}") from error
    reader.close()
    return reader.transcript.messages()


class _Reader:
    """Items in their order as messages. What one answer gave as several items becomes one message again."""

    def __init__(self, session: WireSession) -> None:
        self.transcript = Transcript(session)
        self._thought: str | None = None
        self._text: str | None = None
        self._answering = False

    def message(self, item: Item) -> None:
        parts = _parts(item.content)
        if item.role == "assistant":
            if self._answering or self._text is not None:
                self.close()
            self._text = plain(parts)
            return
        self.close()
        if item.role == "user":
            self.transcript.user(parts)
        else:
            self.transcript.instruct(plain(parts))

    def reasoning(self, item: Item) -> None:
        if self._answering or self._text is not None or self._thought is not None:
            self.close()
        self._thought = plain(_parts(item.content)) or plain(_parts(item.summary))

    def call(self, item: Item) -> None:
        echoed = item.arguments if isinstance(item.arguments, str) else ""
        self._call(item, partial(same_arguments, echoed=echoed))

    def custom_call(self, item: Item) -> None:
        self._call(item, partial(custom_arguments, text=item.input or ""))

    def _call(self, item: Item, arguments: Callable[[str | None], str]) -> None:
        if not item.call_id or not item.name:
            raise InvalidRequest("call_id: a call needs a call_id and a name")
        if not self._answering:
            self.transcript.assistant(self._text or "", self._thought)
            self._text = self._thought = None
            self._answering = True
        self.transcript.call(item.call_id, flat(item.name, item.namespace), arguments)

    def result(self, item: Item) -> None:
        if not item.call_id:
            raise InvalidRequest("call_id: an output must say which call it is of")
        self.close()
        self.transcript.result(item.call_id, _parts(item.output))

    def close(self, item: Item | None = None) -> None:
        """End the assistant message that is being put together."""
        if self._text is not None or self._thought is not None:
            self.transcript.assistant(self._text or "", self._thought)
        self._text = self._thought = None
        self._answering = False

    def skip(self, item: Item) -> None:
        """Nothing that a model is shown."""


_ITEMS: dict[str, Callable[[_Reader, Item], None]] = {
    "message": _Reader.message,
    "reasoning": _Reader.reasoning,
    "function_call": _Reader.call,
    "function_call_output": _Reader.result,
    "custom_tool_call": _Reader.custom_call,
    "custom_tool_call_output": _Reader.result,
    "additional_tools": _Reader.skip,
    # Done by another provider's tools, whose results are not in the items.
    "web_search_call": _Reader.skip,
    "image_generation_call": _Reader.skip,
}


def _parts(content: str | list[Content] | None) -> list[Part]:
    if content is None or isinstance(content, str):
        return [text_part(content)] if content else []
    return [_part(part) for part in content]


def _part(part: Content) -> Part:
    match part.type:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return text_part(part.text or "")
        case "refusal":
            return text_part(part.refusal or "")
        case "input_image" if part.image_url:
            image = {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})
            return {"type": "image_url", "image_url": image}
        case _:
            raise InvalidRequest(
                f"content: a part of type {part.type!r} cannot be read here; texts and images with a URL can"
            )
