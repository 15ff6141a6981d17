"""Servers that say our key, or what no status and no count can be: nothing of it reaches an agent or the store."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from understudy.errors import BackendError
from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.base import NativeRequest
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.backends.chat_response import CALLS_LIMIT
from understudy.gateway.errors import fault_of
from understudy.wire.anthropic import Anthropic
from understudy.wire.errors import ProviderRefusal
from understudy.wire.model import ChatRequest
from understudy.wire.stored import response_blocks, sampled_calls

KEY = "sk-ours-and-secret"
MESSAGE = {"type": "message", "content": [], "model": "m", "stop_reason": "end_turn"}
CHAT = ChatRequest(model="m", messages=[{"role": "user", "content": "x"}])


@asynccontextmanager
async def serving(answer: Callable[[], web.Response]) -> AsyncIterator[str]:
    async def handler(request: web.Request) -> web.Response:
        await request.read()
        return answer()

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def stream(*chunks: Any, name: str = "") -> Callable[[], web.Response]:
    head = f"event: {name}\n" if name else ""
    body = "".join(f"{head}data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    return lambda: web.Response(text=body, content_type="text/event-stream")


async def relayed(answer: Callable[[], web.Response], *, streamed: bool = False) -> BackendError:
    async with serving(answer) as url:
        relay = AnthropicRelay(url, "m", KEY)
        body = json.dumps({"model": "claude", "stream": streamed}).encode()
        try:
            with pytest.raises(BackendError) as raised:
                await relay.relay(NativeRequest(path="/v1/messages", headers={}, body=body, stream=streamed))
        finally:
            await relay.close()
    return raised.value


@pytest.mark.parametrize("error", [{"message": f"no {KEY}", "code": 400}, f"no {KEY}"])
async def test_an_error_in_a_stream_is_told_without_our_key(error: Any) -> None:
    async with serving(stream({"error": error})) as url:
        backend = VLLMBackend(f"{url}/v1", "m", KEY)
        with pytest.raises(BackendError, match="no \\*\\*\\*") as raised:
            await backend.generate(CHAT, lambda _: None)
        await backend.close()
    assert KEY not in str(raised.value)


async def test_an_error_event_of_a_provider_is_told_and_kept_without_our_key() -> None:
    error = {"type": "error", "error": {"type": f"bad {KEY}", "message": f"no {KEY}"}}
    refused = await relayed(stream(error, name="error"), streamed=True)
    assert isinstance(refused, ProviderRefusal)
    assert KEY not in str(refused)
    assert KEY not in str(refused.error)


FORMS = (KEY, f"Bearer {KEY}", KEY.encode().hex(), b64encode(f"x{KEY}".encode()).decode())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_that_says_our_key_is_kept_without_it(form: str, streamed: bool) -> None:
    usage = {"input_tokens": 1, "output_tokens": 1}
    content = [{"type": "text", "text": form}]
    message = MESSAGE | {"id": "m", "role": "assistant", "content": content, "usage": usage}
    start = {"type": "message_start", "message": message | {"content": []}}
    block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": form}}
    delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": form}}
    end = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage}
    events = (start, block, delta, {"type": "content_block_stop", "index": 0}, end, {"type": "message_stop"})
    body = "".join(f"event: {each['type']}\ndata: {json.dumps(each)}\n\n" for each in events)
    answer = web.Response(text=body, content_type="text/event-stream") if streamed else web.json_response(message)
    async with serving(lambda: answer) as url:
        relay = AnthropicRelay(url, "m", KEY)
        request = json.dumps({"model": "claude", "stream": streamed}).encode()
        relayed = await relay.relay(NativeRequest(path="/v1/messages", headers={}, body=request, stream=streamed))
        await relay.close()
    stored = repr(relayed)
    assert "***" in stored
    assert form.removeprefix("Bearer ")[4:-4] not in stored


async def test_chunks_that_say_our_key_are_kept_without_it_and_short_keys_are_words() -> None:
    for key, expected in ((KEY, False), ("EMPTY", True)):
        first = {"choices": [{"index": 0, "delta": {"content": f"is {key}."}}]}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        body = f"data: {json.dumps(first)}\n\ndata: {json.dumps(last)}\n\ndata: [DONE]\n\n"
        answer = web.Response(text=body, content_type="text/event-stream")
        async with serving(lambda answer=answer: answer) as url:
            backend = VLLMBackend(f"{url}/v1", "m", key)
            generation = await backend.generate(CHAT, lambda _: None)
            await backend.close()
        assert (key in repr(generation)) == expected


async def test_a_status_that_is_none_is_told_as_a_failure() -> None:
    error = {"error": {"type": "overloaded_error", "message": "x"}}
    refused = await relayed(lambda: web.json_response(error, status=999))
    assert Anthropic().error(fault_of(refused)).status == 500


@pytest.mark.parametrize("count", [-1, 2**31, 10**30])
async def test_a_usage_that_cannot_be_is_an_error(count: int) -> None:
    refused = await relayed(lambda: web.json_response(MESSAGE | {"usage": {"output_tokens": count}}))
    assert "invalid response" in str(refused)


async def test_an_answer_of_nothing_but_tool_calls_has_an_end() -> None:
    calls = [{"index": index, "function": {"arguments": "x"}} for index in range(CALLS_LIMIT + 1)]
    async with serving(stream(*({"choices": [{"delta": {"tool_calls": [call]}}]} for call in calls))) as url:
        backend = VLLMBackend(f"{url}/v1", "m")
        with pytest.raises(BackendError, match="tool calls"):
            await backend.generate(CHAT, lambda _: None)
        await backend.close()


@pytest.mark.parametrize("content", [b'["x"]', b'[{"type":"tool_use","id":5}]', b"7"])
def test_a_relayed_answer_that_makes_no_sense_does_not_keep_a_session_from_being_restored(content: bytes) -> None:
    assert sampled_calls(response_blocks("anthropic", b'{"role":"assistant","content":%b}' % content)) == {}
