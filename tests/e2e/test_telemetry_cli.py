"""Claude Code's own traces, metrics and logs, through the gateway to a collector, beside the gateway's spans."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from understudy.gateway.config import TelemetryCollector as Address
from understudy.gateway.telemetry import ATTEMPT_ID
from understudy.gateway.telemetry.agent_exports import AgentTelemetry
from understudy.gateway.telemetry.otlp import CallSpans

from fakes import reach
from fakes.collector import Collector, attributes
from fakes.turns import bash, say
from support.cli import CliRun, Rig

pytestmark = pytest.mark.e2e

PORT = 4318


async def run(root: Path, claude: Path, *, protocol: str, collected: bool = True) -> tuple[Rig, CliRun, Collector]:
    """One run of the CLI: the rig, what it did, and the collector, all of them at their end."""
    async with Collector() as collector:
        address = Address(endpoint=collector.url)
        spans, agents = CallSpans(address), AgentTelemetry(address if collected else None)
        rig = Rig(root, claude, observers=[spans.observe], agent_telemetry=agents)
        async with rig:
            rig.script(say("", bash("true")), say("Done."))
            env = {
                "DISABLE_TELEMETRY": "",
                "CLAUDE_CODE_ENABLE_TELEMETRY": "1",
                "CLAUDE_CODE_ENHANCED_TELEMETRY_BETA": "1",
                "CLAUDE_CODE_PROPAGATE_TRACEPARENT": "1",
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_METRICS_EXPORTER": "otlp",
                "OTEL_LOGS_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
                "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{PORT}",
                # Not `authorization`: the CLI sends the escaped space of "Bearer%20" as it is.
                "OTEL_EXPORTER_OTLP_HEADERS": f"x-api-key={rig.key}",
            }
            reached = [sys.executable, reach.__file__, str(PORT), str(root / "g.sock")]
            cli_run = await rig.claude(env=env, through=reached)
        await spans.close()
        await agents.close()
    assert cli_run.result["result"] == "Done."
    return rig, cli_run, collector


async def test_its_traces_arrive_and_the_calls_are_below_them(tmp_path: Path, claude: Path) -> None:
    rig, cli_run, collector = await run(tmp_path, claude, protocol="http/protobuf")
    spans = collector.spans()
    theirs = {span.span_id: span for span in spans if span.name == "claude_code.llm_request"}
    ours = [span for span in spans if span.name == "chat qwen3-coder"]
    assert len(theirs) == len(ours) == len(cli_run.calls) == 2
    assert {span.parent_span_id for span in ours} == theirs.keys()
    assert len({span.trace_id for span in spans}) == 1
    sessions = {attributes(span)["session.id"] for span in theirs.values()}
    assert sessions == {attributes(span)["gen_ai.conversation.id"] for span in ours}
    for kind in ("traces", "metrics", "logs"):
        agents = [one for one in collector.resources(kind) if one["service.name"] == "claude-code"]
        assert agents
        assert {one[ATTEMPT_ID] for one in agents} == {rig.attempt}
    assert all(key_of(headers) is None for headers in collector.headers)


async def test_json_arrives_too(tmp_path: Path, claude: Path) -> None:
    rig, _, collector = await run(tmp_path, claude, protocol="http/json")
    for kind, items in (("traces", "resourceSpans"), ("metrics", "resourceMetrics"), ("logs", "resourceLogs")):
        marks = [named(item["resource"]) for export in collector.json[kind] for item in export[items]]
        assert marks
        assert {mark[ATTEMPT_ID]["stringValue"] for mark in marks} == {rig.attempt}


async def test_without_a_collector_the_cli_runs_as_ever(tmp_path: Path, claude: Path) -> None:
    _, cli_run, collector = await run(tmp_path, claude, protocol="http/protobuf", collected=False)
    assert [call.status for call in cli_run.calls] == ["ok", "ok"]
    assert {one["service.name"] for one in collector.resources("traces")} == {"understudy-gateway"}


def key_of(headers: dict[str, str]) -> str | None:
    return headers.get("x-api-key") or headers.get("authorization")


def named(resource: dict[str, Any]) -> dict[str, Any]:
    return {attribute["key"]: attribute["value"] for attribute in resource["attributes"]}
