"""Small Claude Code logs, written as the CLI writes them: for the tests of the reader."""

from __future__ import annotations

import json
from io import BytesIO
from itertools import count
from typing import Any

import msgspec

from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import Trace, TraceState, expand

MODEL = "claude-opus-4-5"
PROJECT = "/home/dev/.claude/projects/-home-dev-proj"


class Log:
    """Lines of one file. Each record hangs on the one before it unless `parent` says otherwise."""

    def __init__(self, session: str = "s1", version: str = "2.1.150", **envelope: Any) -> None:
        self.envelope = {"sessionId": session, "version": version, "cwd": "/home/dev/proj", **envelope}
        self.lines: list[dict[str, Any]] = []
        self.last: str | None = None
        self._numbers = count(1)

    def add(self, kind: str, *, parent: str | None = "", uuid: str | None = None, **fields: Any) -> str:
        """A record with a uuid, which is returned."""
        uuid = uuid or f"{self.envelope['sessionId']}-{next(self._numbers)}"
        above = self.last if parent == "" else parent
        at = f"2026-11-21T10:00:{len(self.lines):02d}.000Z"
        self.lines.append(
            {"parentUuid": above, **self.envelope, "type": kind, "uuid": uuid, "timestamp": at, **fields}
        )
        self.last = uuid
        return uuid

    def user(self, content: Any, **fields: Any) -> str:
        return self.add("user", message={"role": "user", "content": content}, **fields)

    def result(self, call: str, content: Any, **fields: Any) -> str:
        return self.user([{"type": "tool_result", "tool_use_id": call, "content": content}], **fields)

    def assistant(
        self,
        message_id: str,
        *blocks: Any,
        model: str = MODEL,
        stop: str | None = None,
        usage: dict[str, int] | None = None,
        **fields: Any,
    ) -> str:
        """A line for each block; the uuid of the last one. A string is text, a pair (id, name) a tool call."""
        uuid = ""
        for at, block in enumerate(blocks):
            if isinstance(block, str):
                block = {"type": "text", "text": block}
            elif isinstance(block, tuple):
                name = block[1]
                block = {
                    "type": "tool_use",
                    "id": block[0],
                    "name": name,
                    "input": block[2] if block[2:] else {"n": 1},
                }
            message = {
                "id": message_id,
                "role": "assistant",
                "model": model,
                "content": [block],
                "stop_reason": stop if at == len(blocks) - 1 else None,
                **({} if usage is None else {"usage": usage}),
            }
            uuid = self.add("assistant", message=message, requestId=f"req_{message_id}", **fields)
            fields = {key: value for key, value in fields.items() if key not in ("parent", "uuid")}
        return uuid

    def system(self, subtype: str, **fields: Any) -> str:
        return self.add("system", subtype=subtype, **fields)

    def attachment(self, kind: str, **fields: Any) -> str:
        return self.add("attachment", attachment={"type": kind, **fields})

    def aside(self, kind: str, **fields: Any) -> None:
        """A record without a uuid."""
        self.lines.append({"type": kind, **fields})

    def data(self) -> bytes:
        return b"".join(msgspec.json.encode(line) + b"\n" for line in self.lines)


def thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": "c2ln"}


def of_bytes(path: str, data: bytes) -> LogFile:
    return LogFile(path, len(data), lambda: BytesIO(data))


def read(*logs: Log, **others: bytes) -> list[Trace]:
    """The traces in logs of one project; `others` are files by path below it."""
    files = [of_bytes(f"{PROJECT}/{log.envelope['sessionId']}.jsonl", log.data()) for log in logs]
    files += [of_bytes(f"{PROJECT}/{path}", data) for path, data in others.items()]
    reader = ClaudeCodeFormat()
    assert all(reader.detect(file.path, file.open().read(1 << 16)) for file in files if file.size)
    assert {reader.group(file.path) for file in files} == {PROJECT}
    return list(reader.read(files))


def by_message(*traces: Trace) -> dict[str, TraceState]:
    """The states by message id, without a system prompt; each turn is in there once."""
    states: dict[str, TraceState] = {}
    for trace in traces:
        for state in expand(trace, system=None):
            assert state.message_id not in states
            states[state.message_id] = state
    return states


def outline(state: TraceState) -> list[str]:
    """A state's messages in short: `role: text`, with ids of calls and results."""
    lines: list[str] = []
    for message in state.messages:
        content = message["content"]
        text = content if isinstance(content, str) else json.dumps(content) if content else ""
        calls = [f"+{call['id']}" for call in message.get("tool_calls", [])]
        lines.append(
            " ".join([f"{message.get('tool_call_id') or message['role']}:", *filter(None, [text]), *calls])
        )
    return lines
