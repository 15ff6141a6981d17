"""Several endpoints of one model, on real sockets: who answers whom, and what happens when one dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web

from understudy.errors import BackendError
from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.base import NativeRequest, RestorableBackend
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.backends.pool import BackendPool, RelayPool
from understudy.gateway.config import GatewayConfig, ModelConfig, ModelsConfig
from understudy.gateway.factory import build_models
from understudy.gateway.prices import Price
from understudy.wire.model import ChatRequest, ConversationHandle

from fakes.vllm import FakeVLLM, Raw, Refuse, Say, Step, event

DEADLINE_S = 20


def request(key: str | None) -> ChatRequest:
    conversation = None if key is None else ConversationHandle(key)
    return ChatRequest(model="m", messages=[{"role": "user", "content": "hi"}], conversation=conversation)


@asynccontextmanager
async def pool(
    *scripts: Sequence[Step], default: Step | None = None
) -> AsyncIterator[tuple[BackendPool, list[FakeVLLM]]]:
    async with AsyncExitStack() as stack:
        models = [await stack.enter_async_context(FakeVLLM(*script, default=default)) for script in scripts]
        made = BackendPool([VLLMBackend(model.url, "fake", price=Price(input=1, output=2)) for model in models])
        stack.push_async_callback(made.close)
        yield made, models


async def who(made: BackendPool, models: Sequence[FakeVLLM], key: str | None) -> int:
    """Which endpoint answers a conversation."""
    before = [len(model.requests) for model in models]
    await made.generate(request(key))
    (number,) = [number for number, model in enumerate(models) if len(model.requests) > before[number]]
    return number


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await holds():  # noqa: ASYNC110 - what is waited for happens behind a socket
            await asyncio.sleep(0.05)


async def test_a_conversation_stays_where_it_is_and_many_are_spread() -> None:
    async with pool([], [], []) as (made, models):
        first = {f"attempt {n}": await who(made, models, f"attempt {n}") for n in range(40)}
        again = {key: await who(made, models, key) for key in first}
        spread = [list(first.values()).count(number) for number in range(3)]
        nobody = {await who(made, models, None) for _ in range(30)}
    assert first == again
    assert min(spread) >= 5
    assert len(nobody) == 3
    assert (made.name, made.model, made.price) == ("vllm", "fake", Price(input=1, output=2))


async def test_a_dead_endpoint_is_left_and_taken_again_when_it_is_back() -> None:
    async with pool([], [], []) as (made, models):
        home = {f"attempt {n}": await who(made, models, f"attempt {n}") for n in range(20)}
        dead = home["attempt 0"]
        await models[dead].stop()
        away = {key: await who(made, models, key) for key in home}
        # Only those that were at home there have moved.
        assert {key for key in home if home[key] != away[key]} == {key for key in home if home[key] == dead}
        await models[dead].start(models[dead].port)

        async def back() -> bool:
            return await who(made, models, "attempt 0") == dead

        await until(back)
        assert {key: await who(made, models, key) for key in home} == home


async def test_closing_that_is_called_off_closes_all() -> None:
    def count() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with pool([], []) as (_, models):
        before = count()
        for turns in range(8):
            made = BackendPool([VLLMBackend(model.url, "fake") for model in models])
            for number in range(8):
                await made.generate(request(f"attempt {number}"))
            models[0].default = Refuse(status=500)
            for number in range(8):
                await made.generate(request(f"attempt {number}"))  # one is left alone, and looked after
            closing = asyncio.ensure_future(made.close())
            for _ in range(turns):
                await asyncio.sleep(0)
            called_off = turns and closing.cancel()
            await asyncio.wait([closing])
            assert closing.cancelled() == bool(called_off)
            models[0].default = None

            async with asyncio.timeout(5):  # by itself an idle connection is closed after 15 seconds
                while count() > before:  # noqa: ASYNC110 - what is waited for is the system's
                    await asyncio.sleep(0.01)


async def test_a_server_that_fails_is_left_and_others_are_asked_until_none_is_left() -> None:
    broken = Refuse(status=500, message="out of memory")
    async with pool([], [], default=broken) as (made, models):
        with pytest.raises(BackendError, match="out of memory"):
            await made.generate(request("a"))
        assert [len(model.requests) for model in models] == [1, 1]
        # All are left alone now; that is no reason to refuse without asking.
        models[0].default = models[1].default = Say(text="ok")
        assert (await made.generate(request("a"))).text == "ok"


@pytest.mark.parametrize("status", [400, 401, 404, 429])
async def test_a_refusal_is_an_answer(status: int) -> None:
    async with pool([], [], default=Refuse(status=status)) as (made, models):
        with pytest.raises(BackendError) as refused:
            await made.generate(request("a"))
    assert refused.value.status == status
    assert sum(len(model.requests) for model in models) == 1


async def test_after_the_first_byte_no_other_is_asked() -> None:
    broken = Raw(pieces=[event({"choices": [{"index": 0, "delta": {"content": "x"}}]})], lost=True)
    async with pool([], [], default=broken) as (made, models):
        with pytest.raises(BackendError, match="broke off"):
            await made.generate(request("a"), lambda _: None)
    assert sum(len(model.requests) for model in models) == 1


async def test_before_the_first_byte_a_stream_moves_too() -> None:
    pieces: list[str] = []
    async with pool([], []) as (made, models):
        models[await who(made, models, "a")].script.append(Refuse(status=503))
        got = await made.generate(request("a"), lambda delta: pieces.append(delta.text))
    assert (got.text, pieces) == ("ok", ["ok"])


async def test_relays_are_pooled_alike() -> None:
    body = b'{"id":"m","type":"message","role":"assistant","model":"c","content":[],"stop_reason":"end_turn",'
    body += b'"usage":{"input_tokens":1,"output_tokens":1}}'
    paths: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        paths.append(request.path)
        return web.Response(body=body, content_type="application/json")

    app = web.Application()
    app.router.add_post("/v1/messages", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    alive = f"http://127.0.0.1:{runner.addresses[0][1]}"
    relays = [AnthropicRelay(url, "claude") for url in ("http://127.0.0.1:9", alive)]
    made = RelayPool(relays)
    try:
        for n in range(6):
            native = NativeRequest(
                path="/v1/messages",
                headers={},
                body=b'{"model":"x"}',
                stream=False,
                conversation=ConversationHandle(str(n)),
            )
            assert (await made.relay(native)).message == body
    finally:
        await made.close()
        await runner.cleanup()
    assert (made.dialect, made.model, len(paths)) == ("anthropic", "claude", 6)


async def test_only_a_pool_that_remembers_is_given_the_calls_of_before() -> None:
    config = {"backend": "vllm", "model": "fake"}
    exact = config | {"tokens": "exact", "tool_format": "hermes"}
    async with FakeVLLM() as model:
        for settings, remembers in ((config, False), (exact, True)):
            high = msgspec.convert(settings | {"base_url": model.url}, ModelConfig)
            models = await build_models(GatewayConfig(models=ModelsConfig(high=high)))
            assert isinstance(models.server_for("any"), RestorableBackend) is remembers
            await models.close()
