"""The gateway over real sockets, with a real model server behind it and the real store."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import stat
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from understudy.errors import ConfigError, StoreError
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.capture import CallSink
from understudy.gateway.server.http import BODY_LIMIT, RequestLimits
from understudy.gateway.server.listen import tcp_socket
from understudy.store import Store
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build
from understudy.types import Call

from fakes import sse
from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Hang, Refuse, Say, Step
from support import until


def ask(text: str = "hi", *, stream: bool = True, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "claude", "max_tokens": 50, "messages": messages, "stream": stream} | fields


class Front:
    """An agent's view of a running gateway, and what lies behind it."""

    def __init__(self, url: str, gateway: Gateway, keys: Keys, model: FakeVLLM, attempts: Sequence[str]) -> None:
        self.url, self.gateway, self.keys, self.model, self.attempts = url, gateway, keys, model, attempts
        self.key = keys.issue(attempts[0], sampling={"seed": 5})
        self.http = aiohttp.ClientSession(headers={"x-claude-code-session-id": "s"})

    def post(
        self, body: Any, *, path: str = "/v1/messages?beta=true", key: str | None = None, **headers: str
    ) -> Any:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        auth = {"authorization": f"Bearer {self.key if key is None else key}"}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http.post(self.url + path, data=data, headers=auth | named)

    async def answer(self, body: dict[str, Any], **headers: str) -> dict[str, Any]:
        async with self.post(body, **headers) as reply:
            assert reply.status == 200, await reply.text()
            data = await reply.read()
        return sse.message(data) if body["stream"] else json.loads(data)


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store") as store_of_test:
        yield store_of_test


@asynccontextmanager
async def running(
    store: Store, *script: Step, sink: CallSink | None = None, max_model_len: int = 100_000, **timing: float
) -> AsyncIterator[Front]:
    async with FakeVLLM(*script, max_model_len=max_model_len) as model:
        backend, keys = VLLMBackend(model.url, "fake", api_key="backend-secret"), Keys()
        gateway = Gateway(ModelRouter(backend), sink or store.calls, keys, limits=RequestLimits(**timing))
        front = Front(
            await gateway.start_tcp("127.0.0.1", 0), gateway, keys, model, start_attempts(store, count=2)
        )
        try:
            yield front
        finally:
            await front.http.close()
            await gateway.stop()
            await backend.close()


# --- answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_the_call_that_was_kept(store: Store, stream: bool) -> None:
    step = Say(text="hello", reasoning="hm", tools=[("", "Bash", '{"command" : "ls"}')], cached=4)
    async with running(store, step) as front:
        body = ask(stream=stream, temperature=0.5, stop_sequences=["X"])
        answered = await front.answer(body, x_claude_code_agent_id="sub")
        (call,) = store.calls.of_attempt(front.attempts[0])
        (sent,) = front.model.requests
    message = json.loads(call.response)
    if stream:
        for block in answered["content"]:
            if block["type"] == "tool_use":
                assert block["input"] == '{"command" : "ls"}'
                block["input"] = json.loads(block["input"])
    assert answered == message
    assert message["model"] == "claude"
    assert message["id"] == call.id.replace("call_", "msg_")
    assert call.request == json.dumps(body).encode()
    assert (call.status, call.dialect, call.finish_reason, call.sequence) == ("ok", "anthropic", "tool_calls", 0)
    assert (call.requested_model, call.backend, call.backend_model) == ("claude", "vllm", "fake")
    assert (call.session_id, call.agent_id, call.parent_id) == ("s", "sub", None)
    assert call.completion_token_ids == (*b'hmhello{"command" : "ls"}', 256)
    assert call.logprobs == tuple(-i / 1000 for i in call.completion_token_ids)
    assert call.usage.prompt_tokens == len(call.prompt_token_ids or ())
    assert call.usage.cached_tokens == 4
    assert call.sampling == {"max_tokens": 50, "temperature": 0.5, "stop": ["X"], "seed": 5}
    assert call.started_at <= call.ended_at
    assert {name: sent[name] for name in call.sampling} == call.sampling
    assert sent["return_token_ids"] is True
    assert sent["logprobs"] is True
    assert sent["model"] == "fake"


async def test_a_conversation_extends_its_prompt_though_the_agent_rewrites_it(store: Store) -> None:
    raws = [f'{{"old_string" : "{n}",  "new_string":"x", "file_path":"/a", "n": {n}.0}}' for n in range(4)]
    script = [Say(text=f"step {n}", tools=[("call_0", "Edit", raw)]) for n, raw in enumerate(raws)]
    async with running(store, *script, Say(text="done")) as front:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        for n in range(5):
            answered = await front.answer(ask(messages=list(messages), stream=n % 2 == 0))
            blocks = answered["content"]
            for block in blocks:
                if block["type"] == "tool_use":
                    raw = block["input"]
                    value = json.loads(raw) if isinstance(raw, str) else raw
                    block["input"] = {"replace_all": False, "file_path": value.pop("file_path"), **value, "n": n}
                    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "ok"}
                    messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [result]}]
        calls = list(store.calls.of_attempt(front.attempts[0]))
        last = front.model.requests[-1]
    tools = [call["function"]["arguments"] for m in last["messages"] for call in m.get("tool_calls", [])]
    assert tools == raws
    for before, after in pairwise(calls):
        prompt = before.prompt_token_ids
        assert prompt is not None
        assert after.prompt_token_ids is not None
        assert after.prompt_token_ids[: len(prompt)] == prompt
        assert after.parent_id == before.id
    assert [call.sequence for call in calls] == [0, 1, 2, 3, 4]
    ids = [
        block["tool_use_id"]
        for m in messages
        if m["role"] == "user" and m["content"] != "go"
        for block in m["content"]
    ]
    assert len(set(ids)) == 4


async def test_branches_have_parents_of_their_own(store: Store) -> None:
    async with running(store) as front:
        for text, agent in (("a", ""), ("b", "sub"), ("c", ""), ("d", "sub")):
            await front.answer(ask(text), x_claude_code_agent_id=agent)
        a, b, c, d = store.calls.of_attempt(front.attempts[0])
    assert (a.parent_id, b.parent_id, c.parent_id, d.parent_id) == (None, None, a.id, b.id)


async def test_tokens_are_counted_and_not_kept_as_a_call(store: Store) -> None:
    async with running(store) as front:
        async with front.post(ask(), path="/v1/messages/count_tokens?beta=true") as reply:
            counted = (await reply.json())["input_tokens"]
        await front.answer(ask())
        (call,) = store.calls.of_attempt(front.attempts[0])
    assert counted == len(call.prompt_token_ids or ())


async def test_the_other_paths(store: Store) -> None:
    async with running(store) as front:
        async with front.http.head(front.url + "/") as reply:
            assert reply.status == 200
        async with front.http.get(front.url + "/healthz") as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        for method, path in (("GET", "/"), ("GET", "/v1/messages"), ("POST", "/v1/complete"), ("PUT", "/x")):
            async with front.http.request(method, front.url + path) as reply:
                assert reply.status == 404
                assert (await reply.json())["error"]["type"] == "not_found_error"


# --- commit before answer ------------------------------------------------------------------------------


class Slow:
    """A sink whose commits end when the test says so."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.futures: list[Future[None]] = []

    def append(self, call: Call) -> Future[None]:
        self.calls.append(call)
        self.futures.append(Future())
        return self.futures[-1]


@pytest.mark.parametrize("stream", [True, False])
async def test_nothing_of_an_answer_leaves_before_its_call_is_durable(store: Store, stream: bool) -> None:
    sink = Slow()
    async with running(store, sink=sink, headers_after_s=0.02, ping_every_s=0.02) as front:
        pending = asyncio.ensure_future(_read(front, ask(stream=stream)))
        await until(lambda: sink.futures)
        await asyncio.sleep(0.1)
        assert not pending.done()
        sink.futures[0].set_result(None)
        status, _, data = await pending
    assert status == 200
    if stream:
        kinds = [event["type"] for event in sse.events(data)]
        begin = kinds.index("message_start")
        assert begin >= 2
        assert set(kinds[:begin]) == {"ping"}


async def _read(front: Front, body: Any, **headers: str) -> tuple[int, dict[str, str], bytes]:
    async with front.post(body, **headers) as reply:
        return reply.status, {k.lower(): v for k, v in reply.headers.items()}, await reply.read()


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_commit_that_fails_gives_no_answer(store: Store, stream: bool, late: bool) -> None:
    sink = Slow()
    wait = 0.01 if late else 10.0
    async with running(store, sink=sink, headers_after_s=wait, ping_every_s=wait) as front:
        pending = asyncio.ensure_future(_read(front, ask(stream=stream)))
        await until(lambda: sink.futures)
        await asyncio.sleep(0.05)
        sink.futures[0].set_exception(StoreError("disk full at /secret"))
        status, headers, data = await pending
    assert b"ok" not in data
    assert b"/secret" not in data
    if stream and late:
        assert [event["type"] for event in sse.events(data) if event["type"] != "ping"] == ["error"]
    else:
        assert (status, headers["x-should-retry"]) == (500, "false")


# --- duplicates and clients that leave -----------------------------------------------------------------


async def test_identical_requests_at_once_are_samples_of_their_own(store: Store) -> None:
    hold = asyncio.Event()
    steps = [Say(text=f"sample {n}", tools=[("call_1", "Bash", "{}")], hold=hold) for n in range(4)]
    async with running(store, *steps) as front:
        samples = [asyncio.ensure_future(front.answer(ask())) for _ in range(4)]
        await until(lambda: len(front.model.requests) == 4)
        hold.set()
        answers = await asyncio.gather(*samples)
        calls = list(store.calls.of_attempt(front.attempts[0]))
    assert {answer["content"][0]["text"] for answer in answers} == {f"sample {n}" for n in range(4)}
    assert len({answer["id"] for answer in answers}) == 4
    assert len({answer["content"][1]["id"] for answer in answers}) == 4, "each has tool ids of its own"
    assert {call.id for call in calls} == {answer["id"].replace("msg_", "call_") for answer in answers}
    assert {call.status for call in calls} == {"ok"}
    tree = build(calls)
    assert [node.superseded for node in tree.nodes] == [False] * 4
    merged = merge(tree)
    assert sorted(segment.call_ids[0] for segment in merged.segments) == sorted(call.id for call in calls)
    assert not any(segment.superseded for segment in merged.segments), "each is a sample to learn from"
    assert merged.reasons == {"first call": 1, "sibling": 3}


async def test_retries_of_a_request_in_flight_are_one_call(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, Say(text="once", hold=hold)) as front:
        other_key = front.keys.issue(front.attempts[1])
        same = [asyncio.ensure_future(front.answer(ask()))]
        await until(lambda: len(front.model.requests) == 1)
        for count in (1, 2):
            same.append(asyncio.ensure_future(front.answer(ask(), x_stainless_retry_count=str(count))))
            await asyncio.sleep(0.05)
        # A second retry with the count of another is one of another request.
        more = asyncio.ensure_future(front.answer(ask(), x_stainless_retry_count="2"))
        sub = asyncio.ensure_future(front.answer(ask(), x_claude_code_agent_id="sub", x_stainless_retry_count="1"))
        other = asyncio.ensure_future(_read(front, ask(), key=other_key, x_stainless_retry_count="1"))
        await until(lambda: len(front.model.requests) == 4)
        hold.set()
        answers = await asyncio.gather(*same)
        await asyncio.gather(more, sub, other)
        again = await front.answer(ask(), x_stainless_retry_count="3")
        assert len(front.model.requests) == 5
        calls = list(store.calls.of_attempt(front.attempts[0]))
    assert answers[0] == answers[1] == answers[2]
    assert len(calls) == 4
    superseded = {node.call.id for node in build(calls).nodes if node.superseded}
    assert superseded == {answer["id"].replace("msg_", "call_") for answer in (answers[0], await more)}
    assert again["id"] != answers[0]["id"]


async def test_an_idempotency_key_says_what_is_a_retry(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, *(Say(text=name, hold=hold) for name in "ab")) as front:
        requests = [
            asyncio.ensure_future(front.answer(ask(), idempotency_key=key, x_stainless_retry_count=count))
            for key, count in (("k1", "0"), ("k1", "0"), ("k2", "1"), ("k2", "0"))
        ]
        await until(lambda: len(front.model.requests) == 2)
        await asyncio.sleep(0.05)
        hold.set()
        one, one_again, two, two_again = await asyncio.gather(*requests)
        assert len(front.model.requests) == 2
    assert one == one_again
    assert two == two_again
    assert one["id"] != two["id"]


async def test_a_client_that_leaves_stops_the_generation(store: Store) -> None:
    hang = Hang()
    async with running(store, hang) as front:
        pending = asyncio.ensure_future(_read(front, ask()))
        await until(lambda: front.model.requests)
        pending.cancel()
        await asyncio.wait_for(hang.disconnected.wait(), 60)
        await until(lambda: list(store.calls.of_attempt(front.attempts[0])))
        (call,) = store.calls.of_attempt(front.attempts[0])
        assert (call.status, call.completion_token_ids) == ("abandoned", None)
        assert call.error is not None
        assert call.error.type == "Abandoned"
        assert (await front.answer(ask()))["content"] == [{"type": "text", "text": "ok"}]


async def test_one_of_two_tries_of_a_request_may_leave(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, Say(text="kept", hold=hold)) as front:
        leaves, stays = (
            asyncio.ensure_future(front.answer(ask(), x_stainless_retry_count=count)) for count in "01"
        )
        await until(lambda: front.model.requests)
        await asyncio.sleep(0.05)
        leaves.cancel()
        await asyncio.sleep(0.05)
        hold.set()
        assert (await stays)["content"] == [{"type": "text", "text": "kept"}]
        assert [call.status for call in store.calls.of_attempt(front.attempts[0])] == ["ok"]


async def test_a_client_that_leaves_during_the_commit_loses_nothing(store: Store) -> None:
    sink = Slow()
    async with running(store, sink=sink) as front:
        pending = asyncio.ensure_future(_read(front, ask()))
        await until(lambda: sink.futures)
        pending.cancel()
        await asyncio.sleep(0.05)
        again = asyncio.ensure_future(front.answer(ask()))
        await asyncio.sleep(0.05)
        sink.futures[0].set_result(None)
        assert (await again)["id"] == sink.calls[0].id.replace("call_", "msg_")
    assert [call.status for call in sink.calls] == ["ok"]
    assert len(front.model.requests) == 1


async def test_stop_drains_then_abandons(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, Say(text="slow", hold=hold), Hang(), drain_s=0.5) as front:
        drained = asyncio.ensure_future(front.answer(ask("a")))
        await until(lambda: len(front.model.requests) == 1)
        stuck = asyncio.ensure_future(_read(front, ask("b")))
        await until(lambda: len(front.model.requests) == 2)
        asyncio.get_running_loop().call_later(0.1, hold.set)
        await front.gateway.stop()
        assert (await drained)["content"] == [{"type": "text", "text": "slow"}]
        assert (await stuck)[0] == 529
    assert [call.status for call in store.calls.of_attempt(front.attempts[0])] == ["ok", "abandoned"]


# --- keys ----------------------------------------------------------------------------------------------


async def test_only_the_attempts_own_key_opens_it_and_only_while_it_runs(store: Store) -> None:
    async with running(store) as front:
        other = front.keys.issue(front.attempts[1])
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for key in ("", "sk-understudy-wrong", "Bearer"):
                async with front.post(ask(), path=path, key=key) as reply:
                    assert reply.status == 403
                    assert (await reply.json())["error"]["type"] == "permission_error"
        async with front.http.post(front.url + "/v1/messages", json=ask(), headers={"x-api-key": other}) as reply:
            assert reply.status == 200
        assert list(store.calls.of_attempt(front.attempts[0])) == []
        assert len(list(store.calls.of_attempt(front.attempts[1]))) == 1
        front.keys.revoke(front.attempts[1])
        assert (await _read(front, ask(), key=other))[0] == 403
        assert (await _read(front, ask()))[0] == 200


async def test_a_key_that_is_revoked_while_the_body_comes_begins_nothing(store: Store) -> None:
    async with running(store) as front:
        body = json.dumps(ask()).encode()

        async def slowly() -> AsyncIterator[bytes]:
            yield body[:10]
            await asyncio.sleep(0.1)
            front.keys.revoke(front.attempts[0])
            yield body[10:]

        headers = {"x-api-key": front.key}
        async with front.http.post(front.url + "/v1/messages", data=slowly(), headers=headers) as reply:
            assert reply.status == 403
        assert list(store.calls.of_attempt(front.attempts[0])) == []


async def test_a_request_of_any_depth_is_answered(store: Store) -> None:
    async with running(store) as front:
        for depth in range(900, 1000):
            schema = '{"a":' * depth + "1" + "}" * depth
            body = json.dumps(ask(tools=[{"name": "t", "input_schema": "?"}])).replace('"?"', schema).encode()
            for path in ("/v1/messages/count_tokens", "/v1/messages"):
                async with front.post(body, path=path) as reply:
                    assert reply.status != 500, (depth, await reply.text())


# --- failures ------------------------------------------------------------------------------------------

NUMBERS = "maximum context length is 32 tokens"
FAILURES = [
    (Refuse(status=500), 529, "overloaded_error", None),
    (Refuse(status=503, headers={"retry-after": "7"}), 529, "overloaded_error", "7"),
    (Refuse(status=429, headers={"retry-after": "120"}), 429, "rate_limit_error", "30"),
    (Refuse(status=429, headers={"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}), 429, "rate_limit_error", "0"),
    (Refuse(status=400, message="bad thing"), 400, "invalid_request_error", None),
    (Refuse(status=401, message="key backend-secret is wrong"), 400, "invalid_request_error", None),
    (Refuse(status=404, raw=b"<html>nothing</html>"), 400, "invalid_request_error", None),
    (Refuse(status=200, raw=b"<html>"), 500, "api_error", None),
    (Refuse(status=200, raw=b'{"choices": []}'), 500, "api_error", None),
    (Refuse(status=200, raw=b'{"choices": [{"message": {"content": 5}}]}'), 500, "api_error", None),
    (Say(text="half", finish="abort"), 529, "overloaded_error", None),
    (Say(text="x", extra={"choices": [{"message": {}, "token_ids": [1, 2], "logprobs": {"content": []}}]}), 500,
     "api_error", None),
]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("step", "status", "kind", "retry_after"), FAILURES)
async def test_a_backends_failure_is_a_status_and_a_kept_call(
    store: Store, step: Step, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    async with running(store, step) as front:
        got, headers, data = await _read(front, ask(stream=stream))
        (call,) = store.calls.of_attempt(front.attempts[0])
    error = json.loads(data)["error"]
    assert (got, error["type"], headers.get("retry-after")) == (status, kind, retry_after)
    assert "backend-secret" not in error["message"]
    assert (call.status, call.response) == ("error", data)
    assert call.error is not None
    assert call.error.boundary == "backend"


async def test_a_backend_that_is_down_is_tried_a_few_times_then_told(store: Store) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        backend, keys = VLLMBackend(url, "fake"), Keys()
        gateway = Gateway(ModelRouter(backend), store.calls, keys)
        base = await gateway.start_tcp("127.0.0.1", 0)
        (attempt,) = start_attempts(store)
        auth = {"x-api-key": keys.issue(attempt)}
        async with aiohttp.request("POST", base + "/v1/messages", json=ask(), headers=auth) as reply:
            assert reply.status == 529
            assert "and that the server is running" in await reply.text()
        await gateway.stop()
        await backend.close()
    (call,) = store.calls.of_attempt(attempt)
    assert call.status == "error"


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 60 tokens. However, your request has 90 input tokens.",
        "This model's maximum context length is 60 tokens. However, you requested 50 output tokens and your "
        "prompt contains at least 11 input tokens, for a total of at least 61 tokens.",
        "'max_tokens' or 'max_completion_tokens' is too large: 50. This model's maximum context length is 60 "
        "tokens and your request has 41 input tokens (50 > 60 - 41).",
    ],
)
async def test_a_prompt_that_is_too_long_is_said_in_the_words_that_compact(store: Store, message: str) -> None:
    text = "long" * 20
    async with running(store, Refuse(status=400, message=message), max_model_len=60) as front:
        status, _, data = await _read(front, ask(text))
        (call,) = store.calls.of_attempt(front.attempts[0])
        (counted,) = front.model.tokenized
    assert status == 400
    (tokens, limit) = (int(w) for w in json.loads(data)["error"]["message"].split() if w.isdigit())
    assert json.loads(data)["error"]["message"] == f"prompt is too long: {tokens} tokens > {limit} maximum"
    assert limit == 60
    assert tokens > limit
    assert counted["messages"] == [{"role": "user", "content": text}]
    assert call.error is not None
    assert call.error.type == "ContextOverflow"


async def test_max_tokens_gives_way_to_the_prompt(store: Store) -> None:
    refusal = Refuse(status=400, message="maximum context length is 100 tokens, at least 51 input tokens")
    async with running(store, refusal, max_model_len=100) as front:
        await front.answer(ask(max_tokens=1000))
        (call,) = store.calls.of_attempt(front.attempts[0])
        first, second = front.model.requests
    assert first["max_tokens"] == 1000
    assert second["max_tokens"] == call.sampling["max_tokens"] == 100 - call.usage.prompt_tokens


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "This model's maximum context length is 32768 tokens. However, your request has 40000 input tokens.",
            40000,
        ),
        ("The input (40000 tokens) is longer than the model's context length (32768 tokens).", 40000),
        ("The decoder prompt (length 40000) is longer than the maximum model length of 32768.", 40000),
        (
            "The maximum context length is 32768 tokens. However, your messages resulted in 40000 tokens.",
            40000,
        ),
    ],
)
async def test_without_a_tokenizer_the_refusals_own_numbers_are_taken(
    store: Store, message: str, expected: int
) -> None:
    async with running(store, Refuse(status=400, message=message)) as front:
        front.model.tokenizes = False
        _, _, data = await _read(front, ask())
    assert json.loads(data)["error"]["message"] == f"prompt is too long: {expected} tokens > 32768 maximum"


# --- bad requests --------------------------------------------------------------------------------------


async def test_malformed_bodies_are_refused_and_kept(store: Store) -> None:
    async with running(store) as front:
        for body in (b"", b"{", b"\xff\x00", b'{"model": 1}', b'{"model": "claude", "messages": 1}'):
            status, _, data = await _read(front, body)
            assert (status, json.loads(data)["error"]["type"]) == (400, "invalid_request_error")
        calls = list(store.calls.of_attempt(front.attempts[0]))
        assert front.model.requests == []
    assert [call.status for call in calls] == ["error"] * 5
    assert calls[1].request == b"{"
    assert [call.requested_model for call in calls] == ["", "", "", "", "claude"], "known where it can be read"


async def test_a_body_that_is_too_large_is_not_read(store: Store) -> None:
    async with running(store) as front:
        host, port = front.url.removeprefix("http://").split(":")
        for headers in (f"content-length: {BODY_LIMIT + 1}", "transfer-encoding: chunked"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {front.key}\r\n{headers}\r\n\r\n".encode()
            )
            if "chunked" in headers:
                chunk = b"%x\r\n%b\r\n" % (1 << 20, b"x" * (1 << 20))
                for _ in range(BODY_LIMIT // (1 << 20) + 1):
                    writer.write(chunk)
            answer = await asyncio.wait_for(reader.readuntil(b"}}"), 20)
            assert answer.startswith(b"HTTP/1.1 413 ")
            assert b"request_too_large" in answer
            writer.close()
        assert list(store.calls.of_attempt(front.attempts[0])) == []


async def test_a_client_that_leaves_before_its_body_is_whole_is_forgotten(store: Store) -> None:
    async with running(store) as front:
        host, port = front.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/messages HTTP/1.1\r\nhost: x\r\nx-api-key: {front.key}\r\n"
            "content-length: 9\r\n\r\n{".encode()
        )
        await writer.drain()
        writer.close()
        await front.answer(ask())
        assert len(list(store.calls.of_attempt(front.attempts[0]))) == 1


# --- sockets -------------------------------------------------------------------------------------------


async def _get(path: Path) -> int:
    connector = aiohttp.UnixConnector(path=str(path))
    async with (
        aiohttp.ClientSession(connector=connector) as http,
        http.get("http://localhost/healthz") as reply,
    ):
        return reply.status


def _gateway(store: Store) -> Gateway:
    return Gateway(ModelRouter(VLLMBackend("http://127.0.0.1:9/v1", "m")), store.calls, Keys())


async def test_a_unix_socket_is_open_to_all_and_gone_afterwards(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    gateway = _gateway(store)
    await gateway.start_unix(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert await _get(path) == 200
    with pytest.raises(ConfigError, match="another process listens there"):
        await _gateway(store).start_unix(path)
    assert await _get(path) == 200
    await gateway.stop()
    assert not path.exists()


async def test_a_unix_socket_may_lie_deep(store: Store, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    gateway = _gateway(store)
    await gateway.start_unix(deep / "g.sock")
    short = tmp_path / "s"
    short.symlink_to(deep / "g.sock")
    assert await _get(short) == 200
    await gateway.stop()


async def test_a_dead_socket_is_replaced_and_nothing_else(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "g.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    gateway = _gateway(store)
    await gateway.start_unix(path)
    assert await _get(path) == 200
    await gateway.stop()
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        await gateway.start_unix(path)
    assert path.read_text() == "precious"
    with pytest.raises(ConfigError, match=r"missing/g\.sock: No such file"):
        await gateway.start_unix(tmp_path / "missing" / "g.sock")


@pytest.mark.parametrize("stopping", [False, True], ids=["starting", "stopping"])
async def test_called_off_at_any_moment_it_leaves_no_socket(store: Store, tmp_path: Path, stopping: bool) -> None:
    path = tmp_path / "g.sock"
    for turns in range(12):
        gateway = _gateway(store)
        with closing(socket.socket(socket.AF_UNIX)) as client:
            if stopping:
                await gateway.start_unix(path)
                client.connect(str(path))
                await asyncio.sleep(0)
            task = asyncio.ensure_future(gateway.stop() if stopping else gateway.start_unix(path))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        await gateway.stop()
        assert not path.exists()
        del gateway, task
        gc.collect()  # an open socket warns, which is an error


async def test_a_taken_port_is_named(store: Store) -> None:
    gateway = _gateway(store)
    url = await gateway.start_tcp("127.0.0.1", 0)
    port = int(url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}: .*choose another port"):
        await _gateway(store).start_tcp("127.0.0.1", port)
    await gateway.stop()


def test_answers_in_two_writes_do_not_wait_for_the_client() -> None:
    listener, _ = tcp_socket("127.0.0.1", 0)
    with listener:
        assert listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
