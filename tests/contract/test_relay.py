"""Requests passed on to a provider that speaks Anthropic's API, on real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from understudy.errors import BackendError
from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.base import NativeRequest, NativeResponse
from understudy.gateway.errors import fault_of
from understudy.types import Usage
from understudy.wire.anthropic import Anthropic
from understudy.wire.dialect import ErrorResponse
from understudy.wire.errors import InvalidRequest

from fakes import anthropic as fake
from fakes.anthropic import FakeAnthropic, Reply

BODY = b'{ "model" : "asked", "messages": [{"role": "user", "content": "\\u00e9 \xc3\xa9"}], "stream": true }'
KEY = "sk-ours-1234"


@asynccontextmanager
async def relaying(
    *script: Reply, model: str | None = "ours"
) -> AsyncIterator[tuple[AnthropicRelay, FakeAnthropic]]:
    async with FakeAnthropic(*script) as provider:
        relay = AnthropicRelay(provider.url, model, KEY)
        try:
            yield relay, provider
        finally:
            await relay.close()


def request(body: bytes = BODY, *, stream: bool = True, **headers: str) -> NativeRequest:
    named = {name.replace("_", "-").encode(): value.encode() for name, value in headers.items()}
    return NativeRequest(path="/v1/messages?beta=true", headers=named, body=body, stream=stream)


async def ask(*script: Reply, emit: Callable[[bytes], None] | None = None, **fields: Any) -> NativeResponse:
    async with relaying(*script) as (relay, _):
        return await relay.relay(request(**fields), emit)


async def refused(*script: Reply, **fields: Any) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await ask(*script, **fields)
    return caught.value


def error_response(error: BackendError) -> tuple[ErrorResponse, dict[str, bytes], dict[str, str]]:
    """What the agent is told: the answer, its headers, and the error in it."""
    reply = Anthropic().error(fault_of(error))
    return reply, {name.decode(): value for name, value in reply.headers}, json.loads(reply.body)["error"]


# --- requests ------------------------------------------------------------------------------------------


async def test_a_request_keeps_every_byte_but_those_of_the_model_and_the_key() -> None:
    sent = {
        "accept": "application/json",
        "anthropic_beta": "a,b",
        "anthropic_version": "2023-06-01",
        "anthropic_dangerous_direct_browser_access": "true",
        "user_agent": "claude-cli/2.1.197",
        "x_app": "cli",
        "x_stainless_timeout": "600",
        "x_claude_code_session_id": "s",
    }
    ours = {
        "authorization": "Bearer agents-key",
        "x_api_key": "agents-key",
        "cookie": "c",
        "x_custom": "1",
        "via": "v",
    }
    async with relaying(fake.stream(fake.answer(fake.text(0, "hi")))) as (relay, provider):
        await relay.relay(request(**sent, **ours, connection="close", host="elsewhere", accept_encoding="br"))
        (received,) = provider.requests
    assert received.body == BODY.replace(b'"asked"', b'"ours"')
    assert (received.method, received.path) == ("POST", "/v1/messages?beta=true")
    assert received.headers.items() >= {name.replace("_", "-"): value for name, value in sent.items()}.items()
    assert received.headers["x-api-key"] == KEY
    assert received.headers["content-type"] == "application/json"
    assert {"authorization", "cookie", "x-custom", "via"}.isdisjoint(received.headers)
    assert "br" not in received.headers["accept-encoding"].split(", ")
    assert "agents-key" not in str(received.headers)


async def test_without_a_model_of_its_own_the_agents_name_stays() -> None:
    async with relaying(fake.stream(fake.answer(fake.text(0, "hi"))), model=None) as (relay, provider):
        await relay.relay(request())
    assert provider.requests[0].body == BODY
    assert provider.requests[0].headers["anthropic-version"] == "2023-06-01"


async def test_what_is_no_object_is_refused_before_the_provider_sees_it() -> None:
    async with relaying() as (relay, provider):
        for body in (b"[]", b'{"model": "\xff"}', b'{"model"', b""):
            with pytest.raises(InvalidRequest):
                await relay.relay(request(body))
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            await relay.relay(request(b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"))
        assert provider.requests == []


# --- whole answers -------------------------------------------------------------------------------------

CITATION = {"type": "char_location", "cited_text": "x", "document_index": 0}
SEARCHED = {"type": "web_search_tool_result", "tool_use_id": "srv_1", "content": [{"type": "web_search_result"}]}
SEARCH = {"type": "server_tool_use", "id": "srv_1", "name": "web_search", "input": {}}
MCP = {"type": "mcp_tool_use", "id": "m_1", "name": "find", "server_name": "s", "input": {"q": 1}}
EVERY_KIND = [
    fake.block(
        0,
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "thinking_delta", "thinking": "h"},
        {"type": "thinking_delta", "thinking": "m", "estimated_tokens": 1},
        {"type": "signature_delta", "signature": "c2ln"},
    ),
    fake.block(1, {"type": "redacted_thinking", "data": "opaque"}),
    fake.block(
        2,
        {"type": "text", "text": "", "citations": []},
        {"type": "text_delta", "text": "he"},
        {"type": "citations_delta", "citation": CITATION},
        {"type": "text_delta", "text": "llo"},
    ),
    fake.block(3, SEARCH, {"type": "input_json_delta", "partial_json": '{"query": "q"}'}),
    fake.block(4, SEARCHED),
    fake.block(5, MCP),
    fake.block(6, {"type": "compaction", "content": None}, {"type": "compaction_delta", "content": "summary"}),
    fake.tool(7, "toolu_1", "Bash", "", '{"command" : ', '"ls"}'),
    fake.tool(8, "toolu_2", "Bash"),
    fake.tool(9, "toolu_3", "Bash", '{"command": "l'),
    fake.block(10, {"type": "of_tomorrow", "x": 1}, {"type": "tomorrow_delta", "y": 2}),
]


async def test_the_message_is_put_together_from_every_kind_of_block() -> None:
    start = fake.started(container={"id": "c"})
    applied = {"context_management": {"applied_edits": []}}
    end = [fake.ended("tool_use", input_tokens=None, cache_read_input_tokens=5)[0] | applied, *fake.ended()[1:]]
    raw = fake.sse(start, {"type": "ping"}, *sum(EVERY_KIND, []), {"type": "unheard_of"}, *end)  # noqa: RUF017
    answer = await ask(fake.stream(b": hello\n\n" + raw + b"data: [DONE]\n\n"))
    message = json.loads(answer.message)
    assert answer.events == b": hello\n\n" + raw + b"data: [DONE]\n\n"
    assert message["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "opaque"},
        {"type": "text", "text": "hello", "citations": [CITATION]},
        SEARCH | {"input": {"query": "q"}},
        SEARCHED,
        MCP,
        {"type": "compaction", "content": "summary"},
        {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "toolu_2", "name": "Bash", "input": {}},
        {
            "type": "tool_use",
            "id": "toolu_3",
            "name": "Bash",
            "input": {"__unparsedToolInput": {"raw": '{"command": "l', "len": 14}},
        },
        {"type": "of_tomorrow", "x": 1},
    ]
    assert b'{"command" : "ls"}' in answer.message, "arguments are kept as they were sampled"
    assert (message["stop_reason"], message["container"]) == ("tool_use", {"id": "c"})
    assert message["context_management"] == {"applied_edits": []}
    assert answer.usage == Usage(prompt_tokens=18, completion_tokens=7, cached_tokens=5, cache_write_tokens=3)
    assert (answer.model, answer.finish_reason) == ("claude-x", "tool_calls")


@pytest.mark.parametrize("framing", ["chunked", "close"])
async def test_a_last_event_without_its_blank_line_is_the_last_event(framing: Any) -> None:
    raw = fake.answer(fake.text(0, "hi"))[:-2]
    answer = await ask(fake.stream(raw, framing=framing))
    assert answer.events == raw


@pytest.mark.parametrize(
    ("stop_reason", "finish_reason"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("refusal", "content_filter"),
        ("pause_turn", "pause_turn"),
    ],
)
async def test_the_end_of_an_answer_is_kept_in_the_words_of_chat_completions(
    stop_reason: str, finish_reason: str
) -> None:
    body = b'{"type": "message", "content": [], "stop_reason": "%b"}' % stop_reason.encode()
    answer = await ask(fake.whole(body), stream=False)
    assert (answer.message, answer.finish_reason) == (body, finish_reason)


async def test_an_answer_that_was_not_to_be_streamed_is_passed_on_as_it_is() -> None:
    usage = {"input_tokens": 1, "output_tokens": 2}
    body = b'{"type": "message",  "content": [], "model": "x", "stop_reason": null, "usage": %b}' % (
        json.dumps(usage).encode()
    )
    answer = await ask(fake.whole(body), stream=False)
    assert (answer.message, answer.events, answer.finish_reason) == (body, None, "none")
    assert answer.usage == Usage(prompt_tokens=1, completion_tokens=2)


async def test_a_provider_that_streams_nothing_though_it_was_asked_to_is_understood() -> None:
    emitted: list[bytes] = []
    body = b'{"type": "message", "content": [{"type": "text", "text": "whole\\n\\n"}],\n\n "usage": {}}'
    answer = await ask(fake.whole(body), emit=emitted.append)
    assert (answer.message, answer.events, emitted) == (body, None, [])
    assert b'"text":"whole\\n\\n"' in Anthropic().events(answer.message)


async def test_an_answer_is_whole_when_it_has_said_so_though_its_end_never_comes() -> None:
    raw = fake.answer(fake.text(0, "hi"))
    async with asyncio.timeout(10):
        answer = await ask(fake.stream(raw, stalls=True))
        reset = await ask(fake.stream(raw, lost="reset"))
    assert (answer.events, reset.events) == (raw, raw)


# --- streaming mode ------------------------------------------------------------------------------------


async def test_events_pass_as_they_come_but_for_those_that_complete_something() -> None:
    blocks = [fake.text(0, "a", "b"), fake.tool(1, "toolu_1", "Bash", "{", "}")]
    pieces = [b": soon\n\n", *map(fake.sse, [fake.started(), *sum(blocks, []), *fake.ended("tool_use")])]  # noqa: RUF017
    emitted: list[bytes] = []
    answer = await ask(fake.stream(*pieces), emit=emitted.append)
    ends = (b"event: content_block_stop", b"event: message_delta", b"event: message_stop")
    assert b"".join(emitted) == b"".join(piece for piece in pieces if not piece.startswith(ends))
    assert answer.events == b"".join(piece for piece in pieces if piece.startswith(ends))
    assert json.loads(answer.message)["content"][0]["text"] == "ab"


async def test_nothing_that_was_said_before_a_drop_closes_a_block() -> None:
    emitted: list[bytes] = []
    raw = fake.sse(fake.started(), *fake.text(0, "an answer"), *fake.tool(1, "toolu_1", "Bash", "{}")[:2])
    error = await refused(fake.stream(raw), emit=emitted.append)
    assert b"an answer" in b"".join(emitted)
    assert b"content_block_stop" not in b"".join(emitted)
    assert error_response(error)[0].status == 529


# --- answers that are none -----------------------------------------------------------------------------

START, TEXT = fake.started(), fake.text(0, "hello")
BROKEN: dict[str, bytes] = {
    "nothing": b"",
    "no end": fake.sse(START, *TEXT),
    "no message_stop": fake.sse(START, *TEXT, fake.ended()[0]),
    "in mid-event": fake.answer(TEXT)[:-20],
    "in a block": fake.sse(START, *TEXT[:2]),
    "an open block": fake.sse(START, *TEXT[:2], *fake.ended()),
    "two messages": fake.sse(START, fake.started(id="msg_2"), *TEXT, *fake.ended()),
    "two blocks in one place": fake.sse(START, *TEXT, *TEXT, *fake.ended()),
    "no message": fake.sse(*TEXT, *fake.ended()),
    "an end of nothing": fake.sse(*fake.ended()),
    "a delta for no block": fake.sse(START, TEXT[1], *fake.ended()),
    "a delta after its block": fake.sse(START, *TEXT, TEXT[1], *fake.ended()),
    "thoughts in a text": fake.answer(
        fake.block(0, {"type": "text", "text": ""}, {"type": "thinking_delta", "thinking": "x"})
    ),
    "text in a tool call": fake.answer(
        fake.block(0, {"type": "tool_use", "id": "t", "name": "n"}, {"type": "text_delta", "text": "x"})
    ),
    "a piece that is no text": fake.answer(
        fake.block(0, {"type": "text", "text": ""}, {"type": "text_delta", "text": None})
    ),
    "no JSON": b"event: message_start\ndata: {\n\n",
    "no names": fake.answer(TEXT).replace(b"event: ", b"vent: "),
    "an HTML page": b"<html>sign in</html>",
    "an error in place of a message": b'{"type": "error", "error": {"type": "api_error", "message": "x"}}',
}


@pytest.mark.parametrize("framing", ["chunked", "close"])
@pytest.mark.parametrize("raw", BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_answer_is_an_error_that_can_be_tried_again(raw: bytes, framing: Any) -> None:
    async with relaying(fake.stream(raw, framing=framing), fake.stream(raw, framing=framing)) as (relay, provider):
        with pytest.raises(BackendError) as caught:
            await relay.relay(request())
        assert len(provider.requests) == 1, "what a provider has begun to answer is never asked again"
    assert error_response(caught.value)[0].status in (500, 529)


async def test_a_message_start_that_comes_twice_is_passed_on_once() -> None:
    raw = fake.sse(START, START, *TEXT, START, *fake.ended())
    emitted: list[bytes] = []
    answer = await ask(fake.stream(raw), emit=emitted.append)
    events = b"".join(emitted) + (answer.events or b"")
    assert events == fake.sse(START, *TEXT, *fake.ended())


@pytest.mark.parametrize("lost", ["fin", "reset"])
async def test_a_lost_connection_is_an_error(lost: Any) -> None:
    raw = fake.sse(START, *TEXT)
    async with relaying(fake.stream(raw, lost=lost)) as (relay, provider):
        with pytest.raises(BackendError, match="broke off"):
            await relay.relay(request())
        assert len(provider.requests) == 1


async def test_an_answer_that_was_not_streamed_must_be_whole() -> None:
    for body in (b"", b"[]", b'{"type": "message"}', b'{"type": "message", "content": [', b"<html>"):
        assert error_response(await refused(fake.whole(body), stream=False))[0].status == 500


async def test_nobody_there_is_an_error() -> None:
    async with FakeAnthropic() as provider:
        relay = AnthropicRelay(provider.url, "ours", KEY)
    with pytest.raises(BackendError, match="no response"):
        await relay.relay(request())
    await relay.close()


async def test_an_agent_that_leaves_ends_the_providers_work() -> None:
    silence = fake.stream(fake.sse(START), stalls=True)
    async with relaying(silence) as (relay, provider):
        asking = asyncio.create_task(relay.relay(request()))
        await provider.came.wait()
        asking.cancel()
        async with asyncio.timeout(5):
            await silence.disconnected.wait()
        with pytest.raises(asyncio.CancelledError):
            await asking


# --- refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, "invalid_request_error", "prompt is too long: 250000 tokens > 200000 maximum"),
        (400, "invalid_request_error", "input length and `max_tokens` exceed context limit: 1 + 2 > 2"),
        (402, "billing_error", "no credit"),
        (404, "not_found_error", "model: claude-nope"),
        (413, "request_too_large", "too large"),
        (429, "rate_limit_error", "slow down"),
        (500, "api_error", "boom"),
        (503, "api_error", "away"),
        (529, "overloaded_error", "Overloaded"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_a_refusal_is_told_in_the_same_words(status: int, kind: str, message: str, stream: bool) -> None:
    error = await refused(fake.error(status, kind, message), stream=stream)
    reply, headers, body = error_response(error)
    assert (reply.status, body, headers) == (status, {"type": kind, "message": message}, {})


@pytest.mark.parametrize("should_retry", ["true", "false"])
async def test_when_and_whether_to_try_again_is_told_too(should_retry: str) -> None:
    retry_headers = {"retry_after": "120", "x_should_retry": should_retry}
    _, headers, _ = error_response(await refused(fake.error(429, "rate_limit_error", "slow", **retry_headers)))
    assert headers == {"retry-after": b"120", "x-should-retry": should_retry.encode()}


@pytest.mark.parametrize("status", [401, 403])
async def test_a_key_of_ours_that_is_refused_does_not_look_like_the_agents(status: int) -> None:
    error = await refused(fake.error(status, "authentication_error", f"invalid x-api-key {KEY}"))
    reply, headers, body = error_response(error)
    assert (reply.status, body["type"]) == (500, "api_error")
    # Claude Code looks for "x-api-key" in any error, and asks its user to log in.
    assert body["message"].startswith(f"the model server refused the credentials of the gateway (status {status})")
    assert "x-api-key" not in body["message"]
    assert "invalid x-api-key ***" in str(error)
    assert headers["x-should-retry"] == b"false"
    assert KEY not in str(error)


@pytest.mark.parametrize(
    ("body", "says"), [(b"<html>bad gateway</html>", "<html>bad gateway</html>"), (b"", "502")]
)
async def test_a_refusal_in_no_known_words_keeps_its_status(body: bytes, says: str) -> None:
    reply, _, error = error_response(await refused(fake.whole(body, 502)))
    assert (reply.status, error["type"]) == (502, "api_error")
    assert says in error["message"]


async def test_a_redirect_is_not_followed() -> None:
    async with relaying(fake.whole({}, 302, location="/elsewhere")) as (relay, provider):
        with pytest.raises(BackendError, match="302"):
            await relay.relay(request())
        assert len(provider.requests) == 1


@pytest.mark.parametrize(
    ("kind", "status"),
    [("overloaded_error", 529), ("rate_limit_error", 429), ("new_error", 500), ("api_error", 500)],
)
async def test_an_error_in_mid_stream_is_told_as_what_it_is(kind: str, status: int) -> None:
    event = {"type": "error", "error": {"type": kind, "message": "sorry"}}
    raw = fake.sse(START, *TEXT, event)
    reply, _, body = error_response(await refused(fake.stream(raw)))
    assert (reply.status, body) == (status, {"type": kind, "message": "sorry"})
    strange = await refused(fake.stream(b"event: error\ndata: what\n\n"))
    assert error_response(strange)[2] == {"type": "api_error", "message": "what"}


# --- the rest of the API -------------------------------------------------------------------------------


async def test_tokens_are_counted_by_the_provider() -> None:
    body = b'{"input_tokens": 12, "more": 1}'
    async with relaying(fake.whole(body), fake.error(429, "rate_limit_error", "slow"), fake.whole(b"{}")) as (
        relay,
        provider,
    ):
        counted = NativeRequest(path="/v1/messages/count_tokens?beta=true", headers={}, body=BODY, stream=False)
        assert await relay.relay_count(counted) == body
        assert provider.requests[0].path == "/v1/messages/count_tokens?beta=true"
        assert json.loads(provider.requests[0].body)["model"] == "ours"
        with pytest.raises(BackendError) as caught:
            await relay.relay_count(counted)
        assert error_response(caught.value)[0].status == 429
        with pytest.raises(BackendError, match="input_tokens"):
            await relay.relay_count(counted)


async def test_the_models_of_a_provider_are_listed() -> None:
    listed = {
        "data": [{"type": "model", "id": "claude-a"}, {"type": "model", "id": "claude-b"}],
        "has_more": False,
    }
    async with relaying(fake.whole(listed)) as (relay, provider):
        assert await relay.models() == ["claude-a", "claude-b"]
    assert (provider.requests[0].method, provider.requests[0].headers["x-api-key"]) == ("GET", KEY)
