"""A Claude Code log, line by line: typed records, and what is left of lines that cannot be read.

Decoding is where the time goes, so only what decides a record's place is decoded; texts, inputs and results stay
raw until somebody asks for the messages.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from typing import Any, BinaryIO, cast

import msgspec
from msgspec import Raw, Struct

from understudy.ingest.log_files import LogFile

_NOTIFICATION = re.compile(rb'"\s*<[a-z]+-notification>')
_TASK = rb"{\"task_id\""  # what some versions say of an agent, and never take out again


class PromptQueue(Struct):
    """Prompts that wait, each with how many records there were when it came."""

    waiting: list[tuple[Raw, int]] = []

    def program_started(self, operation: str | None, content: Raw, at: int) -> bool:
        """Take in an operation other than `remove`, behind `at` records. Returns whether the program began so."""
        if operation == "enqueue":
            if _TASK not in bytes(content)[:16]:
                self.waiting.append((content, at))
        elif operation == "popAll":
            self.waiting.clear()
        elif operation == "dequeue":
            if not self.waiting:
                return True  # it was queued before there was a log
            prompt, since = self.waiting.pop(0)
            # A prompt of the command line is a string; those of a stream are lists, which the log leaves out.
            return bool(bytes(prompt)) and since == at
        return False

    def take_sent_prompt(self) -> Raw | None:
        """The prompt that is taken out and sent amid a turn, None where it is a notification or not known."""
        prompt = self.waiting.pop(0)[0] if self.waiting else Raw()
        return prompt if bytes(prompt) and _NOTIFICATION.match(bytes(prompt)) is None else None


UNREADABLE = "unreadable"
"""The type of a record that stands for a line which is no JSON."""

QUEUED_PROMPT = "queued-prompt"
"""The type of a record that stands for a prompt which was taken from the queue and sent amid a turn."""

DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)
"""What decoding hostile text may raise."""

_NOTHING = Raw()
MAX_LINE_BYTES = 128 << 20
"""Bytes of a line; a longer one is left out."""

_LOOSE = 16 << 20
_PIECE = 1 << 16


# Fields stand in the order in which lines have them: they are found faster so.


class ClaudeBlock(Struct, gc=False):
    """A content block. What is raw is rendered when it is asked for."""

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


class ClaudeMessage(Struct, gc=False):
    """The message of a user's or an assistant's record."""

    model: str | None = None
    id: str | None = None
    content: str | list[ClaudeBlock | str] | None = None
    stop_reason: str | None = None


class ClaudeRecord(Struct, gc=False):
    """A line with the fields that decide what it is and where it stands."""

    parentUuid: str | None = None
    isSidechain: bool | None = None
    type: str = ""
    message: ClaudeMessage | None = None
    requestId: str | None = None
    uuid: str | None = None
    timestamp: str | None = None
    toolUseResult: Raw = _NOTHING
    subtype: str | None = None
    isApiErrorMessage: bool | None = None
    isCompactSummary: bool | None = None
    isVisibleInTranscriptOnly: bool | None = None
    logicalParentUuid: str | None = None
    compactMetadata: Raw = _NOTHING
    microcompactMetadata: Raw = _NOTHING
    attachment: Raw = _NOTHING
    content: Raw = _NOTHING
    requestRef: str | int | None = None
    operation: str | None = None


class ClaudeEnvelope(Struct, gc=False):
    """What is the same in most lines of a file."""

    sessionId: str | None = None
    cwd: str | None = None
    version: str | None = None
    agentId: str | None = None
    forkedFrom: Raw = _NOTHING
    uuid: str | None = None


class ClaudeLog(Struct):
    """A file as the records that have a place in a conversation, in the order of the file.

    `ledger` are the lines of the request ledger as they stand. `ends` are the numbers of records after which the
    program was ended. `losses` counts by kind what could not be read or is unknown. `sidechains`: some records are
    of subagents. `queue` has the prompts that wait.
    """

    path: str
    records: list[ClaudeRecord]
    ends: list[int]
    ledger: list[bytes]
    envelope: ClaudeEnvelope
    losses: Counter[str]
    sidechains: bool = False
    queue: PromptQueue = msgspec.field(default_factory=PromptQueue)


_decode = msgspec.json.Decoder(ClaudeRecord).decode
_decode_lines = msgspec.json.Decoder(ClaudeRecord).decode_lines
_body = msgspec.json.Decoder(ClaudeMessage).decode
_block = msgspec.json.Decoder(ClaudeBlock | str).decode
_envelope = msgspec.json.Decoder(ClaudeEnvelope).decode

_LEDGER = ("api-request", "api-request-blob", "api-request-shape")
_ASIDE = frozenset(
    {
        "summary",
        "file-history-snapshot",
        "file-history-delta",
        "mode",
        "permission-mode",
        "ai-title",
        "custom-title",
        "agent-name",
        "agent-color",
        "agent-setting",
        "pr-link",
        "worktree-state",
        "cost-state",
        "tag",
        "task-summary",
        "atis-latch",
        "relocated",
        "tools-used",
    }
)
"""Types of records that say nothing of the conversation."""

_PARENT = re.compile(rb'"parentUuid": ?"([^"\\]{1,200})"')
_UUID = re.compile(rb'"uuid": ?"([^"\\]{1,200})"')
_SIDECHAIN = re.compile(rb'"isSidechain": ?true')
_SPOKEN = re.compile(rb'"(?:assistant|user)"')
_HALF = re.compile(rb"\\u[dD]")
_MARK = b"\xef\xbb\xbf"  # what some editors put before UTF-8
_FAILED = object()
_NOTHING_SAID = ClaudeRecord(type="summary")


def read_log(file: LogFile) -> ClaudeLog:
    """The records of a file. Raises OSError when it cannot be read; nothing that it holds raises."""
    lines = ClaudeLog(file.path, [], [], [], ClaudeEnvelope(), Counter())
    decode = _at_once
    with file.open() as stream:
        for some in _whole_lines(stream, lines.losses):
            try:
                records = decode(some, lines.losses)
            except DECODE_ERRORS:
                # Where one line is bad, others are too.
                decode = _one_by_one
                records = decode(some, lines.losses)
            _file_records(lines, some, records)
    return lines


def read_message_lines(file: LogFile) -> Iterator[bytes]:
    """The lines of a file that may be an assistant's or a user's, as they stand. Raises OSError."""
    with file.open() as stream:
        for some in _whole_lines(stream, Counter()):
            yield from (line for line in BytesIO(some) if _SPOKEN.search(line) is not None)


def _at_once(some: bytes, _: Counter[str]) -> list[ClaudeRecord]:
    """The records of some lines. Raises one of `FAULTS` where there is anything wrong with one."""
    records = _decode_lines(some)
    if not some.isascii():
        some.decode()  # what is left raw has not been looked at
    return records


def _one_by_one(some: bytes, losses: Counter[str]) -> list[ClaudeRecord]:
    """The records of some lines, and of those that cannot be decoded what can be had."""
    lines = BytesIO(some).readlines()  # by far faster than to split
    records: list[ClaudeRecord] = []
    decoded = map(_decode, lines)
    while True:
        try:
            # An error leaves in the list what came before it, and the iterator behind the line that it is of.
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
    """Put records where they belong. `some` are the lines that they were decoded from."""
    records = lines.records
    ledger = False
    for record in new_records:
        if record.uuid is not None:
            records.append(record)
        elif record.type in _LEDGER:
            ledger = True
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


def _file_without_uuid(lines: ClaudeLog, record: ClaudeRecord) -> None:
    """A record without a uuid: one that belongs to the conversation goes behind the one before it."""
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
            lines.records.append(ClaudeRecord(type=QUEUED_PROMPT, uuid=name, parentUuid=above, content=prompt))
        elif lines.queue.program_started(record.operation, record.content, len(lines.records)):
            lines.ends.append(len(lines.records))
    else:
        lines.losses[f"unknown-type:{record.type[:40]}"] += 1


def _salvage(line: bytes, error: Exception, losses: Counter[str]) -> ClaudeRecord:
    """What can be had of a line that does not decode as it should. Its place in the chain matters most."""
    value: Any = _FAILED
    if line.startswith(_MARK):
        line = line.removeprefix(_MARK)
        value = _load_loosely(line)
    elif isinstance(error, UnicodeDecodeError):
        losses["bad-utf8"] += 1
        value = _load_loosely(line.decode(errors="replace"))
    elif isinstance(error, msgspec.ValidationError | RecursionError) or _HALF.search(line) is not None:
        # The standard library reads half surrogate pairs, which JavaScript writes and msgspec refuses.
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
        return _FAILED  # as objects of Python it could take a hundred times as much memory
    try:
        return json.loads(line)
    except DECODE_ERRORS:
        return _FAILED


def _encoded(value: Any) -> bytes:
    """JSON again, half surrogate pairs as question marks."""
    return json.dumps(value, ensure_ascii=False).encode(errors="replace")


def _decodes(value: Any, decode: Callable[[bytes], Any]) -> bool:
    try:
        decode(_encoded(value))
    except DECODE_ERRORS:
        return False
    return True


def _valid_fields(fields: dict[str, Any], losses: Counter[str]) -> dict[str, Any]:
    """The fields whose types are as they should be; of a message's blocks likewise. The others are counted."""
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
    """Take the envelope of the first line that names its session and has a place in the conversation."""
    begin = 0
    while begin < len(some):
        end = some.find(b"\n", begin) + 1 or len(some)
        try:
            envelope = _envelope(some[begin:end])
        except DECODE_ERRORS:
            envelope = None
        if envelope is not None and envelope.sessionId is not None and envelope.uuid is not None:
            lines.envelope = envelope
            return
        begin = end


def _whole_lines(stream: BinaryIO, losses: Counter[str]) -> Iterator[bytes]:
    """A stream in pieces of whole lines, without those lines that are longer than `LONGEST`."""
    pieces: list[bytes] = []
    held = 0
    while piece := stream.read(_PIECE):
        end = piece.rfind(b"\n") + 1
        if end:
            if held <= MAX_LINE_BYTES:
                yield b"".join((*pieces, piece[:end])) if pieces else piece[:end]
            else:
                losses["line-too-long"] += 1
                yield piece[piece.index(b"\n") + 1 : end]
            pieces.clear()
            held = 0
            piece = piece[end:]
        held += len(piece)
        if held > MAX_LINE_BYTES:
            pieces.clear()  # but it goes on
        elif piece:
            pieces.append(piece)
    if held > MAX_LINE_BYTES:
        losses["line-too-long"] += 1
    elif pieces:
        yield b"".join(pieces)


def parents_first(records: Sequence[ClaudeRecord], losses: Counter[str]) -> Sequence[ClaudeRecord]:
    """The records without repeated ones, each behind its parent; in the order of the file as far as can be."""
    first: dict[str | None, ClaudeRecord] = {}
    for record in records:
        if first.setdefault(record.uuid, record) is not record:
            losses["repeated-uuid"] += 1
    done: dict[str | None, ClaudeRecord] = {}
    for record in first.values():
        chain: list[ClaudeRecord] = []
        step: ClaudeRecord | None = record
        waiting: set[str | None] = set()
        while step is not None and step.uuid not in done and step.uuid not in waiting:
            waiting.add(step.uuid)
            chain.append(step)
            step = first.get(step.parentUuid)
        if step is not None and step.uuid in waiting:
            losses["circle"] += 1
        for step in reversed(chain):
            done[step.uuid] = step
    if list(done) != list(first):
        losses["out-of-order"] += 1
    return list(done.values())
