"""The chat template: a conversation as the marked text that is encoded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from understudy.model.protocol import Message, Tool
from understudy.model.scripted.tokenizer import mark

TURN_END = "<|im_end|>"


def render(
    messages: Sequence[Message], tools: Sequence[Tool] | None, *, add_generation_prompt: bool = True
) -> str:
    """Marked text of a conversation. Raises BackendError when a message holds what the model cannot read."""
    return _template().render(
        messages=[_fields(message) for message in messages],
        tools=[msgspec.to_builtins(tool) for tool in tools or ()],
        add_generation_prompt=add_generation_prompt,
    )


def render_call(name: str, arguments: str) -> str:
    """Marked text of one tool call as the template writes it."""
    return f'<tool_call>\n{{"name": {_to_json(name)}, "arguments": {mark(arguments)}}}\n</tool_call>'


def _fields(message: Message) -> dict[str, Any]:
    """A message as the template sees it: every text marked, so that none of it can become a special token."""
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": mark(message.text),
    }
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        fields["reasoning"] = mark(reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "name": call.function.name,
                "arguments": mark(call.function.arguments)
                if isinstance(call.function.arguments, str)
                else call.function.arguments,
            }
            for call in message.tool_calls
        ]
    return fields


def _to_json(value: Any) -> str:
    return mark(json.dumps(value, ensure_ascii=False))


@cache
def _template() -> jinja2.Template:
    # The same environment as transformers renders chat templates in.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    source = resources.files("understudy.model").joinpath("assets/chat_template.jinja").read_text("utf-8")
    return environment.from_string(source)
