"""Reads sessions of pi: lines that form a tree, each naming its parent.

The first line describes the session. Only messages and summaries are shown to the model. After a compaction it
sees the summary and the entries from `firstKeptEntryId` on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.ingest.chat import content, response_message, result_message, thinking_text
from understudy.ingest.formats.base import MAX_CALLS, LogFormat, TraceBuilder
from understudy.ingest.json_values import items, mapping, string
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, outline, read_records
from understudy.ingest.trace import Message, Trace, text_of, tool_call

_COMPACTED = "The conversation history before this point was compacted into the following summary:\n\n<summary>\n"
_BRANCH = "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n"
_NO_RESULT = "No result provided"
_BROKEN = frozenset(("error", "aborted"))
# Entries that are not shown to the model.
_SILENT = frozenset(
    ("custom", "label", "model_change", "session", "session_info", "thinking_level_change", "usage")
)


class PiFormat(LogFormat):
    """Reads sessions of pi."""

    name = "pi"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file begins with pi's session line.

        Session traces of the Hugging Face Hub begin similarly, but name a harness and have no `parentId`.
        """
        keys = outline(head).keys
        is_session_trace = "harness" in keys and b'"parentId"' not in head
        return keys.get("type") == "session" and {"id", "timestamp", "cwd"} <= keys.keys() and not is_session_trace

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        return _PiSession(file, losses).read()


class _PiSession:
    """The state of reading one file."""

    def __init__(self, file: LogFile, losses: Counter[str]) -> None:
        self.file = file
        self.losses = losses
        self.builder = TraceBuilder("pi", file.path, file_name(file.path).removesuffix(".jsonl"), losses=losses)
        self.last_id: str | None = None
        self.parents: dict[str, str | None] = {}
        self.tips: dict[str, int] = {}
        """The node that the conversation ends with at an entry."""
        self.messages: dict[str, Message] = {}

    def read(self) -> Trace:
        for number, entry in enumerate(read_records(self.file, self.losses)):
            if entry.get("type") == "session":
                self.meta(entry)
                continue
            entry_id = string(entry.get("id")) or f"line {number}"
            if entry_id in self.parents:
                self.losses["repeated_id"] += 1
                continue
            # The first versions wrote no tree. An entry whose parent is missing is put after the previous entry.
            parent = string(entry.get("parentId"))
            if parent not in self.parents and not ("parentId" in entry and parent is None):
                parent = self.last_id
            self.parents[entry_id] = parent
            self.builder.tip = -1 if parent is None else self.tips[parent]
            self.entry(entry_id, entry)
            self.tips[entry_id] = self.builder.tip
            self.last_id = entry_id
        return self.builder.finish()

    def meta(self, entry: dict[str, Any]) -> None:
        """Take the session's metadata."""
        trace = self.builder.trace
        if session := string(entry.get("id")):
            trace.session_id, trace.trace_id = session, f"pi:{session}"
        trace.project = string(entry.get("cwd"))

    def entry(self, entry_id: str, entry: dict[str, Any]) -> None:
        """Add an entry at the tip."""
        kind = str(entry.get("type"))
        if kind == "message":
            self.message(entry_id, mapping(entry.get("message")), string(entry.get("timestamp")))
        elif kind == "custom_message":
            self.show(entry_id, {"role": "user", "content": self.content(entry.get("content"))})
        elif kind == "branch_summary":
            self.show(
                entry_id, {"role": "user", "content": f"{_BRANCH}{string(entry.get('summary')) or ''}</summary>"}
            )
        elif kind == "compaction":
            self.compact(entry_id, entry)
        elif kind == "context_edit":
            self.builder.fidelity, self.builder.notes = "lossy", ("context_edited",)
        elif kind not in _SILENT:
            self.losses[f"unknown_record:{kind[:60]}"] += 1

    def message(self, entry_id: str, message: dict[str, Any], timestamp: str | None) -> None:
        """Add a message of the conversation."""
        role = str(message.get("role"))
        if role == "system":
            self.system(message)
        elif role == "assistant":
            answer = self.answer(items(message.get("content")))
            if string(message.get("stopReason")) in _BROKEN:
                self.losses["broken_answer"] += 1  # the broken response is not shown to the model again
            elif not (answer["content"] or answer.get("tool_calls")):
                self.losses["empty_answer"] += 1
            else:
                self.close_calls()
                self.messages[entry_id] = answer
                self.builder.add_turn(entry_id, [answer], model=string(message.get("model")), timestamp=timestamp)
        elif role == "toolResult":
            call_id = string(message.get("toolCallId")) or ""
            text = self.content(message.get("content")) or ""
            self.show(entry_id, result_message(call_id, text, is_error=bool(message.get("isError"))))
        elif role == "bashExecution":
            if not message.get("excludeFromContext"):
                self.show(entry_id, {"role": "user", "content": _command(message)})
        elif role in ("user", "custom"):
            self.show(entry_id, {"role": "user", "content": self.content(message.get("content"))})
        else:
            self.losses["unknown_role"] += 1

    def system(self, message: dict[str, Any]) -> None:
        """Take the system prompt, which may consist of sections, and the tools."""
        if self.builder.trace.shape.system is not None or self.builder.trace.turns:
            self.losses["system_changed"] += 1
            self.builder.fidelity, self.builder.notes = "repaired", ("system_changed",)
            return
        sections = (text_of(self.content(message.get("content"))), *mapping(message.get("sections")).values())
        self.builder.add_system("\n\n".join(text for text in sections if isinstance(text, str) and text))
        self.builder.set_tools([{"type": "function", "function": tool} for tool in _tools(message)])

    def show(self, entry_id: str, message: Message) -> None:
        """Add a message unless it is empty."""
        if message["content"] or message["role"] == "tool":
            if message["role"] == "user":
                self.close_calls()
            self.messages[entry_id] = message
            self.builder.add(message)

    def close_calls(self) -> None:
        """Add the results that the program sends for calls that an interruption left without one."""
        nodes, node, answered_ids = self.builder.trace.nodes, self.builder.tip, set[str]()
        while node >= 0 and nodes[node].body["role"] == "tool" and len(answered_ids) < MAX_CALLS:
            answered_ids.add(nodes[node].body["tool_call_id"])
            node = nodes[node].parent
        for call in (nodes[node].body.get("tool_calls") or ()) if node >= 0 else ():
            if call["id"] not in answered_ids:
                self.builder.add(result_message(call["id"], _NO_RESULT, is_error=True))

    def answer(self, parts: list[Any]) -> Message:
        """Return a response of the model as a message."""
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for part in map(mapping, parts):
            by_kind.setdefault(str(part.get("type")), []).append(part)
        calls: list[dict[str, Any]] = []
        for part in by_kind.pop("toolCall", ()):
            name = string(part.get("name")) or "unknown"
            calls.append(
                tool_call(string(part.get("id")) or f"call_{len(calls)}", name, part.get("arguments") or {})
            )
        thoughts: list[Any] = [*by_kind.pop("thinking", ())]
        visible_parts = [part for parts_of_kind in by_kind.values() for part in parts_of_kind]
        return response_message(self.content(visible_parts), calls, thinking_text(thoughts), hidden=bool(thoughts))

    def content(self, raw: Any) -> Any:
        """Return the content of a message in OpenAI's form."""
        if not isinstance(raw, list):
            return content(raw, self.losses)
        return content([_image(part) or part for part in items(raw)], self.losses)

    def compact(self, entry_id: str, entry: dict[str, Any]) -> None:
        """Apply a compaction: the conversation becomes the summary and the entries that were kept."""
        if not self.builder.may_repeat():
            return
        first_kept_id = string(entry.get("firstKeptEntryId"))
        kept_ids: list[str] = []
        for kept_id in (
            self.path(self.parents[entry_id])
            if first_kept_id in self.parents and first_kept_id != entry_id
            else ()
        ):
            kept_ids.append(kept_id)
            if kept_id == first_kept_id:
                break
        self.builder.count_repeated(len(kept_ids))
        self.builder.continue_from()
        summary = f"{_COMPACTED}{string(entry.get('summary')) or ''}\n</summary>"
        self.show(entry_id, {"role": "user", "content": summary})
        for kept_id in reversed(kept_ids):
            if (message := self.messages.get(kept_id)) is not None:
                self.builder.add(message)

    def path(self, entry_id: str | None) -> Iterator[str]:
        """Yield the ids of the entries from `entry_id` back to the root."""
        while entry_id is not None:
            yield entry_id
            entry_id = self.parents[entry_id]


def _tools(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for tool in map(mapping, items(message.get("toolsAdded"))):
        yield {key: tool[key] for key in ("name", "description", "parameters") if key in tool}


def _image(part: Any) -> dict[str, Any] | None:
    """Convert an image to OpenAI's form. Returns None for other parts."""
    image = mapping(part)
    if image.get("type") != "image" or "data" not in image:
        return None
    return {"type": "image_url", "image_url": f"data:{image.get('mimeType')};base64,{image['data']}"}


def _command(message: dict[str, Any]) -> str:
    """Return the message that tells the model about a command that the user ran."""
    output = string(message.get("output"))
    text = f"Ran `{message.get('command')}`\n" + (f"```\n{output}\n```" if output else "(no output)")
    code = message.get("exitCode")
    if message.get("cancelled"):
        return f"{text}\n\n(command cancelled)"
    return f"{text}\n\nCommand exited with code {code}" if code else text
