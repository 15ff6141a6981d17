"""OTLP: exports calls as spans, and labels agents' exports with their attempt. Needs the extra `otel`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from itertools import groupby
from typing import Any, cast

import msgspec

from understudy import __version__
from understudy.errors import ConfigError
from understudy.gateway.config import TelemetryCollector
from understudy.gateway.telemetry import ATTEMPT_ID
from understudy.types import Call
from understudy.wire.model import Block
from understudy.wire.stored import read_request, read_response

try:
    from google.protobuf.message import DecodeError, Message
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
    from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanLimits, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ALWAYS_ON
    from opentelemetry.trace import SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(
        f"telemetry: OpenTelemetry cannot be imported: {error}; install it: pip install 'understudy[otel]', or "
        "remove `telemetry` from the configuration"
    ) from error

EXPORT_TIMEOUT_S = 5.0
"""How long a batch is tried with all its retries, in seconds.

Closing takes about as long if the collector is down.
"""
TEXT_LIMIT = 1_000
"""The maximum characters of a text in a span, which an agent may have made up. `contents` may be longer."""
CONTENTS_LIMIT = 1 << 20
QUEUE = 512
BATCH = 64
_NANO = 1_000_000_000
Attribute = str | int | float | list[str]

OPERATION = "chat"
_STOPS = 16
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "frequency_penalty", "presence_penalty", "seed")
"""Sampling parameters that have the same names in the conventions."""


class CallSpans:
    """Exports calls as spans, in batches and in a thread of its own. `observe` observes a gateway's calls.

    If the collector is down, spans are lost but never calls.
    """

    def __init__(self, collector: TelemetryCollector) -> None:
        self._contents = collector.contents
        exporter = OTLPSpanExporter(
            endpoint=f"{collector.endpoint.rstrip('/')}/v1/traces",
            headers=dict(collector.headers),
            timeout=EXPORT_TIMEOUT_S,
        )
        # Always sampled: an agent's header that says "not sampled" does not apply to us.
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,
            resource=Resource.create({"service.name": "understudy-gateway", "service.version": __version__}),
            span_limits=SpanLimits(max_span_attribute_length=CONTENTS_LIMIT if collector.contents else TEXT_LIMIT),
            shutdown_on_exit=False,
        )
        batches = BatchSpanProcessor(exporter, max_queue_size=QUEUE, max_export_batch_size=BATCH)
        self._provider.add_span_processor(batches)
        self._tracer = self._provider.get_tracer("understudy.gateway", __version__)
        self._parents = TraceContextTextMapPropagator()

    def observe(self, call: Call, headers: Mapping[bytes, bytes]) -> None:
        """Export a stored call, as a child of the span that its request names as parent, if any."""
        carrier = {"traceparent": headers.get(b"traceparent", b"").decode("latin-1")}
        span = self._tracer.start_span(
            f"{OPERATION} {call.requested_model[:TEXT_LIMIT]}",
            context=self._parents.extract(carrier),
            kind=SpanKind.CLIENT,
            start_time=int(call.started_at * _NANO),
            attributes=attributes(call) | (contents(call) if self._contents else {}),
        )
        if call.error is not None:
            # The message may quote a prompt.
            span.set_status(Status(StatusCode.ERROR, call.error.message if self._contents else None))
        span.end(int(call.ended_at * _NANO))

    async def close(self) -> None:
        """Export what is left, within a few seconds."""
        await asyncio.to_thread(self._provider.shutdown)


_EXPORTS: dict[str, tuple[type[Message], str]] = {
    "traces": (ExportTraceServiceRequest, "resource_spans"),
    "metrics": (ExportMetricsServiceRequest, "resource_metrics"),
    "logs": (ExportLogsServiceRequest, "resource_logs"),
}


def mark(signal: str, body: bytes, attempt_id: str) -> bytes:
    """Add the attempt to each resource of a protobuf export of `signal`. Raises ValueError."""
    kind, items = _EXPORTS[signal]
    try:
        request: Any = kind.FromString(body)
    except DecodeError as error:
        raise ValueError(
            f"invalid OTLP export of {signal}: {error}; expected protobuf of OpenTelemetry: check the "
            "exporter's protocol"
        ) from error
    for item in getattr(request, items):
        resource: ResourceMessage = item.resource
        other_attributes = [attribute for attribute in resource.attributes if attribute.key != ATTEMPT_ID]
        del resource.attributes[:]
        resource.attributes.extend(other_attributes)
        resource.attributes.add(key=ATTEMPT_ID).value.string_value = attempt_id
    return request.SerializeToString()


# --- the attributes of the GenAI semantic conventions ---------------------------------------------------


def attributes(call: Call) -> dict[str, Attribute]:
    """Return the attributes of a call in the conventions, without its contents. Unknown values are left out."""
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
    values |= {f"gen_ai.request.{name}": _number(call.sampling.get(name)) for name in _SAMPLING}
    return {name: value for name, value in values.items() if value is not None}


def contents(call: Call) -> dict[str, Attribute]:
    """Return the messages of a call as JSON text in the conventions' form; empty if they are nested too deeply."""
    request, answer = read_request(call), read_response(call)
    values: dict[str, Any] = {
        "gen_ai.system_instructions": [{"type": "text", "content": request.system}] if request.system else None,
        "gen_ai.input.messages": [
            _message(turn) for _, turn in groupby(request.blocks, key=lambda block: block.turn)
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
    """Return the stop strings; a request may have one or several."""
    listed = cast(list[Any], value if isinstance(value, list) else [value])
    return [item for item in listed[:_STOPS] if isinstance(item, str)] or None


def _number(value: Any) -> float | None:
    """Return a number that fits into a span. One that does not would cost the whole batch."""
    return value if isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63) else None
