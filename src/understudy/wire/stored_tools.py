"""The tools that a call offered, in OpenAI's form, whatever its dialect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec

from understudy.types import Call
from understudy.wire.blocks import decoded

_body = msgspec.json.Decoder(dict[str, Any]).decode


def offered(call: Call) -> list[dict[str, Any]] | None:
    """The tools that the agent itself runs; None when the request offers none, or is none of its dialect."""
    read = _READERS.get(call.dialect)
    try:
        given = decoded(_body, call.request).get("tools") if read else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if read is None or not isinstance(given, list):
        return None
    tools = [cast(dict[str, Any], tool) for tool in cast(list[Any], given) if isinstance(tool, dict)]
    found = [function for tool in tools if (function := read(tool))]
    return [{"type": "function", "function": function} for function in found] or None


def _function(name: Any, description: Any, parameters: Any) -> dict[str, Any] | None:
    if not isinstance(name, str) or not name:
        return None
    schema: Any = cast(Any, parameters) if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"name": name, "description": description if isinstance(description, str) else "", "parameters": schema}


def _anthropic(tool: dict[str, Any]) -> dict[str, Any] | None:
    served = "input_schema" not in tool and tool.get("type", "custom") != "custom"
    return None if served else _function(tool.get("name"), tool.get("description"), tool.get("input_schema"))


def _chat(tool: dict[str, Any]) -> dict[str, Any] | None:
    function: Any = tool.get("function")
    return _responses(cast(dict[str, Any], function)) if isinstance(function, dict) else None


def _responses(tool: dict[str, Any]) -> dict[str, Any] | None:
    if tool.get("type", "function") != "function":
        return None
    return _function(tool.get("name"), tool.get("description"), tool.get("parameters"))


_READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any] | None]] = {
    "anthropic": _anthropic,
    "openai-chat": _chat,
    "openai-responses": _responses,
}
