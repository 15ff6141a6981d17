"""The tools of a Responses request as functions that any model can call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import FREEFORM_SCHEMA, freeform_input
from understudy.wire.decoding import decode
from understudy.wire.errors import InvalidRequest
from understudy.wire.model import ToolCall
from understudy.wire.tools import ToolCache, function_tool

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
