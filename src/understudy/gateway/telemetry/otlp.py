"""OTLP: calls exported as spans, and what agents export marked with their attempt. Needs the extra `otel`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from understudy import __version__
from understudy.errors import ConfigError
from understudy.gateway.telemetry.conventions import (
    ATTEMPT_ID,
    OPERATION,
    TelemetryCollector,
    attributes,
    contents,
)
from understudy.types import Call

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
        f"telemetry needs OpenTelemetry ({error}): install it with `pip install 'understudy[otel]'`"
    ) from error

EXPORT_TIMEOUT_S = 5.0
"""How long a batch is tried, with all its retries; closing takes about as long when the collector is down."""
TEXT_LIMIT = 1_000
"""Characters of one text in a span, which an agent may have made up; `contents` have more room."""
CONTENTS_LIMIT = 1 << 20
QUEUE = 512
BATCH = 64
_NANO = 1_000_000_000


class CallSpans:
    """Exports calls as spans, in batches and in a thread of its own. An observer of a gateway's calls (`observe`).

    A collector that is down costs spans, never calls.
    """

    def __init__(self, collector: TelemetryCollector) -> None:
        self._contents = collector.contents
        exporter = OTLPSpanExporter(
            endpoint=f"{collector.endpoint.rstrip('/')}/v1/traces",
            headers=dict(collector.headers),
            timeout=EXPORT_TIMEOUT_S,
        )
        # Sampled always: an agent that says in its header that it samples nothing does not decide for us.
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
        """Export a call that was kept, below the span that its request names as its parent, if it names one."""
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


def mark(signal: str, body: bytes, attempt_id: str) -> bytes:
    """An export of `signal` in protobuf, with the attempt on each of its resources. Raises ValueError."""
    try:
        request, resources = _read[signal](body)
    except DecodeError as error:
        raise ValueError(f"invalid OTLP export of {signal}: {error}") from error
    for resource in resources:
        honest = [attribute for attribute in resource.attributes if attribute.key != ATTEMPT_ID]
        del resource.attributes[:]
        resource.attributes.extend(honest)
        resource.attributes.add(key=ATTEMPT_ID).value.string_value = attempt_id
    return request.SerializeToString()


_Read = tuple[Message, list[ResourceMessage]]


def _traces(body: bytes) -> _Read:
    traces = ExportTraceServiceRequest.FromString(body)
    return traces, [item.resource for item in traces.resource_spans]


def _metrics(body: bytes) -> _Read:
    metrics = ExportMetricsServiceRequest.FromString(body)
    return metrics, [item.resource for item in metrics.resource_metrics]


def _logs(body: bytes) -> _Read:
    logs = ExportLogsServiceRequest.FromString(body)
    return logs, [item.resource for item in logs.resource_logs]


_read: dict[str, Callable[[bytes], _Read]] = {"traces": _traces, "metrics": _metrics, "logs": _logs}
