"""The steps of an ATIF trajectory: what was said, what the model did in a turn, and the results of its tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, cast

from msgspec import Struct, field

from understudy.export.examples import arguments_of, is_valid_call
from understudy.ingest.trace import Message
from understudy.wire.arguments import unwrapped

Step = dict[str, Any]

_MEDIA = {"jpg": "image/jpeg", "jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif", "webp": "image/webp"}


class ModelTurn(Struct, frozen=True, kw_only=True):
    """What the model did in one turn: `message` is the assistant's, with thinking in `reasoning_content`.

    `copied`: another trajectory contains it too, and it is to be learned from that one.
    """

    message: Message
    model: str | None = None
    timestamp: str | None = None
    metrics: dict[str, Any] = field(default_factory=dict[str, Any])
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    copied: bool = False


def steps(items: Sequence[Message | ModelTurn], agents: Mapping[str, str] | None = None) -> list[Step]:
    """Return the steps of a conversation, numbered from 1.

    An assistant message that is not a `ModelTurn` is copied context here. Tool results belong to the step that
    called the tool; a result without a call becomes user text. `agents` maps the ids of tool calls to the
    trajectories that they started.
    """
    result: list[Step] = []
    callers: dict[Any, Step] = {}
    for item in items:
        message = item.message if isinstance(item, ModelTurn) else item
        role: str = message["role"]
        caller = callers.pop(message.get("tool_call_id"), None) if role == "tool" else None
        if caller is not None:
            _add_observation(caller, message, agents or {})
            continue
        if role == "assistant":
            turn = item if isinstance(item, ModelTurn) else ModelTurn(message=message, copied=True)
            step: Step = _agent_step(turn)
        else:
            source = "system" if role == "system" else "user"
            step = {"source": source, "message": _content(message.get("content"))}
        result.append(step)
        callers |= {call["tool_call_id"]: step for call in step.get("tool_calls", ())}
    return [{"step_id": number, **step} for number, step in enumerate(result, 1)]


def totals(all_steps: Sequence[Step]) -> dict[str, Any]:
    """Return the sums over all steps that are not copied. Sums without any value are left out."""
    metrics_list = [step["metrics"] for step in all_steps if "metrics" in step and "is_copied_context" not in step]
    sums: dict[str, Any] = {}
    for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "cost_usd"):
        values = [metrics[name] for metrics in metrics_list if name in metrics]
        if values:
            sums[f"total_{name}"] = sum(values)
    return {**sums, "total_steps": len(all_steps)}


def _agent_step(turn: ModelTurn) -> Step:
    message = turn.message
    step: Step = {"source": "agent", "message": _content(message.get("content"))}
    extra = dict(turn.extra)
    if turn.timestamp is not None:
        try:
            datetime.fromisoformat(turn.timestamp.replace("Z", "+00:00"))
            step["timestamp"] = turn.timestamp
        except ValueError:  # ATIF only accepts ISO 8601, while logs may contain anything.
            extra["timestamp"] = turn.timestamp
    fields = {
        "model_name": turn.model,
        "reasoning_content": message.get("reasoning_content"),
        "tool_calls": [_call(call) for call in message.get("tool_calls") or ()],
        **({"is_copied_context": True} if turn.copied else {"llm_call_count": 1}),
        "metrics": turn.metrics,
        "extra": extra,
    }
    return step | {name: value for name, value in fields.items() if value}


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = cast(dict[str, Any], call["function"])
    step = {"tool_call_id": call["id"], "function_name": function["name"]}
    if is_valid_call(call):
        return {**step, "arguments": arguments_of(call) or {}}
    # ATIF only accepts objects, so other arguments are kept in a separate field.
    raw = function.get("arguments")
    return {**step, "arguments": {}, "extra": {"arguments": unwrapped(raw) if isinstance(raw, str) else raw}}


def _add_observation(step: Step, message: Message, agents: Mapping[str, str]) -> None:
    call_id = message["tool_call_id"]
    result: dict[str, Any] = {"source_call_id": call_id, "content": _content(message.get("content"))}
    if call_id in agents:
        key = "trajectory_path" if agents[call_id].endswith(".json") else "trajectory_id"
        result["subagent_trajectory_ref"] = [{key: agents[call_id]}]
    if message.get("is_error"):
        result["extra"] = {"is_error": True}
    step.setdefault("observation", {"results": []})["results"].append(result)


def _content(content: Any) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in cast(list[Any], content)] if isinstance(content, list) else []
    return parts or ""


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    fields = cast(dict[str, Any], part) if isinstance(part, dict) else {}
    if "text" in fields:
        return {"type": "text", "text": str(fields["text"] or "")}
    address: Any = fields.get("image_url")
    url = cast(dict[str, Any], address).get("url") if isinstance(address, dict) else address
    if isinstance(url, str) and url:
        return {"type": "image", "source": {"media_type": _media_type(url), "path": url}}
    return {"type": "text", "text": f"[{fields.get('type', 'other')}]"}


def _media_type(url: str) -> str:
    if url.startswith("data:"):
        media_type = url[5:].partition(";")[0].partition(",")[0]
        return media_type if media_type in _MEDIA.values() else "image/png"
    return _MEDIA.get(url.partition("?")[0].rpartition(".")[2].lower(), "image/png")
