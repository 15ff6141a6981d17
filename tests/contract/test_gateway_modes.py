"""What a gateway does besides answering: streaming, slots, pauses, budgets, slow and greedy clients."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import socket
import zlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
import zstandard

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.budget import Budget
from understudy.gateway.fair_slots import FairSlots
from understudy.gateway.keys import Keys
from understudy.gateway.prices import Price
from understudy.gateway.router import ModelRouter
from understudy.gateway.server import connections, http
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.capture import CallObserver
from understudy.gateway.server.http import BODY_LIMIT, RequestLimits
from understudy.store import Store
from understudy.trajectory.tree import build
from understudy.types import Call

from fakes import sse
from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Raw, Say, Step, event
from support import until


class Front:
    """A running gateway and its model, with the keys of two attempts."""

    def __init__(self, url: str, gateway: Gateway, model: FakeVLLM, store: Store, keys: Mapping[str, str]) -> None:
        self.url, self.gateway, self.model, self.store, self.keys = url, gateway, model, store, keys
        self.attempts = list(keys)
        self.http = aiohttp.ClientSession()

    def ask(self, text: str, *, attempt: int = 0, **fields: Any) -> Any:
        body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": text}], **fields}
        headers = {"x-api-key": self.keys[self.attempts[attempt]]}
        return self.http.post(f"{self.url}/v1/messages", json=body, headers=headers)

    async def answer(self, text: str, *, attempt: int = 0, **fields: Any) -> tuple[int, bytes]:
        async with self.ask(text, attempt=attempt, **fields) as reply:
            return reply.status, await reply.read()

    def calls(self, attempt: int = 0) -> list[Call]:
        return list(self.store.calls.of_attempt(self.attempts[attempt]))


@asynccontextmanager
async def running(
    tmp_path: Path,
    *script: Step,
    default: Step | None = None,
    slots: FairSlots | None = None,
    budget: Budget | None = None,
    streaming: bool = False,
    observers: Sequence[CallObserver] = (),
    price: Price | None = None,
    **limits: Any,
) -> AsyncIterator[Front]:
    with Store.open(tmp_path / "store") as store:
        async with FakeVLLM(*script, default=default) as model:
            backend, keys = VLLMBackend(model.url, "fake", price=price), Keys()
            models = ModelRouter(backend, slots={"high": slots} if slots else {})
            gateway = Gateway(
                models,
                store.calls,
                keys,
                observers=observers,
                streaming=streaming,
                limits=RequestLimits(**{"drain_s": 1.0, **limits}),
            )
            issued = {attempt: keys.issue(attempt, budget=budget) for attempt in start_attempts(store, count=2)}
            front = Front(await gateway.start_tcp("127.0.0.1", 0), gateway, model, store, issued)
            try:
                yield front
            finally:
                await front.http.close()
                await gateway.stop()
                await models.close()


async def test_an_observer_that_fails_costs_no_answer(tmp_path: Path) -> None:
    observed: list[str] = []

    def fail(call: Call, _: Mapping[bytes, bytes]) -> None:
        raise ValueError(call.id)

    observers = [fail, lambda call, _: observed.append(call.id)]
    async with running(tmp_path, Say(text="hi"), observers=observers) as front:
        assert (await front.answer("hi"))[0] == 200
        assert [call.id for call in front.calls()] == observed


# --- streaming mode ------------------------------------------------------------------------------------


async def test_streaming_says_the_text_before_the_answer_is_whole_and_the_rest_when_it_is_kept(
    tmp_path: Path,
) -> None:
    step = Say(text="one two three", tools=[("", "Bash", '{"command": "ls"}')])
    async with running(tmp_path, step, streaming=True) as front:
        status, body = await front.answer("go", stream=True)
        (call,) = front.calls()
        assert front.model.requests[0]["stream"] is True
    answered = sse.message(body, overlapping=True)
    for block in answered["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"])
    assert status == 200
    assert answered == json.loads(call.response)
    first_stop = body.index(b"content_block_stop")
    assert body.rindex(b"content_block_delta") < first_stop, "a part was closed before the call was durable"
    assert (call.status, call.completion_token_ids is not None) == ("ok", True)


async def test_a_client_that_does_not_read_its_stream_ends_the_call_and_its_connection_to_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 0.05)
    delta = event({"choices": [{"index": 0, "delta": {"content": "x" * 8192}}]})
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield delta

    async with running(tmp_path, Raw(pieces=cast(Sequence[bytes], endless())), streaming=True) as front:
        reply = await front.ask("go", stream=True)  # whose body nobody reads
        await until(front.calls)
        (call,) = front.calls()
        assert call.status == "abandoned"
        before = sent
        await asyncio.sleep(0.05)
        assert sent == before
        reply.close()


async def test_a_stream_that_breaks_after_it_began_is_an_error_and_is_asked_for_once(tmp_path: Path) -> None:
    async with running(tmp_path, Say(text="half of it", cut=2), streaming=True) as front:
        status, body = await front.answer("go", stream=True)
        (call,) = front.calls()
        assert len(front.model.requests) == 1
    assert status in (200, 529)
    assert b"message_stop" not in body
    assert b"overloaded_error" in body or b"api_error" in body
    assert call.status == "error"


# --- slots and pauses ----------------------------------------------------------------------------------


async def test_requests_above_the_limit_wait_their_turn_and_those_above_the_queue_are_told_to_come_back(
    tmp_path: Path,
) -> None:
    hold = asyncio.Event()
    async with running(tmp_path, default=Say(text="ok", hold=hold), slots=FairSlots(1, 1)) as front:
        first = asyncio.create_task(front.answer("1"))
        await until(lambda: len(front.model.requests) == 1)
        second = asyncio.create_task(front.answer("2"))
        await asyncio.sleep(0.05)
        status, body = await front.answer("3")
        assert (status, json.loads(body)["error"]["type"]) == (529, "overloaded_error")
        assert len(front.model.requests) == 1
        hold.set()
        assert [(await task)[0] for task in (first, second)] == [200, 200]
        assert [call.status for call in front.calls()] == ["error", "ok", "ok"]


async def test_a_pause_holds_what_comes_and_what_was_queued_until_the_new_version(tmp_path: Path) -> None:
    hold = asyncio.Event()
    script = [Say(text="before", hold=hold), Say(text="after"), Say(text="after")]
    async with running(tmp_path, *script, slots=FairSlots(1, 10)) as front:
        control = front.gateway.control
        control.publish("v1")
        first = asyncio.create_task(front.answer("1"))
        await until(lambda: len(front.model.requests) == 1)
        queued = asyncio.create_task(front.answer("2"))
        await asyncio.sleep(0.02)
        control.pause()
        late = asyncio.create_task(front.answer("3"))
        assert await control.drain(0.01) == 1
        hold.set()
        assert await control.drain(5) == 0
        await asyncio.sleep(0.05)
        assert len(front.model.requests) == 1, "a request was sent to weights that are being changed"
        control.resume("v2")
        assert [(await task)[0] for task in (first, queued, late)] == [200, 200, 200]
        calls = front.calls()
    assert [call.policy_version for call in calls] == ["v1", "v2", "v2"]
    assert [[span.version for span in call.policy_spans] for call in calls] == [["v1"], ["v2"], ["v2"]]


async def test_weights_that_change_inside_a_call_are_both_recorded(tmp_path: Path) -> None:
    hold = asyncio.Event()
    async with running(tmp_path, Say(text="x", hold=hold)) as front:
        front.gateway.control.publish("v1")
        task = asyncio.create_task(front.answer("1"))
        await until(lambda: front.model.requests)
        front.gateway.control.publish("v2")
        hold.set()
        await task
        (call,) = front.calls()
    assert [(span.version, span.start, span.end) for span in call.policy_spans] == [
        ("v1", None, None),
        ("v2", None, None),
    ]
    assert call.policy_version == "v2"


# --- budgets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_used_up_budget_is_an_ordinary_end_for_the_agent_and_no_turn_of_the_model(
    tmp_path: Path, stream: bool
) -> None:
    async with running(tmp_path, budget=Budget(calls=2)) as front:
        for number in range(3):
            status, body = await front.answer(str(number), stream=stream)
            assert status == 200
        answered = sse.message(body) if stream else json.loads(body)
        calls = front.calls()
        assert len(front.model.requests) == 2
        other, _ = await front.answer("mine", attempt=1)
        assert other == 200
    assert answered["stop_reason"] == "end_turn"
    assert "2 of 2 calls" in answered["content"][0]["text"]
    assert [call.status for call in calls] == ["ok", "ok", "error"]
    assert calls[2].error is not None
    assert calls[2].error.type == "BudgetExceeded"
    assert build(calls).nodes[2].answer is None


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_used_up_budget_is_told_in_the_callers_dialect_with_all_that_it_asked_for(
    tmp_path: Path, path: str, stream: bool
) -> None:
    async with running(tmp_path, budget=Budget(calls=1)) as front:
        assert (await front.answer("hi"))[0] == 200
        body: dict[str, Any] = {"model": "m", "stream": stream, "max_output_tokens": 77, "input": "hi"}
        if path.endswith("completions"):
            options = {"stream_options": {"include_usage": True}} if stream else {}
            body = {"model": "m", "stream": stream, "messages": [{"role": "user", "content": "hi"}]} | options
        headers = {"authorization": f"Bearer {front.keys[front.attempts[0]]}"}
        async with front.http.post(front.url + path, json=body, headers=headers) as reply:
            assert reply.status == 200
            response_body = await reply.read()
        _, call = front.calls()
    assert b"This attempt ends here." in response_body
    answered = json.loads(call.response)
    if path.endswith("completions"):
        assert answered["choices"][0]["finish_reason"] == "stop"
        assert response_body.count(b'"total_tokens"') == 1
    else:
        assert (answered["status"], answered["max_output_tokens"]) == ("completed", 77)


@pytest.mark.parametrize("budget", [Budget(calls=5), Budget(tokens=3000), Budget(cost_usd=0.003)])
async def test_60_requests_at_once_do_not_pass_a_budget(tmp_path: Path, budget: Budget) -> None:
    price = Price(input=1.0, output=1.0)
    async with running(tmp_path, default=Say(text="ok"), budget=budget, price=price) as front:
        answers = await asyncio.gather(*(front.answer(str(n) + " word" * 90) for n in range(60)))
        assert {status for status, _ in answers} == {200}
        assert sum(b"This attempt ends here" in body for _, body in answers) == 60 - len(front.model.requests)
        ok = [call for call in front.calls() if call.status == "ok"]
    used = sum(call.usage.prompt_tokens + call.usage.completion_tokens for call in ok)
    assert 0 < len(ok) <= (budget.calls or 60)
    assert used <= (budget.tokens or used)
    assert sum(call.cost_usd or 0.0 for call in ok) <= (budget.cost_usd or 1.0)


# --- clients that do harm ------------------------------------------------------------------------------


async def test_a_head_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    async with running(tmp_path, head_s=0.3) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\n")
        for _ in range(3):
            await asyncio.sleep(0.05)
            writer.write(b"a: b\r\n")
        # Before the thirty seconds that a head has where nothing else is said.
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert (await front.answer("hi"))[0] == 200


async def test_a_head_without_measure_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /healthz HTTP/1.1\r\n")
        writer.write(b"a: " + b"x" * (connections.HEAD_LIMIT + 1))
        refusal = await asyncio.wait_for(reader.read(), 5)
        assert refusal.startswith(b"HTTP/1.1 431 ") and refusal.endswith(
            b"\r\n\r\nthe headers are too large: expected at most 128 with 65536 bytes in all; send fewer\n"
        )
        writer.close()


async def test_connections_that_nobody_uses_give_way_to_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "CONNECTIONS", 20)
    hold = asyncio.Event()
    async with running(tmp_path, default=Say(text="ok", hold=hold)) as front:
        under_way = asyncio.create_task(front.answer("hi"))
        await until(lambda: front.model.requests)
        host, port = front.url.removeprefix("http://").split(":")
        others = [await asyncio.open_connection(host, int(port)) for _ in range(50)]
        for _, writer in others[30:]:
            writer.write(b"GET /healthz HTTP/1.1\r\n\r\n")

        def closed() -> int:
            return sum(reader.at_eof() or reader.exception() is not None for reader, _ in others)

        await until(lambda: closed() >= 30)
        await asyncio.sleep(0.1)
        assert closed() <= 32
        hold.set()
        assert (await under_way)[0] == 200
        for _, writer in others:
            writer.close()


async def test_what_follows_a_body_is_not_kept_and_has_an_end(tmp_path: Path) -> None:
    async with running(tmp_path) as front:
        host, port = front.url.removeprefix("http://").split(":")
        key = front.keys[front.attempts[0]]
        head = f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ntransfer-encoding: chunked\r\n\r\n"
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + b"2\r\n{}\r\n0\r\n")
        trailer = b"a: " + b"x" * 1000 + b"\r\n"
        await asyncio.sleep(0.05)
        for _ in range(connections.HEAD_LIMIT // len(trailer) + 1):
            writer.write(trailer)
            await asyncio.sleep(0)
        assert (await asyncio.wait_for(reader.read(20), 5)).startswith(b"HTTP/1.1 431 ")
        writer.close()


async def test_one_attempt_holds_so_much_and_the_others_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "ATTEMPT_LIMIT", 3 << 10)
    hold = asyncio.Event()
    async with running(tmp_path, default=Say(text="ok", hold=hold)) as front:
        pending = [asyncio.create_task(front.answer(str(n) + "x" * (1 << 10))) for n in range(2)]
        await until(lambda: len(front.model.requests) == 2)
        status, body = await front.answer("2" + "x" * (1 << 10))
        assert (status, json.loads(body)["error"]["type"]) == (529, "overloaded_error")
        hold.set()
        assert [(await task)[0] for task in pending] == [200, 200]
        assert (await front.answer("3" + "x" * (1 << 10)))[0] == 200
        assert (await front.answer("4", attempt=1))[0] == 200


async def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "VALUES_LIMIT", 1000)
    async with running(tmp_path) as front:
        status, body = await front.answer("hi", tools=[[]] * 1100)
        assert (status, json.loads(body)["error"]["type"]) == (413, "request_too_large")
        assert (await front.answer("x" * 2000))[0] == 200
        assert len(front.calls()) == 1


REQUEST_BODY = json.dumps(
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
).encode()
BLANKS = b" " * (BODY_LIMIT + 10)
# Without a time in it, so that every worker of pytest-xdist collects the same parameters.
GZIPPED = gzip.compress(REQUEST_BODY, mtime=0)


@pytest.mark.parametrize(
    ("coding", "body", "expected"),
    [
        ("gzip", GZIPPED, 200),
        ("deflate", zlib.compress(REQUEST_BODY), 200),
        ("zstd", zstandard.compress(REQUEST_BODY), 200),
        ("GZIP", GZIPPED, 200),
        ("identity", REQUEST_BODY, 200),
        ("br", REQUEST_BODY, 415),
        ("gzip, gzip", gzip.compress(GZIPPED, mtime=0), 415),
        ("gzip", REQUEST_BODY, 400),
        ("gzip", GZIPPED[:-9], 400),
        ("zstd", REQUEST_BODY, 400),
        ("gzip", gzip.compress(BLANKS, mtime=0), 413),
        ("zstd", zstandard.compress(BLANKS), 413),
    ],
)
async def test_a_body_may_be_compressed(tmp_path: Path, coding: str, body: bytes, expected: int) -> None:
    async with running(tmp_path) as front:
        headers = {"x-api-key": front.keys[front.attempts[0]], "content-encoding": coding}
        async with front.http.post(f"{front.url}/v1/messages", data=body, headers=headers) as reply:
            assert reply.status == expected, await reply.text()
        assert [call.request for call in front.calls()] == ([REQUEST_BODY] if expected == 200 else [])


async def test_a_body_that_never_ends_is_told_so(tmp_path: Path) -> None:
    async with running(tmp_path, body_s=0.2) as front:
        host, port = front.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = front.keys[front.attempts[0]]
        writer.write(
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: 99\r\n\r\n{{".encode()
        )
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
        assert answer.startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert front.calls() == []


async def test_50_megabytes_are_refused_in_the_callers_dialect_and_without_a_key_nothing_is_read(
    tmp_path: Path,
) -> None:
    body = b'{"model": "m", "messages": [' + b" " * (50 << 20) + b"]}"
    async with running(tmp_path) as front:
        key = front.keys[front.attempts[0]]
        for path, type_ in (("/v1/messages", "request_too_large"), ("/v1/chat/completions", "invalid_request")):
            async with front.http.post(
                front.url + path, data=io.BytesIO(body), headers={"x-api-key": key}
            ) as reply:
                assert reply.status == 413
                assert type_ in await reply.text()
        async with front.http.post(f"{front.url}/v1/messages", data=io.BytesIO(body)) as reply:
            assert reply.status == 403
        assert front.calls() == []


async def test_all_bodies_on_their_way_share_one_bound(tmp_path: Path) -> None:
    bound = 1 << 20
    async with running(tmp_path, unread_bytes=bound) as front:
        host, port = front.url.removeprefix("http://").split(":")
        key = front.keys[front.attempts[0]]
        head = (
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\ncontent-length: {bound}\r\n\r\n"
        ).encode()
        streams = [await asyncio.open_connection(host, int(port)) for _ in range(4)]
        for _, writer in streams:
            writer.write(head + b" " * (bound // 2))
        answers = [asyncio.create_task(reader.readuntil(b"}}")) for reader, _ in streams]
        done, _ = await asyncio.wait(answers, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert done and all(task.result().startswith(b"HTTP/1.1 529 ") for task in done)
        for _, writer in streams:
            writer.close()
        await asyncio.gather(*answers, return_exceptions=True)
        whole = {"model": "m", "messages": [{"role": "user", "content": "x" * (bound // 2)}]}

        async def send() -> int:
            data = io.BytesIO(json.dumps(whole).encode())
            async with front.http.post(f"{front.url}/v1/messages", data=data, headers={"x-api-key": key}) as reply:
                return reply.status

        # What was held is free again once the gateway has heard of the end, or these would be too much.
        for _ in range(600):
            if await send() != 529:
                break
            await asyncio.sleep(0.05)
        assert [await send() for _ in range(3)] == [200] * 3


async def test_a_connection_that_sends_nothing_is_closed(tmp_path: Path) -> None:
    async with running(tmp_path, head_s=0.2) as front:
        host, port = front.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(5)
            assert (await asyncio.to_thread(connection.recv, 100)).startswith(b"HTTP/1.1 408 ")
