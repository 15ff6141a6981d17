"""Reads Cline's `api_conversation_history.json`: Anthropic messages, with tool calls as XML for models without
tools.
"""

from __future__ import annotations

import re
from collections import Counter

from understudy.ingest.chat import blocks
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint, iso_time
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, outline, parent_directory, read_document
from understudy.ingest.trace import Message, Trace, text_of

_FILE = "api_conversation_history.json"
_PROJECT = re.compile(r"Current (?:Working|Workspace) Directory \(([^)\n]+)\)")


class ClineFormat(LogFormat):
    """Reads conversations of Cline and its forks."""

    name = "cline"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file is a list of user and assistant messages made of content blocks."""
        beginning = outline(head)
        is_conversation = beginning.keys.get("role") == "user" and beginning.keys.get("content") in ("[", None)
        return (
            beginning.kind == "["
            and (is_conversation or file_name(path) == _FILE)
            and "parts" not in beginning.keys
        )

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        raw_messages = [mapping(raw) for raw in items(read_document(file, losses))]
        # Cline uses the time at which a task began as its name and as the name of its directory.
        task = file_name(parent_directory(file.path)) if file_name(file.path) == _FILE else ""
        builder = TraceBuilder("cline", file.path, task or fingerprint(file.path, raw_messages[:2]), losses=losses)
        for index, raw in enumerate(raw_messages):
            role = raw.get("role")
            if role not in ("user", "assistant"):
                losses["unknown_role"] += 1
                continue
            messages = blocks(role, raw.get("content"), losses)
            if role == "assistant":
                model = string(value_at(raw, "modelInfo", "modelId"))
                messages = messages or [{"role": role, "content": None}]
                builder.add_turn(f"m{index}", messages, model=model, timestamp=iso_time(raw.get("ts"), 1000))
                continue
            for message in messages:
                builder.add(message)
                builder.trace.project = builder.trace.project or _project(message)
        return builder.finish()


def _project(message: Message) -> str | None:
    match = _PROJECT.search(text_of(message.get("content")))
    return match.group(1) if match else None
