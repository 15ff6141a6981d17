"""Recordings of the real CLI as they went over the wire: requests to send, and what the provider said to each."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from fakes.anthropic import Reply, sse

FOLDER = Path(__file__).parents[2].parent / "shared" / "claude-code-traffic"
_MARK = re.compile("«redacted sha256:([0-9a-f]+) len:([0-9]+)»")
_OURS = {"authorization", "x-api-key", "host", "connection", "content-length", "accept-encoding", "content-type"}

Outcome = Literal["whole", "broken", "refused", "silent"]


@dataclass(frozen=True)
class Exchange:
    """One request, and the reply to it, None where the recording has none."""

    path: str
    headers: dict[str, str]
    body: bytes
    reply: Reply | None

    @property
    def request(self) -> dict[str, Any]:
        return json.loads(self.body)

    @property
    def streamed(self) -> bool:
        return bool(self.request.get("stream"))

    @property
    def response_body(self) -> bytes:
        """All bytes of the reply's body."""
        return b"".join(self.reply.pieces) if self.reply else b""

    @property
    def outcome(self) -> Outcome:
        """Whether the reply is a whole message, by no more than its text."""
        if self.reply is None:
            return "silent"
        if self.reply.status != 200:
            return "refused"
        if self.response_body.startswith(b"{"):
            return "whole" if json.loads(self.response_body)["type"] == "message" else "broken"
        names = [line[7:] for line in self.response_body.splitlines() if line.startswith(b"event: ")]
        return "whole" if b"message_stop" in names and b"error" not in names else "broken"


def names() -> list[str]:
    """The names of the recordings; none where they are not at hand."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def exchanges(name: str) -> Iterator[Exchange]:
    """What a recording has of model requests, in their order."""
    with (FOLDER / f"{name}.jsonl").open() as lines:
        for line in lines:
            entry = json.loads(line)
            if entry["type"] == "exchange" and entry["request"]["method"] == "POST":
                yield _exchange(entry)


def _exchange(entry: dict[str, Any]) -> Exchange:
    request = entry["request"]
    headers = {name.lower(): value for name, value in request["headers"] if name.lower() not in _OURS}
    body = json.dumps(_restored(request["body"]), ensure_ascii=False, separators=(",", ":")).encode()
    return Exchange(request["path"], headers, body, _reply(_restored(entry.get("response"))))


def _reply(response: dict[str, Any] | None) -> Reply | None:
    if response is None:
        return None
    headers = {name: value for name, value in response["headers"].items() if name != "connection"}
    if response.get("raw") is not None:
        pieces = [response["raw"].encode()]
    elif response.get("events") is not None:
        pieces = [sse(event) for event in response["events"]]
    else:
        pieces = [json.dumps(response["body"]).encode()]
    # As it was: the end of the connection is the only end, whole or not.
    framing: Literal["chunked", "close"] = "close" if "connection" in response["headers"] else "chunked"
    return Reply(status=response["status"], headers=headers, pieces=pieces, framing=framing)


@cache
def _blobs() -> dict[str, Any]:
    return json.loads((FOLDER / "_blobs.json").read_text())


def _restored(value: Any) -> Any:
    """A value with what was taken out of it put back: shared parts as they were, texts as filler."""
    match value:
        case {"$blob": blob}:
            return _restored(_blobs()[blob])
        case dict():
            return {name: _restored(inner) for name, inner in value.items()}
        case list():
            return [_restored(inner) for inner in value]
        case str():
            return _MARK.sub(_filler, value)
        case _:
            return value


def _filler(mark: re.Match[str]) -> str:
    length = int(mark[2])
    return (f"filler {mark[1]} " * (length // 10 + 1))[:length]


def message_parts(response_body: bytes) -> dict[str, Any]:
    """What a whole reply says: its thoughts, its text, its tool calls with their raw arguments, its stop reason.

    A plain reading that knows only these three kinds of blocks.
    """
    if response_body.startswith(b"{"):
        return _of_message(json.loads(response_body))
    blocks: dict[int, dict[str, Any]] = {}
    parts: dict[int, str] = {}
    stop: str | None = None
    for line in response_body.splitlines():
        event = json.loads(line[6:]) if line.startswith(b"data: {") else {"type": None}
        match event:
            case {"type": "content_block_start", "index": index, "content_block": block}:
                blocks[index], parts[index] = block, ""
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                piece = [delta.get(name) for name in ("text", "thinking", "partial_json") if name in delta]
                parts[index] += "".join(piece)
            case {"type": "message_delta", "delta": delta}:
                stop = delta["stop_reason"]
            case _:
                pass
    for index, block in blocks.items():
        block[{"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]] = parts[index]
    return _parts_of_content([blocks[index] for index in sorted(blocks)], stop)


def _of_message(message: dict[str, Any]) -> dict[str, Any]:
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.dumps(block["input"])
    return _parts_of_content(message["content"], message["stop_reason"])


def _parts_of_content(content: list[dict[str, Any]], stop: str | None) -> dict[str, Any]:
    def of(kind: str) -> list[dict[str, Any]]:
        return [block for block in content if block["type"] == kind]

    return {
        "thinking": "".join(block["thinking"] for block in of("thinking")),
        "text": "".join(block["text"] for block in of("text")),
        "tools": [(block["id"], block["name"], block["input"]) for block in of("tool_use")],
        "stop": stop,
        "kinds": [block["type"] for block in content],
    }
