"""Cline's `api_conversation_history.json`: Anthropic's messages, with calls in XML where a model has no tools."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from understudy.ingest.chat import blocks
from understudy.ingest.formats.base import SingleFileFormat, TraceBuilder, fingerprint
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import (
    file_name,
    items,
    mapping,
    outline,
    parent_directory,
    read_document,
    string,
)
from understudy.ingest.trace import Message, Trace

_FILE = "api_conversation_history.json"
_PROJECT = re.compile(r"Current (?:Working|Workspace) Directory \(([^)\n]+)\)")


class ClineFormat(SingleFileFormat):
    """Reads conversations of Cline and of what grew out of it."""

    name = "cline"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it is a list of the user's and the assistant's messages that are made of blocks."""
        seen = outline(head)
        ours = seen.keys.get("role") == "user" and seen.keys.get("content") in ("[", None)
        return seen.kind == "[" and (ours or file_name(path) == _FILE) and "parts" not in seen.keys

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each file."""
        yield _trace(file)


def _trace(file: LogFile) -> Trace:
    losses: Counter[str] = Counter()
    raw_messages = [mapping(raw) for raw in items(read_document(file, losses))]
    # Cline names a task by the time at which it began, and its directory so.
    task = file_name(parent_directory(file.path)) if file_name(file.path) == _FILE else ""
    builder = TraceBuilder("cline", file.path, task or fingerprint(file.path, raw_messages[:2]), losses=losses)
    for at, raw in enumerate(raw_messages):
        role = raw.get("role")
        if role not in ("user", "assistant"):
            losses["unknown_role"] += 1
            continue
        messages = blocks(role, raw.get("content"), losses)
        if role == "assistant":
            model = string(mapping(raw.get("modelInfo")).get("modelId"))
            builder.add_turn(
                f"m{at}", messages or [{"role": role, "content": None}], model=model, timestamp=_time(raw)
            )
            continue
        for message in messages:
            builder.add(message)
            builder.trace.project = builder.trace.project or _project(message)
    return builder.finish()


def _project(message: Message) -> str | None:
    content = message.get("content")
    texts: list[Any] = (
        [content] if isinstance(content, str) else [part.get("text") or "" for part in items(content)]
    )
    return next((match.group(1) for text in texts if (match := _PROJECT.search(text))), None)


def _time(raw: dict[str, Any]) -> str | None:
    moment = raw.get("ts")
    if not isinstance(moment, int | float) or not 0 < moment < 1e14:
        return None
    return datetime.fromtimestamp(moment / 1000, UTC).isoformat()
