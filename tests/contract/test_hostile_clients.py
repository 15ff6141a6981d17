"""Clients that mean harm, most of them without a key: what a gateway holds for them, and who is served."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server import connections
from understudy.gateway.server.app import Gateway
from understudy.store import Store

from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Say
from support import until

ALIVE = b"HEAD / HTTP/1.1\r\n\r\n"
BODY = json.dumps({"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}).encode()

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Target:
    """A running gateway on a Unix socket, as a sandbox has it, and on a TCP port; and the key of an attempt."""

    def __init__(self, url: str, path: Path, key: str) -> None:
        self.url, self.path, self.key = url, path, key

    async def connect(self) -> Pair:
        return await asyncio.open_unix_connection(str(self.path))

    def request(self) -> bytes:
        headers = f"host: x\r\nx-api-key: {self.key}\r\ncontent-length: {len(BODY)}"
        return f"POST /v1/messages HTTP/1.1\r\n{headers}\r\n\r\n".encode() + BODY

    async def answers_a_good_client(self) -> bool:
        async with (
            aiohttp.ClientSession(headers={"x-api-key": self.key}) as client,
            client.post(f"{self.url}/v1/messages", data=BODY) as response,
        ):
            return response.status == 200 and b"fine" in await response.read()


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[Target]:
    with Store.open(tmp_path / "store") as store:
        async with FakeVLLM(default=Say(text="fine")) as model:
            models, keys = ModelRouter(VLLMBackend(model.url, "fake")), Keys()
            gateway = Gateway(models, store.calls, keys)
            (attempt,) = start_attempts(store, count=1)
            await gateway.start_unix(tmp_path / "gateway.sock")
            url = await gateway.start_tcp("127.0.0.1", 0)
            try:
                yield Target(url, tmp_path / "gateway.sock", keys.issue(attempt))
            finally:
                await gateway.stop()
                await models.close()


def waiting_requests() -> int:
    """How many requests the HTTP server has in memory."""
    return sum(type(one) is RequestResponseCycle for one in gc.get_objects())  # isinstance would wake proxies


async def test_requests_that_are_pipelined_without_end_are_not_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as target:
        reader, writer = await target.connect()
        before = waiting_requests()
        most = 0
        for _ in range(10):
            writer.write(ALIVE * 5000)
            await asyncio.sleep(0.005)
            most = max(most, waiting_requests() - before)
        # The client has read nothing yet: before there was a bound, these were 50,000 requests of 3 KB each.
        assert most <= 2 * connections.PIPELINE_LIMIT
        assert await target.answers_a_good_client()
        writer.close()
        await until(lambda: reader.at_eof() or reader.exception() is not None)


async def test_requests_pipelined_behind_a_call_are_not_kept(tmp_path: Path) -> None:
    """The handler of a call reads on, to see whether its client leaves."""
    async with running(tmp_path) as target:
        _, writer = await target.connect()
        before = waiting_requests()
        writer.write(target.request() + ALIVE * 5000)
        await asyncio.sleep(0.02)
        assert waiting_requests() - before <= 2 * connections.PIPELINE_LIMIT
        writer.close()


async def test_a_few_pipelined_requests_are_answered_in_their_order(tmp_path: Path) -> None:
    async with running(tmp_path) as target:
        reader, writer = await target.connect()
        writer.write(target.request() + ALIVE + b"GET /nowhere HTTP/1.1\r\nconnection: close\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 60)
        assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", b"404"]
        writer.close()


async def test_a_head_of_thousands_of_short_headers_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as target:
        reader, writer = await target.connect()
        writer.write(b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 4000)
        assert (await asyncio.wait_for(reader.read(20), 5)).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_those_that_hold_most_are_closed_when_all_hold_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HELD_LIMIT", 1 << 20)
    async with running(tmp_path) as target:
        pairs = [await target.connect() for _ in range(60)]
        small, hostile = pairs[:10], pairs[10:]
        for _, writer in small:
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")  # a head that is not complete yet
        for _, writer in hostile:
            writer.write(b"GET / HTTP/1.1\r\nhost: " + b"x" * 50_000)

        def closed(some: list[Pair]) -> int:
            return sum(reader.at_eof() or reader.exception() is not None for reader, _ in some)

        await until(lambda: closed(hostile) >= 30)
        assert closed(small) == 0
        for reader, writer in small:
            writer.write(b"\r\n")
            assert (await asyncio.wait_for(reader.read(15), 5)).startswith(b"HTTP/1.1 200")
        assert await target.answers_a_good_client()
        for _, writer in pairs:
            writer.close()


async def test_a_client_with_a_key_keeps_its_connection_when_many_without_one_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 20)
    async with running(tmp_path) as target:
        reader, writer = await target.connect()
        writer.write(target.request())
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 60)).startswith(b"HTTP/1.1 200")
        others = [await target.connect() for _ in range(100)]
        for _, other in others:
            other.write(ALIVE)
        await until(lambda: sum(one.at_eof() or one.exception() is not None for one, _ in others) >= 80)
        writer.write(target.request())
        assert (await asyncio.wait_for(reader.readuntil(b"}}"), 60)).startswith(b"HTTP/1.1 200")
        for _, one in [*others, (reader, writer)]:
            one.close()
