"""OpenAI Responses requests: their schema, their tools as functions, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import FREEFORM_SCHEMA, freeform_arguments, freeform_input, wrapped
from understudy.wire.decoding import ToolCache, decode, decoded, function_tool
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, Conversation, Part, ToolCall, setting_digest

EXPECTED = "an OpenAI Responses request"

# Tools that run at the provider, and the search for tools that were not sent. They are offers, which Codex makes
# in every request: without them the model does its work with the others.
_LEFT_OUT = frozenset(
    {
        "code_interpreter",
        "file_search",
        "image_generation",
        "mcp",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


class GrammarFormat(Struct):
    """What the input of a custom tool must look like."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class ResponsesTool(Struct):
    """A tool of any type; a field that its type does not have keeps the default."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: GrammarFormat | None = None
    tools: list[ResponsesTool] = field(default_factory=list["ResponsesTool"])


class ToolOrigin(Struct, frozen=True):
    """What the client calls a function that the model was offered."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesToolChoice(Struct):
    """A tool_choice that is more than a word. `tools` are those of `allowed_tools`."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponsesToolChoice] = field(default_factory=list["ResponsesToolChoice"])


class Toolbox(Struct, frozen=True):
    """The tools of a request: as they were sent, and as functions of chat completions.

    `origins` maps a function's name to the tool that it stands for. `unsupported` lists the errors of tools
    that no function can stand for.
    """

    tools: Sequence[ResponsesTool]
    functions: list[dict[str, Any]]
    origins: dict[str, ToolOrigin]
    json: Raw
    unsupported: tuple[str, ...]


class _ResponsesToolsBody(Struct):
    tools: list[ResponsesTool] | None = None


_TOOLS = msgspec.json.Decoder(_ResponsesToolsBody)


def flat_name(name: str, namespace: str | None) -> str:
    """The name of a function for the model, which knows no namespaces."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def read_toolbox(sent: bytes) -> Toolbox:
    """The tools of a request. In a stored one, what cannot be read is none; the gateway has refused it."""
    try:
        return _cache.read(sent) if sent else _EMPTY
    except InvalidRequest as error:
        return msgspec.structs.replace(_EMPTY, unsupported=(str(error),))


def new_toolbox(tools: Sequence[ResponsesTool]) -> Toolbox:
    """Tools as functions."""
    builder = _ToolboxBuilder()
    for tool in tools:
        builder.add(tool, None)
    return Toolbox(
        tools,
        builder.functions,
        builder.origins,
        Raw(msgspec.json.encode(builder.functions)),
        tuple(builder.unsupported),
    )


class _ToolboxBuilder:
    def __init__(self) -> None:
        self.functions: list[dict[str, Any]] = []
        self.origins: dict[str, ToolOrigin] = {}
        self.unsupported: list[str] = []

    def add(self, tool: ResponsesTool, namespace: str | None) -> None:
        match tool.type:
            case "function":
                origin = ToolOrigin("function", tool.name, namespace)
                self._add(origin, tool.description, tool.parameters, tool.strict)
            case "custom":
                self._add(ToolOrigin("custom", tool.name, namespace), _freeform(tool), FREEFORM_SCHEMA, None)
            case "namespace" if namespace is None:
                for inner in tool.tools:
                    self.add(inner, tool.name)
            case left_out if left_out in _LEFT_OUT:
                pass
            case unknown:
                self.unsupported.append(
                    f"tools: unsupported type {unknown!r}, expected function, custom or namespace"
                )

    def _add(
        self, origin: ToolOrigin, description: str | None, parameters: dict[str, Any] | None, strict: bool | None
    ) -> None:
        name = flat_name(origin.name, origin.namespace)
        if not origin.name or name in self.origins:
            self.unsupported.append(f"tools: invalid name {name!r}: it is empty, or two tools have it")
            return
        self.origins[name] = origin
        self.functions.append(function_tool(name, description, parameters, strict))


def _freeform(tool: ResponsesTool) -> str:
    description = tool.description or ""
    if tool.format is None or tool.format.type != "grammar":
        return description
    return f"{description}\n\nThe input must follow this {tool.format.syntax} grammar:\n{tool.format.definition}"


_EMPTY = new_toolbox(())
_cache = ToolCache(lambda sent: new_toolbox(decode(b'{"tools":%b}' % sent, _TOOLS, EXPECTED).tools or ()))


def choose(
    box: Toolbox, choice: str | ResponsesToolChoice | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None, tuple[str, ...]]:
    """The functions to offer, the choice between them, and what of it is not supported."""
    if isinstance(choice, ResponsesToolChoice):
        if choice.type == "allowed_tools":
            names = {flat_name(tool.name, tool.namespace) for tool in choice.tools}
            allowed = [function for function in box.functions if function["function"]["name"] in names]
            return allowed, choice.mode if allowed else None, ()
        name = flat_name(choice.name, choice.namespace)
        if name not in box.origins:
            why = f"tool_choice: unknown tool {name or choice.type!r}, expected one of `tools`"
            return box.functions, None, (why,)
        return box.functions, {"type": "function", "function": {"name": name}}, ()
    if choice == "required" and not box.functions:
        why = "tool_choice: a tool is required, but `tools` has none that the client runs"
        return box.functions, None, (why,)
    return box.functions, choice if box.functions else None, ()


# --- calls ---------------------------------------------------------------------------------------------


def call_item(
    origins: Mapping[str, ToolOrigin], call: ToolCall, *, item_id: str, call_id: str, status: str
) -> dict[str, Any]:
    """A tool call of the model as the output item that the client expects."""
    origin = origins.get(call.name) or ToolOrigin("function", call.name)
    item: dict[str, Any] = {"id": f"{_PREFIX[origin.type]}{item_id}", "call_id": call_id, "name": origin.name}
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    if origin.type == "custom":
        return {"type": "custom_tool_call", **item, "input": freeform_input(call.arguments), "status": status}
    return {"type": "function_call", **item, "arguments": call.arguments, "status": status}


_PREFIX = {"function": "fc_", "custom": "ctc_"}


# --- the schema -----------------------------------------------------------------------------------------


class ResponsesContentPart(Struct, gc=False):
    """A part of a content, of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(Struct, gc=False):
    """An input item of any type; a field that its type does not have keeps the default."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsesContentPart] | None = None
    summary: list[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | list[ResponsesContentPart] | None = None
    tools: list[ResponsesTool] = field(default_factory=list[ResponsesTool])


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    format: TextFormat | None = None


class ReasoningOptions(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct):
    """The fields of a request that make up the conversation."""

    input: str | list[Item]
    instructions: str | None = None
    tools: Raw = Raw()
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None


class ResponsesRequest(ResponsesBody, kw_only=True):
    """The fields that change what is asked of a model, and those that ask for what is unsupported.

    All others (`store`, `include`, `truncation`, `metadata`, `user`, `service_tier`, `prompt_cache_key`,
    `max_tool_calls`, `text.verbosity`, `stream_options`, `client_metadata`, …) are ignored, whatever they
    hold.
    """

    model: str
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Refused, but for values that change nothing.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None


_REQUEST = msgspec.json.Decoder(ResponsesRequest)
_BODY = msgspec.json.Decoder(ResponsesBody)


# --- conversations --------------------------------------------------------------------------------------


class ReadRequest(Struct, frozen=True):
    """A request that was read: the conversation, the choice between its tools, and what the tools were."""

    conversation: Conversation
    tool_choice: str | dict[str, Any] | None
    toolbox: Toolbox


def decode_request(body: bytes) -> ResponsesRequest:
    """A request from its bytes. Raises InvalidRequest naming what is wrong, and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """The conversation of a stored request, with all that is known of it. Raises what UNREADABLE lists."""
    request = decoded(_BODY.decode, body)
    conversation, tools = read_conversation(request).conversation, bytes(request.tools)
    return msgspec.structs.replace(
        conversation,
        setting=setting_digest(conversation.system, tools),
        has_tools=tools not in (b"", b"[]", b"null"),
        forced=isinstance(request.tool_choice, ResponsesToolChoice),
    )


def read_conversation(request: ResponsesBody) -> ReadRequest:
    """What a request asks, and what of it no chat model can do."""
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    toolbox = read_toolbox(bytes(request.tools))
    if added := [tool for item in items if item.type == "additional_tools" for tool in item.tools]:
        toolbox = new_toolbox([*toolbox.tools, *added])
    functions, choice, unsupported = choose(toolbox, request.tool_choice)
    reader = _ResponsesReader([*toolbox.unsupported, *unsupported])
    if request.instructions:
        reader.instructions.append(request.instructions)
    for index, item in enumerate(items):
        reader.read(index, item)
    conversation = Conversation(
        instructions=tuple(reader.instructions),
        blocks=tuple(reader.blocks),
        tools=functions,
        tools_json=toolbox.json if functions is toolbox.functions else None,
        unsupported=tuple(reader.unsupported),
    )
    return ReadRequest(conversation, choice, toolbox)


# --- items ----------------------------------------------------------------------------------------------

_CLOSED, _THOUGHT, _SPOKE, _CALLED = range(4)
"""How far an assistant's turn has come: it is thinking, then text, then calls, each of which may be missing."""


class _ResponsesReader:
    """Reads items into blocks. The items of one response become one turn again."""

    def __init__(self, unsupported: Sequence[str] = (), *, response: bool = False) -> None:
        self.instructions: list[str] = []
        self.blocks: list[Block] = []
        self.unsupported = list(unsupported)
        self._response = response
        self._index = 0
        self._turn = -1
        self._stage = _CLOSED

    def read(self, index: int, item: Item) -> None:
        """Take the next item in."""
        self._index = index
        if take := _ITEMS.get(item.type):
            take(self, item)
            return
        self._refuse(f"type: unsupported value {item.type!r}, expected one of {', '.join(_ITEMS)}")
        role = "user" if item.type.endswith("_output") else "assistant"
        self._begin(role, _CALLED if role == "assistant" else _CLOSED)
        self._add(role, "other", f"[{item.type}]", name=item.type, source=item)

    def message(self, item: Item) -> None:
        if item.role == "assistant":
            self._begin("assistant", _SPOKE)
            self._add("assistant", "text", self._text(item.content))
        elif item.role == "user":
            self._begin("user")
            self._user(item.content)
        elif self._turn < 0:
            self.instructions.append(self._text(item.content))
        else:
            self._begin("system")
            self._add("system", "text", self._text(item.content))

    def reasoning(self, item: Item) -> None:
        """The reasoning itself where there is any, else its summary; what is only encrypted cannot be read."""
        self._begin("assistant", _THOUGHT)
        self._add("assistant", "thinking", self._text(item.content) or self._text(item.summary))

    def call(self, item: Item) -> None:
        arguments = item.arguments if isinstance(item.arguments, str) else ""
        self._call(item, arguments if self._response else wrapped(arguments))

    def freeform_call(self, item: Item) -> None:
        self._call(item, freeform_arguments(item.input or ""), freeform=True)

    def _call(self, item: Item, arguments: str, *, freeform: bool = False) -> None:
        if not item.call_id or not item.name:
            self._refuse("call_id: missing call_id or name of a call")
        name = flat_name(item.name or "", item.namespace)
        self._begin("assistant", _CALLED)
        self._add(
            "assistant", "tool_use", id=item.call_id or "", name=name, arguments=arguments, freeform=freeform
        )

    def result(self, item: Item) -> None:
        if not item.call_id:
            self._refuse("call_id: missing; an output must name its call")
        self._begin("user")
        parts = self._parts(item.output)
        images = tuple(image for _, image in parts if image is not None)
        text = TEXT_SEPARATOR.join(text for text, _ in parts)
        self._add("user", "tool_result", text, id=item.call_id or "", images=images)

    def skip(self, item: Item) -> None:
        """Nothing that a model is shown."""

    def _begin(self, role: str, stage: int = _CLOSED) -> None:
        """Begin another turn, unless the item belongs to the assistant's turn that is open."""
        goes_on = role == "assistant" and (self._stage < stage or self._stage == stage == _CALLED)
        if not goes_on or self._stage == _CLOSED:
            self._turn += 1
        self._stage = stage

    def _user(self, content: str | list[ResponsesContentPart] | None) -> None:
        if not isinstance(content, list):
            content = [ResponsesContentPart("input_text", content)]
        for part in content:
            text, image = self._part(part)
            if image is not None:
                self._add("user", "other", text, name="image", images=(image,))
            elif part.type in _TEXTS or part.type == "refusal":
                self._add("user", "text", text)
            else:
                self._add("user", "other", text, name=part.type, source=part)
        if not content:
            self._add("user", "text")

    def _text(self, content: str | list[ResponsesContentPart] | None) -> str:
        """The texts of a content, without its images."""
        return TEXT_SEPARATOR.join(text for text, image in self._parts(content) if image is None)

    def _parts(self, content: str | list[ResponsesContentPart] | None) -> list[tuple[str, Part | None]]:
        if isinstance(content, list):
            return [self._part(part) for part in content]
        return [(content, None)] if content else []

    def _part(self, part: ResponsesContentPart) -> tuple[str, Part | None]:
        """What a model is shown of a part: a text, and the image that it stands for."""
        if part.type in _TEXTS:
            return part.text or "", None
        if part.type == "refusal":
            return part.refusal or "", None
        if part.type == "input_image" and part.image_url:
            image = {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})
            return IMAGE, {"type": "image_url", "image_url": image}
        self._refuse(f"content: unsupported part of type {part.type!r}, expected texts or images with a URL")
        return f"[{part.type}]", None

    def _add(self, role: str, kind: Any, text: str = "", **fields: Any) -> None:
        self.blocks.append(Block(self._turn, role, kind, text, **fields))

    def _refuse(self, why: str) -> None:
        self.unsupported.append(f"input[{self._index}].{why}")


_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ITEMS: dict[str, Callable[[_ResponsesReader, Item], None]] = {
    "message": _ResponsesReader.message,
    "reasoning": _ResponsesReader.reasoning,
    "function_call": _ResponsesReader.call,
    "function_call_output": _ResponsesReader.result,
    "custom_tool_call": _ResponsesReader.freeform_call,
    "custom_tool_call_output": _ResponsesReader.result,
    "additional_tools": _ResponsesReader.skip,
    # Done by another provider's tools, whose results are not in the items.
    "web_search_call": _ResponsesReader.skip,
    "image_generation_call": _ResponsesReader.skip,
}


def read_items(items: Sequence[Item]) -> list[Block]:
    """The blocks of a response's items, tool calls as the model wrote them, as one turn."""
    reader = _ResponsesReader(response=True)
    for index, item in enumerate(items):
        reader.read(index, item)
    return [msgspec.structs.replace(block, turn=0) if block.turn else block for block in reader.blocks]
