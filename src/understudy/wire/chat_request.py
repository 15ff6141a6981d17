"""OpenAI chat completions requests: their schema, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from understudy.wire.arguments import wrapped
from understudy.wire.decoding import RequestTools, ToolCache, decode, decoded, function_tool
from understudy.wire.model import Block, Conversation, Part, ReadingState, as_stored
from understudy.wire.openai import OpenAIPart, OpenAIReader

EXPECTED = "an OpenAI chat completions request"


# --- the schema -----------------------------------------------------------------------------------------


class ChatContentPart(OpenAIPart, gc=False):
    image_url: dict[str, Any] | str | None = None


class CalledFunction(Struct, gc=False):
    name: str
    arguments: str | None = None


class MessageCall(Struct, gc=False):
    """A tool call of an assistant's message."""

    id: str
    type: str = "function"
    function: CalledFunction | None = None


class ChatMessage(Struct, gc=False):
    """A message of a request; a response has the same."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatContentPart] | None = None
    tool_calls: list[MessageCall] | None = None
    tool_call_id: str = ""
    reasoning_content: str | None = None
    reasoning: Any = None
    refusal: str | None = None
    function_call: Any = None


class FunctionParam(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChatTool(Struct):
    type: str
    function: FunctionParam | None = None


class ChosenFunction(Struct):
    name: str = ""


class ChosenTool(Struct):
    type: str = ""
    function: ChosenFunction | None = None


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[ChosenTool]


class ChatToolChoice(Struct):
    type: str
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class ChatStreamOptions(Struct):
    include_usage: bool | None = None


class TemplateArguments(Struct):
    enable_thinking: bool | None = None


class ChatResponseFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class ChatBody(Struct):
    """The fields of a request that contain the conversation."""

    messages: list[ChatMessage]
    tools: Raw = Raw()
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None


class CompletionRequest(ChatBody, kw_only=True):
    """The fields that influence the request to a model, and those that ask for something unsupported.

    All others (`user`, `metadata`, `store`, `service_tier`, `prompt_cache_key`, `safety_identifier`, `prediction`,
    `verbosity`, …) are ignored, whatever they contain.
    """

    model: str
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    parallel_tool_calls: bool | None = None
    response_format: ChatResponseFormat | None = None
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
    # Refused, except for values without an effect.
    n: Any = None
    best_of: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


_REQUEST = msgspec.json.Decoder(CompletionRequest)
_BODY = msgspec.json.Decoder(ChatBody)
_MESSAGE = msgspec.json.Decoder(ChatMessage)


# --- conversations --------------------------------------------------------------------------------------


def decode_request(body: bytes) -> CompletionRequest:
    """Decode a request. Raises InvalidRequest, which says what is wrong and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """Return the conversation of a stored request. Raises the exceptions in UNREADABLE."""
    return _read_stored(decoded(_BODY.decode, body))


def _read_stored(request: ChatBody, instructions: tuple[str, ...] = ()) -> Conversation:
    conversation, _ = read_conversation(request)
    if instructions:
        conversation = msgspec.structs.replace(conversation, instructions=instructions)
    return as_stored(
        conversation, bytes(request.tools), tool_is_forced=isinstance(request.tool_choice, ChatToolChoice)
    )


def read_outer(body: bytes, instructions: tuple[str, ...]) -> Conversation:
    """See Dialect."""
    request = decoded(_BODY.decode, body)
    if request.messages:
        raise ValueError("the outer part of this request has messages, expected none; read the request as a whole")
    return _read_stored(request, instructions)


def read_next(state: ReadingState, body: bytes) -> tuple[list[Block], ReadingState]:
    """See Dialect."""
    return _ChatReader().read_after(state, decoded(_MESSAGE.decode, body))


def read_conversation(request: ChatBody) -> tuple[Conversation, str | dict[str, Any] | None]:
    """Return a request's conversation, what in it no chat model can do, and the tool choice."""
    tools = _tools.read(bytes(request.tools))
    functions, choice, unsupported = _choose(tools, request.tool_choice)
    reader = _ChatReader(tools.unsupported + unsupported)
    for index, message in enumerate(request.messages):
        reader.read(index, message)
    return reader.conversation(tools, functions), choice if functions else None


# --- tools ----------------------------------------------------------------------------------------------


def _read_tools(tools: Sequence[ChatTool]) -> RequestTools:
    functions: list[dict[str, Any]] = []
    unsupported: list[str] = []
    for index, tool in enumerate(tools):
        function = tool.function
        if tool.type != "function":
            unsupported.append(
                f"tools[{index}].type: unsupported value {tool.type[:100]!r}, expected function; leave the tool "
                "out"
            )
        elif function is None:
            unsupported.append(f"tools[{index}].function: missing, expected the function with its name; add it")
        else:
            functions.append(
                function_tool(function.name, function.description, function.parameters, function.strict)
            )
    return RequestTools(functions, Raw(msgspec.json.encode(functions)), tuple(unsupported))


_tools = ToolCache(ChatTool, EXPECTED, _read_tools)


def _choose(
    tools: RequestTools, choice: str | ChatToolChoice | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None, tuple[str, ...]]:
    """Return the functions to offer, the choice between them, and what in them is unsupported."""
    if choice is None or isinstance(choice, str):
        return tools.functions, choice, ()
    if choice.type == "allowed_tools" and choice.allowed_tools:
        names = {tool.function.name for tool in choice.allowed_tools.tools if tool.function}
        allowed = [function for function in tools.functions if function["function"]["name"] in names]
        return allowed, choice.allowed_tools.mode, ()
    if choice.type == "function" and choice.function:
        return tools.functions, {"type": "function", "function": {"name": choice.function.name}}, ()
    problem = (
        f"tool_choice.type: unsupported value {choice.type[:100]!r}, expected function or allowed_tools; send one "
        "of these, or leave tool_choice out"
    )
    return tools.functions, None, (problem,)


# --- messages -------------------------------------------------------------------------------------------


class _ChatReader(OpenAIReader):
    """Reads messages into blocks. A turn is a message; turns are counted from the first message that is not an
    instruction.
    """

    field = "messages"
    text_parts = frozenset({"text", "refusal"})
    expected_parts = "text or image_url"

    def image(self, part: ChatContentPart) -> Part | None:
        if part.type != "image_url" or not part.image_url:
            return None
        return {"url": part.image_url} if isinstance(part.image_url, str) else part.image_url

    def read(self, index: int, message: ChatMessage) -> None:
        """Read the next message. Before any other, those of the system are instructions."""
        self._index = index
        instructs = message.role in ("system", "developer")
        if instructs and self._turn < 0:
            self.instructions.append(self.text(message.content))
            return
        self._turn += 1
        if instructs:
            self.add("system", "text", self.text(message.content))
        elif message.role == "user":
            self.add_user(message.content)
        elif message.role == "tool":
            if not message.tool_call_id:
                self.refuse("tool_call_id: missing, expected the id of the call that this message answers; add it")
            self.add_result(message.tool_call_id, message.content)
        else:
            self._assistant(message)

    def _assistant(self, message: ChatMessage) -> None:
        """Read an assistant's message; that of a response has its tool calls as the model wrote them."""
        if message.function_call is not None:
            self.refuse("function_call: this older form is unsupported; send `tool_calls`")
        before = len(self.blocks)
        thinking = message.reasoning_content or message.reasoning
        if isinstance(thinking, str) and thinking:
            self.add("assistant", "thinking", thinking)
        if text := self.text(message.content) or message.refusal:
            self.add("assistant", "text", text)
        for call in message.tool_calls or ():
            function = call.function
            if call.type != "function" or function is None:
                self.refuse(
                    "tool_calls: a call has no function, expected its name and arguments; add them"
                    if call.type == "function"
                    else f"tool_calls: unsupported type {call.type[:100]!r}, expected function; leave the call out"
                )
                continue
            arguments = function.arguments or ""
            arguments = arguments if self._response else wrapped(arguments)
            self.add("assistant", "tool_use", id=call.id, name=function.name, arguments=arguments)
        if len(self.blocks) == before:
            self.add("assistant", "text")


def read_message(message: ChatMessage) -> list[Block]:
    """Return the blocks of a response's message, with tool calls as the model wrote them."""
    reader = _ChatReader(response=True)
    reader.read(0, message)
    return reader.blocks
