"""HTTP of the embedded server, as ASGI has it: bodies in, bodies and streams out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any

import msgspec
import orjson

from understudy.model.protocol import InvalidRequestError

_BODY_LIMIT = 64 << 20

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Reply = dict[str, Any] | Iterator[dict[str, Any]] | str | None
"""A JSON body, the chunks of a stream, a text, or an empty answer."""


class ClientDisconnectedError(Exception):
    """Nobody waits for the answer any more."""


async def run_unless_disconnected(work: Coroutine[Any, Any, Reply], receive: Receive) -> Reply:
    """What comes of the work; it is cancelled when the client leaves before. Raises ClientLeftError."""
    task = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        left.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(send: Send, status: int, reply: Reply) -> None:
    """Answer."""
    if reply is None or isinstance(reply, dict):
        await _send_bytes(send, status, b"application/json", b"" if reply is None else _encode(reply))
    elif isinstance(reply, str):
        await _send_bytes(send, status, b"text/plain; charset=utf-8", reply.encode())
    else:
        await _send_stream(send, reply)


async def read_request_body(receive: Receive) -> bytes:
    """The body of a request. Raises RequestFault."""
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise InvalidRequestError("the client left before its request was complete")
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > _BODY_LIMIT:
            raise InvalidRequestError(
                f"the request body is larger than {_BODY_LIMIT} bytes",
                status=413,
                kind="RequestEntityTooLargeError",
            )
        if not event.get("more_body"):
            return b"".join(parts)


async def _send_bytes(send: Send, status: int, kind: bytes, data: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _send_stream(send: Send, chunks: Iterator[dict[str, Any]]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for chunk in chunks:
        event = b"data: " + _encode(chunk) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _encode(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, default=msgspec.to_builtins)
