"""The operator's side of a gateway: over a real socket, with agents that wait at the other one."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from understudy.errors import ConfigError, GatewayError
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.budget import Budget
from understudy.gateway.control import GatewayState, GenerationControl, RunningCall
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.serve.admin import (
    AdminApp,
    AdminTarget,
    GatewayAddress,
    SingleGateway,
    announce,
    send_admin_request,
)
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.listen import Listener, tcp_socket
from understudy.gateway.telemetry.metrics import MODELS_LIMIT, GatewayMetrics, merged
from understudy.store import Store
from understudy.types import Call, PolicySpan, Usage

from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Refuse, Say

KEY = "an admin key for tests"
ASK = {"model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]}


class Rig:
    """A gateway with an operator's listener beside it."""

    def __init__(self, admin: aiohttp.ClientSession, agent: aiohttp.ClientSession, model: FakeVLLM) -> None:
        self.admin, self.agent, self.model = admin, agent, model

    async def order(self, method: str, path: str, body: Any = None, *, status: int = 200) -> Any:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        async with self.admin.request(method, path, data=data) as reply:
            assert reply.status == status, await reply.text()
            assert reply.content_type == "application/json"
            return await reply.json()

    async def ask(self, **fields: Any) -> tuple[int, Any]:
        async with self.agent.post("/v1/messages", json=ASK | fields) as reply:
            return reply.status, await reply.json()

    async def metrics(self) -> bytes:
        async with self.admin.get("/metrics") as reply:
            assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
            return await reply.read()

    async def until(self, **expected: Any) -> None:
        async with asyncio.timeout(10):
            while True:
                state = await self.order("GET", "/state")
                if expected.items() <= state.items():
                    return
                await asyncio.sleep(0.005)


@asynccontextmanager
async def listening(target: AdminTarget) -> AsyncIterator[str]:
    listener, url = tcp_socket("127.0.0.1", 0)
    admin = Listener(AdminApp(target, KEY), listener)
    await admin.start()
    try:
        yield url
    finally:
        await admin.stop()


@asynccontextmanager
async def running(
    store: Store, *script: Any, hold_limit_s: float = 60, budget: Budget | None = None
) -> AsyncIterator[Rig]:
    async with FakeVLLM(*script) as model:
        backend, keys, control = (
            VLLMBackend(model.url, "fake"),
            Keys(),
            GenerationControl("v1", hold_limit_s=hold_limit_s),
        )
        metrics = GatewayMetrics(control)
        gateway = Gateway(ModelRouter(backend), store.calls, keys, control=control, observers=[metrics.observe])
        agents_url = await gateway.start_tcp("127.0.0.1", 0)
        (attempt,) = start_attempts(store)
        agent = aiohttp.ClientSession(agents_url, headers={"x-api-key": keys.issue(attempt, budget=budget)})
        async with listening(SingleGateway(control, metrics, gateway.running_calls)) as url:
            admin = aiohttp.ClientSession(url, headers={"authorization": f"Bearer {KEY}"})
            try:
                yield Rig(admin, agent, model)
            finally:
                await admin.close()
                await agent.close()
                await gateway.stop()
                await backend.close()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with Store.open(tmp_path / "store") as store_of_test:
        yield store_of_test


def calls(store: Store) -> list[Call]:
    (rollout,) = store.runs.rollouts()
    return [call for attempt in store.runs.attempts(rollout.id) for call in store.calls.of_attempt(attempt.id)]


# --- orders --------------------------------------------------------------------------------------------


async def test_weights_are_changed_between_two_calls(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, Say(text="old", hold=hold), Say(text="new")) as rig:
        first = asyncio.ensure_future(rig.ask())
        await rig.until(in_flight=1)
        assert await rig.order("POST", "/pause", {"drain_s": 0.01}) == {"in_flight": 1}
        second = asyncio.ensure_future(rig.ask(max_tokens=60))
        await rig.until(paused=True, version="v1", in_flight=1, waiting=1)
        draining = asyncio.ensure_future(rig.order("POST", "/pause"))
        hold.set()
        assert await draining == {"in_flight": 0}
        assert (await first)[0] == 200
        assert len(rig.model.requests) == 1
        resumed = await rig.order("POST", "/resume", {"version": "v2"})
        assert (resumed["paused"], resumed["version"]) == (False, "v2")
        status, answer = await second
        assert (status, answer["content"][0]["text"]) == (200, "new")
    old, new = calls(store)
    assert (old.policy_version, new.policy_version) == ("v1", "v2")
    assert [len(call.policy_spans) for call in (old, new)] == [1, 1]


async def test_a_version_published_inside_a_call_is_told_with_it(store: Store) -> None:
    hold = asyncio.Event()
    async with running(store, Say(text="both", hold=hold)) as rig:
        response = asyncio.ensure_future(rig.ask())
        await rig.until(in_flight=1)
        assert (await rig.order("POST", "/publish", {"version": "v2"}))["version"] == "v2"
        hold.set()
        await response
    (call,) = calls(store)
    assert call.policy_version == "v2"
    assert call.policy_spans == (PolicySpan("v1"), PolicySpan("v2"))


async def test_a_pause_that_lasts_is_told_so_that_the_agent_waits_it_out(store: Store) -> None:
    async with running(store, Say(text="after"), hold_limit_s=0.05) as rig:
        await rig.order("POST", "/pause", {"drain_s": 0})
        status, body = await rig.ask()
        assert (status, body["error"]["type"]) == (529, "overloaded_error")
        assert "paused" in body["error"]["message"]
        assert await rig.order("POST", "/resume") == {
            "paused": False,
            "version": "v1",
            "in_flight": 0,
            "waiting": 0,
        }
        assert (await rig.ask())[0] == 200
        assert len(rig.model.requests) == 1


@pytest.mark.parametrize("key", ["", "an admin key for test", KEY + "s", "\xe9"])
async def test_nothing_is_done_without_the_key(store: Store, key: str) -> None:
    async with running(store) as rig:
        headers = {"authorization": f"Bearer {key}"}
        for method, path in (("GET", "/state"), ("GET", "/metrics"), ("POST", "/pause"), ("GET", "/nothing")):
            async with rig.admin.request(method, path, headers=headers) as reply:
                assert reply.status == 401
                assert "admin key" in (await reply.json())["error"]["message"]
        async with rig.admin.get("/healthz", headers=headers) as reply:
            assert (reply.status, await reply.json()) == (200, {"status": "ok"})
        assert (await rig.order("GET", "/state"))["paused"] is False


async def test_agents_have_no_way_to_these_paths(store: Store) -> None:
    async with running(store) as rig:
        for headers in ({}, {"authorization": f"Bearer {KEY}"}):
            for method, path in (("GET", "/state"), ("GET", "/metrics"), ("POST", "/pause"), ("POST", "/resume")):
                async with rig.agent.request(method, path, headers=headers) as reply:
                    assert reply.status == 404


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/pause", b"{", 400, "send /pause a JSON object with drain_s"),
        ("POST", "/pause", {"drain_s": -1}, 400, "Expected `float` >= 0.0 - at `$.drain_s`"),
        ("POST", "/pause", {"drain": 1}, 400, "unknown field `drain`"),
        ("POST", "/resume", {"version": 2}, 400, "Expected `str | null`"),
        ("POST", "/publish", b"", 400, "missing required field `version`"),
        ("POST", "/publish", {"version": ""}, 400, "send /publish a JSON object with version"),
        (
            "POST",
            "/publish",
            {"version": "v 2"},
            400,
            "printable ASCII characters, without spaces - at `$.version`",
        ),
        ("POST", "/publish", {"version": "v2\n"}, 400, "`$.version`"),
        ("POST", "/publish", b"[" * 9000, 400, "send /publish"),
        ("POST", "/publish", b'{"version": "\xed"}', 400, "send /publish"),
        ("POST", "/publish", b" " * 20_000, 413, "at most 10000 bytes"),
        ("GET", "/pause", None, 405, "/pause: expected POST, got GET"),
        ("POST", "/stop", None, 404, "expected one of /healthz, /state"),
    ],
)
async def test_a_wrong_order_is_told_what_was_expected(
    store: Store, method: str, path: str, body: Any, status: int, message: str
) -> None:
    async with running(store) as rig:
        response = await rig.order(method, path, body, status=status)
        assert message in response["error"]["message"]
        assert await rig.order("GET", "/state") == {
            "paused": False,
            "version": "v1",
            "in_flight": 0,
            "waiting": 0,
        }


class Broken:
    """A target whose worker is gone."""

    async def pause(self, drain_s: float) -> int:
        raise GatewayError("worker 2 does not answer")

    async def resume(self, version: str | None) -> None: ...

    async def publish(self, version: str) -> None: ...

    async def state(self) -> GatewayState:
        return GatewayState(True, None, 0, 0)

    async def calls(self) -> list[RunningCall]:
        return []

    async def metrics(self) -> bytes:
        return b""


async def test_what_a_target_fails_with_is_told() -> None:
    async with (
        listening(Broken()) as url,
        aiohttp.ClientSession(headers={"x-api-key": KEY}) as http,
        http.post(f"{url}/pause") as reply,
    ):
        assert reply.status == 500
        body = await reply.json()
    assert body == {"error": {"message": "worker 2 does not answer", "boundary": "gateway"}}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (None, r"admin\.key: the gateway's admin key cannot be read: No such file or directory; "),
        (b"a\xff", r"admin\.key: invalid admin key, expected one line of printable ASCII"),
        (b"a\r\nX-Other: 1\nb", r"admin\.key: invalid admin key, expected one line of printable ASCII"),
    ],
)
async def test_a_key_file_that_holds_no_key_is_named(key: bytes | None, message: str, tmp_path: Path) -> None:
    announce(tmp_path, GatewayAddress(url="http://127.0.0.1:1", admin_url="http://127.0.0.1:1", pid=1))
    if key is not None:
        (tmp_path / "admin.key").write_bytes(key)
    with pytest.raises(ConfigError, match=message):
        await send_admin_request(tmp_path, "GET", "/state")


async def test_what_is_no_gateway_is_neither_followed_nor_read_without_end(tmp_path: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"x" * (1 << 20))
        return response

    async def elsewhere(request: web.Request) -> web.Response:
        raise web.HTTPFound("/endless")

    app = web.Application()

    async def refused(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "worker 2 does not answer"}}, status=500)

    app.add_routes([web.get("/endless", endless), web.get("/elsewhere", elsewhere), web.get("/refused", refused)])
    async with TestServer(app) as server:
        address = str(server.make_url("/")).rstrip("/")
        announce(tmp_path, GatewayAddress(url=address, admin_url=address, pid=1))
        (tmp_path / "admin.key").write_text("key")
        with pytest.raises(GatewayError, match="sent more than 16 MiB"):
            await send_admin_request(tmp_path, "GET", "/endless")
        with pytest.raises(GatewayError, match="rejected /elsewhere"):
            await send_admin_request(tmp_path, "GET", "/elsewhere")
        with pytest.raises(
            GatewayError, match=r"status 500, expected 200\): worker 2 does not answer; see its log"
        ):
            await send_admin_request(tmp_path, "GET", "/refused")


def test_a_key_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 16 characters, got 3"):
        AdminApp(Broken(), "abc")


# --- metrics -------------------------------------------------------------------------------------------


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(text.decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def sample(text: bytes, name: str, **labels: str) -> float:
    return samples(text)[f"understudy_gateway_{name}", frozenset(labels.items())]


async def test_metrics_count_what_was_asked_and_show_what_goes_on(store: Store) -> None:
    script = (Say(text="one", cached=4), Refuse(status=400), Say(text="two"))
    async with running(store, *script, budget=Budget(calls=3)) as rig:
        await rig.order("POST", "/pause", {"drain_s": 0})
        paused_request = asyncio.ensure_future(rig.ask())
        await rig.until(waiting=1)
        text = await rig.metrics()
        assert (sample(text, "paused"), sample(text, "held"), sample(text, "in_flight")) == (1, 1, 0)
        await rig.order("POST", "/resume", {"version": "v2"})
        await paused_request
        for _ in range(3):
            await rig.ask()
        text = await rig.metrics()
    stored = calls(store)
    model = {"backend": "vllm", "model": "fake"}
    assert sample(text, "calls_total", status="ok", dialect="anthropic", **model) == 2
    assert sample(text, "calls_total", status="error", dialect="anthropic", **model) == 2
    assert sample(text, "errors_total", boundary="backend", type="BackendError") == 1
    assert sample(text, "errors_total", boundary="gateway", type="BudgetExceeded") == 1
    assert sample(text, "tokens_total", kind="cached", **model) == 4
    prompt = sum(call.usage.prompt_tokens for call in stored)
    assert sample(text, "tokens_total", kind="prompt", **model) == prompt
    assert sample(text, "call_seconds_count", **model) == 4
    assert (sample(text, "paused"), sample(text, "held"), sample(text, "in_flight")) == (0, 0, 0)
    assert sample(text, "policy", version="v2") == 1


def call(**fields: Any) -> Call:
    defaults: dict[str, Any] = {
        "id": "call_1",
        "attempt_id": "a",
        "sequence": 0,
        "dialect": "anthropic",
        "requested_model": "claude",
        "backend": "openai",
        "backend_model": "m",
        "request": b"",
        "response": b"",
        "status": "ok",
        "started_at": 1.0,
        "ended_at": 3.0,
        "usage": Usage(10, 7, 6, 5),
        "cost_usd": 0.25,
    }
    return Call(**defaults | fields)


def test_what_a_call_adds() -> None:
    metrics = GatewayMetrics(GenerationControl())
    metrics.observe(call(), {})
    metrics.observe(call(cost_usd=None, usage=Usage()), {})
    text, model = metrics.text(), {"backend": "openai", "model": "m"}
    kinds = ("prompt", "completion", "cached", "cache_write")
    assert [sample(text, "tokens_total", kind=kind, **model) for kind in kinds] == [10, 7, 6, 5]
    assert sample(text, "cost_usd_total", **model) == 0.25
    assert sample(text, "call_seconds_sum", **model) == 4
    assert not any(name == "understudy_gateway_policy" for name, _ in samples(text))


def test_a_server_that_calls_itself_ever_new_names_does_not_fill_the_memory() -> None:
    metrics = GatewayMetrics(GenerationControl())
    for number in range(MODELS_LIMIT + 50):
        metrics.observe(call(backend_model=f"m{number}\n\"'{{"), {})
    series = [
        labels for name, labels in samples(metrics.text()) if name == "understudy_gateway_call_seconds_count"
    ]
    assert len(series) == MODELS_LIMIT + 1
    assert sample(metrics.text(), "call_seconds_count", backend="openai", model="other") == 50


def test_metrics_of_several_workers_are_told_apart() -> None:
    texts: dict[str, bytes] = {}
    for worker, count in (("0", 2), ("1", 3)):
        metrics = GatewayMetrics(GenerationControl("v1"))
        for _ in range(count):
            metrics.observe(call(backend_model='q"\\\n'), {})
        texts[worker] = metrics.text()
    whole = merged(texts)
    for worker, count in (("0", 2), ("1", 3)):
        labels = {"backend": "openai", "model": 'q"\\\n', "worker": worker}
        assert sample(whole, "call_seconds_count", **labels) == count
        assert sample(whole, "policy", version="v1", worker=worker) == 1
    assert whole.count(b"# TYPE understudy_gateway_calls_total counter") == 1
    assert len(samples(whole)) == sum(len(samples(text)) for text in texts.values())
