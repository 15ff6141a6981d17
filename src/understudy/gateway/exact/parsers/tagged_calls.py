"""Formats that write every argument between tags of its own: Qwen3-Coder and GLM 4.5 to 4.7."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.gateway.exact.parsers.base import CallMatch, Tools, json_object, offered_names
from understudy.wire.model import ToolCall

STRING = frozenset({"string"})

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""As a template that prints Python's own values has taught them to the model."""


def parameter_types(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """The JSON types that each parameter of a tool may have, without those of which the schema says nothing."""
    for tool in tools:
        function = json_object(tool.get("function"))
        if function.get("name") == name:
            properties = json_object(json_object(function.get("parameters")).get("properties"))
            types = {key: _types(schema) for key, schema in properties.items()}
            return {key: allowed for key, allowed in types.items() if allowed}
    return {}


def typed_json(value: str, types: frozenset[str] | None) -> str:
    """A bare value as JSON: what it says where the types allow that, else the string that it is.

    Numbers, objects and arrays keep their own spelling. With `types` None every type is allowed.
    """
    if types != STRING:
        word = value.strip()
        word = _PYTHON_WORDS.get(word, word)
        type_ = _type_of_json(word)
        wide = types is None or type_ in types or (type_ == "integer" and "number" in types)
        if type_ not in (None, "string") and wide:
            return word
    return json.dumps(value, ensure_ascii=False)


def _types(schema: Any) -> frozenset[str]:
    """All types that a schema names, itself or in its alternatives; empty where it leaves the type open."""
    types: set[str] = set()
    waiting = [schema]
    while waiting:
        one = json_object(waiting.pop())
        alternatives = [*_list(one.get("anyOf")), *_list(one.get("oneOf"))]
        values = [*_list(one.get("enum")), *([one["const"]] if "const" in one else [])]
        declared = one.get("type")
        named = [declared] if isinstance(declared, str) else _list(declared)
        if not named and not alternatives and not values:
            return frozenset()
        types.update(name for name in named if isinstance(name, str))
        if not named:
            types.update(_type_of(value) for value in values)
        waiting.extend(alternatives)
    return frozenset(types)


def _type_of_json(text: str) -> str | None:
    try:
        return _type_of(msgspec.json.decode(text))
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _type_of(value: object) -> str:
    for type_, name in _NAMES:
        if isinstance(value, type_):
            return "integer" if name == "number" and isinstance(value, float) and value.is_integer() else name
    return "null"


_NAMES: tuple[tuple[type, str], ...] = (
    (str, "string"),
    (bool, "boolean"),
    (int, "integer"),
    (float, "number"),
    (dict, "object"),
    (list, "array"),
)


def _list(value: Any) -> list[Any]:
    return cast("list[Any]", value) if isinstance(value, list) else []


class _Syntax(Struct, frozen=True):
    """How a call is written. A call ends at the first `last`, whatever the values before it hold.

    `head` has the groups `name` and `open` (the call's opening tag). A value stands between `key` and `next_key`,
    or `key` and `last`. `wrapped` says that a value stands on lines of its own.
    """

    head: re.Pattern[str]
    no_arguments: re.Pattern[str]
    key: re.Pattern[str]
    next_key: re.Pattern[str]
    last: re.Pattern[str]
    wrapped: bool


_QWEN3_CODER = _Syntax(
    # The opening tag is often forgotten: then the tool must be one that is offered.
    head=re.compile(r"(?:(?P<open><tool_call>)\s*+)?<function=(?P<name>[^<>\n]++)>\s*+"),
    no_arguments=re.compile(r"</function>\s*+</tool_call>"),
    key=re.compile(r"<parameter=([^<>\n]++)>"),
    next_key=re.compile(r"</parameter>\s*+<parameter=([^<>\n]++)>"),
    last=re.compile(r"</parameter>\s*+</function>\s*+</tool_call>"),
    wrapped=True,
)
_GLM = _Syntax(
    head=re.compile(r"(?P<open><tool_call>)\s*+(?P<name>[^<>\s]++)\s*+"),
    no_arguments=re.compile(r"</tool_call>"),
    key=re.compile(r"<arg_key>([^<]++)</arg_key>\s*+<arg_value>"),
    next_key=re.compile(r"</arg_value>\s*+<arg_key>([^<]++)</arg_key>\s*+<arg_value>"),
    last=re.compile(r"</arg_value>\s*+</tool_call>"),
    wrapped=False,
)


def find_qwen3_coder(text: str, tools: Tools) -> list[CallMatch]:
    """Calls as `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`."""
    return _find(_QWEN3_CODER, text, tools)


def find_glm(text: str, tools: Tools) -> list[CallMatch]:
    """Calls as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`."""
    return _find(_GLM, text, tools)


def _find(syntax: _Syntax, text: str, tools: Tools) -> list[CallMatch]:
    ends = [(one.start(), one.end()) for one in syntax.last.finditer(text)]
    names = offered_names(tools)
    matches: list[CallMatch] = []
    position = 0
    while head := syntax.head.search(text, position):
        position = head.end()
        name = head["name"].strip()
        if not name or (not head["open"] and name not in names):
            continue
        arguments, end = "{}", 0
        if empty := syntax.no_arguments.match(text, position):
            end = empty.end()
        elif key := syntax.key.match(text, position):
            index = bisect_left(ends, (key.end(), 0))
            if index < len(ends):
                arguments = _arguments(syntax, text, key, ends[index][0], parameter_types(tools, name))
                end = ends[index][1]
        if end:
            matches.append(CallMatch(head.start(), end, ToolCall("", name, arguments)))
            position = end
    return matches


def _arguments(syntax: _Syntax, text: str, key: re.Match[str], end: int, types: dict[str, frozenset[str]]) -> str:
    """Compact JSON of the arguments whose first one begins with `key`; of two by one name the last counts."""
    values: dict[str, str] = {}
    while True:
        next_key = syntax.next_key.search(text, key.end(), end)
        value = text[key.end() : next_key.start() if next_key else end]
        if syntax.wrapped:
            value = value.removeprefix("\n").removesuffix("\n")
        name = key[1].strip()
        values[name] = typed_json(value, types.get(name))
        if next_key is None:
            return "{" + ",".join(f"{typed_json(name, STRING)}:{value}" for name, value in values.items()) + "}"
        key = next_key
