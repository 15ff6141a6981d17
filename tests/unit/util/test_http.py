"""The HTTP client: bounded responses, no redirects, no credentials in messages, retries as the caller allows."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from understudy.util.http import HttpConnection, ResponseTooLarge, read_body, was_not_sent

TIMEOUTS = aiohttp.ClientTimeout(total=10)


@asynccontextmanager
async def serving(handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> AsyncGenerator[str]:
    server = web.Server(handler)
    runner = web.ServerRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("url", "key", "base", "header"),
    [
        ("http://h:1/v1/", None, "http://h:1/v1", None),
        ("http://h:1/v1", "secret", "http://h:1/v1", "Bearer secret"),
        ("http://me:p%40ss@h:1/v1", None, "http://h:1/v1", "Basic bWU6cEBzcw=="),
        ("http://me:pass@h:1", "secret", "http://h:1", "Bearer secret"),
    ],
)
def test_credentials_are_a_header_and_not_part_of_the_address(
    url: str, key: str | None, base: str, header: str | None
) -> None:
    connection = HttpConnection(url, key)
    assert connection.base == base
    assert connection.headers.get("authorization") == header
    if header:
        secret = header.split()[1]
        assert secret not in connection.redact(f"refused {secret}")
        assert secret.encode() not in connection.redact_bytes(f"refused {secret}".encode())


async def test_a_redirect_is_not_followed() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        assert request.path == "/"
        return web.Response(status=307, headers={"location": "/elsewhere"})

    async with serving(handler) as url:
        connection = HttpConnection(url)
        async with await connection.open("POST", url, b"{}", timeouts=TIMEOUTS) as response:
            assert response.status == 307
        await connection.close()
        await connection.close()


async def test_a_body_is_bounded_by_its_size_after_decompression() -> None:
    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        body = zlib.compress(b" " * 100_000) if request.path == "/packed" else b" " * 100_000
        return web.Response(
            body=body, headers={"content-encoding": "deflate"} if request.path == "/packed" else {}
        )

    async with serving(handler) as url:
        connection = HttpConnection(url, keep_alive=False)
        for path in ("/packed", "/plain"):
            async with await connection.open("GET", url + path, timeouts=TIMEOUTS) as response:
                assert len(await read_body(response, 100_000)) == 100_000
            async with await connection.open("GET", url + path, timeouts=TIMEOUTS) as response:
                with pytest.raises(ResponseTooLarge, match="more than 99999 bytes"):
                    await read_body(response, 99_999)
        await connection.close()


async def test_a_request_is_sent_again_only_as_the_caller_allows() -> None:
    requests = 0

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal requests
        requests += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    async with serving(handler) as url:
        connection = HttpConnection(url)
        with pytest.raises(aiohttp.ServerDisconnectedError) as caught:
            await connection.open("POST", url, b"{}", timeouts=TIMEOUTS, retry_pauses_s=(0.0, 0.0))
        assert not was_not_sent(caught.value)
        assert requests == 1
        with pytest.raises(aiohttp.ServerDisconnectedError):
            await connection.open(
                "POST", url, b"{}", timeouts=TIMEOUTS, retry_pauses_s=(0.0, 0.0), may_retry=lambda _: True
            )
        assert requests == 4
        await connection.close()
    with pytest.raises(aiohttp.ClientConnectorError) as refused:
        await connection.open("GET", url, timeouts=TIMEOUTS)
    assert was_not_sent(refused.value)
    await connection.close()
