"""Spans in the shape of agent-lightning 0.3: one a call, and one for the reward.

Attribute values that are no scalars are Python literals, as its adapters read them (`ast.literal_eval`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.export.base import Graded
from understudy.trajectory.tree import Node
from understudy.types import Call
from understudy.wire.stored import ChatMessage, Conversation, chat_messages

PREFIX = "llm.hosted_vllm."


class SpanStatus(Struct, frozen=True):
    """OK or ERROR, and what went wrong."""

    status_code: str
    description: str | None = None


class SpanContext(Struct, frozen=True):
    """The identity of a span."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class Resource(Struct, frozen=True):
    """Who emitted a span."""

    attributes: dict[str, str]
    schema_url: str = ""


class Span(Struct, frozen=True, kw_only=True):
    """One line of a stream. Times are Unix seconds; `sequence_id` counts from 1 within the attempt."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None = None
    name: str
    status: SpanStatus
    attributes: dict[str, str | int | float]
    events: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    links: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    start_time: float | None
    end_time: float | None
    context: SpanContext
    parent: SpanContext | None = None
    resource: Resource


def spans(graded: Graded, nodes: Sequence[Node]) -> Iterator[Span]:
    """The spans of the deciding attempt: its calls in order, then its reward."""
    for node in nodes:
        call = node.call
        failure = call.error.message if call.error else None
        status = SpanStatus("OK") if call.status == "ok" else SpanStatus("ERROR", failure or call.status)
        yield _span(
            graded,
            sequence=call.sequence + 1,
            key=call.id,
            name="raw_gen_ai_request",
            status=status,
            attributes=_attributes(node),
            times=(call.started_at, call.ended_at),
        )
    end = graded.attempt.ended_at or max((node.call.ended_at for node in nodes), default=None)
    yield _span(
        graded,
        sequence=max((node.call.sequence for node in nodes), default=-1) + 2,
        key="reward",
        name="agentlightning.annotation",
        status=SpanStatus("OK"),
        attributes={
            "agentlightning.reward.0.name": "primary",
            "agentlightning.reward.0.value": graded.verdict.reward,
            "understudy.integrity": graded.verdict.integrity.status,
        },
        times=(end, end),
    )


def _span(
    graded: Graded,
    *,
    sequence: int,
    key: str,
    name: str,
    status: SpanStatus,
    attributes: dict[str, str | int | float],
    times: tuple[float | None, float | None],
) -> Span:
    rollout_id, attempt_id = graded.rollout.id, graded.attempt.id
    trace_id = _hex(32, attempt_id)
    span_id = _hex(16, attempt_id, key)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence,
        trace_id=trace_id,
        span_id=span_id,
        name=name,
        status=status,
        attributes=attributes,
        start_time=times[0],
        end_time=times[1],
        context=SpanContext(trace_id, span_id),
        resource=Resource(
            {
                "service.name": "understudy",
                "service.version": __version__,
                "agentlightning.rollout_id": rollout_id,
                "agentlightning.attempt_id": attempt_id,
            }
        ),
    )


def _attributes(node: Node) -> dict[str, str | int | float]:
    """The attributes of a call; what its backend did not give is not there."""
    call = node.call
    asked = [_plain(message) for message in chat_messages(node.conversation)]
    attributes: dict[str, str | int | float] = {
        f"{PREFIX}id": call.id,
        f"{PREFIX}model": call.backend_model,
        f"{PREFIX}messages": repr(asked),
        "gen_ai.usage.prompt_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": call.usage.completion_tokens,
        "understudy.branch": node.branch,
        "understudy.role": node.role,
    }
    if call.policy_version is not None:
        attributes["understudy.policy_version"] = call.policy_version
    if call.prompt_token_ids is not None:
        attributes[f"{PREFIX}prompt_token_ids"] = repr(list(call.prompt_token_ids))
    if node.answer is not None:
        attributes[f"{PREFIX}choices"] = repr([_choice(call, chat_messages(Conversation(), node.answer)[0])])
    return attributes


def _choice(call: Call, message: ChatMessage) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": call.finish_reason, "message": _plain(message)}
    if call.completion_token_ids is not None:
        choice["token_ids"] = list(call.completion_token_ids)
    if call.logprobs is not None and all(map(math.isfinite, call.logprobs)):  # inf and nan are no literals
        choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in call.logprobs]}
    return choice


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A chat message as plain types, without what it does not have."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    return {key: value for key, value in plain.items() if value is not None}


def _hex(digits: int, *parts: str) -> str:
    """An identifier that follows from its parts, so that an export can be repeated."""
    return sha256("\0".join(parts).encode()).hexdigest()[:digits]
