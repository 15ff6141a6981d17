"""A model server that lies: every answer that makes no sense is a BackendError, none is stored as it came."""

from __future__ import annotations

import copy
import gzip
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web

from understudy.errors import BackendError
from understudy.gateway.backends import openai
from understudy.gateway.backends.base import ChatRequest
from understudy.gateway.backends.openai import OpenAIBackend

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
    backend = OpenAIBackend(f"http://127.0.0.1:{port}/v1", "m")
    try:
        return await backend.generate(ChatRequest(model="m", messages=[{"role": "user", "content": "x"}]))
    finally:
        await backend.close()
        await runner.cleanup()


async def test_a_password_in_the_address_is_sent_and_stands_in_no_error() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        await request.read()
        seen.append(request.headers.get("authorization", ""))
        return web.json_response({"error": {"message": "no"}}, status=400)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    backend = OpenAIBackend(f"http://me:s%40cret@127.0.0.1:{runner.addresses[0][1]}/v1", "m")
    try:
        with pytest.raises(BackendError) as refused:
            await backend.generate(ChatRequest(model="m", messages=[{"role": "user", "content": "x"}]))
    finally:
        await backend.close()
        await runner.cleanup()
    assert seen == ["Basic " + b64encode(b"me:s@cret").decode()]
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


async def test_an_answer_that_unpacks_beyond_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai, "ANSWER_LIMIT", 1 << 20)
    body = gzip.compress(b" " * (8 << 20))
    with pytest.raises(BackendError, match="more than"):
        await ask(lambda: web.Response(body=body, headers={"content-encoding": "gzip"}))


async def test_a_whole_answer_is_taken() -> None:
    generation = await ask(lambda: web.json_response(GOOD))
    assert generation.completion_token_ids == (1, 2)
