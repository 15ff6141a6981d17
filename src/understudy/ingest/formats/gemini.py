"""Reads Gemini CLI sessions: one JSON document, lines with `$set` and `$rewindTo`, or a saved checkpoint.

A message is written again as its tool calls progress, and the last version counts. `$rewindTo` takes back a
message and everything after it; `$set` of `messages` replaces the whole conversation. A resumed session copies
the earlier messages, by `$set` or one by one, into the same file or another. The copies of responses lack the
model, and the results of their calls are messages with the response's id; these are sent, besides those that were
logged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from understudy.ingest.chat import content, response_message, result_message
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile, read_head
from understudy.ingest.log_reader import file_name, outline, parent_directory, read_document, read_records
from understudy.ingest.trace import Message, PlainRenderer, Trace, TraceParent, TurnAction, tool_call

_ROLES = {"user": "user", "gemini": "assistant", "model": "assistant"}
_SILENT = frozenset(("info", "error", "warning"))
_INTERRUPTED = "[The previous response was interrupted before it completed.]"
_MARKS = frozenset(("$set", "$rewindTo"))


class GeminiFormat(LogFormat):
    """Reads sessions of Gemini CLI."""

    name = "gemini"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file has a session and project hash, lines with `$set` or `$rewindTo`, or a list of
        messages with parts.
        """
        beginning = outline(head)
        if beginning.kind == "[":
            return beginning.keys.get("role") in ("user", "model") and beginning.keys.get("parts") == "["
        has_meta = (
            beginning.keys.keys() & {"projectHash", "startTime", "messages"}
            or beginning.keys.get("kind") == "main"
        )
        if (
            "sessionId" in beginning.keys
            and has_meta
            and "uuid" not in beginning.keys
            and "type" not in beginning.keys
        ):
            return True
        return any(_MARKS & row.keys() or (row.get("type") == "gemini" and "id" in row) for row in beginning.rows)

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        return _GeminiSession(file, losses).read()


_PLAIN = PlainRenderer()


class ReplyRenderer:
    """Renders nodes whose body is a list of messages: a response with the results of its calls, or a prompt."""

    def history(self, body: list[Message]) -> list[Message]:
        """Return the messages without their thinking."""
        return [message for reply in body for message in _PLAIN.history(reply)]

    def action(self, bodies: Sequence[list[Message]]) -> TurnAction:
        """Return the responses as one action."""
        return _PLAIN.action([message for body in bodies for message in body if message["role"] == "assistant"])


class _GeminiSession:
    """The state of reading one file."""

    def __init__(self, file: LogFile, losses: Counter[str]) -> None:
        self.file = file
        self.losses = losses
        self.builder = TraceBuilder("gemini", file.path, file_name(file.path).partition(".")[0], losses=losses)
        self.builder.trace.renderer = ReplyRenderer()
        self.shown: list[tuple[tuple[str, str], int]] = []
        """The messages of the conversation: id and type, and the node."""
        self.position: dict[tuple[str, str], int] = {}
        self.turn_ids: set[str] = set()
        self.records: dict[int, dict[str, Any]] = {}
        self.has_id = False

    def read(self) -> Trace:
        # File names do not tell the two layouts apart: a single document may be named .jsonl, and lines .json.
        beginning = outline(head := read_head(self.file))
        one_long_line = (
            beginning.kind == "{" and b"\n" not in head and file_name(self.file.path).endswith(".jsonl")
        )
        if beginning.rows or one_long_line:
            for record in read_records(self.file, self.losses):
                self.record(record)
        else:
            value = read_document(self.file, self.losses)
            if isinstance(value, list):
                self.checkpoint(items(value))
            elif value is not None:
                self.meta(mapping(value))
        self.fill()
        return self.builder.finish()

    def record(self, record: dict[str, Any]) -> None:
        """Process a line."""
        if "$rewindTo" in record:
            # An unknown message id takes everything back, as it does in the program itself.
            target = str(record["$rewindTo"])
            positions = (self.position.get((target, kind)) for kind in _ROLES)
            self.cut(min((position for position in positions if position is not None), default=0))
            self.builder.tip = self.shown[-1][1] if self.shown else -1
        elif "$set" in record:
            self.meta(mapping(record["$set"]))
        elif "id" in record or "content" in record:
            self.close_results(record)
            self.message(record)
        elif "sessionId" in record:
            self.meta(record)
        else:
            self.losses["unknown_record"] += 1

    def meta(self, record: dict[str, Any]) -> None:
        """Process session metadata, which may include all messages."""
        trace = self.builder.trace
        if not self.has_id and (session := string(record.get("sessionId"))):
            self.has_id = True
            trace.session_id, trace.trace_id = session, f"gemini:{session}"
        directories = items(record.get("directories"))
        trace.project = trace.project or (string(directories[0]) if directories else None)
        directory = file_name(parent_directory(self.file.path))
        if record.get("kind") == "subagent" and directory not in ("", "chats"):
            # The log of a subagent lies in a directory named after the session that it works for.
            trace.parent = TraceParent(directory)
        if isinstance(record.get("messages"), list):
            self.replace([mapping(raw) for raw in items(record["messages"])])

    def replace(self, messages: list[dict[str, Any]]) -> None:
        """Replace the conversation with these messages. Nodes of a common beginning are kept."""
        visible = [message for message in messages if str(message.get("type")) not in _SILENT]
        shared_count = 0
        while shared_count < min(len(visible), len(self.shown)) and _is_same(
            visible[shared_count], self.records[self.shown[shared_count][1]]
        ):
            shared_count += 1
        if shared_count < len(self.shown):
            self.builder.continue_from(self.shown[shared_count - 1][1] if shared_count else -1)
            self.cut(shared_count)
        has_turns = bool(self.turn_ids)
        for message in visible[shared_count:]:
            # A message that a compression wrote in the model's name has no model field.
            by_compression = has_turns and not string(message.get("model"))
            self.message(
                message, is_repeat=by_compression or str(message.get("id")) in self.turn_ids, update=False
            )

    def cut(self, count: int) -> None:
        """Keep only the first `count` messages of the conversation."""
        for key, _ in self.shown[count:]:
            self.position.pop(key, None)
        del self.shown[count:]

    def message(self, record: dict[str, Any], *, is_repeat: bool = False, update: bool = True) -> None:
        """Add a message; with `update`, change one of this id and type that was written before instead.

        With `is_repeat` it is a repetition, and does not become a turn.
        """
        kind = str(record.get("type"))
        if kind in _SILENT:
            return
        role = _ROLES.get(kind)
        if role is None:
            self.losses["unknown_message"] += 1
            return
        message_id = string(record.get("id")) or f"m{len(self.builder.trace.nodes)}"
        key = message_id, kind
        if update and key in self.position:
            self.records[self.shown[self.position[key]][1]] = record
            return
        is_repeat = is_repeat or _is_copy(record)
        if role == "assistant" and not is_repeat:
            self.turn_ids.add(message_id)
            timestamp = string(record.get("timestamp"))
            self.builder.add_turn(message_id, [[]], model=string(record.get("model")), timestamp=timestamp)
        else:
            self.builder.add([])
        self.records[self.builder.tip] = record
        self.position[key] = len(self.shown)
        self.shown.append((key, self.builder.tip))

    def close_results(self, prompt: dict[str, Any]) -> None:
        """Add the text that the program sends as the model's between results without a response and a prompt."""
        last_record = self.records[self.shown[-1][1]] if self.shown else {}
        if (
            prompt.get("type") == last_record.get("type") == "user"
            and _has_results(last_record)
            and not _has_results(prompt)
        ):
            self.message({"type": "gemini", "content": [{"text": _INTERRUPTED}]})

    def checkpoint(self, contents: list[Any]) -> None:
        """Read a checkpoint: a conversation in the form in which it is sent to the model."""
        self.builder.trace.session_id = fingerprint(self.file.path, contents[:3])
        self.builder.trace.trace_id = f"gemini:{self.builder.trace.session_id}"
        for index, raw in enumerate(contents):
            content = mapping(raw)
            self.message({"id": f"m{index}", "type": content.get("role"), "content": items(content.get("parts"))})

    def fill(self) -> None:
        """Render the messages of each node, once no message can be written again."""
        nodes = self.builder.trace.nodes
        for index, record in self.records.items():
            answered_ids = _answered_ids(self.records.get(nodes[index].parent, {}))
            nodes[index].body.extend(record_messages(record, answered_ids, self.losses))
        empty = {index for index in self.records if not nodes[index].body}
        turns = self.builder.trace.turns
        self.losses["empty_answer"] += sum(turn.action[0] in empty for turn in turns)
        self.builder.trace.turns = [turn for turn in turns if turn.action[0] not in empty]


def _is_copy(record: dict[str, Any]) -> bool:
    """Return whether a message in the model's name is a copy of an earlier response, which a resume or a
    compression wrote: it has no model, and its calls are parts of its content.
    """
    return record.get("type") == "gemini" and "model" not in record and isinstance(record.get("content"), list)


def _has_results(record: dict[str, Any]) -> bool:
    return any("functionResponse" in mapping(part) for part in items(record.get("content")))


def _is_same(message: dict[str, Any], shown: dict[str, Any]) -> bool:
    return all(message.get(key) == shown.get(key) for key in ("id", "content", "toolCalls"))


def _answered_ids(record: dict[str, Any]) -> set[str]:
    calls = (mapping(call) for call in items(record.get("toolCalls")))
    return {str(call.get("id")) for call in calls if call.get("result") is not None}


def record_messages(record: dict[str, Any], answered_ids: set[str], losses: Counter[str]) -> list[Message]:
    """Return the messages of a record.

    Results of the calls in `answered_ids` are left out, since they were added before.
    """
    raw = record.get("content")
    parts: list[Any] = items(raw) or [raw]
    parts_shown: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    for entry in parts:
        part = mapping(entry)
        if response := mapping(part.get("functionResponse")):
            if (call_id := string(response.get("id"))) and call_id not in answered_ids:
                results.append(result_message(call_id, _output(response)))
        elif call := mapping(part.get("functionCall")):
            calls.append(_call(call, len(calls), losses))
        elif part.get("thought") and (text := string(part.get("text"))):
            thoughts.append(text)
        elif data := mapping(part.get("inlineData")):
            parts_shown.append(_image(data))
        elif entry:
            parts_shown.append(entry)
    if record.get("type") == "user":
        text = content(parts_shown, losses)
        return results + ([{"role": "user", "content": text}] if text else [])
    for entry in items(record.get("thoughts")):
        thought = mapping(entry)
        thought_texts = [text for key in ("subject", "description") if (text := string(thought.get(key)))]
        if thought_text := "\n".join(thought_texts) or string(entry):
            thoughts.append(thought_text)
    call_ids = {call["id"] for call in calls}
    for entry in items(record.get("toolCalls")):
        call = mapping(entry)
        if str(call.get("id")) not in call_ids:
            calls.append(_call(call, len(calls), losses))
        if call.get("result") is not None:
            # Stored messages have their keys in this order; another order would change their hash in the store.
            text = _result(call, losses)
            result: Message = {"role": "tool", "tool_call_id": str(call.get("id")), "content": text}
            failed = call.get("status") in ("error", "cancelled")
            results.append({**result, "is_error": True} if failed else result)
    text = content(parts_shown, losses)
    if not text and not calls:
        return []
    hidden = bool(value_at(record, "tokens", "thoughts"))
    return [response_message(text, calls, "\n".join(thoughts), hidden=hidden), *results]


def _call(call: dict[str, Any], index: int, losses: Counter[str]) -> dict[str, Any]:
    name = string(call.get("name")) or "unknown"
    call_id = string(call.get("id"))
    if call_id is None:
        losses["call_without_id"] += 1
        call_id = f"{name}-{index}"
    return tool_call(call_id, name, call.get("args") or {})


def _result(call: dict[str, Any], losses: Counter[str]) -> Any:
    """Return the result of a call: its own response and the parts beside it."""
    raw = call.get("result")
    parts: list[Any] = []
    for entry in items(raw) or [raw]:
        part = mapping(entry)
        if response := mapping(part.get("functionResponse")):
            # After the program repaired a conversation, this list may hold responses to other calls too.
            if response.get("id") in (None, call.get("id")):
                parts.append(_output(response))
        elif data := mapping(part.get("inlineData")):
            parts.append(_image(data))
        elif part and "text" not in part:
            parts.append(msgspec.json.encode(part).decode())
        elif entry:
            parts.append(entry)
    return content(parts, losses) or ""


def _image(data: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": f"data:{data.get('mimeType')};base64,{data.get('data')}"}


def _output(response: dict[str, Any]) -> str:
    response_value = mapping(response.get("response"))
    for key in ("output", "error"):
        if isinstance(response_value.get(key), str):
            return response_value[key]
    return msgspec.json.encode(response.get("response")).decode()
