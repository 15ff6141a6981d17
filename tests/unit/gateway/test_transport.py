"""Connections to model servers: what is read and what is refused, and when a connection is used again."""

from __future__ import annotations

import asyncio
import gzip
import os
import shutil
import socket
import ssl
import subprocess
import threading
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from understudy.gateway.backends import transport
from understudy.gateway.backends.http import HttpClient, NotConnectedError, ServerSentEvent
from understudy.gateway.backends.transport import (
    ConnectionFailed,
    ConnectionPool,
    Disconnected,
    InvalidResponse,
    NotConnected,
    UnsendableRequest,
)
from understudy.util.http import ResponseTooLarge

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
TEXT = bytes(range(256)) * 400
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])


class Server:
    """Answers each request with the next of some pieces, each sent on its own; None closes the connection."""

    def __init__(self, *answers: list[bytes | None]) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self.asked = asyncio.Event()
        self._answers = list(answers)
        self.url = ""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
                self.requests.append(head + await reader.readexactly(int(size or b"0")))
                self.asked.set()
                for piece in self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]:
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(*answers: list[bytes | None]) -> AsyncGenerator[tuple[Server, ConnectionPool]]:
    server, pool = Server(*answers), ConnectionPool()
    listener = await asyncio.start_server(server.talk, "127.0.0.1", 0, limit=1 << 23)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server, pool
    finally:
        pool.close()
        pool.close()
        listener.close()


async def ask(
    server: Server, pool: ConnectionPool, method: str = "POST", body: bytes | None = b"{}", **limits: float
) -> tuple[int, bytes]:
    bounds: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0} | limits
    pieces: list[bytes] = []
    async with pool.request(method, f"{server.url}/a?b=%20c", body, {"X-Key": "k"}, **bounds) as response:
        await response.read(pieces.append, 1 << 24)
        return response.status, b"".join(pieces)


def packed(wbits: int) -> bytes:
    compressor = zlib.compressobj(9, wbits=wbits)
    return compressor.compress(TEXT) + compressor.flush()


def coded(coding: bytes, body: bytes) -> list[bytes | None]:
    head = b"content-encoding: %b\r\ncontent-length: %d\r\n\r\n" % (coding, len(body))
    return [OK + head, *(body[at : at + 700] for at in range(0, len(body), 700))]


WHOLE: dict[str, tuple[list[bytes | None], bytes]] = {
    "length": ([OK + b"Content-Length: 5\r\n\r\nhe", b"llo"], b"hello"),
    "chunks": ([CHUNKED, b"3\r\nhel\r\n", b"2;x=y\r\nlo\r\n0\r\nx-trailer: 1\r\n\r\n"], b"hello"),
    "byte by byte": ([bytes([one]) for one in CHUNKED + b"5\r\nhello\r\n0\r\n\r\n"], b"hello"),
    "until the end": ([OK + b"\r\nhel", b"lo", None], b"hello"),
    "an old server": ([b"HTTP/1.0 200 OK\r\n\r\nhello", None], b"hello"),
    "after an interim response": ([b"HTTP/1.1 100 Continue\r\n\r\n" + OK, b"content-length: 2\r\n\r\nhi"], b"hi"),
    "nothing": ([OK + b"content-length: 0\r\n\r\n"], b""),
    "gzip": (coded(b"gzip", packed(31)), TEXT),
    "gzip in two members": (coded(b"x-gzip", gzip.compress(TEXT) + gzip.compress(b"more")), TEXT + b"more"),
    "deflate": (coded(b"deflate", packed(15)), TEXT),
    "deflate without a header": (coded(b"Deflate", packed(-15)), TEXT),
    "identity": (coded(b"identity", b"as it is"), b"as it is"),
}


@pytest.mark.parametrize("name", WHOLE)
@LOOPS
def test_each_form_of_body_is_read_completely_and_connections_are_reused(
    name: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    answer, body = WHOLE[name]

    async def run() -> None:
        async with serving(answer) as (server, pool):
            assert await ask(server, pool) == (200, body)
            assert await ask(server, pool) == (200, body)
            # A connection is used again unless its end was the end of the body.
            assert server.connections == (2 if None in answer else 1)
            assert server.requests[1].startswith(b"POST /a?b=%20c HTTP/1.1\r\nhost: 127.0.0.1:")
            assert b"\r\nx-key: k\r\n" in server.requests[1] and server.requests[1].endswith(b"\r\n\r\n{}")

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


BROKEN: dict[str, tuple[list[bytes | None], type[Exception], str]] = {
    "nothing": ([None], Disconnected, "closed the connection"),
    "half of a head": ([OK, None], Disconnected, "closed the connection"),
    "half of a body": ([OK + b"content-length: 5\r\n\r\nhel", None], Disconnected, "closed the connection"),
    "half of the chunks": ([CHUNKED + b"5\r\nhello\r\n", None], Disconnected, "closed the connection"),
    "no HTTP": ([b"SSH-2.0-x\r\n\r\n"], InvalidResponse, "invalid HTTP"),
    "an upgrade": (
        [b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n"],
        InvalidResponse,
        "invalid HTTP",
    ),
    "two lengths": (
        [OK + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!"],
        InvalidResponse,
        "invalid HTTP",
    ),
    "a head without end": ([OK, *[b"x: " + b"y" * 4000 + b"\r\n"] * 20], InvalidResponse, "of headers"),
    "one header without end": ([OK + b"x: ", *[b"y" * 4000] * 20], InvalidResponse, "of headers"),
    "trailers without end": (
        [CHUNKED + b"1\r\nx\r\n0\r\n", *[b"x: " + b"y" * 4000 + b"\r\n"] * 20],
        InvalidResponse,
        "of headers",
    ),
    "an unknown coding": (coded(b"br", b"xyz"), InvalidResponse, "content-encoding 'br'"),
    "no gzip": (
        coded(b"gzip", b"\x1f\x8bnothing at all"),
        InvalidResponse,
        "compressed body of the response is invalid",
    ),
    "half of gzip": (
        coded(b"gzip", packed(31)[:-9]),
        InvalidResponse,
        "compressed body of the response is incomplete",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_an_invalid_or_truncated_response_is_an_error(name: str) -> None:
    answer, kind, message = BROKEN[name]
    async with serving(answer) as (server, pool):
        with pytest.raises(kind, match=message):
            await ask(server, pool)
        assert server.connections == 1


async def test_stalled_and_slow_responses_time_out() -> None:
    forever: list[bytes | None] = [CHUNKED, *[b"1\r\nx\r\n"] * 3, b"1\r\nx"]
    async with serving(forever) as (server, pool):
        with pytest.raises(TimeoutError, match="the server sent nothing"):
            await ask(server, pool, stall_s=0.1)
        with pytest.raises(TimeoutError, match=r"not complete within [\d.]+ s, the time limit"):
            await ask(server, pool, total_s=0.1)
    async with serving([]) as (server, pool):
        with pytest.raises(TimeoutError, match="the server sent nothing"):
            await ask(server, pool, stall_s=0.1)


async def test_on_a_closed_connection_a_get_is_retried_and_a_post_is_not() -> None:
    hello: list[bytes | None] = [OK + b"content-length: 5\r\n\r\nhello"]
    async with serving(hello, [None], hello, [*hello, None], hello, [None]) as (server, pool):
        assert await ask(server, pool, "GET", None) == (200, b"hello")
        assert await ask(server, pool, "GET", None) == (200, b"hello")
        assert server.connections == 2 and len(server.requests) == 3
        assert await ask(server, pool) == (200, b"hello")  # and then the server closes it
        await asyncio.sleep(0.05)
        assert await ask(server, pool) == (200, b"hello")
        assert server.connections == 3
        with pytest.raises(Disconnected):  # a POST may have been acted on
            await ask(server, pool)
        assert len(server.requests) == 6


async def test_a_connection_with_unsolicited_data_is_not_reused() -> None:
    hello = OK + b"content-length: 5\r\n\r\nhello"
    async with serving([hello + hello], [hello, b"HTTP"], [hello]) as (server, pool):
        for _ in range(2):
            assert await ask(server, pool) == (200, b"hello")
            await asyncio.sleep(0.05)
        assert await ask(server, pool) == (200, b"hello")
        assert server.connections == 3


async def test_an_idle_connection_is_closed_after_the_keep_alive_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "KEEP_ALIVE_S", 0.05)
    async with serving([OK + b"content-length: 0\r\n\r\n"]) as (server, pool):
        await ask(server, pool)
        await asyncio.sleep(0.3)
        await ask(server, pool)
        assert server.connections == 2


async def test_the_reader_of_a_body_can_stop_it_and_its_exceptions_propagate() -> None:
    async with serving([CHUNKED + b"1\r\na\r\n", b"1\r\nb\r\n" * 2]) as (server, pool):
        chunks: list[bytes] = []
        limits: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0}
        async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
            await response.read(lambda piece: chunks.append(piece) or b"b" in piece, 9)
        assert b"".join(chunks) in (b"ab", b"abb") and response.stopped
        with pytest.raises(ZeroDivisionError):
            async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
                await response.read(lambda piece: 1 // 0, 9)
        with pytest.raises(ResponseTooLarge, match="more than 2 bytes"):
            async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
                chunks.clear()
                await response.read(chunks.append, 2)
        assert b"ab".startswith(b"".join(chunks))
        assert server.connections == 3


async def test_chunks_that_arrive_together_are_passed_on_together_also_before_an_error() -> None:
    begun = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        await begun.wait()
        writer.write(b"1\r\na\r\n2\r\nbc\r\n1\r\nd\r\nnot a chunk\r\n")
        await writer.drain()

    async with talking(handler) as (server, pool):
        pieces: list[bytes] = []
        with pytest.raises(InvalidResponse):
            async with pool.request("POST", server.url, b"{}", {}, connect_s=5.0, total_s=10.0) as response:
                asyncio.get_running_loop().call_soon(begun.set)
                await response.read(pieces.append, 9)
        assert pieces == [b"abcd"]


async def test_a_large_request_body_is_sent_completely() -> None:
    body = TEXT * 40
    async with serving([OK + b"content-length: 0\r\n\r\n"]) as (server, pool):
        await ask(server, pool, body=body)
        assert server.requests[0].partition(b"\r\n\r\n")[2] == body


@asynccontextmanager
async def talking(
    handler: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncGenerator[tuple[Server, ConnectionPool]]:
    """A server that does anything, once it has read the head of a request."""

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server.connections += 1
            await reader.readuntil(b"\r\n\r\n")
            await handler(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server, pool = Server(), ConnectionPool()
    listener = await asyncio.start_server(begin, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server, pool
    finally:
        pool.close()
        listener.close()


@LOOPS
@pytest.mark.parametrize("whole", [True, False])
def test_an_early_response_ends_an_upload_that_the_server_does_not_read(
    loop: Callable[[], asyncio.AbstractEventLoop], whole: bool
) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.05)  # until no more can be sent
        writer.write(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 4\r\n\r\nno")
        await asyncio.sleep(0.05)
        writer.write(b"!!" if whole else b"")
        await finished.wait()

    async def run() -> None:
        async with talking(refuse) as (server, pool), asyncio.timeout(30):
            large = ask(server, pool, body=bytes(20 << 20), total_s=20.0 if whole else 0.3)
            if whole:
                assert await large == (413, b"no!!")
                # What was not sent would come before the next request.
                small = asyncio.create_task(ask(server, pool))
                assert await small == (413, b"no!!") and server.connections == 2
            else:
                with pytest.raises(TimeoutError, match=r"not complete within [\d.]+ s, the time limit"):
                    await large
            finished.set()

    finished = asyncio.Event()
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@LOOPS
def test_an_unread_body_is_not_buffered(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(OK + b"content-length: %d\r\n\r\n" % (32 << 20))
        for _ in range(512):
            writer.write(bytes(1 << 16))
            await writer.drain()
            sent += 1 << 16

    async def run() -> None:
        limits: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0}
        async with (
            talking(flood) as (server, pool),
            asyncio.timeout(30),
            pool.request("POST", server.url, b"{}", {}, **limits) as response,
        ):
            before = -1
            while sent > before:
                before = sent
                await asyncio.sleep(0.1)
            assert before < 32 << 20
            size = 0

            def take(piece: bytes) -> None:
                nonlocal size
                size += len(piece)

            await response.read(take, 64 << 20)
            assert size == 32 << 20

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


async def test_decompression_of_a_body_stops_at_the_reader_s_limit() -> None:
    bomb = zlib.compress(bytes(48 << 20), 9)
    answer = [b"".join(piece or b"" for piece in coded(b"deflate", bomb[:-4] + b"bad."))]
    limits: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0}
    async with serving([*answer]) as (server, pool):
        tracemalloc.start()
        try:
            with pytest.raises(ResponseTooLarge):
                async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
                    await response.read(lambda piece: None, 1 << 20)
            assert tracemalloc.get_traced_memory()[1] < 16 << 20
        finally:
            tracemalloc.stop()
        async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
            await response.read(lambda piece: True, 1 << 20)
            assert response.stopped


AFTER_THE_END: dict[str, list[bytes | None]] = {
    "no chunk": [CHUNKED + b"6\r\n[DONE]\r\nnot a chunk\r\n"],
    "half of gzip": [
        b"".join(piece or b"" for piece in coded(b"gzip", gzip.compress(b"[DONE]")[:-4])),
    ],
    "closed": [CHUNKED + b"6\r\n[DONE]\r\n", None],
}


@pytest.mark.parametrize("name", AFTER_THE_END)
async def test_errors_after_the_reader_has_stopped_are_ignored(name: str) -> None:
    async with serving(AFTER_THE_END[name]) as (server, pool):
        limits: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0}
        async with pool.request("POST", server.url, b"{}", {}, **limits) as response:
            await response.read(lambda piece: piece == b"[DONE]", 99)
        assert response.stopped


async def test_unreachable_hosts_and_invalid_urls_are_distinct_errors() -> None:
    pool = ConnectionPool()
    limits: dict[str, Any] = {"connect_s": 5.0, "total_s": 10.0}
    cases: list[tuple[str, type[ConnectionFailed]]] = [
        ("http://127.0.0.1:1/", NotConnected),
        ("http://no-such-host.invalid/", NotConnected),
        ("ftp://127.0.0.1/", UnsendableRequest),
        ("http://127.0.0.1:x/", UnsendableRequest),
        ("http:///path", UnsendableRequest),
        ("http://127.0.0.1:1/a b", UnsendableRequest),
        ("http://127.0.0.1:1/a\r\nx: y", UnsendableRequest),
        ("http://127.0.0.1:1/ä", UnsendableRequest),
        ("http://a..b/", UnsendableRequest),
        (f"http://{'a' * 64}.b/", UnsendableRequest),
    ]
    for url, kind in cases:
        with pytest.raises(kind):
            async with pool.request("GET", url, None, {}, **limits):
                pass
    pool.close()


@pytest.mark.parametrize("key", ["secret-1234567890\n", "secret-1234567890\u2026", "secret-1234567890\x00"])
async def test_an_api_key_invalid_in_a_header_is_an_error_that_hides_the_key(key: str) -> None:
    client = HttpClient("http://127.0.0.1:1", key)
    with pytest.raises(NotConnectedError, match="the header 'authorization' contains the character") as raised:
        await client.send("GET", f"{client.base}/v1/models", None)
    assert "secret" not in str(raised.value)
    await client.close()


@pytest.fixture
def slow_names(monkeypatch: pytest.MonkeyPatch) -> Generator[threading.Event]:
    """A resolver that answers once the event is set."""
    go_on, ask_resolver = threading.Event(), socket.getaddrinfo

    def answer(*arguments: Any, **more: Any) -> Any:
        go_on.wait(10)
        return ask_resolver(*arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    yield go_on
    go_on.set()


async def test_name_resolution_has_its_own_time_limit(
    slow_names: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer: list[bytes | None] = [OK + b"content-length: 2\r\n\r\nhi"]
    async with serving(answer) as (server, pool):
        server.url = server.url.replace("127.0.0.1", "localhost")
        monkeypatch.setattr(transport, "RESOLVE_S", 0.05)
        with pytest.raises(NotConnected, match="cannot resolve localhost within"):
            await ask(server, pool)
        monkeypatch.setattr(transport, "RESOLVE_S", 10.0)
        request = asyncio.create_task(ask(server, pool, connect_s=0.5))
        await asyncio.sleep(0.6)
        slow_names.set()
        assert await request == (200, b"hi")


async def test_requests_waiting_for_name_resolution_can_be_cancelled_or_closed(
    slow_names: threading.Event,
) -> None:
    async with serving([None]) as (server, pool):
        before = asyncio.all_tasks()
        server.url = server.url.replace("127.0.0.1", "localhost")
        first, second = (asyncio.create_task(ask(server, pool)) for _ in range(2))
        await asyncio.sleep(0.05)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        pool.close()
        with pytest.raises(NotConnected, match="closed"):
            await second
        assert asyncio.all_tasks() == before
        slow_names.set()


PHASES = ("connect", "tls", "upload", "head", "body")


def open_sockets() -> set[str]:
    targets: set[str] = set()
    for number in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            targets.add(str(number.readlink()))
    return {one for one in targets if one.startswith("socket:")}


@LOOPS
@pytest.mark.parametrize("phase", PHASES)
def test_a_cancelled_request_leaves_no_connection_or_task(
    phase: str, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    reached, ended = asyncio.Event(), asyncio.Event()

    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n" if phase != "tls" else b"\x16")
        if phase == "body":
            writer.write(CHUNKED + b"1\r\nx\r\n")
        reached.set()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        ended.set()

    async def run() -> None:
        busy = [socket.create_server(("127.0.0.1", 0), backlog=0)]  # whose queue of connections is soon full
        busy += [socket.create_connection(busy[0].getsockname()) for _ in range(phase == "connect")]
        listener = await asyncio.start_server(begin, "127.0.0.1", 0)
        port = (busy[0] if phase == "connect" else listener.sockets[0]).getsockname()[1]
        server, pool = Server(), ConnectionPool()
        server.url = f"{'https' if phase == 'tls' else 'http'}://127.0.0.1:{port}"
        before = open_sockets()
        body = bytes(20 << 20) if phase == "upload" else b"{}"
        request = asyncio.create_task(ask(server, pool, body=body))
        if phase == "connect":
            await asyncio.sleep(0.1)
        else:
            await reached.wait()
            await asyncio.sleep(0.02)
        assert not request.done()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        if phase != "connect":
            async with asyncio.timeout(10):
                await ended.wait()
        pool.close()
        await asyncio.sleep(0.02)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        assert open_sockets() <= before
        listener.close()
        for one in busy:
            one.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a private authority's certificate and key, which is also a server's on localhost."""
    if not (openssl := shutil.which("openssl")):
        pytest.skip("needs openssl, to make a certificate")
    directory = tmp_path_factory.mktemp("authority")
    arguments = (
        "req -x509 -nodes -newkey ec -pkeyopt ec_paramgen_curve:P-256 -days 2 -subj /CN=test -keyout key.pem"
    )
    subprocess.run(
        [openssl, *arguments.split(), "-out", "cert.pem", "-addext", "subjectAltName=DNS:localhost"],
        cwd=directory,
        check=True,
        capture_output=True,
    )
    return directory


@LOOPS
def test_a_private_certificate_authority_from_ssl_cert_file_is_trusted(
    authority: Path, monkeypatch: pytest.MonkeyPatch, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "cert.pem", authority / "key.pem")
    context.set_alpn_protocols(["h2", "http/1.1"])
    trust = transport._tls  # pyright: ignore[reportPrivateUsage]

    async def run() -> None:
        server, pool = Server([CHUNKED, b"5\r\nhello\r\n", b"0\r\n\r\n"]), ConnectionPool()
        listener = await asyncio.start_server(server.talk, "127.0.0.1", 0, ssl=context, limit=1 << 23)
        port = listener.sockets[0].getsockname()[1]
        server.url = f"https://localhost:{port}"
        with pytest.raises(NotConnected, match="certificate verify failed"):
            await ask(server, pool)
        trust.cache_clear()
        monkeypatch.setenv("SSL_CERT_FILE", str(authority / "cert.pem"))
        for body in (b"{}", bytes(3 << 20)):
            assert await ask(server, pool, body=body) == (200, b"hello")
        assert server.connections == 1 and len(server.requests) == 2
        server.url = f"https://127.0.0.1:{port}"
        with pytest.raises(NotConnected, match="IP address mismatch"):
            await ask(server, pool)
        assert len(server.requests) == 2
        pool.close()
        listener.close()

    trust.cache_clear()
    try:
        with asyncio.Runner(loop_factory=loop) as runner:
            runner.run(run())
    finally:
        trust.cache_clear()


async def test_no_request_is_sent_when_the_tls_handshake_fails() -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # without a certificate the handshake fails at once
    refused = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        refused.set()

    listener = await asyncio.start_server(talk, "127.0.0.1", 0, ssl=context)
    pool = ConnectionPool()
    with pytest.raises(NotConnected):
        url = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}/"
        async with pool.request("GET", url, None, {}, connect_s=5.0, total_s=5.0):
            pass
    assert not refused.is_set()
    listener.close()


async def test_connections_of_concurrent_requests_are_reused() -> None:
    async with serving([CHUNKED, b"5\r\nhello\r\n", b"0\r\n\r\n"]) as (server, pool):
        for _ in range(2):
            assert await asyncio.gather(*(ask(server, pool) for _ in range(50))) == [(200, b"hello")] * 50
        assert server.connections <= 50


async def test_cancelling_a_stream_closes_its_connection() -> None:
    started = asyncio.Event()

    def take(events: list[ServerSentEvent]) -> None:
        started.set()

    async with serving([CHUNKED + b"9\r\ndata: x\n\n\r\n"], [OK + b"content-length: 1\r\n\r\nx"]) as (server, _):
        client = HttpClient(server.url)
        stream = asyncio.create_task(client.stream("POST", server.url, b"{}", take))
        await started.wait()
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        assert await client.send("POST", server.url, b"{}") == b"x"
        assert server.connections == 2
        await client.close()


async def test_closing_the_pool_fails_requests_in_flight() -> None:
    async with serving([CHUNKED]) as (server, pool):
        request = asyncio.create_task(ask(server, pool))
        await server.asked.wait()
        pool.close()
        with pytest.raises(Disconnected):
            await request


def test_decompression_yields_pieces_of_limited_size() -> None:
    inflater = transport._Inflater()  # pyright: ignore[reportPrivateUsage]
    sizes = [len(piece) for piece in inflater.feed(zlib.compress(bytes(10 << 20), 9))]
    assert sum(sizes) == 10 << 20 and max(sizes) <= transport.INFLATED_PIECE
    assert inflater.complete


def probe_due_s(port: int) -> float | None:
    """In how many seconds the kernel probes this process's connection to a port, if it waits for that."""
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    ((timer, _, due),) = (
        row[5].partition(":") for row in rows if row[2].endswith(f":{port:04X}") and row[3] == "01"
    )
    return int(due, 16) / os.sysconf("SC_CLK_TCK") if timer == "02" else None


@LOOPS
def test_a_machine_that_vanished_is_noticed_long_before_the_time_limit(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def wait() -> None:
        async with serving([]) as (server, pool):
            asking = asyncio.create_task(ask(server, pool))
            await server.asked.wait()
            port = int(server.url.rpartition(":")[2])
            while (due_s := probe_due_s(port)) is None:  # noqa: ASYNC110 - until the request is acknowledged
                await asyncio.sleep(0.01)
            assert due_s <= transport.VANISHED_S
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(wait())
