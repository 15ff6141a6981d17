"""The tools of a Responses request as functions that any model can call, and calls of them told back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from understudy.wire.arguments import parse_object
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import function_tool
from understudy.wire.model import ToolCall

_INPUT = "input"
_INPUT_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {_INPUT: {"type": "string", "description": "The whole input of the tool, as plain text."}},
    "required": [_INPUT],
    "additionalProperties": False,
}
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


class Format(Struct):
    """What the input of a custom tool must look like."""

    type: str = "text"
    syntax: str = ""
    definition: str = ""


class Tool(Struct):
    """A tool of any type; a field that its type does not have keeps the default."""

    type: str
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: Format | None = None
    tools: list[Tool] = field(default_factory=list["Tool"])


class Origin(Struct, frozen=True):
    """What the client calls a function that the model was offered."""

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class Choice(Struct):
    """A tool_choice that is more than a word. `tools` are those of `allowed_tools`."""

    type: str
    name: str = ""
    namespace: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[Choice] = field(default_factory=list["Choice"])


class Toolbox(Struct, frozen=True):
    """`functions` in the shape of chat completions; `origins` says by the function's name what each one was."""

    functions: list[dict[str, Any]]
    origins: dict[str, Origin]


def flat(name: str, namespace: str | None) -> str:
    """The name of a function for the model, which knows no namespaces."""
    return f"{namespace.removesuffix('__')}__{name}" if namespace else name


def toolbox(tools: Sequence[Tool]) -> Toolbox:
    """Translate tools. Raises InvalidRequest for one that no function can stand for."""
    box = Toolbox([], {})
    for tool in tools:
        _add(box, tool, None)
    return box


def _add(box: Toolbox, tool: Tool, namespace: str | None) -> None:
    match tool.type:
        case "function":
            _put(box, Origin("function", tool.name, namespace), tool.description, tool.parameters, tool.strict)
        case "custom":
            _put(box, Origin("custom", tool.name, namespace), _freeform(tool), _INPUT_SCHEMA, None)
        case "namespace" if namespace is None:
            for inner in tool.tools:
                _add(box, inner, tool.name)
        case left_out if left_out in _LEFT_OUT:
            pass
        case unknown:
            raise InvalidRequest(f"tools: type {unknown!r} is not known here; function, custom and namespace are")


def _put(
    box: Toolbox,
    origin: Origin,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
) -> None:
    name = flat(origin.name, origin.namespace)
    if not origin.name or name in box.origins:
        raise InvalidRequest(f"tools: the name {name!r} is empty, or two tools have it")
    box.origins[name] = origin
    box.functions.append(function_tool(name, description, parameters, strict))


def _freeform(tool: Tool) -> str:
    description = tool.description or ""
    if tool.format is None or tool.format.type != "grammar":
        return description
    return f"{description}\n\nThe input must follow this {tool.format.syntax} grammar:\n{tool.format.definition}"


def choose(box: Toolbox, choice: str | Choice | None) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """The functions to offer, and the choice between them. Raises InvalidRequest."""
    if isinstance(choice, Choice):
        if choice.type == "allowed_tools":
            allowed = {flat(tool.name, tool.namespace) for tool in choice.tools}
            kept = [function for function in box.functions if function["function"]["name"] in allowed]
            return kept, choice.mode if kept else None
        name = flat(choice.name, choice.namespace)
        if name not in box.origins:
            raise InvalidRequest(f"tool_choice: there is no tool {name or choice.type!r} here to be chosen")
        return box.functions, {"type": "function", "function": {"name": name}}
    if choice == "required" and not box.functions:
        raise InvalidRequest(
            "tool_choice: a tool is required, and there is none; tools of the server are not here"
        )
    return box.functions, choice if box.functions else None


# --- calls ---------------------------------------------------------------------------------------------


def called_item(
    origins: Mapping[str, Origin], call: ToolCall, *, item_id: str, call_id: str, status: str
) -> dict[str, Any]:
    """A tool call of the model as the output item that the client expects."""
    origin = origins.get(call.name) or Origin("function", call.name)
    item: dict[str, Any] = {"id": f"{_PREFIX[origin.type]}{item_id}", "call_id": call_id, "name": origin.name}
    if origin.namespace is not None:
        item["namespace"] = origin.namespace
    if origin.type == "custom":
        return {"type": "custom_tool_call", **item, "input": custom_input(call.arguments), "status": status}
    return {"type": "function_call", **item, "arguments": call.arguments, "status": status}


_PREFIX = {"function": "fc_", "custom": "ctc_"}


def custom_input(arguments: str) -> str:
    """The plain text that a model passed to a custom tool: in the one parameter, or as it wrote it."""
    text = (parse_object(arguments) or {}).get(_INPUT)
    return text if isinstance(text, str) else arguments


def custom_arguments(sampled: str | None, text: str) -> str:
    """The arguments to send to the model for a custom call: as it wrote them when the echo says the same.

    Text that was no JSON is put into the one parameter: servers refuse a conversation with such a call.
    """
    if sampled is not None and parse_object(sampled) is not None and custom_input(sampled) == text:
        return sampled
    return msgspec.json.encode({_INPUT: text}).decode()
