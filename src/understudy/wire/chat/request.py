"""OpenAI chat completions requests, understood and made ready for a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec import Struct

from understudy.wire.arguments import same_arguments
from understudy.wire.decoding import decode
from understudy.wire.dialect import Branch, DialectRequest, WireSession
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import Part, Transcript, function_tool, plain, text_part
from understudy.wire.model import ChatRequest

WHAT = "an OpenAI chat completions request"


class ChatDialectRequest(DialectRequest, frozen=True):
    """A chat completions request, with what only its answer needs to know."""

    logprobs: bool
    usage: bool


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: dict[str, Any] | str | None = None


class CalledFunction(Struct):
    name: str
    arguments: str | None = None


class Called(Struct):
    id: str
    type: str = "function"
    function: CalledFunction | None = None


class InMessage(Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    function_call: Any = None


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: str
    function: Function | None = None


class Named(Struct):
    name: str = ""


class NamedTool(Struct):
    type: str = ""
    function: Named | None = None


class Allowed(Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ToolChoice(Struct):
    type: str
    function: Named | None = None
    allowed_tools: Allowed | None = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class TemplateArguments(Struct):
    enable_thinking: bool | None = None


class ResponseFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class CompletionRequest(Struct):
    """The fields that change what is asked of a model, and those that ask for what cannot be given.

    All others (`user`, `metadata`, `store`, `service_tier`, `prompt_cache_key`, `safety_identifier`, `prediction`,
    `verbosity`, …) are left aside, whatever they hold.
    """

    model: str
    messages: list[InMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: TemplateArguments | None = None
    logprobs: bool | None = None
    # Passed on as they are.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    reasoning_effort: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    # Refused, but for what says nothing.
    n: Any = None
    best_of: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


_DECODER = msgspec.json.Decoder(CompletionRequest)

_PASSED = (
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
_REFUSED: dict[str, tuple[Sequence[object], str]] = {
    "n": ((1,), "a request gets one answer; send it again for another"),
    "best_of": ((1,), "a request gets one answer; send it again for another"),
    "top_logprobs": ((0,), "only the logprobs of the sampled tokens are kept; leave it out"),
    "modalities": ((["text"],), "models answer with text here"),
    "audio": ((), "models answer with text here"),
    "functions": (([],), "this older form is not understood; send `tools`"),
    "function_call": (("auto", "none"), "this older form is not understood; send `tool_choice`"),
    "web_search_options": ((), "tools that run at the server do not exist here"),
}


def parse(body: bytes, session: WireSession, branch: Branch) -> ChatDialectRequest:
    """Understand a request. Raises InvalidRequest naming the field."""
    request = decode(body, _DECODER, WHAT)
    for name, (harmless, why) in _REFUSED.items():
        value = getattr(request, name)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name}: {why}")
    tools, tool_choice = _chosen(request)
    format_, template = request.response_format, request.chat_template_kwargs
    options = request.stream_options
    return ChatDialectRequest(
        model=request.model,
        stream=bool(request.stream),
        chat=ChatRequest(
            model=request.model,
            messages=_messages(request.messages, session),
            tools=tools,
            tool_choice=tool_choice if tools else None,
            parallel_tool_calls=request.parallel_tool_calls if tools else None,
            response_format=msgspec.to_builtins(format_) if format_ and format_.type != "text" else None,
            enable_thinking=template.enable_thinking if template else None,
            sampling=_sampling(request) | session.sampling,
            conversation=session.conversation(branch),
        ),
        logprobs=bool(request.logprobs),
        usage=not request.stream or bool(options and options.include_usage),
    )


def _sampling(request: CompletionRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {name: getattr(request, name) for name in _PASSED}
    limit = request.max_completion_tokens
    asked["max_tokens"] = request.max_tokens if limit is None else limit
    asked["stop"] = [request.stop] if isinstance(request.stop, str) else request.stop or None
    return {name: value for name, value in asked.items() if value is not None}


def _chosen(request: CompletionRequest) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The tools to offer, and the choice between them."""
    functions = [_named(tool) for tool in request.tools or ()]
    choice: str | dict[str, Any] | None = None
    if isinstance(request.tool_choice, str):
        choice = request.tool_choice
    elif request.tool_choice is not None:
        asked = request.tool_choice
        if asked.type == "allowed_tools" and asked.allowed_tools:
            names = {tool.function.name for tool in asked.allowed_tools.tools if tool.function}
            functions = [function for function in functions if function.name in names]
            choice = asked.allowed_tools.mode
        elif asked.type == "function" and asked.function:
            choice = {"type": "function", "function": {"name": asked.function.name}}
        else:
            raise InvalidRequest(f"tool_choice.type: {asked.type!r} is not known; function and allowed_tools are")
    tools = [
        function_tool(function.name, function.description, function.parameters, function.strict)
        for function in functions
    ]
    return tools, choice


def _named(tool: Tool) -> Function:
    if tool.type != "function" or tool.function is None:
        raise InvalidRequest(f"tools: type {tool.type!r} is not known here; function is")
    return tool.function


# --- messages ------------------------------------------------------------------------------------------


def _messages(messages: Sequence[InMessage], session: WireSession) -> list[dict[str, Any]]:
    transcript = Transcript(session)
    for index, message in enumerate(messages):
        add = _ROLES[message.role]
        try:
            add(transcript, message)
        except InvalidRequest as error:
            raise InvalidRequest(f"messages[{index}].{error}") from error
    return transcript.messages()


def _assistant(transcript: Transcript, message: InMessage) -> None:
    if message.function_call is not None:
        raise InvalidRequest("function_call: this older form is not understood; send `tool_calls`")
    text = plain(_parts(message.content)) or message.refusal or ""
    thought = message.reasoning_content or message.reasoning
    transcript.assistant(text, thought if isinstance(thought, str) else None)
    for called in message.tool_calls or ():
        function = called.function
        if called.type != "function" or function is None:
            raise InvalidRequest(f"tool_calls: type {called.type!r} is not known here; function is")
        arguments = partial(same_arguments, echoed=function.arguments or "")
        transcript.call(called.id, function.name, arguments)


def _result(transcript: Transcript, message: InMessage) -> None:
    if not message.tool_call_id:
        raise InvalidRequest("tool_call_id: a tool message must say which call it answers")
    transcript.result(message.tool_call_id, _parts(message.content))


_ROLES: dict[str, Callable[[Transcript, InMessage], None]] = {
    "system": lambda transcript, message: transcript.instruct(plain(_parts(message.content))),
    "developer": lambda transcript, message: transcript.instruct(plain(_parts(message.content))),
    "user": lambda transcript, message: transcript.user(_parts(message.content)),
    "assistant": _assistant,
    "tool": _result,
}


def _parts(content: str | list[ContentPart] | None) -> list[Part]:
    if content is None or isinstance(content, str):
        return [text_part(content or "")]
    return [_part(part) for part in content]


def _part(part: ContentPart) -> Part:
    match part.type:
        case "text":
            return text_part(part.text or "")
        case "refusal":
            return text_part(part.refusal or "")
        case "image_url" if part.image_url:
            image = {"url": part.image_url} if isinstance(part.image_url, str) else part.image_url
            return {"type": "image_url", "image_url": image}
        case _:
            raise InvalidRequest(f"content: a part of type {part.type!r} cannot be read here; text and images can")
