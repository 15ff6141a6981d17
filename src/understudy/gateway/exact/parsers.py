"""The formats in which models write thinking and tool calls, and the parsers of completions in them."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.wire.model import ToolCall

Tools = Sequence[dict[str, Any]]
"""Tools in the form of OpenAI chat completions."""

THINK, END_THINK = "<think>", "</think>"

_OPENING = re.compile(rf"[ \n]*+{THINK}")
_DOUBLED = re.compile(rf"(?:[ \n]*+{END_THINK})++")


class ParsedOutput(Struct, frozen=True):
    """A parsed completion. The calls have no ids; `reasoning` is None if no thinking was opened.

    A call's `arguments` are the sampled characters if the format uses JSON, else compact JSON made from them.
    Incomplete calls stay in `text`. Newlines that only separate the parts of a turn are removed.
    """

    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class CallMatch(Struct, frozen=True):
    """A complete tool call in `text[start:end]`."""

    start: int
    end: int
    call: ToolCall


FindCalls = Callable[[str, Tools], list[CallMatch]]
"""Finds the complete calls in a text, in order and without overlap. Never raises, and takes linear time."""


class CompletionFormat(Struct, frozen=True):
    """The syntax in which a family of models writes thinking and tool calls.

    `turn_ends` are the texts of the special tokens that end a turn.
    """

    name: str
    turn_ends: tuple[str, ...]
    find_calls: FindCalls

    def parse(self, text: str, tools: Tools = (), *, thinking_open: bool = False) -> ParsedOutput:
        """Parse a completion that was decoded with its special tokens. Never raises, whatever it contains.

        `thinking_open`: the prompt ended inside a thinking block (see `opens_thinking`). Calls inside closed
        thinking are drafts and not returned. Thinking that is never closed ends before trailing calls. If no tools
        are offered, a call is text.
        """
        # A server stops at the first end token. Any other one in the text is a look-alike that the model wrote.
        end = next((end for end in self.turn_ends if text.endswith(end)), "")
        text = text.removesuffix(end)
        reasoning, after_thinking = _split_thinking(text, thinking_open)
        if after_thinking is not None:
            return _assemble(after_thinking, self.find_calls(after_thinking, tools) if tools else [], reasoning)
        assert reasoning is not None
        matches = _trailing(reasoning, self.find_calls(reasoning, tools) if tools else [])
        calls = tuple(match.call for match in matches)
        return ParsedOutput("", (reasoning[: matches[0].start] if matches else reasoning).strip("\n"), calls)


def opens_thinking(prompt: str) -> bool:
    """Return whether a prompt ends inside an open thinking block. The end of the prompt is enough to tell."""
    return prompt.rstrip().endswith(THINK)


def _split_thinking(text: str, is_open: bool) -> tuple[str | None, str | None]:
    """Split off the thinking at the start. None means that thinking was not opened, or not closed."""
    thoughts: list[str] = []
    position = 0
    while True:
        if opening := _OPENING.match(text, position):
            position = opening.end()
        elif not is_open:
            break
        end = text.find(END_THINK, position)
        if end < 0:
            return "\n".join([*thoughts, text[position:].strip("\n")]), None
        thoughts.append(text[position:end].strip("\n"))
        position = end + len(END_THINK)
        is_open = False
    if doubled := _DOUBLED.match(text, position):
        position = doubled.end()
    after_thinking = text[position:].lstrip("\n") if position else text
    return "\n".join(thoughts) if thoughts else None, after_thinking


def _trailing(text: str, matches: list[CallMatch]) -> list[CallMatch]:
    """Return the calls after which only calls follow."""
    end = len(text)
    for index in range(len(matches) - 1, -1, -1):
        if text[matches[index].end : end].strip():
            return matches[index + 1 :]
        end = matches[index].start
    return matches


def _assemble(text: str, matches: list[CallMatch], reasoning: str | None) -> ParsedOutput:
    if not matches:
        return ParsedOutput(text, reasoning)
    starts = [0, *(match.end for match in matches)]
    ends = [*(match.start for match in matches), len(text)]
    parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    remaining = "\n".join(part.strip("\n") for part in parts if part.strip())
    return ParsedOutput(remaining, reasoning, tuple(match.call for match in matches))


def offered_names(tools: Tools) -> frozenset[str]:
    """Return the names of the tools, skipping those without a name."""
    functions = (json_object(tool.get("function")) for tool in tools)
    return frozenset(name for function in functions if isinstance(name := function.get("name"), str))


def json_object(value: Any) -> dict[str, Any]:
    """Return the value if it is a JSON object, else an empty dict."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


_T = TypeVar("_T")

_DEPTH_LIMIT = 200
# Skips to the next bracket outside of strings. Stopping at a `<` or a backslash, which JSON cannot have there,
# keeps the search linear: if a call begins inside another, one of the two ends after a few characters.
_BRACKET = re.compile(r'(?:[^"{}\[\]<\\]++|"(?:[^"\\]++|\\.)*+")*+[{}\[\]]', re.DOTALL)

_HERMES_OPEN = re.compile(r"<tool_call>\s*+(?=\{)")
_HERMES_CLOSE = re.compile(r"\s*+</tool_call>")

_DEEPSEEK_OPEN = re.compile(
    r"(?:<｜tool▁calls▁begin｜>\s*+)?<｜tool▁call▁begin｜>"
    r"(?:function<｜tool▁sep｜>(?P<fenced>[^\n<]++)\n```json\n|(?P<bare>[^\n<]++)<｜tool▁sep｜>)\s*+(?=\{)"
)
_DEEPSEEK_CLOSE = {
    "fenced": re.compile(r"\s*+```\s*+<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?"),
    "bare": re.compile(r"\s*+<｜tool▁call▁end｜>(?:\s*+<｜tool▁calls▁end｜>)?"),
}

_PYTHON_TAG = "<|python_tag|>"
_LLAMA_BETWEEN = re.compile(r"\s*+;?\s*+")


class _HermesCallJson(Struct):
    name: str
    arguments: msgspec.Raw


class _LlamaCall(Struct):
    name: str
    parameters: msgspec.Raw = msgspec.Raw()
    arguments: msgspec.Raw = msgspec.Raw()


class _Nothing(Struct):
    """Any JSON object; its contents are not decoded."""


def find_hermes(text: str, tools: Tools) -> list[CallMatch]:
    """Find calls written as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    matches: list[CallMatch] = []
    position = 0
    while start := _HERMES_OPEN.search(text, position):
        position = start.end()
        end = _object_end(text, position)
        close = _HERMES_CLOSE.match(text, end) if end else None
        call = _decode(text[position:end], _HermesCallJson) if close else None
        if call and close and call.name:
            matches.append(CallMatch(start.start(), close.end(), ToolCall("", call.name, _text(call.arguments))))
            position = close.end()
    return matches


def find_deepseek(text: str, tools: Tools) -> list[CallMatch]:
    """Find calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, with JSON fenced as in V3 or bare."""
    matches: list[CallMatch] = []
    position = 0
    while start := _DEEPSEEK_OPEN.search(text, position):
        position = start.end()
        style = str(start.lastgroup)
        end = _object_end(text, position)
        close = _DEEPSEEK_CLOSE[style].match(text, end) if end else None
        name = start[style].strip()
        if close and name and _decode(text[position:end], _Nothing):
            matches.append(CallMatch(start.start(), close.end(), ToolCall("", name, text[position:end])))
            position = close.end()
    return matches


def find_llama3(text: str, tools: Tools) -> list[CallMatch]:
    """Find calls written as `{"name": …, "parameters": {…}}`, several separated by `;`.

    They follow `<|python_tag|>`, or begin the turn. In the latter case they must name an offered tool, because an
    answer may be JSON too.
    """
    bare = text.lstrip().startswith("{")
    tag = -1 if bare else text.find(_PYTHON_TAG)
    if not bare and tag < 0:
        return []
    start, position = (0, 0) if bare else (tag, tag + len(_PYTHON_TAG))
    names = offered_names(tools)
    matches: list[CallMatch] = []
    while between := _LLAMA_BETWEEN.match(text, position):
        begin = between.end()
        end = _object_end(text, begin) if text.startswith("{", begin) else 0
        call = _decode(text[begin:end], _LlamaCall) if end else None
        arguments = _text(call.parameters) or _text(call.arguments) if call else ""
        if not call or not call.name or not arguments or (bare and call.name not in names):
            break
        matches.append(CallMatch(position if matches else start, end, ToolCall("", call.name, arguments)))
        position = end
    return matches


def _object_end(text: str, start: int) -> int:
    """Return where the JSON object that starts here ends, or 0 if it does not. Its contents are only scanned."""
    depth, position = 0, start
    while bracket := _BRACKET.match(text, position):
        position = bracket.end()
        depth += 1 if text[position - 1] in "{[" else -1
        if depth == 0:
            return position
        if depth > _DEPTH_LIMIT:
            break
    return 0


def _decode(text: str, expected: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(text, type=expected)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None


def _text(raw: msgspec.Raw) -> str:
    return bytes(raw).decode()


STRING = frozenset({"string"})

_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON values, for models that learned from templates which print Python values."""


def parameter_types(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool, except parameters whose type the schema leaves open."""
    for tool in tools:
        function = json_object(tool.get("function"))
        if function.get("name") == name:
            properties = json_object(json_object(function.get("parameters")).get("properties"))
            types = {key: _types(schema) for key, schema in properties.items()}
            return {key: allowed for key, allowed in types.items() if allowed}
    return {}


def typed_json(value: str, types: frozenset[str] | None) -> str:
    """Return a bare value as JSON: parsed if the types allow that, else as a string.

    Numbers, objects and arrays keep their spelling. `types` None allows every type.
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
    """Return all types that a schema names, itself or in its alternatives; empty if it leaves the type open."""
    types: set[str] = set()
    waiting = [schema]
    while waiting:
        subschema = json_object(waiting.pop())
        alternatives = [*_list(subschema.get("anyOf")), *_list(subschema.get("oneOf"))]
        values = [*_list(subschema.get("enum")), *([subschema["const"]] if "const" in subschema else [])]
        declared = subschema.get("type")
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
    """How a call is written. A call ends at the first `last`, whatever the values before it contain.

    `head` has the groups `name` and `open` (the call's opening tag). A value lies between `key` and `next_key`, or
    `key` and `last`. `wrapped`: values are on lines of their own.
    """

    head: re.Pattern[str]
    no_arguments: re.Pattern[str]
    key: re.Pattern[str]
    next_key: re.Pattern[str]
    last: re.Pattern[str]
    wrapped: bool


_QWEN3_CODER = _Syntax(
    # Models often forget the opening tag; then the tool must be an offered one.
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
    """Find calls written as
    `<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`.
    """
    return _find(_QWEN3_CODER, text, tools)


def find_glm(text: str, tools: Tools) -> list[CallMatch]:
    """Find calls written as `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>`."""
    return _find(_GLM, text, tools)


def _find(syntax: _Syntax, text: str, tools: Tools) -> list[CallMatch]:
    ends = [(match.start(), match.end()) for match in syntax.last.finditer(text)]
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
    """Return the arguments from the first `key` on as compact JSON. If a name repeats, the last one counts."""
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


_CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")

FORMATS = {
    format_.name: format_
    for format_ in (
        CompletionFormat("hermes", _CHATML_ENDS, find_hermes),
        CompletionFormat("qwen3-coder", _CHATML_ENDS, find_qwen3_coder),
        CompletionFormat("glm", ("<|user|>", "<|observation|>", "<|endoftext|>"), find_glm),
        CompletionFormat("deepseek", ("<｜end▁of▁sentence｜>",), find_deepseek),
        CompletionFormat("llama3", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), find_llama3),
    )
}


def format_named(name: str) -> CompletionFormat:
    """Return the format with this name. Raises ConfigError if there is none."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"unsupported output format {name!r}; give one of {', '.join(sorted(FORMATS))}"
        ) from None
