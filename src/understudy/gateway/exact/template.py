"""Chat templates, rendered as `transformers` renders them: conversations as text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Literal, NoReturn, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from understudy.errors import BackendError, ConfigError

Messages = Sequence[dict[str, Any]]
"""Messages, or tools, as OpenAI chat completions has them."""

_FAULTS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError),
    *(LookupError, AttributeError, RecursionError),
)
"""What a template can raise: it is a program of its own, and need not have thought of the conversation."""


class _CallShape(Struct, frozen=True):
    """How a template wants a turn with tool calls."""

    arguments: Literal["string", "object"]
    content: str | None
    """What stands for a text that is empty."""


# A string is what was sampled to the letter; an object may come out in another spelling, and is what most expect.
_SHAPES = (
    _CallShape("string", ""),
    _CallShape("string", None),
    _CallShape("object", ""),
    _CallShape("object", None),
)
_PROBE_ARGUMENT = "probe_4c1f"
_PROBE_ARGUMENTS = f'{{ "{_PROBE_ARGUMENT}":  "{_PROBE_ARGUMENT}"}}'


class ChatTemplate:
    """The template of a model, or its templates by name.

    `variables` are those that every rendering has (`bos_token`). `mark` is applied to every text of a conversation
    but to none of the template's own. Raises ConfigError for a template that cannot be read.
    """

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, Any], mark: Callable[[str], str]
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise, "strftime_now": _strftime_now}
        try:
            self._templates = {name: environment.from_string(text, functions) for name, text in sources.items()}
        except jinja2.TemplateError as error:
            raise ConfigError(f"invalid chat template: {error}; download it from the model again") from error
        self._variables = dict(variables)
        self._mark = mark
        self._shapes: dict[bool, _CallShape] = {}

    def render(self, messages: Messages, tools: Messages, variables: Mapping[str, Any]) -> str:
        """A conversation as text (see Codec.render). Raises BackendError."""
        shape = self._shapes.get(bool(tools)) or self._shapes.setdefault(bool(tools), self._shape(bool(tools)))
        prepared = [_prepared(message, shape) for message in messages]
        try:
            return self._render(prepared, tools, variables)
        except _FAULTS as error:
            raise BackendError(
                f"the chat template rejected the conversation: {str(error) or type(error).__name__}", status=400
            ) from error

    def _render(self, messages: Messages, tools: Messages, variables: Mapping[str, Any]) -> str:
        named = "tool_use" if tools and "tool_use" in self._templates else "default"
        shown = {"messages": _marked(messages, self._mark), "tools": _marked(tools, self._mark) if tools else None}
        return self._templates[named].render({**self._variables, **shown, "documents": None, **variables})

    def _shape(self, with_tools: bool) -> _CallShape:
        """The first shape in which the template shows the arguments of a call; an object where it shows none."""
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": _PROBE_ARGUMENTS}}
        probe = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for shape in _SHAPES:
            wanted = _PROBE_ARGUMENTS if shape.arguments == "string" else _PROBE_ARGUMENT
            try:
                text = self._render([_prepared(message, shape) for message in probe], [tool] * with_tools, {})
            except _FAULTS:
                continue
            if wanted in text:
                return shape
        return _CallShape("object", "")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks what trainers learn from: here it is what stands inside it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _prepared(message: dict[str, Any], shape: _CallShape) -> dict[str, Any]:
    """A message as templates expect it: its text one string, calls in their shape, reasoning by all its names."""
    prepared = {key: value for key, value in message.items() if value is not None and value != []}
    prepared["content"] = _text(message.get("content"))
    if "tool_calls" in prepared:
        prepared["content"] = prepared["content"] or shape.content
        prepared["tool_calls"] = [_shaped(call, shape) for call in message["tool_calls"]]
    reasoning = next((prepared[key] for key in ("reasoning_content", "reasoning") if key in prepared), None)
    if reasoning is not None:
        prepared |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    return prepared


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """The text of a message; parts are on lines of their own. Raises BackendError for an image."""
    if content is None or isinstance(content, str):
        return content or ""
    other = [part.get("type") for part in content if part.get("type") != "text"]
    if other:
        raise BackendError(
            f'unsupported content of type {other[0]!r}: with tokens = "exact" a model gets text only',
            status=400,
        )
    return "\n".join(part["text"] for part in content)


def _shaped(call: dict[str, Any], shape: _CallShape) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if shape.arguments == "object":
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        # What is no object the template may still take as the string that it is.
        arguments = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): _marked(item, mark) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, Sequence):
        return [_marked(item, mark) for item in cast("Sequence[Any]", value)]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)
