"""mini-swe-agent: a bare list of messages, or an object with `messages` and a `trajectory_format` (1 and 1.1).

What 1.1 keeps of the Responses API are whole responses and `function_call_output`s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from understudy.ingest.formats.base import SingleFileFormat
from understudy.ingest.formats.outcomes import instance_id as instance_of
from understudy.ingest.formats.outcomes import outcome_from
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, items, mapping, outline, read_document, string
from understudy.ingest.trace import Trace
from understudy.ingest.trace_builder import TraceBuilder, add_messages, fingerprint, repository


class MiniSweAgentFormat(SingleFileFormat):
    """Reads trajectories of mini-swe-agent."""

    name = "mini-swe-agent"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it names itself, has `info` before its messages, or is a list of messages."""
        seen = outline(head)
        if seen.kind == "[":
            has_text = seen.keys.get("content", "{") not in "{["
            return has_text and (seen.keys.get("role") == "system" or file_name(path).endswith(".traj.json"))
        if seen.keys.get("trajectory_format", "").startswith("mini-swe-agent"):
            return True
        return seen.keys.get("info") == "{" and seen.keys.get("messages") == "["

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each file."""
        yield _trace(file)


def _trace(file: LogFile) -> Trace:
    losses: Counter[str] = Counter()
    value = read_document(file, losses)
    log = mapping(value)
    messages = [_chatlike(mapping(raw)) for raw in items(value) or items(log.get("messages"))]
    info = mapping(log.get("info"))
    config = mapping(info.get("config"))
    instance = string(log.get("instance_id")) or file_name(file.path).partition(".")[0]
    builder = TraceBuilder(
        "mini-swe-agent", file.path, f"{instance}-{fingerprint(file.path, messages[:3])}", losses=losses
    )
    builder.trace.version = string(info.get("mini_version"))
    builder.trace.project = repository(instance) or string(mapping(config.get("environment")).get("cwd"))
    builder.trace.outcome = outcome_from(
        resolved=info.get("resolved", log.get("resolved")),
        reward=info.get("reward"),
        task=string(log.get("instance_id")) or instance_of(instance),
        exit_status=info.get("exit_status"),
    )
    # The end of a run is told to the person, not to the model.
    conversation = [raw for raw in messages if raw.get("role") != "exit"]
    model = string(mapping(config.get("model")).get("model_name"))
    add_messages(builder, conversation, model=model, models=_model, timestamps=_time)
    return builder.finish()


def _chatlike(raw: dict[str, Any]) -> dict[str, Any]:
    """A message of the Responses API as one of chat completions."""
    if raw.get("type") == "function_call_output":
        return {"role": "tool", "content": raw.get("output"), "tool_call_id": raw.get("call_id")}
    if raw.get("object") != "response":
        return raw
    output = [mapping(item) for item in items(raw.get("output"))]
    thoughts = [
        text
        for item in output
        if item.get("type") == "reasoning"
        for part in (*items(item.get("summary")), *items(item.get("content")))
        if (text := string(mapping(part).get("text")))
    ]
    return {
        "role": "assistant",
        "content": [
            part for item in output if item.get("type") == "message" for part in items(item.get("content"))
        ],
        "tool_calls": [
            {**item, "id": item.get("call_id")} for item in output if item.get("type") == "function_call"
        ],
        "reasoning_content": "\n".join(thoughts),
        "thinking_blocks": [item for item in output if item.get("type") == "reasoning"],
        "extra": {"response": {"model": raw.get("model")}, "timestamp": raw.get("created_at")},
    }


def _model(raw: dict[str, Any]) -> str | None:
    return string(mapping(mapping(raw.get("extra")).get("response")).get("model"))


def _time(raw: dict[str, Any]) -> str | None:
    moment = mapping(raw.get("extra")).get("timestamp")
    if not isinstance(moment, int | float) or not 0 < moment < 1e11:
        return None
    return datetime.fromtimestamp(moment, UTC).isoformat()
