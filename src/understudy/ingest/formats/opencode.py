"""OpenCode: what `opencode export` writes, or a session's list of messages as its server answers it.

A message has an `info` and `parts`. A response of the model is what stands between two `step-start` parts, or in
messages without them the whole message. The parts of tool calls hold their results as well. A compaction is a
user's message with a `compaction` part and the response that summarises: the conversation goes on from these two.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.ingest.chat import content, response_message, result_message
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint, iso_time
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import outline, read_document
from understudy.ingest.trace import Message, Trace, TraceParent, tool_call

_OF_SESSION = re.compile(rb'"(?:sessionID|projectID)"\s*:')
_COMPACTED = "What did we do so far?"
_CLEARED = "[Old tool result content cleared]"
_STOPPED = "[Tool execution was interrupted]"
# Parts that the model is not shown.
_SILENT = frozenset(("step-finish", "snapshot", "patch", "agent", "retry"))


class OpenCodeFormat(LogFormat):
    """Reads exported sessions of OpenCode."""

    name = "opencode"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it has a session's info before its messages, or is a list of messages with parts."""
        seen = outline(head)
        inside = "parts" if seen.kind == "[" else "messages"
        return seen.keys.get("info") == "{" and seen.keys.get(inside) == "[" and bool(_OF_SESSION.search(head))

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """The trace of a file."""
        value = read_document(file, losses)
        session = mapping(mapping(value).get("info"))
        messages = [mapping(raw) for raw in items(value) or items(mapping(value).get("messages"))]
        own = (string(value_at(raw, "info", "sessionID")) for raw in messages)
        session_id = string(session.get("id")) or next((id_ for id_ in own if id_), None)
        builder = TraceBuilder(
            "opencode", file.path, session_id or fingerprint(file.path, messages[:2]), losses=losses
        )
        builder.trace.project = string(session.get("directory"))
        builder.trace.version = string(session.get("version"))
        if above := string(session.get("parentID")):
            builder.trace.parent = TraceParent(above)
        _add_messages(builder, messages)
        return builder.finish()


def _add_messages(builder: TraceBuilder, messages: list[dict[str, Any]]) -> None:
    goes_on = False  # whether the model has not ended its turn
    for at, raw in enumerate(messages):
        info, parts = mapping(raw.get("info")), [mapping(part) for part in items(raw.get("parts"))]
        if info.get("role") == "user":
            if goes_on or info.get("agent") == "plan":
                # Reminders on plan mode, and around what is written while the model works, are only sent.
                builder.fidelity, builder.notes = "repaired", ("reminders_not_logged",)
            if any(part.get("type") == "compaction" for part in parts) and builder.may_repeat():
                builder.continue_from()
                parts = [{"type": "text", "text": _COMPACTED}]
            if message_content := content(list(_visible_parts(parts, builder.losses)), builder.losses):
                builder.add({"role": "user", "content": message_content})
        elif info.get("role") == "assistant":
            _add_response(builder, info, parts, string(info.get("id")) or f"m{at}")
            goes_on = info.get("finish") == "tool-calls"
        else:
            builder.losses["not_a_message" if not info else "unknown_role"] += 1


def _visible_parts(parts: list[dict[str, Any]], losses: Counter[str]) -> Iterator[Any]:
    """The parts of a user's message that the model is shown."""
    for part in parts:
        kind = str(part.get("type"))
        if kind == "text" and not part.get("ignored"):
            yield part
        elif kind == "file" and str(part.get("mime")).startswith("image/"):
            yield {"type": "image_url", "image_url": part.get("url")}
        elif kind == "subtask":
            yield "The following tool was executed by the user"
        elif kind == "file" and part.get("mime") not in ("text/plain", "application/x-directory"):
            # Texts and listings of directories stand in further parts; other files are in no request we can build.
            losses["file_left_out"] += 1
        elif kind not in ("text", "file") and kind not in _SILENT:
            losses[f"unknown_part:{kind[:60]}"] += 1


def _steps(parts: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    step: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") == "step-start":
            yield step
            step = []
        else:
            step.append(part)
    yield step


def _add_response(builder: TraceBuilder, info: dict[str, Any], parts: list[dict[str, Any]], own: str) -> None:
    count = 0
    for step in _steps(parts):
        message, results = _response(step, builder.losses)
        if message is None:
            continue
        if info.get("summary") is True:
            builder.losses["summary_left_out"] += 1  # it answers another prompt, that of the compaction
            builder.add(message)
        else:
            count += 1
            builder.add_turn(
                own if count == 1 else f"{own}.{count}",
                [message],
                model=string(info.get("modelID")),
                timestamp=iso_time(value_at(info, "time", "created"), 1000),
            )
        for result in results:
            builder.add(result)


def _response(step: list[dict[str, Any]], losses: Counter[str]) -> tuple[Message | None, list[Message]]:
    """A response and the results of its calls; None for one that is empty."""
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    hidden = False
    for part in step:
        kind = str(part.get("type"))
        if kind == "text":
            texts.append(part.get("text") or "")
        elif kind == "reasoning":
            thought = string(part.get("text"))
            thoughts.extend([thought] if thought else [])
            hidden = True
        elif kind == "tool":
            state = mapping(part.get("state"))
            call_id = string(part.get("callID")) or f"call_{len(calls)}"
            losses["call_without_id"] += "callID" not in part
            name = string(part.get("tool")) or "unknown"
            calls.append(tool_call(call_id, name, state.get("input") or {}))
            results.append(_result(call_id, state, losses))
        elif kind not in _SILENT:
            losses[f"unknown_part:{kind[:60]}"] += 1
    text = "\n\n".join(str(text) for text in texts if text) or None
    if not (text or calls or thoughts):
        return None, []
    return response_message(text, calls, "\n\n".join(thoughts), hidden=hidden), results


def _result(call_id: str, state: dict[str, Any], losses: Counter[str]) -> Message:
    status = state.get("status")
    if status == "error":
        return result_message(call_id, string(state.get("error")) or "", is_error=True)
    if status != "completed":
        losses["result_missing"] += 1
        return result_message(call_id, _STOPPED, is_error=True)
    if value_at(state, "time", "compacted"):
        return result_message(call_id, _CLEARED)
    images = [
        {"type": "image_url", "image_url": file.get("url")}
        for file in map(mapping, items(state.get("attachments")))
        if str(file.get("mime")).startswith("image/")
    ]
    return result_message(call_id, content([state.get("output") or "", *images], losses) or "")
