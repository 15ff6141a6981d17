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
_TASK = rb"{\"task_id\""


_START_S = 0.2  # the longest time, in seconds, that a command-line prompt waits in the queue


class QueuedPrompt(Struct):
    """A prompt in the queue: its content, the number of records logged before it, and when it was queued."""

    content: Raw
    at: int
    timestamp: str | None

    def is_notification(self) -> bool:
        """Return whether the program queued it rather than the user."""
        return _NOTIFICATION.match(bytes(self.content)) is not None


class PromptQueue(Struct):
    """The prompts that are waiting to be sent."""

    waiting: list[QueuedPrompt] = []

    def program_started(self, record: ClaudeRecord, at: int) -> bool:
        """Apply a queue operation other than `remove`, which the log has after `at` records.

        Returns whether the operation shows that the program was started here, which is so for a dequeued prompt
        that was not queued while the program was running.
        """
        if record.operation == "enqueue":
            if _TASK not in bytes(record.content)[:16]:
                self.waiting.append(QueuedPrompt(record.content, at, record.timestamp))
        elif record.operation == "popAll":
            self.waiting.clear()
        elif record.operation == "dequeue":
            if not self.waiting:
                return True  # the prompt was queued before this log began
            prompt = self.waiting.pop(0)
            waited = seconds_between(prompt.timestamp, record.timestamp)
            # A prompt from the command line is a string and is dequeued at once. Prompts from a JSON stream are
            # lists, which the log omits; they may come at any time.
            at_once = prompt.at == at and (waited is None or waited <= _START_S)
            return at_once and bool(bytes(prompt.content)) and not prompt.is_notification()
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

_NOTHING = Raw()
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
_LOOSE = 16 << 20
_PIECE = 1 << 16


# Fields are in the order in which the CLI writes them, which msgspec decodes faster.


class ClaudeBlock(Struct, gc=False):
    """A content block. Raw fields are decoded when messages are rendered."""

    type: str = ""
    tool_use_id: str | None = None
    id: str | None = None
    name: str | None = None
    text: Raw = _NOTHING
    thinking: Raw = _NOTHING
    input: Raw = _NOTHING
    content: Raw = _NOTHING
    is_error: bool | None = None
    source: Raw = _NOTHING
    title: Raw = _NOTHING
    tool: Raw = _NOTHING


class ClaudeMessage(Struct, gc=False):
    """The message in a user or assistant record."""

    model: str | None = None
    id: str | None = None
    content: str | list[ClaudeBlock | str] | None = None
    stop_reason: str | None = None
    usage: Raw = _NOTHING


class ClaudeRecord(Struct, gc=False):
    """A line of the log, with the fields that decide its kind and its place in the conversation."""

    parentUuid: str | None = None
    isSidechain: bool | None = None
    type: str = ""
    message: ClaudeMessage | None = None
    requestId: str | None = None
    uuid: str | None = None
    timestamp: str | None = None
    toolUseResult: Raw = _NOTHING
    todos: Raw = _NOTHING
    sourceToolUseID: str | None = None
    subtype: str | None = None
    isApiErrorMessage: bool | None = None
    isCompactSummary: bool | None = None
    isVisibleInTranscriptOnly: bool | None = None
    logicalParentUuid: str | None = None
    compactMetadata: Raw = _NOTHING
    microcompactMetadata: Raw = _NOTHING
    attachment: Raw = _NOTHING
    rendered: Raw = _NOTHING
    content: Raw = _NOTHING
    requestRef: str | int | None = None
    operation: str | None = None
    messageId: str | None = None
    isSnapshotUpdate: bool | None = None
    data: Raw = _NOTHING

    def is_tool_hook(self) -> bool:
        """Return whether the record reports that a hook ran before or after a tool."""
        return _TOOL_HOOK.search(bytes(self.data)[:_HOOK_HEAD]) is not None


class ClaudeEnvelope(Struct, gc=False):
    """Fields that have the same value in most lines of a file."""

    sessionId: str | None = None
    cwd: str | None = None
    version: str | None = None
    agentId: str | None = None
    forkedFrom: Raw = _NOTHING
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
_body = msgspec.json.Decoder(ClaudeMessage).decode
_block = msgspec.json.Decoder(ClaudeBlock | str).decode
_envelope = msgspec.json.Decoder(ClaudeEnvelope).decode

_SNAPSHOT = "file-history-snapshot"
_SUMMARY = "summary"
_LEDGER = ("api-request", "api-request-blob", "api-request-shape")
_ASIDE_TEXT = """
file-history-delta mode permission-mode ai-title custom-title agent-name
agent-color agent-setting pr-link worktree-state cost-state tag task-summary atis-latch relocated tools-used
"""
_ASIDE = frozenset(_ASIDE_TEXT.split())
"""Types of records that are not part of the conversation."""

_PARENT = re.compile(rb'"parentUuid": ?"([^"\\]{1,200})"')
_UUID = re.compile(rb'"uuid": ?"([^"\\]{1,200})"')
_SIDECHAIN = re.compile(rb'"isSidechain": ?true')
_MESSAGE_ROLE = re.compile(rb'"(?:assistant|user)"')
_NO_RESPONSE = b'"No response requested."'
_RESUMED = b'"SessionStart:resume"'
_HALF = re.compile(rb"\\u[dD]")
_MARK = b"\xef\xbb\xbf"  # the UTF-8 byte order mark, which is skipped
_FAILED = object()
_NOTHING_SAID = ClaudeRecord(type="mode")


def read_log(file: LogFile) -> ClaudeLog:
    """Read a log file. Malformed lines are counted and never raise. Raises OSError if the file cannot be read."""
    lines = ClaudeLog(file.path, [], [], [], ClaudeEnvelope(), Counter())
    decode = _at_once
    size = 0
    with file.open() as stream:
        for some in whole_lines(stream, lines.losses):
            try:
                records = decode(some, lines.losses)
            except DECODE_ERRORS:
                # If one line is malformed, others usually are too, so the rest of the file is decoded line by
                # line.
                decode = _one_by_one
                records = decode(some, lines.losses)
            size += len(some)
            if size > _CHUNK_BYTES:
                for record in records:
                    _detach(record)
            _file_records(lines, some, records)
    return lines


def _detach(record: ClaudeRecord) -> None:
    """Copy the raw fields of a record, so that the lines it was decoded from can be freed.

    `toolUseResult` repeats most of the message for display, so it is dropped unless it names an agent.
    """
    if _AGENT_ID not in bytes(record.toolUseResult):
        record.toolUseResult = _NOTHING
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
        if raw is not _NOTHING:
            setattr(value, name, raw.copy())


def read_message_lines(file: LogFile) -> Iterator[bytes]:
    """Yield the unparsed lines that may hold an assistant or user message. Raises OSError."""
    with file.open() as stream:
        for some in whole_lines(stream, Counter()):
            yield from (line for line in BytesIO(some) if _MESSAGE_ROLE.search(line) is not None)


def decode_envelopes(some: bytes, *, backwards: bool = False) -> Iterator[ClaudeEnvelope]:
    """Yield the envelopes of some lines, decoded one at a time; malformed lines are skipped."""
    for line in _lines_from_end(some) if backwards else BytesIO(some):
        with suppress(*DECODE_ERRORS):
            yield _envelope(line)


def _lines_from_end(some: bytes) -> Iterator[bytes]:
    end = len(some)
    while end:
        begin = some.rfind(b"\n", 0, end - 1) + 1
        yield some[begin:end]
        end = begin


def _at_once(some: bytes, _: Counter[str]) -> list[ClaudeRecord]:
    """Decode all lines in one call. Raises one of `DECODE_ERRORS` if any line is malformed."""
    records = _decode_lines(some)
    if not some.isascii():
        some.decode()  # check UTF-8 here, since msgspec does not validate raw fields
    return records


def _one_by_one(some: bytes, losses: Counter[str]) -> list[ClaudeRecord]:
    """Decode lines one by one, and recover what is possible from malformed ones."""
    lines = BytesIO(some).readlines()  # reading through a stream is much faster than splitting the bytes
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
            records.append(_NOTHING_SAID if line.isspace() else _salvage(line, error, losses))
    if not some.isascii():
        for at, line in enumerate(lines):
            if not line.isascii() and records[at].type != UNREADABLE:
                try:
                    line.decode()
                except UnicodeDecodeError as error:
                    records[at] = _salvage(line, error, losses)
    return records


def _file_records(lines: ClaudeLog, some: bytes, new_records: list[ClaudeRecord]) -> None:
    """Add decoded records to the log. `some` are the lines that they were decoded from."""
    records = lines.records
    ledger = False
    for record in new_records:
        if record.uuid is not None:
            kind = record.type
            if kind == "assistant":
                records.append(record)
                if _answers_nothing(record):
                    lines.ends.append(len(records))
                continue
            if kind == "attachment":
                lines.attachments = True
            elif kind == "progress" and _RESUMED in bytes(record.data)[:_HOOK_HEAD]:
                lines.ends.append(len(records))  # the program ran the hooks of a resumed session
            records.append(record)
        elif record.type in _LEDGER:
            ledger = True
        elif record.type == _SNAPSHOT:
            _file_snapshot(lines, record)
        elif record.type == _SUMMARY:
            if records and _ends_turn(records[-1]):
                lines.ends.append(len(records))  # a title is written when the program starts
        elif record.type not in _ASIDE:
            _file_without_uuid(lines, record)
    if not lines.sidechains and True in [record.isSidechain for record in new_records]:
        lines.sidechains = True
    if lines.envelope.sessionId is None and records:
        _find_envelope(lines, some)
    if ledger:
        for line in BytesIO(some):
            if b'"api-request' in line and (record := _one_by_one(line, Counter())[0]).uuid is None:
                lines.ledger += [line] if record.type in _LEDGER else ()


def _file_snapshot(lines: ClaudeLog, record: ClaudeRecord) -> None:
    """Count a file snapshot for a prompt. A resumed session writes all of its snapshots again."""
    if record.messageId is not None and not record.isSnapshotUpdate:
        before = max(lines.snapshots.values(), default=1)
        lines.snapshots[record.messageId] += 1
        # Snapshots may be written one by one during the first turn, so only the first repeated one marks the
        # start.
        if lines.snapshots[record.messageId] > max(before, 1) and lines.records:
            lines.ends.append(len(lines.records))


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


def _file_without_uuid(lines: ClaudeLog, record: ClaudeRecord) -> None:
    """Add a record that has no uuid.

    If it belongs to the conversation, the record before it becomes its parent.
    """
    if record.type in ("user", "assistant", UNREADABLE):
        if record.type != UNREADABLE:
            lines.losses["no-uuid"] += 1
        record.uuid = f"?{len(lines.records)}"
        if record.parentUuid is None and lines.records:
            record.parentUuid = lines.records[-1].uuid
        lines.records.append(record)
    elif record.type == "last-prompt":
        lines.ends.append(len(lines.records))
    elif record.type == "queue-operation":
        prompt = lines.queue.take_sent_prompt() if record.operation == "remove" else None
        if prompt is not None and lines.records:
            name, above = f"?{len(lines.records)}", lines.records[-1].uuid
            lines.records.append(
                ClaudeRecord(
                    type=QUEUED_PROMPT,
                    uuid=name,
                    parentUuid=above,
                    content=prompt,
                    timestamp=record.timestamp,
                )
            )
        elif lines.queue.program_started(record, len(lines.records)):
            lines.ends.append(len(lines.records))
    else:
        lines.losses[f"unknown-type:{record.type[:40]}"] += 1


def _salvage(line: bytes, error: Exception, losses: Counter[str]) -> ClaudeRecord:
    """Recover a record from a malformed line.

    Its uuid and parent matter most, since they keep the chain connected.
    """
    value: Any = _FAILED
    if line.startswith(_MARK):
        line = line.removeprefix(_MARK)
        value = _load_loosely(line)
    elif isinstance(error, UnicodeDecodeError):
        losses["bad-utf8"] += 1
        value = _load_loosely(line.decode(errors="replace"))
    elif isinstance(error, msgspec.ValidationError | RecursionError) or _HALF.search(line) is not None:
        # JavaScript writes unpaired surrogates, which msgspec rejects and the standard library accepts.
        value = _load_loosely(line)
    if value is _FAILED:
        losses["bad-json"] += 1
        at = line.rfind(b'"uuid":')
        uuid = _UUID.match(line, at) if at > 0 and line[at - 1] in b",{ " else None
        parent = _PARENT.search(line, 0, 4000)
        return ClaudeRecord(
            type=UNREADABLE,
            uuid=uuid[1].decode(errors="replace") if uuid else None,
            parentUuid=parent[1].decode(errors="replace") if parent else None,
            isSidechain=_SIDECHAIN.search(line, 0, 1000) is not None,
        )
    if not isinstance(value, dict):
        losses["not-an-object"] += 1
        return _NOTHING_SAID
    fields = cast(dict[str, Any], value)
    try:
        return _decode(_encoded(fields))
    except DECODE_ERRORS:
        return _decode(_encoded(_valid_fields(fields, losses)))


def _load_loosely(line: str | bytes) -> Any:
    if len(line) > _LOOSE:
        return _FAILED  # as Python objects the value could take a hundred times as much memory
    try:
        return json.loads(line)
    except DECODE_ERRORS:
        return _FAILED


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
    sound: dict[str, Any] = {}
    for key, value in fields.items():
        if _decodes({key: value}, _decode):
            sound[key] = value
            continue
        losses[f"odd-field:{key[:40]}"] += 1
        if key == "message" and isinstance(value, dict):
            body = cast(dict[str, Any], value)
            content = body.get("content")
            if isinstance(content, list):
                blocks = cast(list[Any], content)
                body = {**body, "content": [block for block in blocks if _decodes(block, _block)]}
            sound[key] = {name: item for name, item in body.items() if _decodes({name: item}, _body)}
    return sound


def _find_envelope(lines: ClaudeLog, some: bytes) -> None:
    """Set the envelope from the first line that has a session id and a uuid."""
    for envelope in decode_envelopes(some):
        if envelope.sessionId is not None and envelope.uuid is not None:
            lines.envelope = envelope
            return


def whole_lines(stream: BinaryIO, losses: Counter[str], head: bytes = b"") -> Iterator[bytes]:
    """Yield the stream in pieces of whole lines, without lines longer than `MAX_LINE_BYTES`.

    `head` is what was read of it already.
    """
    pieces: list[bytes] = []
    size = 0
    while piece := head or stream.read(_PIECE):
        head = b""
        end = piece.rfind(b"\n") + 1
        if end:
            if size <= MAX_LINE_BYTES:
                yield b"".join((*pieces, memoryview(piece)[:end])) if pieces else piece[:end]
            else:
                losses["line-too-long"] += 1
                yield piece[piece.index(b"\n") + 1 : end]
            pieces.clear()
            size = 0
            piece = piece[end:]
        size += len(piece)
        if size > MAX_LINE_BYTES:
            pieces.clear()  # inside an overlong line: its remaining data is dropped
        elif piece:
            pieces.append(piece)
    if size > MAX_LINE_BYTES:
        losses["line-too-long"] += 1
    elif pieces:
        yield b"".join(pieces)


def parents_first(records: Sequence[ClaudeRecord], losses: Counter[str]) -> Sequence[ClaudeRecord]:
    """Return the records without duplicates, each after its parent, otherwise in file order."""
    first: dict[str | None, ClaudeRecord] = {}
    for record in records:
        if first.setdefault(record.uuid, record) is not record:
            losses["repeated-uuid"] += 1
    done: dict[str | None, ClaudeRecord] = {}
    # uuid of a parent that has not come yet → the records that wait for it
    waiting: dict[str | None, list[ClaudeRecord]] = {}

    def put(record: ClaudeRecord) -> None:
        stack = [record]
        while stack:
            one = stack.pop()
            done[one.uuid] = one
            stack += reversed(waiting.pop(one.uuid, []))

    for record in first.values():
        if record.parentUuid in first and record.parentUuid not in done:
            waiting.setdefault(record.parentUuid, []).append(record)
        else:
            put(record)
    for record in first.values():
        if record.uuid not in done:
            losses["circle"] += 1
            waiting[record.parentUuid].remove(record)
            put(record)
    if list(done) != list(first):
        losses["out-of-order"] += 1
    return list(done.values())
