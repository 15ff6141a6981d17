"""OTLP exports of the agents themselves: labelled with their attempt, and forwarded to a collector."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from understudy.gateway.config import TelemetryCollector
from understudy.gateway.telemetry import ATTEMPT_ID

LIMIT = 8 << 20
"""The largest export in bytes, after decompression."""
TIMEOUT_S = 10.0

_PROTOBUF, _JSON = b"application/x-protobuf", b"application/json"
_NOTHING = {_PROTOBUF: b"", _JSON: b"{}"}
_LISTS = {"traces": "resourceSpans", "metrics": "resourceMetrics", "logs": "resourceLogs"}
PATHS = tuple(f"/v1/{signal}" for signal in _LISTS)

_Export = dict[str, list[dict[str, Any]]]
_Marker = Callable[[str, bytes, str], bytes]


class ExportReply(Struct, frozen=True):
    """An HTTP answer."""

    status: int
    content_type: bytes
    body: bytes


class AgentTelemetry:
    """Takes agents' exports and forwards them to `collector`; without one they are accepted and dropped.

    Raises ConfigError if there is a collector and the extra `otel` is missing.
    """

    def __init__(self, collector: TelemetryCollector | None = None) -> None:
        self._collector = collector
        self._http: aiohttp.ClientSession | None = None
        self._marks: dict[bytes, _Marker] = {_JSON: _mark_json}
        if collector is not None:
            from understudy.gateway.telemetry.otlp import mark

            self._marks[_PROTOBUF] = mark

    async def take(self, path: str, headers: Mapping[bytes, bytes], body: bytes, attempt_id: str) -> ExportReply:
        """Return the response to an export of an attempt's agent.

        `path` is one of PATHS; header names are in lower case.

        The collector's response is passed back, or 503 if it cannot be reached, which makes exporters try again.
        """
        kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
        if kind not in _NOTHING:
            return _refuse(
                415,
                f"unsupported content-type {kind[:80].decode('latin-1')!r}, expected {_PROTOBUF.decode()} or "
                f"{_JSON.decode()}; set the exporter's protocol to http/protobuf or http/json",
            )
        if self._collector is None:
            return ExportReply(200, kind, _NOTHING[kind])
        try:
            plain = _unpack(headers.get(b"content-encoding", b"identity"), body)
            marked = self._marks[kind](path.removeprefix("/v1/"), plain, attempt_id)
        except (ValueError, msgspec.MsgspecError, RecursionError) as error:
            return _refuse(400, str(error))
        return await self._send(self._collector, path, kind, marked)

    async def _send(self, collector: TelemetryCollector, path: str, kind: bytes, body: bytes) -> ExportReply:
        if self._http is None:
            self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=TIMEOUT_S))
        url = collector.endpoint.rstrip("/") + path
        headers = collector.headers | {"content-type": kind.decode()}
        try:
            async with self._http.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                return ExportReply(answer.status, answer.content_type.encode(), await answer.content.read(LIMIT))
        except (aiohttp.ClientError, TimeoutError):
            return _refuse(
                503, "no connection to the telemetry collector; check telemetry.endpoint, or send it again later"
            )

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._http is not None:
            await self._http.close()


def _refuse(status: int, message: str) -> ExportReply:
    return ExportReply(status, _JSON, msgspec.json.encode({"message": message}))


def _unpack(encoding: bytes, body: bytes) -> bytes:
    """Decompress the body. Raises ValueError, also if it is too large."""
    match encoding.lower():
        case b"identity" | b"":
            plain = body
        case b"gzip":
            stream = zlib.decompressobj(wbits=31)
            try:
                plain = stream.decompress(body, LIMIT + 1)
            except zlib.error as error:
                raise ValueError(
                    f"invalid gzip body: {error}; send it compressed with gzip, or without content-encoding"
                ) from error
            if not stream.eof and len(plain) <= LIMIT:
                raise ValueError("invalid gzip body: it is truncated; send it again")
        case _:
            raise ValueError(
                f"unsupported content-encoding {encoding[:80].decode('latin-1')!r}, expected gzip or identity; "
                "set the exporter's compression to one of them"
            )
    if len(plain) > LIMIT:
        raise ValueError(f"export too large: it has more than {LIMIT} bytes, the maximum; send smaller batches")
    return plain


def _mark_json(signal: str, body: bytes, attempt_id: str) -> bytes:
    """Add the attempt to each resource of an export in JSON. Raises msgspec.MsgspecError."""
    export = msgspec.json.decode(body, type=_Export)
    mark = {"key": ATTEMPT_ID, "value": {"stringValue": attempt_id}}
    for item in export.get(_LISTS[signal], []):
        resource = msgspec.convert(item.get("resource", {}), dict[str, Any])
        attributes = msgspec.convert(resource.get("attributes", []), list[dict[str, Any]])
        other_attributes = [attribute for attribute in attributes if attribute.get("key") != ATTEMPT_ID]
        item["resource"] = resource | {"attributes": [*other_attributes, mark]}
    return msgspec.json.encode(export)
