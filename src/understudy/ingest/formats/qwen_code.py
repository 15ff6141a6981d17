"""Reads chats of Qwen Code: lines that form a tree, with messages in Gemini's form.

`uuid` and `parentUuid` work as in Claude Code's logs; messages have `parts`. A `chat_compression` record holds the
whole conversation that continues, but not the results of the calls that it ends with: they were logged before it.
A subagent's chat is a separate file.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from understudy.ingest.formats.base import MAX_CALLS, LogFormat, TraceBuilder
from understudy.ingest.formats.gemini import ReplyRenderer, record_messages
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, outline, read_records
from understudy.ingest.trace import Message, Trace

_KINDS = {"user": "user", "tool_result": "user", "assistant": "gemini"}
_ROLES = {"user": "user", "model": "gemini"}


class QwenCodeFormat(LogFormat):
    """Reads chats of Qwen Code."""

    name = "qwen-code"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether lines with parents hold messages with parts."""
        beginning = outline(head)
        if {"uuid", "parentUuid", "provenance"} <= beginning.keys.keys():
            return True
        # The search avoids parsing the first lines of most other programs' logs.
        return b'"parts"' in head and any(
            "parentUuid" in row and "parts" in mapping(row.get("message")) for row in beginning.rows
        )

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        name = file_name(file.path).removesuffix(".jsonl")
        builder = TraceBuilder("qwen-code", file.path, name, losses=losses)
        builder.trace.renderer = ReplyRenderer()
        tips: dict[str | None, int] = {None: -1}
        restored = False  # whether earlier results were added after the last compression
        for number, record in enumerate(read_records(file, losses)):
            parent = string(record.get("parentUuid"))
            # A record whose parent is missing is put after the previous record.
            builder.tip = tips.get(parent, builder.tip)
            if _is_compression(record):
                builder.fidelity, builder.notes = "exact", ()
                restored = _compress(builder, items(value_at(record, "systemPayload", "compressedHistory")))
            else:
                if restored and record.get("type") == "user":
                    # A resumed session lacks those results, and the log does not show whether it was resumed.
                    builder.fidelity, builder.notes = "repaired", ("resume_not_logged",)
                _add(builder, record, number)
            tips[string(record.get("uuid")) or f"line {number}"] = builder.tip
            builder.trace.session_id = string(record.get("sessionId")) or builder.trace.session_id
            builder.trace.version = builder.trace.version or string(record.get("version"))
            builder.trace.project = builder.trace.project or string(record.get("cwd"))
        return builder.finish()


def _take_back(builder: TraceBuilder) -> None:
    """Let the next answer follow what came before an answer whose calls have no results.

    Qwen Code asks again, without it, for an answer that was cut off in a call's arguments, after it has logged it.
    """
    node = builder.trace.nodes[builder.tip] if builder.tip >= 0 else None
    if node is not None and node.body and node.body[-1]["role"] == "assistant" and "tool_calls" in node.body[-1]:
        builder.tip = node.parent


def _is_compression(record: dict[str, Any]) -> bool:
    return record.get("type") == "system" and record.get("subtype") == "chat_compression"


def _compress(builder: TraceBuilder, history: list[Any]) -> bool:
    """Apply a compression: the conversation becomes this history.

    Returns whether earlier results had to be added, because the history ends with calls. A prompt that is not yet
    answered is no part of the history either.
    """
    if not history or not builder.may_repeat():
        return False
    index = builder.tip
    last_messages: list[Message] = list(builder.trace.nodes[index].body[-1:]) if index >= 0 else []
    builder.count_repeated(len(history))
    builder.continue_from()
    messages: list[Message] = []
    for content in map(mapping, history):
        line = {"type": _ROLES.get(str(content.get("role"))), "content": items(content.get("parts"))}
        messages = record_messages(line, set(), builder.losses)
        builder.add(messages)
    unanswered = {call["id"] for call in (messages[-1].get("tool_calls") or () if messages else ())}
    results: list[Message] = []
    for _ in range(MAX_CALLS):  # they were logged right before, each in a node of its own at most
        if index < 0 or not unanswered:
            break
        node = builder.trace.nodes[index]
        for message in reversed(node.body):
            if message.get("tool_call_id") in unanswered:
                unanswered.remove(message["tool_call_id"])
                results.append(message)
        index = node.parent
    if results:
        builder.add(results[::-1])
    elif last_messages and last_messages[0]["role"] == "user" and last_messages != messages[-1:]:
        builder.add(last_messages)  # the prompt before which the conversation was compressed
    return bool(results)


def _add(builder: TraceBuilder, record: dict[str, Any], number: int) -> None:
    """Add a record at the tip."""
    kind, subtype = str(record.get("type")), record.get("subtype")
    message = mapping(record.get("message"))
    if kind in _KINDS and message and subtype != "realtime_message":
        line = {"type": _KINDS[kind], "content": items(message.get("parts"))}
        messages = record_messages(line, set(), builder.losses)
        if kind != "assistant":
            builder.add(messages)
        elif messages:
            _take_back(builder)
            record_id = string(record.get("uuid")) or f"line {number}"
            timestamp = string(record.get("timestamp"))
            builder.add_turn(record_id, [messages], model=string(record.get("model")), timestamp=timestamp)
        else:
            builder.losses["empty_answer"] += 1
    elif kind != "system":
        builder.losses[f"unknown_record:{kind[:60]}"] += 1
