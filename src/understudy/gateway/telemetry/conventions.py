"""Where telemetry goes, and what it says of a call: the names of the GenAI semantic conventions stand here only.

They are those that OpenTelemetry's Python package of conventions lists; their home is a repository of their own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import groupby
from typing import Any, cast
from urllib.parse import unquote

import msgspec
from msgspec import Struct

from understudy.types import Call
from understudy.wire.model import Block
from understudy.wire.stored import read_request, read_response

Attribute = str | int | float | list[str]

HEADERS_VARIABLE = "OTEL_EXPORTER_OTLP_HEADERS"
ATTEMPT_ID = "understudy.attempt.id"
OPERATION = "chat"
_STOPS = 16
_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "seed": "gen_ai.request.seed",
}


class TelemetryCollector(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where telemetry goes: `endpoint` is the base URL of an OTLP/HTTP collector.

    Headers for it, which may be secrets, are in the environment variable OTEL_EXPORTER_OTLP_HEADERS. `contents`
    asks for the prompts and answers too, else nothing that an agent or a model wrote is exported.
    """

    endpoint: str
    contents: bool = False

    @property
    def headers(self) -> dict[str, str]:
        """What goes with each export, as `name=value` with commas between, values in URL encoding."""
        pairs = (pair.partition("=") for pair in os.environ.get(HEADERS_VARIABLE, "").split(","))
        return {name.strip().lower(): unquote(value.strip()) for name, _, value in pairs if name.strip()}


def attributes(call: Call) -> dict[str, Attribute]:
    """What the conventions say of a call, without its contents. What is not known is not there."""
    usage = call.usage
    answered = call.finish_reason is not None
    values: dict[str, Attribute | None] = {
        "gen_ai.operation.name": OPERATION,
        "gen_ai.provider.name": call.backend,
        "gen_ai.request.model": call.requested_model,
        "gen_ai.response.model": call.backend_model if answered else None,
        "gen_ai.response.finish_reasons": None if call.finish_reason is None else [call.finish_reason],
        "gen_ai.conversation.id": call.session_id,
        "gen_ai.agent.id": call.agent_id,
        "gen_ai.usage.input_tokens": usage.prompt_tokens if answered else None,
        "gen_ai.usage.output_tokens": usage.completion_tokens if answered else None,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens or None,
        "gen_ai.usage.cache_creation.input_tokens": usage.cache_write_tokens or None,
        "gen_ai.request.stop_sequences": _strings(call.sampling.get("stop")),
        "error.type": None if call.error is None else call.error.type,
        ATTEMPT_ID: call.attempt_id,
        "understudy.call.id": call.id,
        "understudy.call.status": call.status,
        "understudy.dialect": call.dialect,
        "understudy.error.boundary": None if call.error is None else call.error.boundary,
        "understudy.policy_version": call.policy_version,
        "understudy.cost_usd": call.cost_usd,
    }
    for name, attribute in _SAMPLING.items():
        values[attribute] = _number(call.sampling.get(name))
    return {name: value for name, value in values.items() if value is not None}


def contents(call: Call) -> dict[str, Attribute]:
    """What was said in a call, as the JSON text that the conventions describe; nothing when it is too deep."""
    asked, answer = read_request(call), read_response(call)
    values: dict[str, Any] = {
        "gen_ai.system_instructions": [{"type": "text", "content": asked.system}] if asked.system else None,
        "gen_ai.input.messages": [
            _message(turn) for _, turn in groupby(asked.blocks, key=lambda block: block.turn)
        ],
    }
    if answer is not None:
        values["gen_ai.output.messages"] = [_message(answer) | {"finish_reason": call.finish_reason or ""}]
    try:
        return {name: msgspec.json.encode(value).decode() for name, value in values.items() if value}
    except RecursionError:
        return {}


def _message(blocks: Iterable[Block]) -> dict[str, Any]:
    turn = list(blocks)
    role = turn[0].role if turn else "assistant"
    return {"role": role, "parts": [_part(block) for block in turn]}


def _part(block: Block) -> dict[str, Any]:
    match block.kind:
        case "text":
            return {"type": "text", "content": block.text}
        case "thinking":
            return {"type": "reasoning", "content": block.text}
        case "tool_use":
            return {"type": "tool_call", "id": block.id, "name": block.name, "arguments": block.inputs()}
        case "tool_result":
            return {"type": "tool_call_response", "id": block.id, "response": block.text}
        case "other":
            return {"type": block.name}


def _strings(value: Any) -> list[str] | None:
    """The stop strings, of which a request may give one or several."""
    listed = cast(list[Any], value if isinstance(value, list) else [value])
    return [item for item in listed[:_STOPS] if isinstance(item, str)] or None


def _number(value: Any) -> float | None:
    """A number that fits into a span: one that does not would cost the whole batch it is in."""
    return value if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) else None
