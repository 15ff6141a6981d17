"""What a connection of the gateway's server writes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from understudy.gateway.server.connections import BoundedProtocol, ConnectionTable
from understudy.gateway.server.http import HttpRequest, Receive, Send


class RecordingTransport(asyncio.Transport):
    """Keeps what is written, one item for each write."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default


async def written_by(app: Callable[[HttpRequest], Awaitable[None]], request: bytes) -> RecordingTransport:
    """What a connection writes for a request that `app` answers."""

    async def answer(scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        await app(HttpRequest(scope, receive, send))

    config = uvicorn.Config(answer, http=HttpToolsProtocol, ws="none", lifespan="off", log_config=None)
    config.load()
    protocol = BoundedProtocol(ConnectionTable(), 5.0, config=config, server_state=ServerState(), app_state={})
    transport = RecordingTransport()
    protocol.connection_made(transport)
    protocol.data_received(request)
    await asyncio.wait(protocol.tasks)
    protocol.connection_lost(None)
    return transport


async def test_the_head_of_a_response_is_sent_with_the_first_part_of_its_body() -> None:
    async def whole(request: HttpRequest) -> None:
        await request.send_response(200, b"{}")

    async def stream(request: HttpRequest) -> None:
        await request.write(b"one")
        await request.write(b"two", last=True)

    (response,) = (await written_by(whole, b"GET / HTTP/1.1\r\n\r\n")).written
    assert response.startswith(b"HTTP/1.1 200 OK\r\n") and response.endswith(b"\r\n\r\n{}")
    (head,) = (await written_by(whole, b"HEAD / HTTP/1.1\r\n\r\n")).written
    assert head == response.removesuffix(b"{}")
    first, second = (await written_by(stream, b"GET / HTTP/1.1\r\n\r\n")).written
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\n3\r\none\r\n")
    assert second == b"3\r\ntwo\r\n0\r\n\r\n"


async def test_a_response_that_ends_after_its_head_closes_the_connection() -> None:
    async def fail(request: HttpRequest) -> None:
        await request.start(200, [])
        raise ValueError("a bug")

    transport = await written_by(fail, b"GET / HTTP/1.1\r\n\r\n")
    assert transport.closed and transport.written == []
