"""A model server that lies: every answer that makes no sense is a BackendError, none is stored as it came."""

from __future__ import annotations

import asyncio
import copy
import json
import zlib
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from understudy.errors import BackendError
from understudy.gateway.backends import http
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.backends.http import NotServedError
from understudy.wire.model import ChatRequest

GOOD: dict[str, Any] = {
    "model": "m",
    "choices": [
        {
            "message": {"content": "hi"},
            "finish_reason": "stop",
            "token_ids": [1, 2],
            "logprobs": {"content": [{"logprob": -0.1}, {"logprob": 0.0}]},
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    "prompt_token_ids": [1, 2, 3],
}


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    body = copy.deepcopy(GOOD)
    change(body)
    return body


async def ask(answer: Callable[[], web.Response]) -> Any:
    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return answer() if request.path == "/v1/chat/completions" else web.json_response(GOOD)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    backend = VLLMBackend(f"http://127.0.0.1:{port}/v1", "m")
    try:
        return await backend.generate(ChatRequest(model="m", messages=[{"role": "user", "content": "x"}]))
    finally:
        await backend.close()
        await runner.cleanup()


async def test_a_password_in_the_address_is_sent_and_stands_in_no_error() -> None:
    authorizations: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        authorizations.append(request.headers.get("authorization", ""))
        return web.json_response({"error": {"message": "no"}}, status=400)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = VLLMBackend(f"http://me:s%40cret@127.0.0.1:{runner.addresses[0][1]}/v1", "m")
    try:
        with pytest.raises(BackendError) as refused:
            await backend.generate(ChatRequest(model="m", messages=[{"role": "user", "content": "x"}]))
    finally:
        await backend.close()
        await runner.cleanup()
    assert authorizations == ["Basic " + b64encode(b"me:s@cret").decode()]
    assert "cret" not in str(refused.value) and "127.0.0.1" in str(refused.value)


LIES = {
    "negative token": changed(lambda b: b["choices"][0].update(token_ids=[-1, 2])),
    "token above 31 bits": changed(lambda b: b["choices"][0].update(token_ids=[2**40, 2])),
    "token above 64 bits": changed(lambda b: b["choices"][0].update(token_ids=[2**70, 2])),
    "negative prompt token": changed(lambda b: b.update(prompt_token_ids=[-5])),
    "positive logprob": changed(lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=5.5)),
    "text without tokens": changed(lambda b: b["choices"][0].update(token_ids=[], logprobs={"content": []})),
    "negative usage": changed(lambda b: b["usage"].update(prompt_tokens=-7)),
    "usage that overflows a sum": changed(lambda b: b["usage"].update(completion_tokens=2**62)),
    "usage above 63 bits": changed(lambda b: b["usage"].update(prompt_tokens=2**64 - 1)),
}


@pytest.mark.parametrize("name", LIES)
async def test_an_answer_with_impossible_numbers_is_an_error(name: str) -> None:
    with pytest.raises(BackendError):
        await ask(lambda: web.json_response(LIES[name]))


async def test_a_redirect_is_not_followed() -> None:
    with pytest.raises(BackendError, match="status 307"):
        await ask(lambda: web.Response(status=307, headers={"location": "/elsewhere"}))


async def test_an_answer_that_unpacks_beyond_the_limit_is_an_error() -> None:
    packed, blanks = zlib.compressobj(1, wbits=31), b" " * (1 << 20)
    body = b"".join(packed.compress(blanks) for _ in range(http.ANSWER_LIMIT // len(blanks) + 1)) + packed.flush()
    with pytest.raises(BackendError, match="more than"):
        await ask(lambda: web.Response(body=body, headers={"content-encoding": "gzip"}))


async def test_half_of_a_character_in_an_answer_is_replaced() -> None:
    """JSON can have half of a surrogate pair; the store, agents' streams and exports, which are UTF-8, cannot."""
    body = json.dumps(changed(lambda b: b["choices"][0]["message"].update(content="cut \ud83d here \U0001f600")))
    assert "ud83d here" in body
    generation = await ask(lambda: web.Response(text=body, content_type="application/json"))
    assert generation.text == "cut \ufffd here \U0001f600"


async def test_a_whole_answer_is_taken() -> None:
    generation = await ask(lambda: web.json_response(GOOD))
    assert generation.completion_token_ids == (1, 2)


# --- connections ---------------------------------------------------------------------------------------

REQUEST = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}])
OK = json.dumps(GOOD).encode()
WHOLE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(OK) + OK
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'


@asynccontextmanager
async def bare(*answers: bytes | None) -> AsyncIterator[tuple[str, list[bytes]]]:
    """A server that says bytes, one answer a connection, or with None nothing more, ever; the last one again."""
    requests: list[bytes] = []
    remaining = list(answers)
    forever = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            requests.append(await reader.readuntil(b'"stream":'))
            answer = remaining.pop(0) if len(remaining) > 1 else remaining[0]
            if answer is None:
                await forever.wait()
            else:
                writer.write(answer)
        finally:
            writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0, limit=1 << 20)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", requests
    finally:
        forever.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_connection_lost_before_the_first_byte_is_tried_again(stream: bool) -> None:
    end = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    async with bare(b"", b"", STREAM + CHUNK + end if stream else WHOLE) as (url, requests):
        backend = VLLMBackend(url, "m")
        got = await backend.generate(REQUEST, (lambda _: None) if stream else None)
        await backend.close()
    assert got.text == ("x" if stream else "hi")
    assert len(requests) == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_not_tried_for_ever(stream: bool) -> None:
    async with bare(b"") as (url, requests):
        backend = VLLMBackend(url, "m")
        with pytest.raises(NotServedError, match="no response"):
            await backend.generate(REQUEST, (lambda _: None) if stream else None)
        await backend.close()
    assert len(requests) == 3


HALF: dict[str, tuple[bytes | None, bool]] = {
    "nothing": (None, False),
    "half of a body": (WHOLE[:-5], False),
    "half of a stream": (STREAM + CHUNK, True),
}


@pytest.mark.parametrize("name", HALF)
async def test_what_was_begun_is_never_asked_again(name: str) -> None:
    answer, stream = HALF[name]
    async with bare(answer) as (url, requests):
        backend = VLLMBackend(url, "m", timeout_s=0.3)
        with pytest.raises(BackendError) as broken:
            await backend.generate(REQUEST, (lambda _: None) if stream else None)
        await backend.close()
    assert not isinstance(broken.value, NotServedError)
    assert len(requests) == 1


async def test_our_key_is_in_no_error() -> None:
    key = "sk-very-secret"
    async with bare(b"HTTP/1.1 401 No\r\ncontent-length: 30\r\n\r\n" + b"bad key sk-very-secret, really") as (
        url,
        requests,
    ):
        backend = VLLMBackend(url, "m", key)
        with pytest.raises(BackendError, match=r"bad key \*\*\*, really") as refused:
            await backend.generate(REQUEST)
        await backend.close()
    assert key.encode() in requests[0]
    assert key not in repr(refused.value) + repr(refused.value.body)


COMMENT = b": " + b"x" * (1 << 20) + b"\n\n"


@pytest.mark.parametrize(
    ("endless", "message"),
    [
        (lambda: b"data: " + b"x" * http.EVENT_LIMIT, "one event has more"),
        (lambda: COMMENT * (http.STREAM_LIMIT // len(COMMENT) + 1), "the response has more than"),
    ],
    ids=["one event", "many events"],
)
async def test_a_stream_without_end_is_an_error(endless: Callable[[], bytes], message: str) -> None:
    async with bare(STREAM + endless()) as (url, _):
        backend = VLLMBackend(url, "m")
        with pytest.raises(BackendError, match=message):
            await backend.generate(REQUEST, lambda _: None)
        await backend.close()
