"""Tools for a conversation whose log does not hold them: what its own calls tell of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

from msgspec import Struct, field

from understudy.ingest.trace import Message, Trace
from understudy.preference.proposals import sent_name
from understudy.wire.arguments import parse_object

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


class _Seen(Struct):
    """A tool as it was called: how often, and of each argument how often, and with what types."""

    calls: int = 0
    arguments: dict[str, int] = field(default_factory=dict[str, int])
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def inferred(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The tools called in messages, by name, in OpenAI form: each takes the arguments that it was seen with.

    One that it had in each call is required, and may be of the types it had; anything more is allowed.
    """
    tools: dict[str, _Seen] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function: dict[str, Any] = call.get("function") or {}
            arguments = parse_object(str(function.get("arguments") or ""))
            name = function.get("name")
            if not isinstance(name, str) or not name or arguments is None:
                continue
            seen = tools.setdefault(name, _Seen())
            seen.calls += 1
            for argument, value in arguments.items():
                seen.arguments[argument] = seen.arguments.get(argument, 0) + 1
                seen.types.setdefault(argument, set()).add(_type(value))
    return [_tool(name, seen) for name, seen in sorted(tools.items())]


def sendable(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools as every API takes them: functions, each name once, with a schema that is an object's.

    Those of other kinds are a provider's own, and are left out. Names are those of `sent_name`.
    """
    tools_by_name: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not (name := cast("dict[str, Any]", function).get("name")):
            continue
        fields = cast("dict[str, Any]", function)
        sent: dict[str, Any] = {"name": sent_name(str(name))}
        if fields.get("description"):
            sent["description"] = str(fields["description"])
        schema = fields.get("parameters")
        parameters = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        properties = parameters.get("properties")
        sent["parameters"] = parameters | {
            "type": "object",
            "properties": properties if isinstance(properties, dict) else {},
        }
        tools_by_name.setdefault(sent["name"], {"type": "function", "function": sent})
    return list(tools_by_name.values())


def tools_of(trace: Trace) -> list[dict[str, Any]]:
    """The tools that were called anywhere in a trace, on whichever branch.

    Not only in a state's own history: before its first call, that would leave a teacher without any.
    """
    return inferred(message for node in trace.nodes for message in trace.renderer.history(node.body))


def _tool(name: str, seen: _Seen) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for argument, types in seen.types.items():
        type_names = sorted(types - {""})
        # Where several types were seen, or none is known, any is allowed.
        properties[argument] = {"type": type_names[0]} if len(type_names) == 1 and "" not in types else {}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [argument for argument, count in seen.arguments.items() if count == seen.calls],
        "additionalProperties": True,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _type(value: object) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")
