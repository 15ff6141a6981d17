"""What a parser of a model's own output format gives: the text, the reasoning and the tool calls of a turn."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from msgspec import Struct

from understudy.wire.model import ToolCall

Tools = Sequence[dict[str, Any]]
"""Tools as OpenAI chat completions has them."""

THINK, END_THINK = "<think>", "</think>"

_OPENING = re.compile(rf"[ \n]*+{THINK}")
_DOUBLED = re.compile(rf"(?:[ \n]*+{END_THINK})++")


class ParsedOutput(Struct, frozen=True):
    """A completion, taken apart. The ids of the calls are empty; `reasoning` is None where none was opened.

    `arguments` of a call are the sampled characters where the format writes JSON, else compact JSON of what it
    writes. What is no whole call stays in `text`. Newlines that only keep the parts of a turn apart are not told.
    """

    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class CallMatch(Struct, frozen=True):
    """A whole tool call in `text[start:end]`."""

    start: int
    end: int
    call: ToolCall


FindCalls = Callable[[str, Tools], list[CallMatch]]
"""The whole calls in a text, in order and apart from each other. Never raises, and takes linear time."""


class CompletionFormat(Struct, frozen=True):
    """The syntax in which a family of models writes thinking and tool calls.

    `turn_ends` are the texts of the special tokens that end a turn.
    """

    name: str
    turn_ends: tuple[str, ...]
    find_calls: FindCalls

    def parse(self, text: str, tools: Tools = (), *, thinking_open: bool = False) -> ParsedOutput:
        """Take a completion apart, which was decoded with its special tokens. Never raises, whatever it says.

        `thinking_open`: the prompt ended inside a thinking block that it had opened itself (see `opens_thinking`).
        Calls inside closed thinking are drafts. Thinking that is never closed ends where only calls follow. Where
        no tools are offered, a call is text.
        """
        # A server stops at the first of them: any other is a look-alike that the model wrote.
        end = next((end for end in self.turn_ends if text.endswith(end)), "")
        text = text.removesuffix(end)
        reasoning, rest = _split_thinking(text, thinking_open)
        if rest is not None:
            return _assemble(rest, self.find_calls(rest, tools) if tools else [], reasoning)
        assert reasoning is not None
        matches = _trailing(reasoning, self.find_calls(reasoning, tools) if tools else [])
        calls = tuple(one.call for one in matches)
        return ParsedOutput("", (reasoning[: matches[0].start] if matches else reasoning).strip("\n"), calls)


def opens_thinking(prompt: str) -> bool:
    """Whether a prompt, of which the end is enough, leaves a thinking block open for the model to go on in."""
    return prompt.rstrip().endswith(THINK)


def _split_thinking(text: str, is_open: bool) -> tuple[str | None, str | None]:
    """The thinking at the start and what follows it: None for thinking that was not opened, or not closed."""
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
    rest = text[position:].lstrip("\n") if position else text
    return "\n".join(thoughts) if thoughts else None, rest


def _trailing(text: str, matches: list[CallMatch]) -> list[CallMatch]:
    """Those of the calls after which nothing but calls comes."""
    end = len(text)
    for index in range(len(matches) - 1, -1, -1):
        if text[matches[index].end : end].strip():
            return matches[index + 1 :]
        end = matches[index].start
    return matches


def _assemble(text: str, matches: list[CallMatch], reasoning: str | None) -> ParsedOutput:
    if not matches:
        return ParsedOutput(text, reasoning)
    starts = [0, *(one.end for one in matches)]
    ends = [*(one.start for one in matches), len(text)]
    parts = [text[start:end] for start, end in zip(starts, ends, strict=True)]
    remaining = "\n".join(part.strip("\n") for part in parts if part.strip())
    return ParsedOutput(remaining, reasoning, tuple(one.call for one in matches))


def offered_names(tools: Tools) -> frozenset[str]:
    """The names of the tools; what has none is left out."""
    functions = (json_object(tool.get("function")) for tool in tools)
    return frozenset(name for function in functions if isinstance(name := function.get("name"), str))


def json_object(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
