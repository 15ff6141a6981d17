"""Reads OpenCode sessions: its database, its earlier storage, the output of `opencode export`, or a list of
messages from its server.

The storage of earlier versions is a directory with a file for each session, message and part:
`storage/session/PROJECT/SESSION.json`, `storage/message/SESSION/MESSAGE.json`,
`storage/part/MESSAGE/PART.json`. Ids of messages and parts ascend in time.

A message has an `info` and `parts`. A response is what lies between two `step-start` parts, or the whole message
if it has none. The parts of tool calls also hold their results. A compaction is a user message with a `compaction`
part and the response with the summary; the conversation continues from these two and, in newer versions, from the
messages between the one with the part's `tail_start_id` and the compaction.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from understudy.ingest.chat import content, response_message, result_message
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint, iso_time
from understudy.ingest.formats.opencode_database import MAGICS, database_of, read_database
from understudy.ingest.json_values import items, mapping, string, value_at
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import outline, read_document
from understudy.ingest.trace import Message, Trace, TraceParent, tool_call

_STORED = re.compile(
    r"(.*/|)storage/(?:session/[^/]+/(?P<own>ses_[^/]+)|message/(?P<session>ses_[^/]+)/msg_[^/]+"
    r"|part/(?P<message>msg_[^/]+)/prt_[^/]+)\.json"
)
_DATABASE = re.compile(r"(?:.*/|)opencode[^/]*\.db(?:-wal|-shm)?")
_SESSION_ID = re.compile(rb'"sessionID"\s*:\s*"(ses_[^"\\]+)"')
_OF_SESSION = re.compile(rb'"(?:sessionID|projectID)"\s*:')
_COMPACTED = "What did we do so far?"
_CLEARED = "[Old tool result content cleared]"
_STOPPED = "[Tool execution was interrupted]"
# Parts that are not shown to the model.
_SILENT = frozenset(("step-finish", "snapshot", "patch", "agent", "retry"))


class OpenCodeFormat(LogFormat):
    """Reads sessions of OpenCode, in its database or storage, or exported."""

    name = "opencode"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file is a database, an export with session info, a list of messages with parts, or a
        stored file.
        """
        if head.startswith(MAGICS):
            return bool(_DATABASE.fullmatch(path.replace("\\", "/")))
        if _STORED.fullmatch(path.replace("\\", "/")):
            return head.lstrip().startswith(b"{")
        beginning = outline(head)
        list_key = "parts" if beginning.kind == "[" else "messages"
        return (
            beginning.keys.get("info") == "{"
            and beginning.keys.get(list_key) == "["
            and bool(_OF_SESSION.search(head))
        )

    def group(self, path: str) -> str:
        """Return the key of files that are read together.

        For a stored file it is its session, or the message if the file is a part of one; for a database's `-wal`
        file it is the database.
        """
        stored = _STORED.fullmatch(path.replace("\\", "/"))
        if stored is None:
            return database_of(path)
        return f"{stored[1]}{stored['own'] or stored['session'] or stored['message']}"

    def links(self, path: str, head: bytes) -> Iterable[str]:
        """The session that a stored part belongs to."""
        stored = _STORED.fullmatch(path.replace("\\", "/"))
        session = _SESSION_ID.search(head) if stored is not None and stored["own"] is None else None
        if stored is None or (session is None and stored["own"] is None):
            return ()
        return (f"{stored[1]}{session[1].decode(errors='replace') if session is not None else stored['own']}",)

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """Yield the traces of a database, of exports (one per file), or of the files of one session. Raises
        OSError.
        """
        if database_of(files[0].path).endswith(".db"):
            for session, messages, losses in read_database(files):
                yield _trace(session, messages, files[0].path, losses)
            return
        stored: list[tuple[re.Match[str], LogFile]] = []
        for file in files:
            match = _STORED.fullmatch(file.path.replace("\\", "/"))
            if match is None:
                yield from self.read_file(file)
            else:
                stored.append((match, file))
        if stored:
            losses: Counter[str] = Counter()
            yield _trace(*_stored_session(stored, losses), stored[0][1].path, losses)

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of an export."""
        value = read_document(file, losses)
        messages = [mapping(raw) for raw in items(value) or items(mapping(value).get("messages"))]
        return _trace(mapping(mapping(value).get("info")), messages, file.path, losses)


def _trace(session: dict[str, Any], messages: list[dict[str, Any]], source: str, losses: Counter[str]) -> Trace:
    session_ids = (string(value_at(raw, "info", "sessionID")) for raw in messages)
    session_id = string(session.get("id")) or next(filter(None, session_ids), None)
    builder = TraceBuilder("opencode", source, session_id or fingerprint(source, messages[:2]), losses=losses)
    builder.trace.project = string(session.get("directory"))
    builder.trace.version = string(session.get("version"))
    if parent_id := string(session.get("parentID")):
        builder.trace.parent = TraceParent(parent_id)
    _add_messages(builder, messages)
    return builder.finish()


def _stored_session(
    files: Iterable[tuple[re.Match[str], LogFile]], losses: Counter[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The info of a stored session, and its messages with their parts, as an export has them."""
    session: dict[str, Any] = {}
    infos: dict[str, dict[str, Any]] = {}
    parts: dict[str, list[dict[str, Any]]] = {}
    for match, file in sorted(files, key=lambda item: item[1].path.rpartition("/")[2]):
        value = mapping(read_document(file, losses))
        if match["own"]:
            session = value
        elif match["session"]:
            infos[string(value.get("id")) or file.path] = value
        else:
            parts.setdefault(match["message"], []).append(value)
    losses["part_without_message"] += sum(
        len(message_parts) for message_id, message_parts in parts.items() if message_id not in infos
    )
    return session, [{"info": info, "parts": parts.get(message_id, [])} for message_id, info in infos.items()]


def _add_messages(builder: TraceBuilder, messages: list[dict[str, Any]]) -> None:
    continues = False  # whether the model's turn continues
    shown: dict[str, list[Message]] = {}
    kept_messages: list[Message] = []  # what a compaction keeps
    for index, raw in enumerate(messages):
        info, parts = mapping(raw.get("info")), [mapping(part) for part in items(raw.get("parts"))]
        message_id = string(info.get("id")) or f"m{index}"
        if info.get("role") == "user":
            if continues or info.get("agent") == "plan":
                # Reminders about plan mode, and around what is typed while the model works, are sent but not
                # logged.
                builder.fidelity, builder.notes = "repaired", ("reminders_not_logged",)
            compaction = next((part for part in parts if part.get("type") == "compaction"), None)
            if compaction is not None and builder.may_repeat():
                builder.continue_from()
                kept_messages = _messages_from(string(compaction.get("tail_start_id")), shown)
                builder.count_repeated(len(kept_messages))
                parts = [{"type": "text", "text": _COMPACTED}]
            if message_content := content(list(_visible_parts(parts, builder.losses)), builder.losses):
                shown[message_id] = [{"role": "user", "content": message_content}]
                builder.add(shown[message_id][0])
        elif info.get("role") == "assistant":
            shown[message_id] = _add_response(builder, info, parts, message_id)
            continues = info.get("finish") == "tool-calls"
            if info.get("summary") is True:
                for message in kept_messages:
                    builder.add(message)
                kept_messages = []
        else:
            builder.losses["not_a_message" if not info else "unknown_role"] += 1


def _messages_from(start: str | None, shown: dict[str, list[Message]]) -> list[Message]:
    """Return what the model was shown of the messages from the one with the id `start` on."""
    ids = list(shown)
    return (
        [message for message_id in ids[ids.index(start) :] for message in shown[message_id]]
        if start in shown
        else []
    )


def _visible_parts(parts: list[dict[str, Any]], losses: Counter[str]) -> Iterator[Any]:
    """Yield the parts of a user message that the model is shown."""
    for part in parts:
        kind = str(part.get("type"))
        if kind == "text" and not part.get("ignored"):
            yield part
        elif kind == "file" and str(part.get("mime")).startswith("image/"):
            yield {"type": "image_url", "image_url": part.get("url")}
        elif kind == "subtask":
            yield "The following tool was executed by the user"
        elif kind == "file" and part.get("mime") not in ("text/plain", "application/x-directory"):
            # Text files and directory listings are repeated in other parts. Other files cannot be reconstructed.
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


def _add_response(
    builder: TraceBuilder, info: dict[str, Any], parts: list[dict[str, Any]], message_id: str
) -> list[Message]:
    """Add the responses of a message and the results of their calls, and return them."""
    count = 0
    added: list[Message] = []
    for step in _steps(parts):
        message, results = _response(step, builder.losses)
        if message is None:
            continue
        if info.get("summary") is True:
            # the summary answers the prompt of the compaction, not the user
            builder.losses["summary_left_out"] += 1
            builder.add(message)
        else:
            count += 1
            builder.add_turn(
                message_id if count == 1 else f"{message_id}.{count}",
                [message],
                model=string(info.get("modelID")),
                timestamp=iso_time(value_at(info, "time", "created"), 1000),
            )
        for result in results:
            builder.add(result)
        added += [message, *results]
    return added


def _response(step: list[dict[str, Any]], losses: Counter[str]) -> tuple[Message | None, list[Message]]:
    """Return a response and the results of its calls. The response is None if it is empty."""
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Message] = []
    is_hidden = False
    for part in step:
        kind = str(part.get("type"))
        if kind == "text":
            texts.append(part.get("text") or "")
        elif kind == "reasoning":
            thought = string(part.get("text"))
            thoughts.extend([thought] if thought else [])
            is_hidden = True
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
    return response_message(text, calls, "\n\n".join(thoughts), hidden=is_hidden), results


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
