"""Generations as Anthropic messages and event streams, and the arguments in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import BackendError, StoreError
from understudy.gateway.errors import fault_of
from understudy.gateway.session import GatewaySession
from understudy.types import Usage
from understudy.wire.anthropic import Anthropic, AnthropicWriter, to_events
from understudy.wire.arguments import same_input, upstream_arguments
from understudy.wire.errors import ContextOverflow, ProviderError, ProviderRefusal
from understudy.wire.model import Delta, Generation, ToolCall

from fakes import sse

TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, width=32) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(TEXT, VALUE, max_size=4)
ARGUMENTS = (
    OBJECT.map(json.dumps) | OBJECT.map(lambda value: json.dumps(value, indent=2, ensure_ascii=False)) | TEXT
)
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, ARGUMENTS), max_size=4)


def session() -> GatewaySession:
    return GatewaySession("attempt", {})


def generation(**fields: Any) -> Generation:
    return Generation(**({"model": "m", "text": "", "finish_reason": "stop"} | fields))


def message(**fields: Any) -> dict[str, Any]:
    return json.loads(AnthropicWriter("asked", session(), "msg_1").whole(generation(**fields)).body)


@given(TEXT, st.none() | TEXT, CALLS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_event_stream_assembles_to_the_whole_message(
    text: str, reasoning: str | None, calls: list[ToolCall], finish: str
) -> None:
    reply = AnthropicWriter("asked", session(), "msg_1").whole(
        generation(text=text, reasoning=reasoning, tool_calls=tuple(calls), finish_reason=finish)
    )
    whole = json.loads(reply.body)
    streamed = sse.message(to_events(reply.body))
    tool_calls = [block for block in streamed["content"] if block["type"] == "tool_use"]
    for block, call in zip(tool_calls, calls, strict=True):
        if isinstance(_json(call.arguments), dict):
            assert block["input"] == call.arguments, "the sampled bytes are streamed as they are"
        block["input"] = json.loads(block["input"])
    assert streamed == whole
    assert len({block["id"] for block in tool_calls}) == len(tool_calls)
    assert list(reply.sampled) == [block["id"] for block in tool_calls]
    assert all(isinstance(block["input"], dict) for block in tool_calls)


def _json(raw: str) -> Any:
    try:
        return json.loads(raw, parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return None


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"finish_reason": "stop"}, "end_turn", None),
        ({"finish_reason": "stop", "stop": "X"}, "stop_sequence", "X"),
        ({"finish_reason": "length"}, "max_tokens", None),
        ({"finish_reason": "tool_calls"}, "tool_use", None),
        ({"finish_reason": "stop", "tool_calls": (ToolCall("", "T", "{}"),)}, "tool_use", None),
        ({"finish_reason": "content_filter"}, "refusal", None),
    ],
)
def test_finish_reasons_map_to_stop_reasons(fields: dict[str, Any], reason: str, sequence: str | None) -> None:
    body = message(**fields)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize("finish", ["abort", "error", "none"])
def test_an_aborted_generation_is_a_backend_error(finish: str) -> None:
    with pytest.raises(BackendError, match="incomplete"):
        message(text="half", finish_reason=finish)


def test_usage_reports_cached_tokens_separately() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4)
    assert message(usage=usage)["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }


def test_tool_ids_are_valid_and_unique_within_a_session() -> None:
    shared, ids = session(), list[str]()
    for _ in range(2):
        offered = [ToolCall(id_, "T", "{}") for id_ in ("call_1", "", "functions.T:0", "x" * 500)]
        reply = AnthropicWriter("asked", shared, "msg_1").whole(generation(tool_calls=tuple(offered)))
        ids += [block["id"] for block in json.loads(reply.body)["content"]]
        assert list(reply.sampled.values()) == offered
    assert ids[0] == "call_1"
    assert all(id_.startswith("toolu_") for id_ in ids[1:])
    assert len(set(ids)) == 8


@pytest.mark.parametrize("raw", ['{"a": ', "[1]", "null", "1", '{"a": NaN}', "{}{}", "[" * 5000, '{"a":' * 5000])
def test_arguments_that_are_not_a_json_object_become_the_cli_s_unparsed_input(raw: str) -> None:
    (block,) = message(tool_calls=(ToolCall("t", "T", raw),))["content"]
    assert block["input"] == {"__unparsedToolInput": {"raw": raw, "len": len(raw)}}


@pytest.mark.parametrize("raw", ["", "  "])
def test_empty_arguments_become_an_empty_object(raw: str) -> None:
    (block,) = message(tool_calls=(ToolCall("t", "T", raw),))["content"]
    assert block["input"] == {}


# --- the tolerant matcher ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"file_path": "a"}', b'{"replace_all":false,"file_path":"a"}'),
        ('{"b":1,  "a":2}', b'{"a":2,"b":1}'),
        ('{"t": 5000.0, "u": 1e0, "v": -0.0}', b'{"t":5000,"u":1,"v":0}'),
        ('{"n": 12345678901234567890}', b'{"n":12345678901234567000}'),
        ('{"s": "d\\u00e9j\\u00e0 \\/"}', '{"s":"déjà /"}'.encode()),
        ('{"l": [{"x": 1}]}', b'{"l":[{"x":1,"multi":false}]}'),
        ("", b"{}"),
    ],
)
def test_an_equivalent_echo_is_replaced_by_the_sampled_arguments(sampled: str, echoed: bytes) -> None:
    assert upstream_arguments(sampled, echoed.decode()) == sampled


@pytest.mark.parametrize(
    ("sampled", "echoed"),
    [
        ('{"a": 1}', b'{"a":2}'),
        ('{"a": 1}', b"{}"),
        ('{"a": 1}', b'{"a":true}'),
        ('{"a": "1"}', b'{"a":1}'),
        ('{"a": [1, 2]}', b'{"a":[1]}'),
        ('{"a": null}', b'{"a":false}'),
        ('{"a": ', b'{"__unparsedToolInput":{"raw":"{\\"a\\": ","len":6}}'),
        ('{"a":' * 900 + "1" + "}" * 900, b'{"a":' * 900 + b"1" + b"}" * 900),
        (None, b'{"a" : 1}'),
    ],
)
def test_a_different_echo_is_sent_unchanged(sampled: str | None, echoed: bytes) -> None:
    assert upstream_arguments(sampled, echoed.decode()) == echoed.decode()


@given(OBJECT, OBJECT)
def test_matching_ignores_order_and_additions_only(sampled: dict[str, Any], added: dict[str, Any]) -> None:
    backwards = dict(reversed((added | sampled).items()))
    assert same_input(sampled, json.loads(json.dumps(backwards)))
    for key in sampled:
        assert not same_input(sampled, {k: v for k, v in backwards.items() if k != key})
        assert not same_input(sampled, backwards | {key: [sampled[key]]})


# --- faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status", "kind", "expected", "headers"),
    [
        (BackendError("gone"), 529, "overloaded_error", "gone", {}),
        (BackendError("x", status=503, retry_after_s=3), 529, "overloaded_error", "x", {"retry-after": "3"}),
        (BackendError("x", status=429, retry_after_s=120), 429, "rate_limit_error", "x", {"retry-after": "30"}),
        (BackendError("x", status=408), 529, "overloaded_error", "x", {}),
        (BackendError("x", status=404), 400, "invalid_request_error", "x", {}),
        (BackendError("x", status=200), 500, "api_error", "x", {}),
        (
            ContextOverflow(40, 32),
            400,
            "invalid_request_error",
            "prompt is too long: 40 tokens > 32 maximum",
            {},
        ),
        (StoreError("/secret/path"), 500, "api_error", "not be stored", {"x-should-retry": "false"}),
    ],
)
def test_each_backend_error_becomes_an_anthropic_error_with_status_and_headers(
    error: BackendError, status: int, kind: str, expected: str, headers: dict[str, str]
) -> None:
    reply = Anthropic().error(fault_of(error))
    body = json.loads(reply.body)
    assert (reply.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert expected in body["error"]["message"]
    assert "/secret" not in body["error"]["message"]
    assert {name.decode(): value.decode() for name, value in reply.headers} == headers
    assert sse.events(Anthropic().error_event(fault_of(error))) == [body]


# --- the rest of the dialect ---------------------------------------------------------------------------


def test_a_provider_error_is_passed_on_unchanged() -> None:
    error = ProviderError(404, "not_found_error", "model: nope", should_retry=True)
    reply = Anthropic().error(fault_of(ProviderRefusal("POST /: status 404", error, retry_after_s=120)))
    assert (reply.status, dict(reply.headers)) == (404, {b"retry-after": b"120", b"x-should-retry": b"true"})
    assert json.loads(reply.body)["error"] == {"type": "not_found_error", "message": "model: nope"}


def test_usage_reports_cache_write_tokens_separately() -> None:
    usage = Usage(prompt_tokens=10, completion_tokens=3, cached_tokens=4, cache_write_tokens=5)
    reported = message(usage=usage)["usage"]
    assert (reported["input_tokens"], reported["cache_creation_input_tokens"]) == (1, 5)


def test_models_are_listed_in_the_apis_shape() -> None:
    listing = json.loads(Anthropic().models(["high", "low"]))
    assert [(model["type"], model["id"]) for model in listing["data"]] == [("model", "high"), ("model", "low")]
    assert (listing["has_more"], listing["first_id"], listing["last_id"]) == (False, "high", "low")
    assert json.loads(Anthropic().models([]))["first_id"] is None


def test_server_tool_and_redacted_blocks_can_be_streamed() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result"}]},
    ]
    whole = {"id": "m", "type": "message", "role": "assistant", "model": "x", "content": blocks, "container": None}
    stream = sse.events(to_events(json.dumps(whole).encode()))
    starts = [event["content_block"] for event in stream if event["type"] == "content_block_start"]
    assert starts == [blocks[0], blocks[1] | {"input": {}}, blocks[2]]
    assert stream[0]["message"]["container"] is None
    assert stream[-2]["delta"] == {"stop_reason": None, "stop_sequence": None}


def writer() -> AnthropicWriter:
    return AnthropicWriter("asked", session(), "msg_1")


def test_a_writer_without_deltas_emits_the_whole_message_at_the_end() -> None:
    reply, stream = writer().finish(generation(text="hi", reasoning="hm"))
    assert stream == to_events(reply.body)


def test_a_writer_starts_the_message_at_once_and_opens_no_empty_block() -> None:
    stream = writer()
    assert [event["type"] for event in sse.events(stream.feed(Delta("text", "")))] == ["message_start"]
    assert stream.feed(Delta("text", "")) == b""
    reply, rest = stream.finish(generation())
    assert json.loads(reply.body)["content"] == []
    assert [event["type"] for event in sse.events(rest)] == ["message_delta", "message_stop"]


def test_a_writer_refuses_to_finish_an_aborted_generation() -> None:
    stream = writer()
    stream.feed(Delta("text", "half"))
    with pytest.raises(BackendError, match="incomplete"):
        stream.finish(generation(text="half", finish_reason="abort"))
