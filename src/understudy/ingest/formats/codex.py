"""The rollouts of Codex CLI: lines `{timestamp, type, payload}`, and before that bare items.

What the model answered at once are the output items between two inputs. `event_msg` lines repeat what the items
hold, except those that tell of turns taken back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from understudy.ingest.chat import ROLES, content
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, items, mapping, outline, read_document, read_records, string
from understudy.ingest.trace import Message, Trace, TraceParent, text_of, tool_call
from understudy.ingest.trace_builder import TraceBuilder

_TYPES = frozenset(("session_meta", "response_item", "event_msg", "turn_context", "compacted"))
_OUTPUT = frozenset(("reasoning", "message"))
_SILENT = frozenset(("ghost_snapshot",))
_HIDDEN = frozenset(("compaction", "compaction_summary", "context_compaction"))
# What stays of the user's words after a compaction: the newest, about 20,000 tokens.
_KEPT_CHARACTERS = 80_000
_LEAST_COST = 40
_AT_ONCE = 1.0  # seconds in which a fork has copied all, and no model has answered
# What the program says in the user's name: taking back a turn does not count these.
_CONTEXT = (
    "<environment_context>",
    "<user_instructions>",
    "# AGENTS.md",
    "<turn_aborted>",
    "<skill",
    "<user_shell_command>",
)


class Codex:
    """Reads rollouts of Codex CLI."""

    name = "codex"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether a line is of a rollout's types, or it is named as a rollout and begins with a session."""
        seen = outline(head)
        if any(str(row.get("type")) in _TYPES and "payload" in row for row in seen.rows):
            return True
        old = file_name(path).startswith("rollout-") and {"id", "timestamp"} <= seen.keys.keys()
        oldest = seen.keys.get("session") == "{" and seen.keys.get("items") == "["
        return seen.kind == "{" and ({"timestamp", "type", "payload"} <= seen.keys.keys() or old or oldest)

    def group(self, path: str) -> str:
        """The file itself."""
        return path

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """One trace of each file."""
        for file in files:
            yield _Rollout(file).read()


class _Rollout:
    """One file as it is read."""

    def __init__(self, file: LogFile) -> None:
        self.file = file
        self.losses: Counter[str] = Counter()
        self.story = TraceBuilder(
            "codex", file.path, file_name(file.path).removesuffix(".jsonl"), losses=self.losses
        )
        self.model: str | None = None
        self.met = False
        self.answer: list[dict[str, Any]] = []
        self.answer_at: tuple[int, str | None] = (0, None)
        self.said: list[int] = []
        self.known: dict[str, dict[str, Any]] = {}
        self.forked: float | None = None

    def lines(self) -> Iterator[dict[str, Any]]:
        """The records: of lines, or of the one document that the first versions wrote."""
        if not file_name(self.file.path).endswith(".json"):
            yield from read_records(self.file, self.losses)
            return
        whole = mapping(read_document(self.file, self.losses))
        yield mapping(whole.get("session"))
        for raw in items(whole.get("items")):
            yield mapping(raw)

    def read(self) -> Trace:
        """The trace of the file."""
        for number, record in enumerate(self.lines()):
            kind, payload = record.get("type"), mapping(record.get("payload"))
            if kind == "response_item" or (kind is not None and "payload" not in record):
                self.item(number, payload or record, string(record.get("timestamp")))
            elif kind == "session_meta":
                self.meta(payload, _moment(string(record.get("timestamp"))))
            elif kind is None and "id" in record and "timestamp" in record:
                self.meta(record)
            elif kind == "turn_context":
                self.model = string(payload.get("model")) or self.model
                self.story.trace.project = self.story.trace.project or string(payload.get("cwd"))
            elif kind == "compacted":
                self.compacted(payload)
            elif kind == "event_msg":
                if payload.get("type") == "thread_rolled_back":
                    self.rolled_back(payload.get("num_turns"))
            elif "record_type" not in record:
                self.losses[f"unknown_record:{str(kind)[:60]}"] += 1
        self.flush()
        return self.story.finish()

    def meta(self, payload: dict[str, Any], written: float | None = None) -> None:
        """The session's own description; a fork repeats that of the session it came from, which is not taken."""
        if self.met:
            return
        self.met = True
        if string(payload.get("forked_from_id")):
            self.forked = written
        trace = self.story.trace
        if session := string(payload.get("id")):
            trace.session_id, trace.trace_id = session, f"codex:{session}"
        trace.project = string(payload.get("cwd"))
        trace.version = string(payload.get("cli_version"))
        self.story.system(string(mapping(payload.get("base_instructions")).get("text")))
        spawn = mapping(mapping(mapping(payload.get("source")).get("subagent")).get("thread_spawn"))
        if above := string(spawn.get("parent_thread_id")) or string(payload.get("parent_thread_id")):
            depth = spawn.get("depth")
            trace.parent = TraceParent(above, None, depth if isinstance(depth, int) else 1)

    def item(self, number: int, item: dict[str, Any], timestamp: str | None) -> None:
        """An item of a request or an answer."""
        kind = str(item.get("type"))
        if own := string(item.get("id")):
            self.known[own] = item
        if kind in _SILENT:
            return
        if kind in _HIDDEN:
            self.hidden()
        elif kind == "message" and item.get("role") != "assistant":
            self.flush()
            self.told(item)
        elif kind.endswith("_output"):
            self.flush()
            self.result(item)
        elif kind in _OUTPUT or kind.endswith("_call"):
            if not self.answer:
                self.answer_at = (number, timestamp)
            self.answer.append(item)
        else:
            self.losses[f"unknown_item:{kind[:60]}"] += 1

    def told(self, item: dict[str, Any]) -> None:
        """A message of the user, or of the developer."""
        role = ROLES.get(str(item.get("role")))
        said = content(item.get("content"), self.losses)
        if role is None or said is None:
            self.losses["unknown_role" if role is None else "empty_message"] += 1
            return
        if role == "user" and not (isinstance(said, str) and said.lstrip().startswith(_CONTEXT)):
            self.said.append(self.story.tip)
        if role == "system" and not self.story.trace.nodes and isinstance(said, str):
            self.story.system(said)
        else:
            self.story.add({"role": role, "content": said})

    def result(self, item: dict[str, Any]) -> None:
        """What a call gave."""
        call_id, output = string(item.get("call_id")), item.get("output")
        failed = mapping(output).get("success") is False
        if isinstance(output, dict):
            output = mapping(output).get("content")
        said = content(output, self.losses) or ""
        if call_id is None:
            self.losses["result_without_id"] += 1
            return
        mark = {"is_error": True} if failed else {}
        self.story.add({"role": "tool", "content": said, "tool_call_id": call_id, **mark})

    def flush(self) -> None:
        """Makes a turn of the answer's items."""
        answer, self.answer = self.answer, []
        message = _message(answer, self.losses)
        if message is not None:
            number, timestamp = self.answer_at
            if self.copied(timestamp):
                self.story.add(message)
                self.losses["copied_turn"] += 1
                return
            self.story.turn(f"line-{number}", [message], model=self.model, timestamp=timestamp)

    def copied(self, timestamp: str | None) -> bool:
        """Whether an answer is another session's: a fork writes all that it repeats at once, when it begins."""
        if self.forked is None:
            return False
        moment = _moment(timestamp)
        if moment is not None and moment - self.forked > _AT_ONCE:
            self.forked = None
        return self.forked is not None and moment is not None

    def compacted(self, payload: dict[str, Any]) -> None:
        """The conversation is replaced: by what the log says, else by what the user said and the summary."""
        self.flush()
        replacement = items(payload.get("replacement_history"))
        for raw in items(payload.get("replacement_history_entries")):
            entry = mapping(raw)
            item = mapping(entry.get("item")) or self.known.get(str(entry.get("item_id")))
            self.losses["lost_reference"] += item is None
            replacement.append(item)
        summary = string(payload.get("message"))
        if not replacement:
            if not self.story.may_repeat():
                return
            kept = self.last_said()
            self.story.repeated(len(kept))
            self.story.fresh()
            self.said = []
            for message in reversed(kept):
                self.said.append(self.story.tip)
                self.story.add(message)
            if summary:
                self.story.add({"role": "user", "content": summary})
            self.story.fidelity, self.story.notes = "repaired", ("compaction_rebuilt",)
            return
        self.story.fresh()
        self.said = []
        for raw in replacement:
            item = mapping(raw)
            if str(item.get("type")) in _HIDDEN:
                self.hidden()
            elif item.get("type") == "message" and item.get("role") != "assistant":
                self.told(item)
            elif str(item.get("type")).endswith("_output"):
                self.result(item)
            elif (message := _message([item], self.losses)) is not None:
                self.story.add(message)

    def last_said(self) -> list[Message]:
        """The user's messages, the newest first, as far back as the program keeps them."""
        nodes = self.story.trace.nodes
        at, kept, room = self.story.tip, list[Message](), _KEPT_CHARACTERS
        while at >= 0 and room > 0:
            body = nodes[at].body
            if body["role"] == "user":
                room -= len(text_of(body["content"])) + _LEAST_COST
                kept.append(body)
            at = nodes[at].parent
        return kept

    def hidden(self) -> None:
        """From here on the model sees a summary that the log holds only enciphered."""
        self.losses["hidden_summary"] += 1
        self.story.fidelity, self.story.notes = "lossy", ("hidden_summary",)

    def rolled_back(self, turns: Any) -> None:
        """The last turns of the user are taken back."""
        self.flush()
        if not isinstance(turns, int) or not 0 < turns <= len(self.said):
            self.losses["bad_rollback"] += 1
            return
        self.story.tip = self.said[-turns]
        del self.said[-turns:]


def _moment(timestamp: str | None) -> float | None:
    """Seconds since the epoch, None where it is no time."""
    try:
        return datetime.fromisoformat(timestamp).timestamp() if timestamp else None
    except (ValueError, OverflowError):
        return None


def _message(answer: Sequence[dict[str, Any]], losses: Counter[str]) -> Message | None:
    """One message of the output items of an answer, None where they say nothing."""
    parts: list[Any] = []
    thoughts: list[str] = []
    hidden = False
    made: list[dict[str, Any]] = []
    for item in answer:
        kind = str(item.get("type"))
        if kind == "message":
            raw = item.get("content")
            parts.extend([raw] if isinstance(raw, str) else items(raw))
        elif kind == "reasoning":
            told = [*items(item.get("content"))] or [*items(item.get("summary"))]
            thoughts.extend(text for part in told if (text := string(mapping(part).get("text"))))
            hidden = hidden or not told
        elif call := _call(kind, item):
            made.append(call)
        else:
            losses[f"call_left_out:{kind[:60]}"] += 1
    said = content(parts, losses)
    if not said and not made:
        if answer:
            losses["empty_answer"] += 1
        return None
    message: Message = {"role": "assistant", "content": said}
    if made:
        message["tool_calls"] = made
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    elif hidden:
        message["thinking_hidden"] = True
    return message


def _call(kind: str, item: dict[str, Any]) -> dict[str, Any] | None:
    """A call, None for one that the provider itself carried out and that has no result here."""
    call_id = string(item.get("call_id"))
    if call_id is None:
        return None
    if kind == "custom_tool_call":
        # Free text, which a call of chat completions cannot have.
        arguments: Any = {"input": item.get("input")}
    else:
        arguments = item.get("arguments") or item.get("action") or {}
    title = string(item.get("name")) or kind.removesuffix("_call")
    return tool_call(call_id, title, arguments)
