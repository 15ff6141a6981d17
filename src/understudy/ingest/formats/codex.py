"""Reads rollouts of Codex CLI: lines of `{timestamp, type, payload}`, or bare items in older versions.

All output items between two inputs form one response. `event_msg` lines repeat what the items hold, except for
those that report that turns were rolled back. The response before a compaction is its summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from understudy.ingest.chat import ROLES, content, response_message, result_message, thinking_text
from understudy.ingest.formats.base import LogFormat, TraceBuilder, timestamp_seconds
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, outline, read_document, read_records
from understudy.ingest.trace import Message, Trace, TraceParent, text_of, tool_call

_TYPES = frozenset(("session_meta", "response_item", "event_msg", "turn_context", "compacted"))
_OUTPUT = frozenset(("reasoning", "message"))
_SILENT = frozenset(("ghost_snapshot",))
_NOT_SHOWN = ("event_msg", "token_usage_record", "world_state")
"""Records that the model is not shown, or that repeat what the items hold. A tuple: a type may be a list, say."""
_HIDDEN = frozenset(("compaction", "compaction_summary", "context_compaction"))
# A compaction keeps the user's newest messages, about 20,000 tokens of them.
_RETAINED_CHARACTERS = 80_000
_MIN_COST = 40
_AT_ONCE = 1.0  # seconds in which a fork copies its history, which is faster than any model answers
# Beginnings of messages that the program writes in the user's name. A rollback does not count them as turns.
_CONTEXT = (
    "<environment_context>", "<user_instructions>", "# AGENTS.md", "<turn_aborted>", "<skill",
    "<user_shell_command>",
)  # fmt: skip


class CodexFormat(LogFormat):
    """Reads rollouts of Codex CLI."""

    name = "codex"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether a line has a rollout's record type, or the file is named like a rollout and begins with
        session metadata.
        """
        beginning = outline(head)
        if any(str(row.get("type")) in _TYPES and "payload" in row for row in beginning.rows):
            return True
        is_named_rollout = file_name(path).startswith("rollout-") and {"id", "timestamp"} <= beginning.keys.keys()
        is_document = beginning.keys.get("session") == "{" and beginning.keys.get("items") == "["
        return beginning.kind == "{" and (
            {"timestamp", "type", "payload"} <= beginning.keys.keys() or is_named_rollout or is_document
        )

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        return _CodexRollout(file, losses).read()


class _CodexRollout:
    """The state of reading one file."""

    def __init__(self, file: LogFile, losses: Counter[str]) -> None:
        self.file = file
        self.losses = losses
        self.builder = TraceBuilder("codex", file.path, file_name(file.path).removesuffix(".jsonl"), losses=losses)
        self.model: str | None = None
        self.has_meta = False
        self.pending: list[dict[str, Any]] = []
        self.pending_since: tuple[int, str | None] = (0, None)
        self.user_positions: list[int] = []
        self.items_by_id: dict[str, dict[str, Any]] = {}
        self.forked_at: float | None = None

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield the records: lines, or the items of the single document that the first versions wrote."""
        if not file_name(self.file.path).endswith(".json"):
            yield from read_records(self.file, self.losses)
            return
        document = mapping(read_document(self.file, self.losses))
        yield mapping(document.get("session"))
        for raw in items(document.get("items")):
            yield mapping(raw)

    def read(self) -> Trace:
        """Return the trace of the file."""
        for number, record in enumerate(self.lines()):
            kind, payload = record.get("type"), mapping(record.get("payload"))
            if kind == "response_item" or (kind is not None and "payload" not in record):
                self.add_item(number, payload or record, string(record.get("timestamp")))
            elif kind == "session_meta":
                self.set_meta(payload, timestamp_seconds(string(record.get("timestamp"))))
            elif kind is None and "id" in record and "timestamp" in record:
                self.set_meta(record)
            elif kind == "turn_context":
                self.model = string(payload.get("model")) or self.model
                self.builder.trace.project = self.builder.trace.project or string(payload.get("cwd"))
            elif kind == "compacted":
                self.compact(payload)
            elif kind == "event_msg" and payload.get("type") == "thread_rolled_back":
                self.roll_back(payload.get("num_turns"))
            elif kind in _NOT_SHOWN:
                continue
            elif "record_type" not in record:
                self.losses[f"unknown_record:{str(kind)[:60]}"] += 1
        self.flush()
        return self.builder.finish()

    def set_meta(self, payload: dict[str, Any], written_at: float | None = None) -> None:
        """Take the session's metadata.

        Only the first counts: a fork repeats that of the session it was forked from.
        """
        if self.has_meta:
            return
        self.has_meta = True
        if string(payload.get("forked_from_id")):
            self.forked_at = written_at
        trace = self.builder.trace
        if session := string(payload.get("id")):
            trace.session_id, trace.trace_id = session, f"codex:{session}"
        trace.project = string(payload.get("cwd"))
        trace.version = string(payload.get("cli_version"))
        self.builder.add_system(string(value_at(payload, "base_instructions", "text")))
        spawn = mapping(value_at(payload, "source", "subagent", "thread_spawn"))
        if parent_id := string(spawn.get("parent_thread_id")) or string(payload.get("parent_thread_id")):
            depth = spawn.get("depth")
            trace.parent = TraceParent(parent_id, None, depth if isinstance(depth, int) else 1)

    def add_item(self, number: int, item: dict[str, Any], timestamp: str | None) -> None:
        """Add an item of a request or of a response."""
        kind = str(item.get("type"))
        if item_id := string(item.get("id")):
            self.items_by_id[item_id] = item
        if kind in _SILENT:
            return
        if kind in _HIDDEN:
            self.mark_hidden_summary()
        elif kind == "message" and item.get("role") != "assistant":
            self.flush()
            self.add_input_message(item)
        elif kind.endswith("_output"):
            self.flush()
            self.add_result(item)
        elif kind in _OUTPUT or kind.endswith("_call"):
            if not self.pending:
                self.pending_since = (number, timestamp)
            self.pending.append(item)
        else:
            self.losses[f"unknown_item:{kind[:60]}"] += 1

    def add_input_message(self, item: dict[str, Any]) -> None:
        """Add a message of the user or the developer."""
        role = ROLES.get(str(item.get("role")))
        text = content(item.get("content"), self.losses)
        if role is None or text is None:
            self.losses["unknown_role" if role is None else "empty_message"] += 1
            return
        if role == "user" and not (isinstance(text, str) and text.lstrip().startswith(_CONTEXT)):
            self.user_positions.append(self.builder.tip)
        message = {"role": role, "content": text}
        if not self.builder.take_system(message):
            self.builder.add(message)

    def add_result(self, item: dict[str, Any]) -> None:
        """Add the result of a tool call."""
        call_id, output = string(item.get("call_id")), item.get("output")
        text = content(mapping(output).get("content") if isinstance(output, dict) else output, self.losses)
        if call_id is None:
            self.losses["result_without_id"] += 1
            return
        self.builder.add(result_message(call_id, text or "", is_error=value_at(output, "success") is False))

    def flush(self) -> None:
        """Make a turn of the pending items of a response."""
        output, self.pending = self.pending, []
        message = _message(output, self.losses)
        number, timestamp = self.pending_since
        if message is not None and self.is_copied(timestamp):
            self.builder.add(message)
            self.losses["copied_turn"] += 1
        elif message is not None:
            self.builder.add_turn(f"line-{number}", [message], model=self.model, timestamp=timestamp)

    def is_copied(self, timestamp: str | None) -> bool:
        """Return whether a response was copied from another session: a fork writes all copied items at once when
        it begins.
        """
        if self.forked_at is None:
            return False
        time_s = timestamp_seconds(timestamp)
        if time_s is not None and time_s - self.forked_at > _AT_ONCE:
            self.forked_at = None
        return self.forked_at is not None and time_s is not None

    def compact(self, payload: dict[str, Any]) -> None:
        """Apply a compaction: the conversation becomes the messages that the log lists, else the newest user
        messages and the summary.
        """
        self.leave_out_summary(string(payload.get("message")) or "")
        self.flush()
        replacement = items(payload.get("replacement_history"))
        for raw in items(payload.get("replacement_history_entries")):
            entry = mapping(raw)
            item = mapping(entry.get("item")) or self.items_by_id.get(str(entry.get("item_id")))
            self.losses["lost_reference"] += item is None
            replacement.append(item)
        summary = string(payload.get("message"))
        if not replacement:
            if not self.builder.may_repeat():
                return
            messages = self.newest_user_messages()
            self.builder.count_repeated(len(messages))
            self.builder.continue_from()
            self.user_positions = []
            for message in reversed(messages):
                self.user_positions.append(self.builder.tip)
                self.builder.add(message)
            if summary:
                self.builder.add({"role": "user", "content": summary})
            self.builder.fidelity, self.builder.notes = "repaired", ("compaction_rebuilt",)
            return
        self.builder.continue_from()
        self.user_positions = []
        for raw in replacement:
            item = mapping(raw)
            if str(item.get("type")) in _HIDDEN:
                self.mark_hidden_summary()
            elif item.get("type") == "message" and item.get("role") != "assistant":
                self.add_input_message(item)
            elif str(item.get("type")).endswith("_output"):
                self.add_result(item)
            elif (message := _message([item], self.losses)) is not None:
                self.builder.add(message)

    def leave_out_summary(self, replacement: str) -> None:
        """Leave out the last response if it is the summary with which a compaction replaces the conversation.

        It answers a request that the log does not hold.
        """
        text = content(items(self.pending[-1].get("content")), self.losses) if self.pending else None
        if isinstance(text, str) and text.strip() and replacement.endswith(text):
            del self.pending[-1]
            self.losses["summary_left_out"] += 1

    def newest_user_messages(self) -> list[Message]:
        """Return the user's messages, newest first, as far back as the program keeps them."""
        nodes = self.builder.trace.nodes
        node, newest, remaining_characters = self.builder.tip, list[Message](), _RETAINED_CHARACTERS
        while node >= 0 and remaining_characters > 0:
            body = nodes[node].body
            if body["role"] == "user":
                remaining_characters -= len(text_of(body["content"])) + _MIN_COST
                newest.append(body)
            node = nodes[node].parent
        return newest

    def mark_hidden_summary(self) -> None:
        """Mark later turns as lossy, because the model sees a summary that the log holds only in encrypted
        form.
        """
        self.losses["hidden_summary"] += 1
        self.builder.fidelity, self.builder.notes = "lossy", ("hidden_summary",)

    def roll_back(self, turns: Any) -> None:
        """Remove the user's last `turns` turns from the conversation."""
        self.flush()
        if not isinstance(turns, int) or not 0 < turns <= len(self.user_positions):
            self.losses["bad_rollback"] += 1
            return
        self.builder.tip = self.user_positions[-turns]
        del self.user_positions[-turns:]


def _message(output: Sequence[dict[str, Any]], losses: Counter[str]) -> Message | None:
    """Return the output items of a response as one message, or None if they hold neither text nor calls."""
    parts: list[Any] = []
    thoughts: list[str] = []
    is_hidden = False
    calls: list[dict[str, Any]] = []
    for item in output:
        kind = str(item.get("type"))
        if kind == "message":
            raw = item.get("content")
            parts.extend([raw] if isinstance(raw, str) else items(raw))
        elif kind == "reasoning":
            parts_of_thought = [*items(item.get("content"))] or [*items(item.get("summary"))]
            thoughts += [text] if (text := thinking_text(parts_of_thought, "text")) else []
            is_hidden = is_hidden or not parts_of_thought
        elif call := _call(kind, item):
            calls.append(call)
        else:
            losses[f"call_left_out:{kind[:60]}"] += 1
    text = content(parts, losses)
    if not text and not calls:
        if output:
            losses["empty_answer"] += 1
        return None
    return response_message(text, calls, "\n".join(thoughts), hidden=is_hidden)


def _call(kind: str, item: dict[str, Any]) -> dict[str, Any] | None:
    """Convert a tool call.

    Returns None for a call that the provider executed itself, whose result is not logged.
    """
    call_id = string(item.get("call_id"))
    if call_id is None:
        return None
    if kind == "custom_tool_call":
        # Calls in chat completions need JSON arguments, so free text is wrapped in an object.
        arguments: Any = {"input": item.get("input")}
    else:
        arguments = item.get("arguments") or item.get("action") or {}
    name = string(item.get("name")) or kind.removesuffix("_call")
    return tool_call(call_id, name, arguments)
