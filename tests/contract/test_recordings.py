"""Every recording of the real CLI, played again through the gateway: passed on as it is, and translated."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.base import Backend, Relay
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.store import Store
from understudy.types import Call

from fakes.anthropic import FakeAnthropic, Reply
from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Refuse, Say, Step
from support import recordings
from support.recordings import Exchange, message_parts

pytestmark = [
    pytest.mark.skipif(not recordings.FOLDER.exists(), reason="the recordings are not here"),
    pytest.mark.asyncio(loop_scope="module"),
]

every_recording = pytest.mark.parametrize("name", recordings.names())


class Agent:
    """What sends the requests of a recording to a gateway, with a key of its own."""

    def __init__(self, rig: Rig, attempt: str) -> None:
        self._rig, self._attempt = rig, attempt
        self._key = rig.keys.issue(attempt)

    async def send(self, exchange: Exchange) -> tuple[int, Mapping[str, str], bytes]:
        headers = exchange.headers | {"authorization": f"Bearer {self._key}", "content-type": "application/json"}
        async with self._rig.http.post(
            self._rig.url + exchange.path, data=exchange.body, headers=headers
        ) as reply:
            return reply.status, reply.headers, await reply.read()

    def calls(self) -> list[Call]:
        return list(self._rig.store.calls.of_attempt(self._attempt))


class Rig:
    """A running gateway that keeps its calls in a store."""

    def __init__(self, url: str, store: Store, keys: Keys) -> None:
        self.url, self.store, self.keys = url, store, keys
        self.http = aiohttp.ClientSession()
        self._attempts = iter(start_attempts(store, count=len(recordings.names())))

    def agent(self) -> Agent:
        return Agent(self, next(self._attempts))


@asynccontextmanager
async def gateway(store: Store, answerer: Backend | Relay, *, streaming: bool = False) -> AsyncIterator[Rig]:
    keys, models = Keys(), ModelRouter(answerer)
    app = Gateway(models, store.calls, keys, streaming=streaming)
    rig = Rig(await app.start_tcp("127.0.0.1", 0), store, keys)
    try:
        yield rig
    finally:
        await rig.http.close()
        await app.stop()
        await models.close()


module_wide = pytest_asyncio.fixture(scope="module", loop_scope="module")


@module_wide
async def provider() -> AsyncIterator[FakeAnthropic]:
    async with FakeAnthropic() as fake:
        yield fake


async def _relaying(
    provider: FakeAnthropic, folder: pytest.TempPathFactory, *, streaming: bool
) -> AsyncIterator[Rig]:
    relay = AnthropicRelay(provider.url, "claude-ours", "sk-ours")
    with Store.open(folder.mktemp("store")) as store:
        async with gateway(store, relay, streaming=streaming) as rig:
            yield rig


@module_wide
async def atomic(provider: FakeAnthropic, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async for rig in _relaying(provider, tmp_path_factory, streaming=False):
        yield rig


@module_wide
async def streamed(provider: FakeAnthropic, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    async for rig in _relaying(provider, tmp_path_factory, streaming=True):
        yield rig


@module_wide
async def model() -> AsyncIterator[FakeVLLM]:
    async with FakeVLLM() as fake:
        yield fake


@module_wide
async def translated(model: FakeVLLM, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    with Store.open(tmp_path_factory.mktemp("store")) as store:
        async with gateway(store, VLLMBackend(model.url, "fake")) as rig:
            yield rig


# --- passed on -----------------------------------------------------------------------------------------


@every_recording
async def test_what_the_provider_says_is_what_the_agent_gets(
    name: str, atomic: Rig, provider: FakeAnthropic
) -> None:
    await _replay(name, atomic.agent(), provider, streaming=False)


@every_recording
async def test_in_streaming_mode_too_but_that_what_completes_it_comes_last(
    name: str, streamed: Rig, provider: FakeAnthropic
) -> None:
    await _replay(name, streamed.agent(), provider, streaming=True)


async def _replay(name: str, agent: Agent, provider: FakeAnthropic, *, streaming: bool) -> None:
    played = list(recordings.exchanges(name))
    provider.requests.clear()
    for exchange in played:
        await _pass_on(exchange, provider, agent, streaming=streaming)
    _check_requests(played, provider)
    calls = agent.calls()
    assert [call.request for call in calls] == [exchange.body for exchange in played]
    expected = {"whole": "ok", "broken": "error", "refused": "error", "silent": "abandoned"}
    for exchange, call in zip(played, calls, strict=True):
        assert call.status == expected[exchange.outcome]
        assert call.agent_id == exchange.headers.get("x-claude-code-agent-id")
        if call.status == "ok":
            _check_kept(call, message_parts(exchange.response_body))


def _check_kept(call: Call, expected: dict[str, Any]) -> None:
    stored = message_parts(call.response)
    assert {**stored, "tools": None} == {**expected, "tools": None}
    assert [_parsed_call(tool) for tool in stored["tools"]] == [_parsed_call(tool) for tool in expected["tools"]]
    assert call.finish_reason == _STORED.get(expected["stop"], expected["stop"] or "none")


def _parsed_call(tool: tuple[str, str, str]) -> tuple[str, str, Any]:
    """A tool call as the CLI has it: what it cannot parse, it wraps."""
    raw = tool[2]
    parsed = _parsed(raw)
    unparsed = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}
    return (*tool[:2], parsed if isinstance(parsed, dict) else unparsed)


async def _pass_on(exchange: Exchange, provider: FakeAnthropic, agent: Agent, *, streaming: bool) -> None:
    if exchange.reply is None:
        return await _never_answered(exchange, provider, agent)
    provider.script.append(exchange.reply)
    status, headers, got = await agent.send(exchange)
    match exchange.outcome:
        case "whole" if exchange.streamed and not exchange.response_body.startswith(b"{"):
            assert status == 200
            assert got == exchange.response_body or (
                streaming and _same_but_for_the_ends(got, exchange.response_body)
            )
        case "whole":
            assert status == 200
            assert message_parts(got)["text"] == message_parts(exchange.response_body)["text"]
            assert exchange.streamed or got == exchange.response_body
        case "refused":
            assert status == exchange.reply.status
            for header in ("retry-after", "x-should-retry"):
                assert headers.get(header) == exchange.reply.headers.get(header)
            assert _error(got) == _error(exchange.response_body, exchange.reply)
        case _:
            assert b"event: message_stop" not in got
            assert b"event: content_block_stop" not in got, "what is closed is taken for the answer"
            assert status >= 500 or (streaming and b"event: error" in got)


async def _never_answered(exchange: Exchange, provider: FakeAnthropic, agent: Agent) -> None:
    silence = Reply(stalls=True)
    provider.script.append(silence)
    provider.came.clear()
    sending = asyncio.create_task(agent.send(exchange))
    async with asyncio.timeout(10):
        await provider.came.wait()
        sending.cancel()
        await silence.disconnected.wait()
        request_count = len(provider.requests)
        while len(agent.calls()) < request_count:  # noqa: ASYNC110 - what is waited for happens behind a socket
            await asyncio.sleep(0.01)


def _same_but_for_the_ends(got: bytes, expected: bytes) -> bool:
    """The same events byte for byte, with those that complete something after all the others."""
    events, ends = expected.split(b"\n\n")[:-1], (b"event: content_block_stop", b"event: message_")
    start = next(index for index, event in enumerate(events) if event.startswith(b"event: message_start"))
    first = events[: start + 1] + [event for event in events[start + 1 :] if not event.startswith(ends)]
    last = [event for event in events[start + 1 :] if event.startswith(ends)]
    return got.split(b"\n\n")[:-1] == first + last


def _error(body: bytes, reply: Reply | None = None) -> dict[str, str]:
    if reply is not None and reply.headers["content-type"] != "application/json":
        return {"type": "api_error", "message": body.decode()}
    return json.loads(body)["error"]


_FOR_THE_PROVIDER = ("accept", "anthropic-", "user-agent", "x-app", "x-claude-code-", "x-stainless-")


def _check_requests(played: list[Exchange], provider: FakeAnthropic) -> None:
    assert len(provider.requests) == len(played)
    for exchange, received in zip(played, provider.requests, strict=True):
        model = json.dumps(exchange.request["model"], ensure_ascii=False).encode()
        assert received.body == exchange.body.replace(b'"model":' + model, b'"model":"claude-ours"', 1)
        assert received.path == exchange.path
        assert received.headers["x-api-key"] == "sk-ours"
        assert "authorization" not in received.headers
        for header, value in exchange.headers.items():
            assert received.headers.get(header) == (value if header.startswith(_FOR_THE_PROVIDER) else None)


# --- translated ----------------------------------------------------------------------------------------

# A chat backend's words for why it stopped; Anthropic's other reasons have none.
_FINISH = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length", "refusal": "content_filter"}
_STORED = _FINISH | {"stop_sequence": "stop", "model_context_window_exceeded": "length"}
_ORDER = ["thinking", "text", "tool_use"]


@every_recording
async def test_a_chat_model_that_says_the_same_is_heard_the_same(
    name: str, translated: Rig, model: FakeVLLM
) -> None:
    agent = translated.agent()
    played = [exchange for exchange in recordings.exchanges(name) if exchange.outcome in ("whole", "refused")]
    branches: dict[str | None, tuple[dict[str, Any], dict[str, Any]]] = {}
    sampled: dict[str, str] = {}
    for exchange in played:
        served = [tool for tool in exchange.request["tools"] if "input_schema" not in tool]
        model.script[:], model.requests[:] = [_step(exchange)], []
        status, _, got = await agent.send(exchange)
        if served:
            assert status == 400
            assert served[0]["name"] in _error(got)["message"]
            continue
        branch = exchange.headers.get("x-claude-code-agent-id")
        plain = _plain(exchange.request)
        if branch in branches:
            _check_prefix(*branches[branch], plain, model.requests[0])
        branches[branch] = plain, model.requests[0]
        _check_echoes(model.requests[0], sampled)
        if exchange.outcome == "refused":
            assert status >= 400
        else:
            assert status == 200, got
            _check_same(message_parts(got), message_parts(exchange.response_body), sampled)
    assert [call.request for call in agent.calls()] == [exchange.body for exchange in played]


def _step(exchange: Exchange) -> Step:
    assert exchange.reply is not None
    if exchange.outcome == "refused":
        named = {name: exchange.reply.headers[name] for name in ("retry-after",) if name in exchange.reply.headers}
        return Refuse(status=exchange.reply.status, headers=named, raw=exchange.response_body)
    answer = message_parts(exchange.response_body)
    return Say(
        text=answer["text"],
        reasoning=answer["thinking"],
        tools=answer["tools"],
        finish=_FINISH.get(answer["stop"]),
    )


def _check_same(got: dict[str, Any], expected: dict[str, Any], sampled: dict[str, str]) -> None:
    assert (got["thinking"], got["text"]) == (expected["thinking"], expected["text"])
    assert [name for _, name, _ in got["tools"]] == [name for _, name, _ in expected["tools"]]
    for (got_id, _, got_input), (said_id, _, raw) in zip(got["tools"], expected["tools"], strict=True):
        assert got_id not in sampled, "Claude Code erases a turn whose tool id it has seen before"
        assert got_id == said_id or said_id in sampled or not re.fullmatch("[A-Za-z0-9_-]+", said_id)
        sampled[got_id] = raw
        assert _parsed(got_input) == _parsed(raw) or "__unparsedToolInput" in got_input
    if expected["stop"] in _FINISH and (expected["stop"] == "tool_use") == bool(expected["tools"]):
        assert got["stop"] == expected["stop"]
    kinds = [kind for kind in dict.fromkeys(expected["kinds"]) if kind == "tool_use" or expected[kind]]
    assert list(dict.fromkeys(got["kinds"])) == sorted(kinds, key=_ORDER.index)


def _check_echoes(request: dict[str, Any], sampled: dict[str, str]) -> None:
    """Tool calls go back to the model in the very bytes it sampled, however the CLI has rewritten them."""
    for call in (call for message in request["messages"] for call in message.get("tool_calls", ())):
        raw, sent = sampled.get(call["id"]), call["function"]["arguments"]
        if raw is not None and isinstance(_parsed(raw), dict) and _parsed(sent).items() >= _parsed(raw).items():
            assert sent == (raw or "")


def _check_prefix(
    old: dict[str, Any], asked_before: dict[str, Any], new: dict[str, Any], asked_after: dict[str, Any]
) -> None:
    """What the CLI only extends is only extended for the model."""
    if new["tools"] == old["tools"] and new["system"] == old["system"]:
        same = len(old["messages"])
        if new["messages"][:same] == old["messages"]:
            messages = asked_before["messages"]
            assert asked_after["messages"][: len(messages)] == messages
            assert asked_after["tools"] == asked_before["tools"]


def _plain(value: Any) -> Any:
    """A request without the marks that say nothing to a model."""
    if isinstance(value, list):
        return [_plain(item) for item in value if not _is_billing(item)]
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items() if name != "cache_control"}
    return value


def _is_billing(item: Any) -> bool:
    text = item.get("text") if isinstance(item, dict) else item
    return isinstance(text, str) and "x-anthropic-billing-header" in text[:60]


def _parsed(raw: str) -> Any:
    try:
        return json.loads(raw or "{}")
    except ValueError:
        return raw
