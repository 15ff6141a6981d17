"""An OTLP/HTTP collector on a real loopback socket, which decodes what it is sent."""

from __future__ import annotations

import gzip
from collections import defaultdict
from typing import Any, Self

import orjson
from aiohttp import web
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from fakes.listen import listen

_PROTOBUF = {
    "traces": ExportTraceServiceRequest,
    "metrics": ExportMetricsServiceRequest,
    "logs": ExportLogsServiceRequest,
}


def value(any_value: AnyValue) -> Any:
    """An attribute's value in Python."""
    kind = any_value.WhichOneof("value")
    return (
        [value(item) for item in any_value.array_value.values]
        if kind == "array_value"
        else getattr(any_value, kind or "")
    )


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    named = [(attribute.key, value(attribute.value)) for attribute in of.attributes]
    assert len(dict(named)) == len(named), named
    return dict(named)


class Collector:
    """Keeps what it is sent, by signal: protobuf decoded in `exports`, JSON in `json`. Answers with `status`."""

    def __init__(self, status: int = 200) -> None:
        self.status = status
        self.exports: dict[str, list[Any]] = defaultdict(list)
        self.json: dict[str, list[Any]] = defaultdict(list)
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/v1/{signal}", self._take)
        self._runner, self.url = await listen(app)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        signal, body = request.match_info["signal"], await request.read()
        self.headers.append({name.lower(): content for name, content in request.headers.items()})
        if request.headers.get("content-encoding") == "gzip" and body.startswith(b"\x1f\x8b"):
            body = gzip.decompress(body)
        if request.content_type == "application/json":
            self.json[signal].append(orjson.loads(body))
            return web.json_response({}, status=self.status)
        export: Message = _PROTOBUF[signal]()
        export.ParseFromString(body)
        self.exports[signal].append(export)
        return web.Response(status=self.status, content_type="application/x-protobuf")

    def resources(self, signal: str) -> list[dict[str, Any]]:
        """The attributes of each resource of a signal that came as protobuf."""
        field = {"traces": "resource_spans", "metrics": "resource_metrics", "logs": "resource_logs"}[signal]
        return [attributes(item.resource) for export in self.exports[signal] for item in getattr(export, field)]

    def spans(self) -> list[Span]:
        """All spans that came as protobuf, in their order."""
        return [
            span
            for export in self.exports["traces"]
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
