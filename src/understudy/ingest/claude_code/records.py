"""Parses a Claude Code log into typed records, line by line, and recovers what it can from malformed lines.

Decoding takes most of the time, so only the fields that place a record are decoded. Texts, inputs and results stay
raw JSON until the messages are rendered.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from io import BytesIO
from typing import Any, BinaryIO, cast

import msgspec
from msgspec import Raw, Struct

from understudy.ingest.log_files import LogFile

_NOTIFICATION = re.compile(rb'"\s*<[a-z]+-notification>')
_TOOL_HOOK = re.compile(rb'"hookEvent": ?"(?:Pre|Post)ToolUse')
# some versions queue a notice about a background agent in this form, and never dequeue it
_TASK_NOTICE = rb"{\"task_id\""


_MAX_START_S = 0.2  # the longest time, in seconds, that a command-line prompt waits in the queue


class QueuedPrompt(Struct):
    """A prompt in the queue: its content, the number of records logged before it, and when it was queued."""

    content: Raw
    record_count: int
    timestamp: str | None

    def is_notification(self) -> bool:
        """Return whether the program queued it rather than the user."""
        return _NOTIFICATION.match(bytes(self.content)) is not None


class PromptQueue(Struct):
    """The prompts that are waiting to be sent."""

    waiting: list[QueuedPrompt] = []

    def program_started(self, record: ClaudeRecord, record_count: int) -> bool:
        """Apply a queue operation other than `remove`, which the log has after `record_count` records.

        Returns whether the operation shows that the program was started here, which is so for a dequeued prompt
        that was not queued while the program was running.
        """
        if record.operation == "enqueue":
            if _TASK_NOTICE not in bytes(record.content)[:16]:
                self.waiting.append(QueuedPrompt(record.content, record_count, record.timestamp))
        elif record.operation == "popAll":
            self.waiting.clear()
        elif record.operation == "dequeue":
            if not self.waiting:
                return True  # the prompt was queued before this log began
            prompt = self.waiting.pop(0)
            waited_s = seconds_between(prompt.timestamp, record.timestamp)
            # A prompt from the command line is a string and is dequeued at once. Prompts from a JSON stream are
            # lists, which the log omits; they may come at any time.
            was_immediate = prompt.record_count == record_count and (waited_s is None or waited_s <= _MAX_START_S)
            return was_immediate and bool(bytes(prompt.content)) and not prompt.is_notification()
        return False

    def take_sent_prompt(self) -> Raw | None:
        """Apply a `remove` operation: remove and return the prompt that was sent in the middle of a turn.

        The operation does not name the prompt: it is the user's oldest one. Returns None if there is none.
        """
        prompts = [prompt for prompt in self.waiting if not prompt.is_notification()] or self.waiting[:1]
        if not prompts:
            return None
        self.waiting.remove(prompts[0])
        return prompts[0].content if bytes(prompts[0].content) and not prompts[0].is_notification() else None


def seconds_between(first: str | None, second: str | None) -> float | None:
    """Return the seconds between two ISO timestamps, or None if one is missing or malformed."""
    try:
        return (datetime.fromisoformat(second or "") - datetime.fromisoformat(first or "")).total_seconds()
    except (TypeError, ValueError):  # a timestamp is missing, or only one of them has a time zone
        return None


UNREADABLE = "unreadable"
"""The type of a record that stands for a line that is not JSON."""

QUEUED_PROMPT = "queued-prompt"
"""The type of a record made for a prompt that was taken from the queue and sent in the middle of a turn.

Versions up to about 2.1.60 log only that the prompt was taken, not the message.
"""

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
"""The exceptions that decoding malformed text may raise."""

_EMPTY = Raw()
MAX_LINE_BYTES = 128 << 20
"""Longest line that is read, in bytes; longer lines are counted and skipped."""

_CHUNK_BYTES = 32 << 20
"""While fewer bytes than this were read, records keep the lines they were decoded from alive: copying takes time.
"""

_AGENT_ID = b'"agentId"'
_HOOK_HEAD = 120
_RAW_OF_BLOCK = ("text", "thinking", "input", "content", "source", "title", "tool")
_RAW_OF_RECORD = (
    "toolUseResult",
    "compactMetadata",
    "microcompactMetadata",
    "attachment",
    "rendered",
    "content",
    "todos",
)
_MAX_LOOSE_BYTES = 16 << 20
_READ_BYTES = 1 << 16


# Fields are in the order in which the CLI writes them, which msgspec decodes faster.


class ClaudeBlock(Struct, gc=False):
    """A content block. Raw fields are decoded when messages are rendered."""

    type: str = ""
    tool_use_id: str | None = None
    id: str | None = None
    name: str | None = None
    text: Raw = _EMPTY
    thinking: Raw = _EMPTY
    input: Raw = _EMPTY
    content: Raw = _EMPTY
    is_error: bool | None = None
    source: Raw = _EMPTY
    title: Raw = _EMPTY
    tool: Raw = _EMPTY


class ClaudeMessage(Struct, gc=False):
    """The message in a user or assistant record."""

    model: str | None = None
    id: str | None = None
    content: str | list[ClaudeBlock | str] | None = None
    stop_reason: str | None = None
    usage: Raw = _EMPTY


class ClaudeRecord(Struct, gc=False):
    """A line of the log, with the fields that decide its kind and its place in the conversation."""

    parentUuid: str | None = None
    isSidechain: bool | None = None
    type: str = ""
    message: ClaudeMessage | None = None
    requestId: str | None = None
    uuid: str | None = None
    timestamp: str | None = None
    toolUseResult: Raw = _EMPTY
    todos: Raw = _EMPTY
    sourceToolUseID: str | None = None
    subtype: str | None = None
    isApiErrorMessage: bool | None = None
    isCompactSummary: bool | None = None
    isVisibleInTranscriptOnly: bool | None = None
    logicalParentUuid: str | None = None
    compactMetadata: Raw = _EMPTY
    microcompactMetadata: Raw = _EMPTY
    attachment: Raw = _EMPTY
    rendered: Raw = _EMPTY
    content: Raw = _EMPTY
    requestRef: str | int | None = None
    operation: str | None = None
    messageId: str | None = None
    isSnapshotUpdate: bool | None = None
    data: Raw = _EMPTY

    def is_tool_hook(self) -> bool:
        """Return whether the record reports that a hook ran before or after a tool."""
        return _TOOL_HOOK.search(bytes(self.data)[:_HOOK_HEAD]) is not None


class ClaudeEnvelope(Struct, gc=False):
    """Fields that have the same value in most lines of a file."""

    sessionId: str | None = None
    cwd: str | None = None
    version: str | None = None
    agentId: str | None = None
    forkedFrom: Raw = _EMPTY
    uuid: str | None = None


class ClaudeLog(Struct):
    """The contents of one log file. `records` are those of the conversation, in file order.

    `ledger`: unparsed lines of the request ledger. `ends`: for each end of the program, the number of records
    before it; the next record belongs to a resumed session. `losses`: counts of unreadable or unknown data, by
    kind. `sidechains`: whether some records belong to subagents; `attachments`: whether some are attachments.
    `queue`: prompts that were not yet sent. `snapshots`: how often files were saved, by the uuid of the prompt.
    """

    path: str
    records: list[ClaudeRecord]
    ends: list[int]
    ledger: list[bytes]
    envelope: ClaudeEnvelope
    losses: Counter[str]
    sidechains: bool = False
    attachments: bool = False
    queue: PromptQueue = msgspec.field(default_factory=PromptQueue)
    snapshots: Counter[str] = msgspec.field(default_factory=Counter[str])


_decode = msgspec.json.Decoder(ClaudeRecord).decode
_decode_lines = msgspec.json.Decoder(ClaudeRecord).decode_lines
_decode_body = msgspec.json.Decoder(ClaudeMessage).decode
_decode_block = msgspec.json.Decoder(ClaudeBlock | str).decode
_decode_envelope = msgspec.json.Decoder(ClaudeEnvelope).decode

_SNAPSHOT = "file-history-snapshot"
_SUMMARY = "summary"
_LEDGER = ("api-request", "api-request-blob", "api-request-shape")
_NOT_CONVERSATION_TEXT = """
file-history-delta mode permission-mode ai-title custom-title agent-name
agent-color agent-setting pr-link worktree-state cost-state tag task-summary atis-latch relocated tools-used
"""
_NOT_CONVERSATION = frozenset(_NOT_CONVERSATION_TEXT.split())
"""Types of records that are not part of the conversation."""

_PARENT = re.compile(rb'"parentUuid": ?"([^"\\]{1,200})"')
_UUID = re.compile(rb'"uuid": ?"([^"\\]{1,200})"')
_SIDECHAIN = re.compile(rb'"isSidechain": ?true')
_MESSAGE_ROLE = re.compile(rb'"(?:assistant|user)"')
_NO_RESPONSE = b'"No response requested."'
_RESUMED = b'"SessionStart:resume"'
_SURROGATE = re.compile(rb"\\u[dD]")
_BOM = b"\xef\xbb\xbf"  # the UTF-8 byte order mark, which is skipped
_UNDECODED = object()
_IGNORED = ClaudeRecord(type="mode")


def read_log(file: LogFile) -> ClaudeLog:
    """Read a log file. Malformed lines are counted and never raise. Raises OSError if the file cannot be read."""
    log = ClaudeLog(file.path, [], [], [], ClaudeEnvelope(), Counter())
    decode = _decode_chunk
    size = 0
    with file.open() as stream:
        for chunk in whole_lines(stream, log.losses):
            try:
                records = decode(chunk, log.losses)
            except DECODE_ERRORS:
                # If one line is malformed, others usually are too, so the rest of the file is decoded line by
                # line.
                decode = _decode_line_by_line
                records = decode(chunk, log.losses)
            size += len(chunk)
            if size > _CHUNK_BYTES:
                for record in records:
                    _detach(record)
            _add_records(log, chunk, records)
    return log


def _detach(record: ClaudeRecord) -> None:
    """Copy the raw fields of a record, so that the lines it was decoded from can be freed.

    `toolUseResult` repeats most of the message for display, so it is dropped unless it names an agent.
    """
    if _AGENT_ID not in bytes(record.toolUseResult):
        record.toolUseResult = _EMPTY
    record.data = Raw(bytes(record.data)[:_HOOK_HEAD])
    _copy_raw(record, _RAW_OF_RECORD)
    if record.message is not None:
        _copy_raw(record.message, ("usage",))
    content = record.message.content if record.message is not None else None
    if isinstance(content, list):
        for block in content:
            if isinstance(block, ClaudeBlock):
                _copy_raw(block, _RAW_OF_BLOCK)


def _copy_raw(value: ClaudeRecord | ClaudeMessage | ClaudeBlock, names: Sequence[str]) -> None:
    for name in names:
        raw: Raw = getattr(value, name)
        if raw is not _EMPTY:
            setattr(value, name, raw.copy())


def read_message_lines(file: LogFile) -> Iterator[bytes]:
    """Yield the unparsed lines that may hold an assistant or user message. Raises OSError."""
    with file.open() as stream:
        for chunk in whole_lines(stream, Counter()):
            yield from (line for line in BytesIO(chunk) if _MESSAGE_ROLE.search(line) is not None)


def decode_envelopes(chunk: bytes, *, backwards: bool = False) -> Iterator[ClaudeEnvelope]:
    """Yield the envelopes of the lines of a chunk, decoded one at a time; malformed lines are skipped."""
    for line in _lines_from_end(chunk) if backwards else BytesIO(chunk):
        with suppress(*DECODE_ERRORS):
            yield _decode_envelope(line)


def _lines_from_end(chunk: bytes) -> Iterator[bytes]:
    end = len(chunk)
    while end:
        begin = chunk.rfind(b"\n", 0, end - 1) + 1
        yield chunk[begin:end]
        end = begin


def _decode_chunk(chunk: bytes, _: Counter[str]) -> list[ClaudeRecord]:
    """Decode all lines in one call. Raises one of `DECODE_ERRORS` if any line is malformed."""
    records = _decode_lines(chunk)
    if not chunk.isascii():
        chunk.decode()  # check UTF-8 here, since msgspec does not validate raw fields
    return records


def _decode_line_by_line(chunk: bytes, losses: Counter[str]) -> list[ClaudeRecord]:
    """Decode lines one by one, and recover what is possible from malformed ones."""
    lines = BytesIO(chunk).readlines()  # reading through a stream is much faster than splitting the bytes
    records: list[ClaudeRecord] = []
    decoded = map(_decode, lines)
    while True:
        try:
            # After an error, `records` holds the lines before the malformed one, and the iterator continues after
            # it.
            records.extend(decoded)
            break
        except DECODE_ERRORS as error:
            line = lines[len(records)]
            records.append(_IGNORED if line.isspace() else _salvage(line, error, losses))
    if not chunk.isascii():
        for index, line in enumerate(lines):
            if not line.isascii() and records[index].type != UNREADABLE:
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    records[index] = _salvage(line, error, losses)
    return records


def _add_records(log: ClaudeLog, chunk: bytes, new_records: list[ClaudeRecord]) -> None:
    """Add decoded records to the log. `chunk` has the lines that they were decoded from."""
    records = log.records
    has_ledger = False
    for record in new_records:
        if record.uuid is not None:
            kind = record.type
            if kind == "assistant":
                records.append(record)
                if _answers_nothing(record):
                    log.ends.append(len(records))
                continue
            if kind == "attachment":
                log.attachments = True
            elif kind == "progress" and _RESUMED in bytes(record.data)[:_HOOK_HEAD]:
                log.ends.append(len(records))  # the program ran the hooks of a resumed session
            records.append(record)
        elif record.type in _LEDGER:
            has_ledger = True
        elif record.type == _SNAPSHOT:
            _count_snapshot(log, record)
        elif record.type == _SUMMARY:
            if records and _ends_turn(records[-1]):
                log.ends.append(len(records))  # a title is written when the program starts
        elif record.type not in _NOT_CONVERSATION:
            _add_without_uuid(log, record)
    if not log.sidechains and True in [record.isSidechain for record in new_records]:
        log.sidechains = True
    if log.envelope.sessionId is None and records:
        _find_envelope(log, chunk)
    if has_ledger:
        for line in BytesIO(chunk):
            if b'"api-request' in line and (record := _decode_line_by_line(line, Counter())[0]).uuid is None:
                log.ledger += [line] if record.type in _LEDGER else ()


def _count_snapshot(log: ClaudeLog, record: ClaudeRecord) -> None:
    """Count a file snapshot for a prompt. A resumed session writes all of its snapshots again."""
    if record.messageId is not None and not record.isSnapshotUpdate:
        most_saved = max(log.snapshots.values(), default=1)
        log.snapshots[record.messageId] += 1
        # Snapshots may be written one by one during the first turn, so only the first repeated one marks the
        # start.
        if log.snapshots[record.messageId] > max(most_saved, 1) and log.records:
            log.ends.append(len(log.records))


def _answers_nothing(record: ClaudeRecord) -> bool:
    """Return whether the program added it because a resumed session ended with a user's message."""
    body = record.message
    if body is None or body.model != "<synthetic>" or not isinstance(body.content, list):
        return False
    return any(isinstance(block, ClaudeBlock) and bytes(block.text) == _NO_RESPONSE for block in body.content)


def _ends_turn(record: ClaudeRecord) -> bool:
    """Return whether the record is a response without tool calls."""
    content = record.message.content if record.type == "assistant" and record.message is not None else None
    return isinstance(content, list) and all(
        isinstance(block, ClaudeBlock) and block.type == "text" for block in content
    )


def _add_without_uuid(log: ClaudeLog, record: ClaudeRecord) -> None:
    """Add a record that has no uuid.

    If it belongs to the conversation, the record before it becomes its parent.
    """
    if record.type in ("user", "assistant", UNREADABLE):
        if record.type != UNREADABLE:
            log.losses["no-uuid"] += 1
        record.uuid = f"?{len(log.records)}"
        if record.parentUuid is None and log.records:
            record.parentUuid = log.records[-1].uuid
        log.records.append(record)
    elif record.type == "last-prompt":
        log.ends.append(len(log.records))
    elif record.type == "queue-operation":
        prompt = log.queue.take_sent_prompt() if record.operation == "remove" else None
        if prompt is not None and log.records:
            uuid, parent = f"?{len(log.records)}", log.records[-1].uuid
            log.records.append(
                ClaudeRecord(
                    type=QUEUED_PROMPT,
                    uuid=uuid,
                    parentUuid=parent,
                    content=prompt,
                    timestamp=record.timestamp,
                )
            )
        elif log.queue.program_started(record, len(log.records)):
            log.ends.append(len(log.records))
    else:
        log.losses[f"unknown-type:{record.type[:40]}"] += 1


def _salvage(line: bytes, error: Exception, losses: Counter[str]) -> ClaudeRecord:
    """Recover a record from a malformed line.

    Its uuid and parent matter most, since they keep the chain connected.
    """
    value: Any = _UNDECODED
    if line.startswith(_BOM):
        line = line.removeprefix(_BOM)
        value = _load_loosely(line)
    elif isinstance(error, UnicodeDecodeError):
        losses["bad-utf8"] += 1
        value = _load_loosely(line.decode(errors="replace"))
    elif isinstance(error, msgspec.ValidationError | RecursionError) or _SURROGATE.search(line) is not None:
        # JavaScript writes unpaired surrogates, which msgspec rejects and the standard library accepts.
        value = _load_loosely(line)
    if value is _UNDECODED:
        losses["bad-json"] += 1
        position = line.rfind(b'"uuid":')
        uuid = _UUID.match(line, position) if position > 0 and line[position - 1] in b",{ " else None
        parent = _PARENT.search(line, 0, 4000)
        return ClaudeRecord(
            type=UNREADABLE,
            uuid=uuid[1].decode(errors="replace") if uuid else None,
            parentUuid=parent[1].decode(errors="replace") if parent else None,
            isSidechain=_SIDECHAIN.search(line, 0, 1000) is not None,
        )
    if not isinstance(value, dict):
        losses["not-an-object"] += 1
        return _IGNORED
    fields = cast(dict[str, Any], value)
    try:
        return _decode(_encoded(fields))
    except DECODE_ERRORS:
        return _decode(_encoded(_valid_fields(fields, losses)))


def _load_loosely(line: str | bytes) -> Any:
    if len(line) > _MAX_LOOSE_BYTES:
        return _UNDECODED  # as Python objects the value could take a hundred times as much memory
    try:
        return json.loads(line)
    except DECODE_ERRORS:
        return _UNDECODED


def _encoded(value: Any) -> bytes:
    """Encode a value as JSON. Unpaired surrogates become question marks."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _decodes(value: Any, decode: Callable[[bytes], Any]) -> bool:
    try:
        decode(_encoded(value))
    except DECODE_ERRORS:
        return False
    return True


def _valid_fields(fields: dict[str, Any], losses: Counter[str]) -> dict[str, Any]:
    """Return the fields that have the expected types, and count the others.

    Blocks of a message are checked likewise.
    """
    valid: dict[str, Any] = {}
    for key, value in fields.items():
        if _decodes({key: value}, _decode):
            valid[key] = value
            continue
        losses[f"odd-field:{key[:40]}"] += 1
        if key == "message" and isinstance(value, dict):
            body = cast(dict[str, Any], value)
            content = body.get("content")
            if isinstance(content, list):
                blocks = cast(list[Any], content)
                body = {**body, "content": [block for block in blocks if _decodes(block, _decode_block)]}
            valid[key] = {name: item for name, item in body.items() if _decodes({name: item}, _decode_body)}
    return valid


def _find_envelope(log: ClaudeLog, chunk: bytes) -> None:
    """Set the envelope from the first line that has a session id and a uuid."""
    for envelope in decode_envelopes(chunk):
        if envelope.sessionId is not None and envelope.uuid is not None:
            log.envelope = envelope
            return


def whole_lines(stream: BinaryIO, losses: Counter[str], head: bytes = b"") -> Iterator[bytes]:
    """Yield the stream in chunks of whole lines, without lines longer than `MAX_LINE_BYTES`.

    `head` is what was read of it already.
    """
    unfinished: list[bytes] = []
    unfinished_bytes = 0
    while data := head or stream.read(_READ_BYTES):
        head = b""
        end = data.rfind(b"\n") + 1
        if end:
            if unfinished_bytes <= MAX_LINE_BYTES:
                yield b"".join((*unfinished, memoryview(data)[:end])) if unfinished else data[:end]
            else:
                losses["line-too-long"] += 1
                yield data[data.index(b"\n") + 1 : end]
            unfinished.clear()
            unfinished_bytes = 0
            data = data[end:]
        unfinished_bytes += len(data)
        if unfinished_bytes > MAX_LINE_BYTES:
            unfinished.clear()  # inside an overlong line: its remaining data is dropped
        elif data:
            unfinished.append(data)
    if unfinished_bytes > MAX_LINE_BYTES:
        losses["line-too-long"] += 1
    elif unfinished:
        yield b"".join(unfinished)


def parents_first(records: Sequence[ClaudeRecord], losses: Counter[str]) -> Sequence[ClaudeRecord]:
    """Return the records without duplicates, each after its parent, otherwise in file order."""
    first_by_uuid: dict[str | None, ClaudeRecord] = {}
    for record in records:
        if first_by_uuid.setdefault(record.uuid, record) is not record:
            losses["repeated-uuid"] += 1
    placed: dict[str | None, ClaudeRecord] = {}
    # uuid of a parent that has not come yet → the records that wait for it
    waiting_by_parent: dict[str | None, list[ClaudeRecord]] = {}

    def place(record: ClaudeRecord) -> None:
        stack = [record]
        while stack:
            current = stack.pop()
            placed[current.uuid] = current
            stack += reversed(waiting_by_parent.pop(current.uuid, []))

    for record in first_by_uuid.values():
        if record.parentUuid in first_by_uuid and record.parentUuid not in placed:
            waiting_by_parent.setdefault(record.parentUuid, []).append(record)
        else:
            place(record)
    for record in first_by_uuid.values():
        if record.uuid not in placed:
            losses["circle"] += 1
            waiting_by_parent[record.parentUuid].remove(record)
            place(record)
    if list(placed) != list(first_by_uuid):
        losses["out-of-order"] += 1
    return list(placed.values())
