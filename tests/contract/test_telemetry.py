"""Calls as spans, and what agents export themselves, as a real collector sees them."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import error_attributes, gen_ai_attributes

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.config import TelemetryCollector as Address
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.telemetry import ATTEMPT_ID
from understudy.gateway.telemetry.agent_exports import LIMIT, AgentTelemetry
from understudy.gateway.telemetry.otlp import CallSpans, attributes, contents
from understudy.store import Store
from understudy.types import Call, ErrorInfo, Usage

from fakes import collector as otlp
from fakes.attempts import start_attempts
from fakes.collector import Collector
from fakes.vllm import FakeVLLM, Refuse, Say

SECRET = "the prompt that nobody may see"
REQUEST = {
    "model": "claude",
    "max_tokens": 50,
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": SECRET},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "tool_use", "id": "t1", "name": "Bash", "input": {"command": "ls"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.py"}]},
    ],
}
ANSWER = {"role": "assistant", "content": [{"type": "text", "text": "Done."}]}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"


def call(**fields: Any) -> Call:
    defaults: dict[str, Any] = {
        "id": "call_1",
        "attempt_id": "attempt-1",
        "sequence": 0,
        "dialect": "anthropic",
        "requested_model": "claude",
        "backend": "vllm",
        "backend_model": "qwen",
        "request": json.dumps(REQUEST).encode(),
        "response": json.dumps(ANSWER).encode(),
        "status": "ok",
        "started_at": 1000.25,
        "ended_at": 1002.5,
        "session_id": "s",
        "agent_id": "sub",
        "policy_version": "v7",
        "finish_reason": "stop",
        "usage": Usage(100, 7, 60, 5),
        "sampling": {"max_tokens": 50, "temperature": 0.5, "stop": ["X"], "seed": 5, "tools": [SECRET]},
        "cost_usd": 0.002,
    }
    return Call(**defaults | fields)


@pytest.fixture(autouse=True)
def _headers(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "X-Token=t")


async def exported(*calls: Call, headers: dict[bytes, bytes] | None = None, **address: Any) -> list[Span]:
    async with Collector() as collector:
        spans = CallSpans(Address(endpoint=collector.url, **address))
        for one in calls:
            spans.observe(one, headers or {})
        await spans.close()
        assert {headers_sent["x-token"] for headers_sent in collector.headers} == {"t"}
        (resource,) = collector.resources("traces")
        assert resource["service.name"] == "understudy-gateway"
        return collector.spans()


# --- calls as spans ------------------------------------------------------------------------------------


async def test_a_call_is_a_span_with_the_names_of_the_conventions() -> None:
    (span,) = await exported(call())
    assert (span.name, span.kind) == ("chat claude", Span.SPAN_KIND_CLIENT)
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (1000_250_000_000, 1002_500_000_000)
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert span.parent_span_id == b""
    assert otlp.attributes(span) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": "claude",
        "gen_ai.response.model": "qwen",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.conversation.id": "s",
        "gen_ai.agent.id": "sub",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 60,
        "gen_ai.usage.cache_creation.input_tokens": 5,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.stop_sequences": ["X"],
        "gen_ai.request.seed": 5,
        "understudy.attempt.id": "attempt-1",
        "understudy.call.id": "call_1",
        "understudy.call.status": "ok",
        "understudy.dialect": "anthropic",
        "understudy.policy_version": "v7",
        "understudy.cost_usd": 0.002,
    }


def test_the_names_are_those_of_the_conventions() -> None:
    listed = vars(gen_ai_attributes) | vars(error_attributes)
    conventional = {text for name, text in listed.items() if name.isupper()}
    exported_names = {**attributes(call(error=ErrorInfo("backend", "BackendError", "no"))), **contents(call())}
    ours = {name for name in exported_names if not name.startswith("understudy.")}
    assert ours <= conventional, ours - conventional
    old = {gen_ai_attributes.GEN_AI_SYSTEM, gen_ai_attributes.GEN_AI_PROMPT, gen_ai_attributes.GEN_AI_COMPLETION}
    assert not ours & old


async def test_a_failed_call_tells_its_type_and_nothing_of_what_was_said() -> None:
    error = ErrorInfo("backend", "BackendError", f"no: {SECRET}")
    (span,) = await exported(call(status="error", error=error, finish_reason=None, usage=Usage()))
    exported_attributes = otlp.attributes(span)
    assert (span.status.code, span.status.message) == (Status.STATUS_CODE_ERROR, "")
    assert (exported_attributes["error.type"], exported_attributes["understudy.error.boundary"]) == (
        "BackendError",
        "backend",
    )
    assert not {"gen_ai.response.model", "gen_ai.usage.input_tokens"} & exported_attributes.keys()
    assert SECRET.encode() not in span.SerializeToString()


async def test_contents_are_exported_only_when_asked_for() -> None:
    (shut,) = await exported(call())
    assert SECRET.encode() not in shut.SerializeToString()
    (span,) = await exported(call(), contents=True)
    messages = {name: json.loads(text) for name, text in otlp.attributes(span).items() if "messages" in name}
    assert json.loads(otlp.attributes(span)["gen_ai.system_instructions"]) == [
        {"type": "text", "content": "Be brief."}
    ]
    assert messages["gen_ai.input.messages"] == [
        {"role": "user", "parts": [{"type": "text", "content": SECRET}]},
        {
            "role": "assistant",
            "parts": [
                {"type": "reasoning", "content": "hm"},
                {"type": "tool_call", "id": "t1", "name": "Bash", "arguments": {"command": "ls"}},
            ],
        },
        {"role": "user", "parts": [{"type": "tool_call_response", "id": "t1", "response": "a.py"}]},
    ]
    assert messages["gen_ai.output.messages"] == [
        {"role": "assistant", "parts": [{"type": "text", "content": "Done."}], "finish_reason": "stop"}
    ]


def test_contents_of_another_dialect_are_the_same_parts() -> None:
    tool = {"id": "t1", "type": "function", "function": {"name": "Bash", "arguments": '{"command" : '}}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "go"}, {"role": "assistant", "tool_calls": [tool]}],
    }
    answer = {"choices": [{"message": {"role": "assistant", "content": "Done."}, "finish_reason": "stop"}]}
    request, response = json.dumps(body).encode(), json.dumps(answer).encode()
    exported_contents = contents(call(dialect="openai-chat", request=request, response=response))
    assert json.loads(str(exported_contents["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": "go"}]},
        {"role": "assistant", "parts": [{"type": "tool_call", "id": "t1", "name": "Bash", "arguments": {}}]},
    ]
    assert json.loads(str(exported_contents["gen_ai.output.messages"]))[0]["parts"] == [
        {"type": "text", "content": "Done."}
    ]


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"messages":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_bodies_that_cannot_be_read_have_no_contents(body: bytes) -> None:
    assert contents(call(request=body, response=body)) == {}


async def test_a_span_is_below_the_agents_own_even_if_that_one_is_not_sampled() -> None:
    (span,) = await exported(call(), headers={b"traceparent": PARENT.encode()})
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"


@pytest.mark.parametrize("parent", [b"", b"00-zz", b"\xff\x00", b"00-" + b"0" * 32 + b"-" + b"0" * 16 + b"-01"])
async def test_a_parent_that_is_none_makes_a_root(parent: bytes) -> None:
    (span,) = await exported(call(), headers={b"traceparent": parent})
    assert span.parent_span_id == b""


async def test_what_does_not_fit_into_a_span_costs_no_other_span() -> None:
    spans = await exported(call(sampling={"seed": 2**70, "stop": "X", "temperature": "hot"}), call())
    assert len(spans) == 2
    exported_attributes = otlp.attributes(spans[0])
    assert exported_attributes["gen_ai.request.stop_sequences"] == ["X"]
    assert not {"gen_ai.request.seed", "gen_ai.request.temperature"} & exported_attributes.keys()


async def test_what_an_agent_makes_up_takes_little_room() -> None:
    endless = "m" * 1_000_000
    (span,) = await exported(call(requested_model=endless, sampling={"stop": [endless] * 1000}))
    assert len(span.SerializeToString()) < 25_000


async def test_a_collector_that_is_down_costs_spans_and_no_time() -> None:
    spans = CallSpans(Address(endpoint="http://127.0.0.1:9"))
    for _ in range(100):
        spans.observe(call(), {})
    began = time.monotonic()
    await spans.close()
    assert time.monotonic() - began < 15


# --- what agents export --------------------------------------------------------------------------------


def forged() -> dict[str, bytes]:
    """An export of each signal in protobuf, by an agent that claims to be another attempt's."""
    traces, metrics, logs = ExportTraceServiceRequest(), ExportMetricsServiceRequest(), ExportLogsServiceRequest()
    traces.resource_spans.add().scope_spans.add().spans.add(name="interaction")
    traces.resource_spans.add()
    metrics.resource_metrics.add()
    logs.resource_logs.add()
    for resource in (traces.resource_spans[0], metrics.resource_metrics[0], logs.resource_logs[0]):
        for name, text in (("service.name", "claude-code"), (ATTEMPT_ID, "x"), (ATTEMPT_ID, "y")):
            resource.resource.attributes.add(key=name).value.string_value = text
    return {
        "traces": traces.SerializeToString(),
        "metrics": metrics.SerializeToString(),
        "logs": logs.SerializeToString(),
    }


HEADERS = {b"content-type": b"application/x-protobuf"}


@pytest.mark.parametrize("packed", [False, True])
async def test_what_an_agent_exports_is_marked_with_its_own_attempt(packed: bool) -> None:
    async with Collector() as collector:
        taker = AgentTelemetry(Address(endpoint=collector.url + "/"))
        headers = HEADERS | ({b"content-encoding": b"gzip"} if packed else {})
        for signal, body in forged().items():
            sent = gzip.compress(body, mtime=0) if packed else body
            reply = await taker.take(f"/v1/{signal}", headers, sent, "attempt-1")
            assert (reply.status, reply.content_type, reply.body) == (200, b"application/x-protobuf", b"")
        await taker.close()
        marked = {"service.name": "claude-code", ATTEMPT_ID: "attempt-1"}
        assert collector.resources("traces") == [marked, {ATTEMPT_ID: "attempt-1"}]
        assert collector.resources("metrics") == collector.resources("logs") == [marked]
        assert [span.name for span in collector.spans()] == ["interaction"]
        assert all(
            request_headers["x-token"] == "t" and "authorization" not in request_headers
            for request_headers in collector.headers
        )


async def test_json_is_marked_and_otherwise_kept() -> None:
    honest = {"key": "service.name", "value": {"stringValue": "claude-code"}}
    forged = {"key": ATTEMPT_ID, "value": {"stringValue": "x"}}
    mark = {"key": ATTEMPT_ID, "value": {"stringValue": "attempt-1"}}
    spans = [{"scope": {"name": "s"}, "spans": [{"traceId": "0a", "startTimeUnixNano": "1795242597884000000"}]}]
    items = [{"resource": {"attributes": [honest, forged]}, "scopeSpans": spans}, {"scopeSpans": spans}]
    async with Collector() as collector:
        taker = AgentTelemetry(Address(endpoint=collector.url))
        body = json.dumps({"resourceSpans": items}).encode()
        reply = await taker.take(
            "/v1/traces", {b"content-type": b"application/json; charset=utf-8"}, body, "attempt-1"
        )
        await taker.close()
    assert (reply.status, reply.content_type, reply.body) == (200, b"application/json", b"{}")
    assert collector.json["traces"] == [
        {
            "resourceSpans": [
                {"resource": {"attributes": [honest, mark]}, "scopeSpans": spans},
                {"scopeSpans": spans, "resource": {"attributes": [mark]}},
            ]
        }
    ]


@pytest.mark.parametrize(
    ("kind", "encoding", "body", "status", "message"),
    [
        (b"text/plain", b"", b"x", 415, "application/x-protobuf or application/json"),
        (b"application/x-protobuf", b"", b"\xff" * 9, 400, "invalid OTLP export of traces"),
        (b"application/json", b"", b"{", 400, "truncated"),
        (b"application/json", b"", b'{"resourceSpans": 3}', 400, "Expected `array`"),
        (b"application/json", b"", b'{"resourceSpans": [{"resource": 3}]}', 400, "Expected `object`"),
        (
            b"application/json",
            b"",
            b'{"resourceSpans": [{"resource": {"attributes": 3}}]}',
            400,
            "Expected `array`",
        ),
        (b"application/json", b"", b'{"resourceSpans": ' + b"[" * 100_000, 400, ""),
        (b"application/json", b"gzip", b"{}", 400, "invalid gzip body"),
        (b"application/json", b"gzip", gzip.compress(b"{}" * 99, mtime=0)[:-9], 400, "truncated"),
        (b"application/json", b"br", b"{}", 400, "expected gzip or identity"),
        (b"application/x-protobuf", b"gzip", gzip.compress(bytes(LIMIT + 1)), 400, "smaller batches"),
    ],
)
async def test_what_is_no_export_is_refused(
    kind: bytes, encoding: bytes, body: bytes, status: int, message: str
) -> None:
    async with Collector() as collector:
        taker = AgentTelemetry(Address(endpoint=collector.url))
        headers = {b"content-type": kind, b"content-encoding": encoding}
        reply = await taker.take("/v1/traces", headers, body, "attempt-1")
        await taker.close()
        assert (reply.status, reply.content_type) == (status, b"application/json")
        assert message in json.loads(reply.body)["message"]
        assert collector.headers == []


async def test_what_the_collector_says_is_passed_back() -> None:
    async with Collector(status=429) as collector:
        taker = AgentTelemetry(Address(endpoint=collector.url))
        reply = await taker.take("/v1/logs", HEADERS, forged()["logs"], "attempt-1")
        assert reply.status == 429
    reply = await taker.take("/v1/logs", HEADERS, forged()["logs"], "attempt-1")
    assert reply.status == 503
    await taker.close()


async def test_through_the_gateway(tmp_path: Path) -> None:
    async with FakeVLLM(Say(text="ok"), Refuse(status=400)) as model, Collector() as collector:
        with Store.open(tmp_path / "store") as store:
            address, keys = Address(endpoint=collector.url), Keys()
            spans, agents = CallSpans(address), AgentTelemetry(address)
            backend = VLLMBackend(model.url, "fake")
            gateway = Gateway(
                ModelRouter(backend), store.calls, keys, observers=[spans.observe], agent_telemetry=agents
            )
            url = await gateway.start_tcp("127.0.0.1", 0)
            (attempt,) = start_attempts(store)
            key = keys.issue(attempt)
            async with aiohttp.ClientSession(url) as http:
                for _ in range(2):
                    headers = {"x-api-key": key, "traceparent": PARENT}
                    async with http.post("/v1/messages", json=REQUEST, headers=headers):
                        pass
                for name, status in ((key, 200), ("sk-understudy-wrong", 403)):
                    headers = {"x-api-key": name, "content-type": "application/x-protobuf"}
                    async with http.post("/v1/traces", data=forged()["traces"], headers=headers) as reply:
                        assert reply.status == status
            await gateway.stop()
            await spans.close()
            await agents.close()
            await backend.close()
            stored = list(store.calls.of_attempt(attempt))
    ours = [span for span in collector.spans() if span.name == "chat claude"]
    assert [otlp.attributes(span)["understudy.call.id"] for span in ours] == [call.id for call in stored]
    assert {span.parent_span_id.hex() for span in ours} == {"b7ad6b7169203331"}
    assert [otlp.attributes(span)[ATTEMPT_ID] for span in ours] == [attempt] * 2
    assert [resource.get(ATTEMPT_ID) for resource in collector.resources("traces")].count(attempt) == 2


async def test_without_a_collector_exports_are_taken_and_dropped() -> None:
    taker = AgentTelemetry()
    for kind, nothing in ((b"application/x-protobuf", b""), (b"application/json", b"{}")):
        reply = await taker.take("/v1/metrics", {b"content-type": kind}, b"anything", "attempt-1")
        assert (reply.status, reply.content_type, reply.body) == (200, kind, nothing)
    await taker.close()


def test_without_the_extra_it_is_said_what_to_install() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from understudy.gateway.telemetry.agent_exports import AgentTelemetry\n"
        "from understudy.gateway.config import TelemetryCollector\n"
        "from understudy.errors import ConfigError\n"
        "AgentTelemetry()\n"
        "try:\n    AgentTelemetry(TelemetryCollector(endpoint='http://127.0.0.1:4318'))\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "install it: pip install 'understudy[otel]'" in done.stdout
