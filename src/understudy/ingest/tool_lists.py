"""The tools that a model was offered: as logged, else as its program's version offers them, else inferred from
calls.

A model that learns from conversations must be shown the tools that it is to call, but few logs hold them. For
Claude Code there is a table of what its versions offer (`claude_code/tool_table.py`); any other tool is inferred
from its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Protocol, Self

from msgspec import Struct, field

from understudy.ingest.claude_code.tool_table import claude_tools
from understudy.ingest.json_values import mapping, string
from understudy.wire.arguments import UNPARSED_INPUT, parse_object

ToolsSource = Literal["logged", "version", "inferred"]
"""Where a state's tools come from: `logged`, its log; `version`, what its agent's version offers; `inferred`, if
at least one tool was inferred from its calls.
"""

NO_SUCH_TOOL = "No such tool available"
"""Text near the beginning of the result of a call to a tool that does not exist (Claude Code)."""

_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


class HasTools(Protocol):
    """The tool fields of a state, which are the fields of `ToolList`."""

    tools: list[dict[str, Any]] | None
    tools_source: ToolsSource | None
    tools_version: str | None
    tools_inferred: tuple[str, ...]


class ToolList(Struct, frozen=True, kw_only=True):
    """Tools in OpenAI's form, and where they come from. Both are None if nothing is known.

    `version` is the recorded agent version that the tools were taken from, the nearest to the session's own;
    `inferred` are the names of tools that were inferred from calls.
    """

    tools: list[dict[str, Any]] | None = None
    source: ToolsSource | None = None
    version: str | None = None
    inferred: tuple[str, ...] = ()

    @classmethod
    def of(cls, state: HasTools) -> Self:
        """Return the tools of a state."""
        return cls(
            tools=state.tools,
            source=state.tools_source,
            version=state.tools_version,
            inferred=state.tools_inferred,
        )


class _ToolUse(Struct):
    """How a tool was called: the number of calls, and for each argument its number of uses and its types."""

    calls: int = 0
    arguments: dict[str, int] = field(default_factory=dict[str, int])
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def tool_list(
    messages: Iterable[Mapping[str, Any]],
    *,
    version: str | None = None,
    subagent: bool = False,
    date: str | None = None,
) -> ToolList:
    """Return the tools of a conversation whose log does not hold them.

    `messages`: all messages of the conversation. `version`: the version of Claude Code; None for another program
    or an unknown version. `date`: the session's ISO date or time.
    """
    called = _called(messages)
    recorded = claude_tools(version, called, subagent=subagent, date=date) if version else None
    tools = [] if recorded is None else recorded.tools
    missing = sorted(called.keys() - names_of(tools))
    tools = [*tools, *(_inferred_tool(name, _tool_use(called[name])) for name in missing)]
    if not tools:
        return ToolList()
    return ToolList(
        tools=tools,
        source="inferred" if missing else "version",
        version=recorded and recorded.version,
        inferred=tuple(missing),
    )


def completed(offered: ToolList, messages: Iterable[Mapping[str, Any]]) -> ToolList:
    """Return the list extended by tools that further messages call. A list from a log is returned unchanged."""
    if offered.source == "logged":
        return offered
    called = _called(messages)
    missing = sorted(called.keys() - names_of(offered.tools or ()))
    if not missing:
        return offered
    return ToolList(
        tools=[*(offered.tools or ()), *(_inferred_tool(name, _tool_use(called[name])) for name in missing)],
        source="inferred",
        version=offered.version,
        inferred=(*offered.inferred, *missing),
    )


def names_of(functions: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names in a list of tools or of tool calls in OpenAI's form."""
    names = (mapping(function.get("function")).get("name") for function in functions)
    return {name for name in names if isinstance(name, str)}


def _called(messages: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the arguments of each tool's calls, as JSON, by tool name. The order of the messages does not matter.

    A call that was answered with "no such tool" does not count, and a repeated call counts once. Tools without any
    call whose arguments can be parsed are left out.
    """
    calls: dict[tuple[str, str, str], None] = {}
    unknown: set[str] = set()
    for message in messages:
        if message.get("role") == "tool":
            content = message.get("content")
            if isinstance(content, str) and NO_SUCH_TOOL in content[:80]:
                unknown.add(str(message.get("tool_call_id")))
        for call in message.get("tool_calls") or ():
            function = mapping(call.get("function"))
            if name := string(function.get("name")):
                calls[str(call.get("id")), name, str(function.get("arguments") or "")] = None
    tools: dict[str, list[str]] = {}
    for call_id, name, text in calls:
        if call_id not in unknown and (name in tools or _arguments(text) is not None):
            tools.setdefault(name, []).append(text)
    return tools


def _arguments(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call, or None if they cannot be parsed."""
    arguments = parse_object(text)
    return None if arguments is None or UNPARSED_INPUT in arguments else arguments


def _tool_use(texts: Iterable[str]) -> _ToolUse:
    """Summarize calls of one tool, given their arguments as JSON. Calls that cannot be parsed are skipped."""
    use = _ToolUse()
    for text in texts:
        arguments = _arguments(text)
        if arguments is None:
            continue
        use.calls += 1
        for argument, value in arguments.items():
            use.arguments[argument] = use.arguments.get(argument, 0) + 1
            use.types.setdefault(argument, set()).add(_type(value))
    return use


def _inferred_tool(name: str, use: _ToolUse) -> dict[str, Any]:
    """Return a tool definition inferred from calls.

    An argument that every call had is required. Its type is the observed one; additional arguments are allowed.
    """
    properties: dict[str, Any] = {}
    for argument, types in sorted(use.types.items()):
        type_names = sorted(types - {""})
        # With several types, or an unknown one, any type is allowed.
        properties[argument] = {"type": type_names[0]} if len(type_names) == 1 and "" not in types else {}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": sorted(argument for argument, count in use.arguments.items() if count == use.calls),
        "additionalProperties": True,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _type(value: object) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")
