"""OpenAI chat completions requests: their schema, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct

from understudy.wire.arguments import wrapped
from understudy.wire.decoding import ToolCache, decode, decoded, function_tool
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, Conversation, Part, setting_digest

EXPECTED = "an OpenAI chat completions request"


# --- the schema -----------------------------------------------------------------------------------------


class ChatContentPart(Struct, gc=False):
    type: str
    text: str | None = None
    refusal: str | None = None
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
    """The fields of a request that make up the conversation."""

    messages: list[ChatMessage]
    tools: Raw = Raw()
    tool_choice: Literal["none", "auto", "required"] | ChatToolChoice | None = None


class CompletionRequest(ChatBody, kw_only=True):
    """The fields that change what is asked of a model, and those that ask for what is unsupported.

    All others (`user`, `metadata`, `store`, `service_tier`, `prompt_cache_key`, `safety_identifier`, `prediction`,
    `verbosity`, …) are ignored, whatever they hold.
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
    # Refused, but for values that change nothing.
    n: Any = None
    best_of: Any = None
    top_logprobs: Any = None
    modalities: Any = None
    audio: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None


class _ChatToolsBody(Struct):
    tools: list[ChatTool] | None = None


_REQUEST = msgspec.json.Decoder(CompletionRequest)
_BODY = msgspec.json.Decoder(ChatBody)
_TOOLS = msgspec.json.Decoder(_ChatToolsBody)


# --- conversations --------------------------------------------------------------------------------------


def decode_request(body: bytes) -> CompletionRequest:
    """A request from its bytes. Raises InvalidRequest naming what is wrong, and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """The conversation of a stored request, with all that is known of it. Raises what UNREADABLE lists."""
    request = decoded(_BODY.decode, body)
    conversation, _ = read_conversation(request)
    tools = bytes(request.tools)
    return msgspec.structs.replace(
        conversation,
        setting=setting_digest(conversation.system, tools),
        has_tools=tools not in (b"", b"[]", b"null"),
        forced=isinstance(request.tool_choice, ChatToolChoice),
    )


def read_conversation(request: ChatBody) -> tuple[Conversation, str | dict[str, Any] | None]:
    """What a request asks, what of it no chat model can do, and the choice between its tools."""
    tools = _tools(bytes(request.tools))
    functions, choice, unsupported = _choose(tools, request.tool_choice)
    reader = _ChatReader(tools.unsupported + unsupported)
    for index, message in enumerate(request.messages):
        reader.read(index, message)
    conversation = Conversation(
        instructions=tuple(reader.instructions),
        blocks=tuple(reader.blocks),
        tools=functions,
        tools_json=tools.json if functions is tools.functions else None,
        unsupported=tuple(reader.unsupported),
    )
    return conversation, choice if functions else None


# --- tools ----------------------------------------------------------------------------------------------


class _ChatTools(Struct, frozen=True):
    """The tools of a request, in their own form and as their JSON."""

    functions: list[dict[str, Any]]
    json: Raw
    unsupported: tuple[str, ...] = ()


def _read_tools(tools: Sequence[ChatTool]) -> _ChatTools:
    functions: list[dict[str, Any]] = []
    unsupported: list[str] = []
    for tool in tools:
        function = tool.function
        if tool.type != "function" or function is None:
            unsupported.append(f"tools: unsupported type {tool.type!r}, expected function")
        else:
            functions.append(
                function_tool(function.name, function.description, function.parameters, function.strict)
            )
    return _ChatTools(functions, Raw(msgspec.json.encode(functions)), tuple(unsupported))


_NO_TOOLS = _read_tools(())
_cache = ToolCache(lambda sent: _read_tools(decode(b'{"tools":%b}' % sent, _TOOLS, EXPECTED).tools or ()))


def _tools(sent: bytes) -> _ChatTools:
    """The tools of a request. In a stored one, what cannot be read is none; the gateway has refused it."""
    try:
        return _cache.read(sent) if sent else _NO_TOOLS
    except InvalidRequest as error:
        return msgspec.structs.replace(_NO_TOOLS, unsupported=(str(error),))


def _choose(
    tools: _ChatTools, choice: str | ChatToolChoice | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None, tuple[str, ...]]:
    """The functions to offer, the choice between them, and what of it is not supported."""
    if choice is None or isinstance(choice, str):
        return tools.functions, choice, ()
    if choice.type == "allowed_tools" and choice.allowed_tools:
        names = {tool.function.name for tool in choice.allowed_tools.tools if tool.function}
        allowed = [function for function in tools.functions if function["function"]["name"] in names]
        return allowed, choice.allowed_tools.mode, ()
    if choice.type == "function" and choice.function:
        return tools.functions, {"type": "function", "function": {"name": choice.function.name}}, ()
    return (
        tools.functions,
        None,
        (f"tool_choice.type: unsupported value {choice.type!r}, expected function or allowed_tools",),
    )


# --- messages -------------------------------------------------------------------------------------------


class _ChatReader:
    """Reads messages into blocks. A turn is a message, counted from the first that is no instruction."""

    def __init__(self, unsupported: Sequence[str] = ()) -> None:
        self.instructions: list[str] = []
        self.blocks: list[Block] = []
        self.unsupported = list(unsupported)
        self._index = 0
        self._turn = -1

    def read(self, index: int, message: ChatMessage) -> None:
        self._index = index
        instructs = message.role in ("system", "developer")
        if instructs and self._turn < 0:
            self.instructions.append(self._text(message.content))
            return
        self._turn += 1
        if instructs:
            self._add("system", "text", self._text(message.content))
        elif message.role == "user":
            self._user(message.content)
        elif message.role == "tool":
            self._result(message)
        else:
            self.assistant(message)

    def assistant(self, message: ChatMessage, *, response: bool = False) -> None:
        """Read an assistant's message; that of a `response` has its tool calls as the model wrote them."""
        if message.function_call is not None:
            self._refuse("function_call: this older form is unsupported; send `tool_calls`")
        before = len(self.blocks)
        thinking = message.reasoning_content or message.reasoning
        if isinstance(thinking, str) and thinking:
            self._add("assistant", "thinking", thinking)
        text = self._text(message.content) or message.refusal or ""
        if text:
            self._add("assistant", "text", text)
        for call in message.tool_calls or ():
            function = call.function
            if call.type != "function" or function is None:
                self._refuse(f"tool_calls: unsupported type {call.type!r}, expected function")
                continue
            arguments = function.arguments or ""
            self.blocks.append(
                Block(
                    max(self._turn, 0),
                    "assistant",
                    "tool_use",
                    id=call.id,
                    name=function.name,
                    arguments=arguments if response else wrapped(arguments),
                )
            )
        if len(self.blocks) == before:
            self._add("assistant", "text", "")

    def _user(self, content: str | list[ChatContentPart] | None) -> None:
        if not isinstance(content, list):
            content = [ChatContentPart("text", content)]
        if not content:
            self._add("user", "text", "")
        for part in content:
            text, image = self._part(part)
            if image is not None:
                self.blocks.append(Block(self._turn, "user", "other", text, name="image", images=(image,)))
            elif part.type in ("text", "refusal"):
                self._add("user", "text", text)
            else:
                self.blocks.append(Block(self._turn, "user", "other", text, name=part.type, source=part))

    def _result(self, message: ChatMessage) -> None:
        if not message.tool_call_id:
            self._refuse("tool_call_id: missing; a tool message must name the call that it answers")
        content = message.content
        parts = [self._part(part) for part in content] if isinstance(content, list) else [(content or "", None)]
        self.blocks.append(
            Block(
                self._turn,
                "user",
                "tool_result",
                TEXT_SEPARATOR.join(text for text, _ in parts),
                id=message.tool_call_id,
                images=tuple(image for _, image in parts if image is not None),
            )
        )

    def _text(self, content: str | list[ChatContentPart] | None) -> str:
        """The texts of a content, without its images."""
        if isinstance(content, list):
            return TEXT_SEPARATOR.join(text for text, image in map(self._part, content) if image is None)
        return content or ""

    def _part(self, part: ChatContentPart) -> tuple[str, Part | None]:
        """What a model is shown of a part: a text, and the image that it stands for."""
        if part.type == "text":
            return part.text or "", None
        if part.type == "refusal":
            return part.refusal or "", None
        if part.type == "image_url" and part.image_url:
            image = {"url": part.image_url} if isinstance(part.image_url, str) else part.image_url
            return IMAGE, {"type": "image_url", "image_url": image}
        self._refuse(f"content: unsupported part of type {part.type!r}, expected text or image_url")
        return f"[{part.type}]", None

    def _add(self, role: str, kind: Literal["text", "thinking"], text: str) -> None:
        self.blocks.append(Block(max(self._turn, 0), role, kind, text))

    def _refuse(self, why: str) -> None:
        self.unsupported.append(f"messages[{self._index}].{why}")


def read_message(message: ChatMessage) -> list[Block]:
    """The blocks of a response's message, tool calls as the model wrote them."""
    reader = _ChatReader()
    reader.assistant(message, response=True)
    return reader.blocks
