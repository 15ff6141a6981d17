"""Steps of ATIF, of messages and of what the model did between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from understudy.export.matching import arguments_of, is_valid_call
from understudy.ingest.trace import Message
from understudy.wire.arguments import unwrapped

Step = dict[str, Any]

_MEDIA = {"jpg": "image/jpeg", "jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif", "webp": "image/webp"}


class Did(Struct, frozen=True, kw_only=True):
    """What the model did in one turn: `message` is the assistant's, thinking in `reasoning_content`.

    `copied`: it stands in another trajectory too, which it is to be learned from.
    """

    message: Message
    model: str | None = None
    timestamp: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    copied: bool = False


def steps(items: Sequence[Message | Did], agents: Mapping[str, str] | None = None) -> list[Step]:
    """The steps of a conversation, numbered from 1.

    An assistant's message that is no `Did` was not the model's turn here, so it is copied context. Tool results
    are in the step that asked for them; one that nothing asked for is the user's words. `agents` maps the ids of
    tool calls to the trajectories that they started.
    """
    made: list[Step] = []
    asked: dict[Any, Step] = {}
    for item in items:
        message = item.message if isinstance(item, Did) else item
        role: str = message["role"]
        caller = asked.pop(message.get("tool_call_id"), None) if role == "tool" else None
        if caller is not None:
            _observe(caller, message, agents or {})
            continue
        if role == "assistant":
            step: Step = _agent(item if isinstance(item, Did) else Did(message=message, copied=True))
        else:
            source = "system" if role == "system" else "user"
            step = {"source": source, "message": _content(message.get("content"))}
        made.append(step)
        asked |= {call["tool_call_id"]: step for call in step.get("tool_calls", ())}
    return [{"step_id": number, **step} for number, step in enumerate(made, 1)]


def instant(seconds: float) -> str:
    """A time in Unix seconds as ISO 8601."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def totals(made: Sequence[Step]) -> dict[str, Any]:
    """The sums over steps, without those that are copied; what no step tells is not there."""
    told = [step["metrics"] for step in made if "metrics" in step and "is_copied_context" not in step]
    found: dict[str, Any] = {}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
        values = [metrics[name] for metrics in told if name in metrics]
        if values:
            found[f"total_{name}"] = sum(values)
    return {**found, "total_steps": len(made)}


def _agent(did: Did) -> Step:
    message = did.message
    step: Step = {"source": "agent", "message": _content(message.get("content"))}
    extra = dict(did.extra)
    if did.timestamp is not None:
        if _is_instant(did.timestamp):
            step["timestamp"] = did.timestamp
        else:
            extra["timestamp"] = did.timestamp
    if did.model:
        step["model_name"] = did.model
    if message.get("reasoning_content"):
        step["reasoning_content"] = message["reasoning_content"]
    if message.get("tool_calls"):
        step["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    if did.copied:
        step["is_copied_context"] = True
    else:
        step["llm_call_count"] = 1
    if did.metrics:
        step["metrics"] = did.metrics
    if extra:
        step["extra"] = extra
    return step


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = cast(dict[str, Any], call["function"])
    step = {"tool_call_id": call["id"], "function_name": function["name"]}
    if is_valid_call(call):
        return {**step, "arguments": arguments_of(call) or {}}
    # ATIF has objects only: what the model wrote in their place is kept beside.
    return {**step, "arguments": {}, "extra": {"arguments": _written(function.get("arguments"))}}


def _written(arguments: Any) -> Any:
    """What the model wrote as arguments that are no JSON object."""
    return unwrapped(arguments) if isinstance(arguments, str) else arguments


def _observe(step: Step, message: Message, agents: Mapping[str, str]) -> None:
    call_id = message["tool_call_id"]
    result: dict[str, Any] = {"source_call_id": call_id, "content": _content(message.get("content"))}
    if call_id in agents:
        result["subagent_trajectory_ref"] = [_reference(agents[call_id])]
    if message.get("is_error"):
        result["extra"] = {"is_error": True}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _reference(place: str) -> dict[str, str]:
    return {"trajectory_path": place} if place.endswith(".json") else {"trajectory_id": place}


def _content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in cast(list[Any], content)] if isinstance(content, list) else []
    return parts or ""


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    told = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    if "text" in told:
        return {"type": "text", "text": str(told["text"] or "")}
    address: Any = told.get("image_url")
    url = cast(dict[str, Any], address).get("url") if isinstance(address, dict) else address
    if isinstance(url, str) and url:
        return {"type": "image", "source": {"media_type": _media(url), "path": url}}
    return {"type": "text", "text": f"[{told.get('type', 'other')}]"}


def _media(url: str) -> str:
    if url.startswith("data:"):
        told = url[5:].partition(";")[0].partition(",")[0]
        return told if told in _MEDIA.values() else "image/png"
    return _MEDIA.get(url.partition("?")[0].rpartition(".")[2].lower(), "image/png")


def _is_instant(text: str) -> bool:
    try:
        datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return False
    return True


def plain(value: Any) -> Any:
    """A struct as JSON types."""
    return msgspec.to_builtins(value)
