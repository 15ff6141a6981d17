"""Formats that write the arguments of a call as JSON: Hermes (Qwen 2.5 and 3), DeepSeek, Llama 3."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Struct

from understudy.gateway.exact.parsers.base import CallMatch, Tools, offered_names
from understudy.wire.model import ToolCall

_T = TypeVar("_T")

_DEPTH_LIMIT = 200
# Up to the next bracket outside of a string. A `<` or a backslash there is no JSON, and to stop at it keeps the
# search linear: of two calls that begin one inside the other, one is over after a few characters.
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
    """Any JSON object."""


def find_hermes(text: str, tools: Tools) -> list[CallMatch]:
    """Calls as `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    matches: list[CallMatch] = []
    position = 0
    while opened := _HERMES_OPEN.search(text, position):
        position = opened.end()
        end = _object_end(text, position)
        close = _HERMES_CLOSE.match(text, end) if end else None
        call = _decode(text[position:end], _HermesCallJson) if close else None
        if call and close and call.name:
            matches.append(CallMatch(opened.start(), close.end(), ToolCall("", call.name, _text(call.arguments))))
            position = close.end()
    return matches


def find_deepseek(text: str, tools: Tools) -> list[CallMatch]:
    """Calls between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`, the JSON fenced as in V3 or bare."""
    matches: list[CallMatch] = []
    position = 0
    while opened := _DEEPSEEK_OPEN.search(text, position):
        position = opened.end()
        style = str(opened.lastgroup)
        end = _object_end(text, position)
        close = _DEEPSEEK_CLOSE[style].match(text, end) if end else None
        name = opened[style].strip()
        if close and name and _decode(text[position:end], _Nothing):
            matches.append(CallMatch(opened.start(), close.end(), ToolCall("", name, text[position:end])))
            position = close.end()
    return matches


def find_llama3(text: str, tools: Tools) -> list[CallMatch]:
    """Calls as `{"name": …, "parameters": {…}}`, several separated by `;`.

    They follow `<|python_tag|>`, or are what the turn begins with; then they must name a tool that is offered, for
    an answer may be JSON as well.
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
    """Where the JSON object that starts here ends, 0 where it does not; inside it is not looked at closely."""
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
