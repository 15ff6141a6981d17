"""Reads ATIF, the Agent Trajectory Interchange Format, 1.5 to 1.8: one JSON document with `steps`.

Steps that are copied context, or that no model made, become part of the conversation but not turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.ingest.chat import content, response_message, result_message
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint, outcome_from_extra
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import outline, read_document
from understudy.ingest.trace import Message, Trace, TraceParent, tool_call

_MAX_DEPTH = 32


class AtifFormat(LogFormat):
    """Reads trajectories in ATIF."""

    name = "atif"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the document has an ATIF `schema_version`, or an agent and steps."""
        keys = outline(head).keys
        return keys.get("schema_version", "").startswith("ATIF-v") or (
            keys.get("agent") == "{" and keys.get("steps") == "["
        )

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield the trace of the file, and those of the subagents in it."""
        losses: Counter[str] = Counter()
        log = mapping(read_document(file, losses))
        session = string(log.get("session_id")) or fingerprint(file.path, items(log.get("steps"))[:2])
        yield from _traces(log, file.path, session, "", None, losses)


def _traces(
    log: dict[str, Any],
    source: str,
    session: str,
    parent_id: str,
    parent: TraceParent | None,
    losses: Counter[str],
) -> Iterator[Trace]:
    agent = mapping(log.get("agent"))
    trajectory_id = string(log.get("trajectory_id"))
    # A trajectory id identifies the document, while several may share a session id. A subagent's id is unique only
    # within its parent.
    trace_id = (
        f"{parent_id}/{trajectory_id}"
        if parent_id
        else "/".join(part for part in (session, trajectory_id) if part)
    )
    builder = TraceBuilder("atif", source, session, losses=losses, trace_id=trace_id)
    builder.trace.parent = parent
    builder.trace.agent, builder.trace.version = string(agent.get("name")), string(agent.get("version"))
    # otherwise our own exporter inferred these tools
    if value_at(log, "extra", "tools_source") in (None, "logged"):
        builder.set_tools(items(agent.get("tool_definitions")))
    model = string(agent.get("model_name"))
    if not str(log.get("schema_version")).startswith("ATIF-v1."):
        losses["unknown_version"] += 1
    callers: dict[str, str] = {}
    for number, raw in enumerate(items(log.get("steps")), 1):
        _step(builder, mapping(raw), number, model, callers)
    builder.trace.outcome = outcome_from_extra(log.get("extra"), value_at(log, "final_metrics", "extra"))
    if log.get("continued_trajectory_ref"):
        losses["continued_elsewhere"] += 1
    yield builder.finish()
    depth = parent.depth + 1 if parent else 1
    for number, raw in enumerate(items(log.get("subagent_trajectories"))):
        child = mapping(raw)
        name = string(child.get("trajectory_id")) or f"subagent-{number}"
        if depth > _MAX_DEPTH:
            losses["too_deep"] += 1
            continue
        origin = TraceParent(session, callers.get(name), depth)
        yield from _traces({**child, "trajectory_id": name}, source, session, trace_id, origin, Counter())


def _step(
    builder: TraceBuilder, step: dict[str, Any], index: int, model: str | None, callers: dict[str, str]
) -> None:
    losses = builder.losses
    source = step.get("source")
    text = content(step.get("message"), losses)
    if source == "agent":
        message = response_message(text, _calls(step, losses), string(step.get("reasoning_content")))
        if step.get("is_copied_context") or step.get("llm_call_count") == 0:
            builder.add(message)
        else:
            number = step.get("step_id")
            builder.add_turn(
                f"step-{number if isinstance(number, int) else index}",
                [message],
                model=string(step.get("model_name")) or model,
                timestamp=string(step.get("timestamp")),
            )
    elif source in ("system", "user"):
        message = {"role": source, "content": text}
        if not builder.take_system(message):
            builder.add(message)
    else:
        losses["unknown_source"] += 1
    last_message: Message = builder.trace.nodes[-1].body if builder.trace.nodes else {}
    call_ids = {call["id"] for call in last_message.get("tool_calls") or ()}
    for result in items(value_at(step, "observation", "results")):
        _result(builder, mapping(result), call_ids, callers)


def _calls(step: dict[str, Any], losses: Counter[str]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for raw in items(step.get("tool_calls")):
        call = mapping(raw)
        call_id, name = string(call.get("tool_call_id")), string(call.get("function_name"))
        if call_id is None or name is None:
            losses["unknown_call"] += 1
            continue
        calls.append(tool_call(call_id, name, call.get("arguments") or {}))
    return calls


def _result(builder: TraceBuilder, result: dict[str, Any], call_ids: set[str], callers: dict[str, str]) -> None:
    call_id = string(result.get("source_call_id"))
    for raw in items(result.get("subagent_trajectory_ref")):
        child = string(mapping(raw).get("trajectory_id"))
        if child and call_id:
            callers[child] = call_id
    text = content(result.get("content"), builder.losses)
    if call_id is not None and call_id in call_ids:
        failed = value_at(result, "extra", "is_error") is True
        builder.add(result_message(call_id, text or "", is_error=failed))
        return
    if call_id is not None:
        builder.losses["result_without_call"] += 1
    if text:
        builder.add({"role": "user", "content": text})
