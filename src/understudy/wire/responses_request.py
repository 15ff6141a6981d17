"""OpenAI Responses requests: their schema, their tools as functions, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import FREEFORM_SCHEMA, freeform_arguments, freeform_input, wrapped
from understudy.wire.decoding import RequestTools, ToolCache, decode, decoded, function_tool
from understudy.wire.model import Block, Conversation, Part, ReadingState, ToolCall, as_stored
from understudy.wire.openai import OpenAIPart, OpenAIReader

EXPECTED = "an OpenAI Responses request"

# Tools that run at the provider, and the search for tools that were not sent. They are left out, because Codex
# offers them in every request, and the model can work without them.
_LEFT_OUT_TOOL_TYPES = frozenset(
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
    """The grammar that the input of a custom tool must match."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class ResponsesTool(Struct):
    """A tool of any type; fields that its type does not have keep their defaults."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: GrammarFormat | None = None
    tools: list[ResponsesTool] = field(default_factory=list["ResponsesTool"])


class ToolOrigin(Struct, frozen=True):
    """What the client calls a tool that the model is offered as a function."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class ResponsesToolChoice(Struct):
    """A tool_choice that is an object. `tools` are those of the type `allowed_tools`."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[ResponsesToolChoice] = field(default_factory=list["ResponsesToolChoice"])


class Toolbox(RequestTools, frozen=True):
    """The tools of a request, as functions and as `sent`; `origins` has the tool of each function, by the
    function's name.
    """

    sent: Sequence[ResponsesTool] = ()
    origins: Mapping[str, ToolOrigin] = {}


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name of a function for the model, for which there are no namespaces."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def _new_toolbox(tools: Sequence[ResponsesTool]) -> Toolbox:
    """Return the functions that a model is offered for the tools of a request."""
    functions: list[dict[str, Any]] = []
    origins: dict[str, ToolOrigin] = {}
    unsupported: list[str] = []
    for tool, namespace in _without_namespaces(tools):
        if tool.type in _LEFT_OUT_TOOL_TYPES:
            continue
        if tool.type != "function" and tool.type != "custom":
            unsupported.append(
                f"tools: unsupported type {tool.type[:100]!r}, expected function, custom or namespace; leave the "
                "tool out"
            )
            continue
        name = flat_name(tool.name, namespace)
        if not tool.name or name in origins:
            unsupported.append(
                f"tools: invalid name {name[:100]!r}, expected one that is not empty and that no other tool has; "
                "rename the tool"
            )
            continue
        origins[name] = ToolOrigin(tool.type, tool.name, namespace)
        if tool.type == "custom":
            functions.append(function_tool(name, _freeform_description(tool), FREEFORM_SCHEMA))
        else:
            functions.append(function_tool(name, tool.description, tool.parameters, tool.strict))
    return Toolbox(functions, Raw(msgspec.json.encode(functions)), tuple(unsupported), tools, origins)


def _without_namespaces(tools: Iterable[ResponsesTool]) -> Iterator[tuple[ResponsesTool, str | None]]:
    """Yield each tool with its namespace; the tools of a namespace are listed in its place."""
    for tool in tools:
        if tool.type == "namespace":
            yield from ((inner, tool.name) for inner in tool.tools)
        else:
            yield tool, None


def _freeform_description(tool: ResponsesTool) -> str:
    description = tool.description or ""
    if tool.format is None or tool.format.type != "grammar":
        return description
    return f"{description}\n\nThe input must follow this {tool.format.syntax} grammar:\n{tool.format.definition}"


_tools = ToolCache(ResponsesTool, EXPECTED, _new_toolbox)


def _choose(
    toolbox: Toolbox, choice: str | ResponsesToolChoice | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None, tuple[str, ...]]:
    """Return the functions to offer, the choice between them, and what in the choice is unsupported."""
    if isinstance(choice, ResponsesToolChoice):
        if choice.type == "allowed_tools":
            names = {flat_name(tool.name, tool.namespace) for tool in choice.tools}
            allowed = [function for function in toolbox.functions if function["function"]["name"] in names]
            return allowed, choice.mode if allowed else None, ()
        name = flat_name(choice.name, choice.namespace)
        if name not in toolbox.origins:
            problem = f"tool_choice: `tools` has no tool {(name or choice.type)[:100]!r}"
            if toolbox.origins:
                problem += f", expected one of {_names(toolbox)}"
            return toolbox.functions, None, (f"{problem}; name one that it has, or leave tool_choice out",)
        return toolbox.functions, {"type": "function", "function": {"name": name}}, ()
    if choice == "required" and not toolbox.functions:
        problem = (
            "tool_choice: required, but `tools` has no function that the client runs; add one, or leave "
            "tool_choice out"
        )
        return toolbox.functions, None, (problem,)
    return toolbox.functions, choice if toolbox.functions else None, ()


def _names(toolbox: Toolbox) -> str:
    """Return the names of the first tools, for an error."""
    names = list(toolbox.origins)
    return ", ".join(name[:100] for name in names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")


_MAX_NAMES = 20


# --- calls ---------------------------------------------------------------------------------------------


def call_item(
    origins: Mapping[str, ToolOrigin], call: ToolCall, *, item_id: str, call_id: str, status: str
) -> dict[str, Any]:
    """Return a tool call of the model as the output item that the client expects."""
    origin = origins.get(call.name) or ToolOrigin("function", call.name)
    item: dict[str, Any] = {"id": f"{_ID_PREFIXES[origin.type]}{item_id}", "call_id": call_id, "name": origin.name}
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    if origin.type == "custom":
        return {"type": "custom_tool_call", **item, "input": freeform_input(call.arguments), "status": status}
    return {"type": "function_call", **item, "arguments": call.arguments, "status": status}


_ID_PREFIXES = {"function": "fc_", "custom": "ctc_"}


# --- the schema -----------------------------------------------------------------------------------------


class ResponsesContentPart(OpenAIPart, gc=False):
    image_url: str | None = None
    detail: str | None = None


class Item(Struct, gc=False):
    """An input item of any type; fields that its type does not have keep their defaults."""

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
    """The fields of a request that contain the conversation."""

    input: str | list[Item]
    instructions: str | None = None
    tools: Raw = Raw()
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None


class ResponsesRequest(ResponsesBody, kw_only=True):
    """The fields that influence the request to a model, and those that ask for something unsupported.

    All others (`store`, `include`, `truncation`, `metadata`, `user`, `service_tier`, `prompt_cache_key`,
    `max_tool_calls`, `text.verbosity`, `stream_options`, `client_metadata`, …) are ignored, whatever they contain.
    """

    model: str
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Refused, except for values without an effect.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None


_REQUEST = msgspec.json.Decoder(ResponsesRequest)
_BODY = msgspec.json.Decoder(ResponsesBody)
_ITEM = msgspec.json.Decoder(Item)


# --- conversations --------------------------------------------------------------------------------------


def decode_request(body: bytes) -> ResponsesRequest:
    """Decode a request. Raises InvalidRequest, which says what is wrong and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """Return the conversation of a stored request. Raises the exceptions in UNREADABLE."""
    return _read_stored(decoded(_BODY.decode, body))


def _read_stored(request: ResponsesBody, instructions: tuple[str, ...] = ()) -> Conversation:
    conversation, _, _ = read_conversation(request)
    if instructions:
        instructions = (*conversation.instructions, *instructions)
        conversation = msgspec.structs.replace(conversation, instructions=instructions)
    tool_is_forced = isinstance(request.tool_choice, ResponsesToolChoice)
    return as_stored(conversation, bytes(request.tools), tool_is_forced=tool_is_forced)


def read_outer(body: bytes, instructions: tuple[str, ...]) -> Conversation:
    """See Dialect."""
    request = decoded(_BODY.decode, body)
    if request.input:
        raise ValueError("the outer part of this request has items, expected none; read the request as a whole")
    return _read_stored(request, instructions)


def read_next(state: ReadingState, body: bytes) -> tuple[list[Block], ReadingState]:
    """See Dialect. The tools that an item adds belong to the whole request."""
    item = decoded(_ITEM.decode, body)
    if item.type == "additional_tools":
        raise ValueError("an item changes the tools; read the request as a whole")
    return _ResponsesReader().read_after(state, item)


def read_conversation(request: ResponsesBody) -> tuple[Conversation, str | dict[str, Any] | None, Toolbox]:
    """Return a request's conversation, what in it no chat model can do, the tool choice, and the tools."""
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    toolbox = _tools.read(bytes(request.tools))
    if added := [tool for item in items if item.type == "additional_tools" for tool in item.tools]:
        # If no tool of `tools` could be read, the reasons are kept.
        unread = () if toolbox.sent else toolbox.unsupported
        toolbox = _new_toolbox([*toolbox.sent, *added])
        toolbox = msgspec.structs.replace(toolbox, unsupported=unread + toolbox.unsupported)
    functions, choice, unsupported = _choose(toolbox, request.tool_choice)
    reader = _ResponsesReader(toolbox.unsupported + unsupported)
    if request.instructions:
        reader.instructions.append(request.instructions)
    for index, item in enumerate(items):
        reader.read(index, item)
    return reader.conversation(toolbox, functions), choice, toolbox


# --- items ----------------------------------------------------------------------------------------------

_NO_OPEN_TURN, _THINKING_STAGE, _TEXT_STAGE, _CALL_STAGE = range(4)
"""What the open turn of an assistant had last: thinking, then text, then calls; each of them may be missing."""


class _ResponsesReader(OpenAIReader):
    """Reads items into blocks. The items of one response become one turn again."""

    field = "input"
    text_parts = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"})
    expected_parts = "texts or images with a URL"

    def image(self, part: ResponsesContentPart) -> Part | None:
        if part.type != "input_image" or not part.image_url:
            return None
        return {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})

    def read(self, index: int, message: Item) -> None:
        """Read the next item."""
        self._index, item = index, message
        match item.type:
            case "message":
                self._message(item)
            case "reasoning":
                # The reasoning itself where there is any, else its summary; what is only encrypted cannot be read.
                self._begin("assistant", _THINKING_STAGE)
                self.add("assistant", "thinking", self.text(item.content) or self.text(item.summary))
            case "function_call":
                arguments = item.arguments if isinstance(item.arguments, str) else ""
                self._call(item, arguments if self._response else wrapped(arguments))
            case "custom_tool_call":
                self._call(item, freeform_arguments(item.input or ""), freeform=True)
            case "function_call_output" | "custom_tool_call_output":
                if not item.call_id:
                    self.refuse("call_id: missing, expected the id of the call that this output answers; add it")
                self._begin("user")
                self.add_result(item.call_id or "", item.output)
            case hidden if hidden in _HIDDEN_ITEMS:
                pass
            case unknown:
                self.refuse(
                    f"type: unsupported value {unknown[:100]!r}, expected one of {', '.join(_KNOWN_ITEMS)}; leave "
                    "the item out"
                )
                role = "user" if unknown.endswith("_output") else "assistant"
                self._begin(role, _CALL_STAGE if role == "assistant" else _NO_OPEN_TURN)
                self.add(role, "other", f"[{unknown}]", name=unknown, source=item)

    def _message(self, item: Item) -> None:
        if item.role == "assistant":
            self._begin("assistant", _TEXT_STAGE)
            self.add("assistant", "text", self.text(item.content))
        elif item.role == "user":
            self._begin("user")
            self.add_user(item.content)
        elif self._turn < 0:
            self.instructions.append(self.text(item.content))
        else:
            self._begin("system")
            self.add("system", "text", self.text(item.content))

    def _call(self, item: Item, arguments: str, *, freeform: bool = False) -> None:
        if not item.call_id or not item.name:
            self.refuse("call_id or name: missing, expected both in a call; add what is missing")
        name = flat_name(item.name or "", item.namespace)
        self._begin("assistant", _CALL_STAGE)
        self.add("assistant", "tool_use", id=item.call_id or "", name=name, arguments=arguments, freeform=freeform)

    def _begin(self, role: str, stage: int = _NO_OPEN_TURN) -> None:
        """Begin a new turn, unless the item belongs to the assistant's turn that is open."""
        continues_turn = role == "assistant" and (self._stage < stage or self._stage == stage == _CALL_STAGE)
        if not continues_turn or self._stage == _NO_OPEN_TURN:
            self._turn += 1
        self._stage = stage


# Items that a model is shown nothing of. The calls among them were done by another provider's tools, whose results
# are not in the items.
_HIDDEN_ITEMS = ("additional_tools", "web_search_call", "image_generation_call")
_SHOWN_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_KNOWN_ITEMS = (*_SHOWN_ITEMS, "custom_tool_call", "custom_tool_call_output", *_HIDDEN_ITEMS)


def read_items(items: Sequence[Item]) -> list[Block]:
    """Return the blocks of a response's items as one turn, with tool calls as the model wrote them."""
    reader = _ResponsesReader(response=True)
    for index, item in enumerate(items):
        reader.read(index, item)
    return [msgspec.structs.replace(block, turn=0) if block.turn else block for block in reader.blocks]
