"""A scripted provider that speaks Anthropic's API byte for byte on a real loopback socket.

It is no web framework: what it sends is what the script says, broken where the script breaks it.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from socket import SO_LINGER, SOL_SOCKET
from typing import Any, Literal, Self

STREAM = {"content-type": "text/event-stream; charset=utf-8"}


@dataclass(kw_only=True)
class Reply:
    """An answer; each of `pieces` is a write of its own.

    `framing` tells where the body ends: `close` by the connection's end, which then looks like any other. With
    `lost` the connection ends before the body does, by a reset if that is wanted. With `stalls`, nothing follows
    the pieces until the client goes away, which sets `disconnected`.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: dict(STREAM))
    pieces: Sequence[bytes] = ()
    framing: Literal["chunked", "close"] = "chunked"
    lost: Literal["fin", "reset"] | None = None
    stalls: bool = False
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True)
class ReceivedRequest:
    """A request as it came; header names in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


def sse(*events: dict[str, Any]) -> bytes:
    """Events as bytes, each named by its type."""
    return b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)


def stream(*pieces: bytes, **how: Any) -> Reply:
    """A streamed answer."""
    return Reply(pieces=pieces, **how)


def whole(body: Any, status: int = 200, **headers: str) -> Reply:
    """An answer of one JSON document, or of the bytes given."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status=status, headers={"content-type": "application/json"} | named, pieces=[data])


def error(status: int, kind: str, message: str, **headers: str) -> Reply:
    """A refusal in the API's shape."""
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    return whole(body, status, **headers)


def started(**fields: Any) -> dict[str, Any]:
    """The event that begins a message."""
    usage = {"input_tokens": 10, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 3}
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage,
    }  # fmt: skip
    return {"type": "message_start", "message": message | fields}


def block(index: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of one block."""
    return [
        {"type": "content_block_start", "index": index, "content_block": start},
        *({"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": index},
    ]


def text(index: int, *parts: str) -> list[dict[str, Any]]:
    """The events of a block of text."""
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": part} for part in parts))


def tool(index: int, id: str, name: str, *parts: str) -> list[dict[str, Any]]:
    """The events of a tool call, its arguments in parts."""
    deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
    return block(index, {"type": "tool_use", "id": id, "name": name, "input": {}}, *deltas)


def ended(stop: str | None = "end_turn", **usage: Any) -> list[dict[str, Any]]:
    """The events that end a message."""
    delta = {"stop_reason": stop, "stop_sequence": None}
    return [
        {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7} | usage},
        {"type": "message_stop"},
    ]


def answer(*blocks: Iterable[dict[str, Any]], stop: str = "end_turn") -> bytes:
    """A whole stream of these blocks."""
    return sse(started(), *(event for events in blocks for event in events), *ended(stop))


class FakeAnthropic:
    """Answers with the replies of `script` in order, then refuses; keeps every request in `requests`."""

    def __init__(self, *script: Reply) -> None:
        self.script = list(script)
        self.requests: list[ReceivedRequest] = []
        self.came = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._tasks: set[asyncio.Task[None]] = set()
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 26)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (request := await _request(reader)) is not None:
                self.requests.append(request)
                reply = self.script.pop(0) if self.script else error(400, "invalid_request_error", "script ended")
                self.came.set()
                if not await _send(reply, reader, writer):
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()


async def _request(reader: asyncio.StreamReader) -> ReceivedRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    line, *fields = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    method, path, _ = line.split(" ")
    if headers.get("transfer-encoding") != "chunked":
        return ReceivedRequest(
            method, path, headers, await reader.readexactly(int(headers.get("content-length", 0)))
        )
    body = b""
    while size := int(await reader.readline(), 16):
        body += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return ReceivedRequest(method, path, headers, body)


async def _send(reply: Reply, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Say a reply; whether the connection can be used again."""
    chunked = reply.framing == "chunked"
    framing = {"transfer-encoding": "chunked"} if chunked else {"connection": "close"}
    fields = "".join(f"{name}: {value}\r\n" for name, value in (dict(reply.headers) | framing).items())
    writer.write(f"HTTP/1.1 {reply.status} Whatever\r\n{fields}\r\n".encode())
    for piece in filter(None, reply.pieces):
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
        await writer.drain()
    if reply.stalls:
        await reader.read()
        reply.disconnected.set()
        return False
    if reply.lost == "reset":
        writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
    if reply.lost is None and chunked:
        writer.write(b"0\r\n\r\n")
    await writer.drain()
    return reply.lost is None and chunked
