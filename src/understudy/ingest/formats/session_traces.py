"""Reads session traces of the Hugging Face Hub: JSON lines, a header with `harness` and `id`, then one message a
line.

What Understudy exports as `session-traces` has more in its header: the tools, the model and the outcome.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from understudy.ingest.formats.base import (
    LogFormat,
    TraceBuilder,
    add_messages,
    fingerprint,
    iso_time,
    outcome_from_extra,
)
from understudy.ingest.json_values import items, mapping, string
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import outline, read_records
from understudy.ingest.trace import Trace, TraceParent

_NAMES = {
    "reasoningContent": "reasoning_content",
    "toolCalls": "tool_calls",
    "toolCallId": "tool_call_id",
    "isError": "is_error",
}


class SessionTracesFormat(LogFormat):
    """Reads sessions in the Hub's "Session Trace Simple Format"."""

    name = "session-traces"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the first line is a session header that names its harness.

        Sessions of pi may name one too, but their entries have a `parentId`.
        """
        keys = outline(head).keys
        return keys.get("type") == "session" and {"harness", "id"} <= keys.keys() and b'"parentId"' not in head

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        header: dict[str, Any] = {}
        messages: list[dict[str, Any]] = []
        for record in read_records(file, losses):
            if record.get("type") == "session" and not header:
                header = record
            elif record.get("type") == "message":
                message = mapping(record.get("message"))
                messages.append({_NAMES.get(key, key): value for key, value in message.items()})
            else:
                losses["unknown_record"] += 1
        session = string(header.get("id")) or fingerprint(file.path, messages[:2])
        builder = TraceBuilder(self.name, file.path, session, losses=losses)
        builder.trace.agent = string(header.get("harness"))
        builder.trace.version = string(header.get("version"))
        builder.set_tools(items(header.get("tools")))
        if parent := string(header.get("parent")):
            builder.trace.parent = TraceParent(parent)
        builder.trace.outcome = outcome_from_extra(header)
        add_messages(
            builder,
            messages,
            string(header.get("model")),
            models=lambda message: message.get("model"),
            times=lambda message: iso_time(message.get("timestamp"), 1000),
        )
        return builder.finish()
