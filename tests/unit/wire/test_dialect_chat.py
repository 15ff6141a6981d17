"""OpenAI chat completions: requests understood, generations as completions and as streams of chunks."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import BackendError, StoreError
from understudy.gateway.errors import fault_of
from understudy.gateway.session import GatewaySession
from understudy.types import Usage
from understudy.wire.chat import OpenAIChat
from understudy.wire.dialect import Branch, DialectRequest
from understudy.wire.errors import ContextOverflow, Fault, InvalidRequest
from understudy.wire.model import ChatRequest, Delta, Generation, ToolCall

MAIN = Branch("s", None)
CHAT = OpenAIChat()
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=4)


def tool(name: str = "run", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": {}} | fields}


def body(*messages: Any, **fields: Any) -> bytes:
    prompt = [
        {"role": "user", "content": message} if isinstance(message, str) else message for message in messages
    ]
    return json.dumps(
        {"model": "asked", "messages": prompt or [{"role": "user", "content": "hi"}]} | fields
    ).encode()


def parse(*messages: Any, session: GatewaySession | None = None, **fields: Any) -> DialectRequest:
    return CHAT.parse(body(*messages, **fields), session or GatewaySession("attempt", {}), MAIN)


def chat(*messages: Any, session: GatewaySession | None = None, **fields: Any) -> ChatRequest:
    return parse(*messages, session=session, **fields).chat


def generation(**fields: Any) -> Generation:
    return Generation(**({"model": "m", "text": "", "finish_reason": "stop"} | fields))


def chunks(stream: bytes) -> list[dict[str, Any]]:
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    assert events.pop() == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def put_together(stream: bytes) -> dict[str, Any]:
    """A stream as a client takes it in: the message, why it ended, and the usage."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning_content": "", "tool_calls": {}}
    finish_reasons: list[str] = []
    for chunk in chunks(stream):
        for choice in chunk["choices"]:
            assert not finish_reasons, "nothing follows the finish reason"
            delta = choice["delta"]
            message["role"] = message["role"] or delta.get("role")
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", ()):
                assembled_call = message["tool_calls"].setdefault(
                    call["index"], {"id": None, "name": None, "arguments": ""}
                )
                assembled_call["id"] = assembled_call["id"] or call.get("id")
                assembled_call["name"] = call["function"].get("name", assembled_call["name"])
                assembled_call["arguments"] += call["function"].get("arguments", "")
            finish_reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert len(finish_reasons) == 1
    return message | {"finish_reason": finish_reasons[0], "usage": chunks(stream)[-1].get("usage")}


# --- requests ------------------------------------------------------------------------------------------


def test_the_fields_of_a_request_are_passed_on() -> None:
    request = chat(
        "hi",
        tools=[tool()],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0.5,
        max_completion_tokens=7,
        max_tokens=9,
        stop="END",
        seed=3,
        logit_bias={"5": -100},
        reasoning_effort="low",
        response_format={"type": "json_object"},
        user="u",
        metadata={"a": "b"},
        store=True,
        service_tier="flex",
        prompt_cache_key="k",
        unheard_of={"x": 1},
    )
    assert request.messages == [{"role": "user", "content": "hi"}]
    assert request.tools == [tool()]
    assert (request.tool_choice, request.parallel_tool_calls) == ("required", False)
    assert request.response_format == {"type": "json_object"}
    assert request.sampling == {
        "temperature": 0.5,
        "max_tokens": 7,
        "stop": ["END"],
        "seed": 3,
        "logit_bias": {"5": -100},
        "reasoning_effort": "low",
    }


def test_the_sampling_of_the_attempt_overrides_that_of_the_agent() -> None:
    request = chat(session=GatewaySession("attempt", {"temperature": 1.0, "top_k": 5}), temperature=0.1, top_p=0.9)
    assert request.sampling == {"temperature": 1.0, "top_k": 5, "top_p": 0.9}


def test_leading_instructions_merge_into_one_system_message_and_later_ones_become_user_messages() -> None:
    request = chat(
        {"role": "system", "content": "a"},
        {"role": "developer", "content": [{"type": "text", "text": "b"}]},
        "hi",
        {"role": "system", "content": "c"},
    )
    assert request.messages == [
        {"role": "system", "content": "a\n\nb"},
        {"role": "user", "content": "hi"},
        {"role": "user", "content": "c"},
    ]


def test_a_conversation_with_tools_thinking_and_images_is_translated() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    request = chat(
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}},
                {"id": "2", "type": "function", "function": {"name": "run", "arguments": "{oops"}},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}, image]},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        "next",
    )
    calls = request.messages[1].pop("tool_calls")
    assert request.messages == [
        {"role": "user", "content": [{"type": "text", "text": "see"}, image]},
        {"role": "assistant", "content": "", "reasoning": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "one\n[image]"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "user", "content": [image, {"type": "text", "text": "next"}]},
    ]
    assert calls[0]["function"] == {"name": "run", "arguments": '{"a": 1}'}
    # Servers parse the arguments of a conversation, and refuse all of it when they cannot.
    assert json.loads(calls[1]["function"]["arguments"]) == {"__unparsedToolInput": {"raw": "{oops", "len": 5}}


def test_echoed_tool_calls_are_sent_with_the_sampled_arguments() -> None:
    session = GatewaySession("attempt", {})
    sampled = ToolCall("backend-1", "run", '{ "n": 5000.0 }')
    message = CHAT.message(generation(tool_calls=(sampled,)), parse(), session, "msg_1")
    session.record_response(MAIN, "call_1", message.sampled)
    sent_message = json.loads(message.body)["choices"][0]["message"]
    sent_message["tool_calls"][0]["function"]["arguments"] = '{"n":5000}'
    again = chat(
        "hi", sent_message, {"role": "tool", "tool_call_id": "backend-1", "content": "ok"}, session=session
    )
    assert again.messages[1]["tool_calls"][0] == {
        "id": "backend-1",
        "type": "function",
        "function": {"name": "run", "arguments": '{ "n": 5000.0 }'},
    }


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("auto", ["a", "b"], "auto"),
        ("none", ["a", "b"], "none"),
        (
            {"type": "function", "function": {"name": "b"}},
            ["a", "b"],
            {"type": "function", "function": {"name": "b"}},
        ),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]},
            },
            ["b"],
            "required",
        ),
    ],
)
def test_each_form_of_tool_choice_is_translated(choice: Any, names: list[str], expected: Any) -> None:
    request = chat(tools=[tool("a"), tool("b")], tool_choice=choice)
    assert [function["function"]["name"] for function in request.tools] == names
    assert request.tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"n": 2}, "n"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "v"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"tools": [{"type": "custom", "custom": {"name": "c"}}]}, "tools"),
        ({"tool_choice": {"type": "custom", "custom": {"name": "c"}}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "function", "content": "x"}]}, "$.messages[0].role"),
        ({"messages": "hi"}, "$.messages"),
        ({"model": None}, "$.model"),
        ({"temperature": "hot"}, "$.temperature"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**fields)
    assert field in str(error.value)


def test_unsupported_fields_with_default_values_are_accepted() -> None:
    parse(n=1, modalities=["text"], functions=[], top_logprobs=0, stop=None, tools=None, stream=None, audio=None)


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"model": "\\ud800"'])
def test_invalid_json_requests_are_refused(junk: bytes) -> None:
    for read in (CHAT.peek, lambda data: CHAT.parse(data, GatewaySession("attempt", {}), MAIN)):
        with pytest.raises(InvalidRequest):
            read(junk)


def test_a_lone_surrogate_in_a_request_is_replaced() -> None:
    data = b'{"model": "m", "messages": [{"role": "user", "content": "\\ud83d"}], "stream": true}'
    assert CHAT.peek(data) == ("m", True)
    assert CHAT.parse(data, GatewaySession("attempt", {}), MAIN).chat.messages[0]["content"] == "\ufffd"


FIELDS = ["model", "messages", "role", "content", "type", "text", "tools", "tool_calls", "function", "name", "id"]
FIELDS += ["arguments", "tool_choice", "allowed_tools", "image_url", "url", "tool_call_id", "stop", "reasoning"]

KINDS = [
    "user",
    "assistant",
    "tool",
    "system",
    "text",
    "refusal",
    "image_url",
    "function",
    "allowed_tools",
    "auto",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8))
def test_any_request_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        parse(**fields)


# --- answers -------------------------------------------------------------------------------------------


def test_a_generation_becomes_a_chat_completion() -> None:
    reply = CHAT.message(
        generation(
            text="hi",
            reasoning="hm",
            tool_calls=(ToolCall("id", "run", "{oops"),),
            usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4),
        ),
        parse(),
        GatewaySession("attempt", {}),
        "msg_1",
    )
    whole = json.loads(reply.body)
    assert (whole["id"], whole["object"], whole["model"]) == ("chatcmpl-1", "chat.completion", "asked")
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "hi",
                "reasoning_content": "hm",
                "tool_calls": [
                    {"id": "id", "type": "function", "function": {"name": "run", "arguments": "{oops"}}
                ],
            },
            "logprobs": None,
            "finish_reason": "tool_calls",
        }
    ]
    assert whole["usage"] == {
        "prompt_tokens": 10,
        "completion_tokens": 2,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    assert reply.sampled == {"id": ToolCall("id", "run", "{oops")}


@pytest.mark.parametrize("reason", ["abort", "none", ""])
def test_an_incomplete_generation_is_a_backend_error(reason: str) -> None:
    with pytest.raises(BackendError, match="incomplete"):
        CHAT.message(generation(finish_reason=reason), parse(), GatewaySession("attempt", {}), "msg_1")


def test_logprobs_are_reported_by_token_id() -> None:
    with_logprobs = generation(text="hi", completion_token_ids=(7, 8), logprobs=(-0.5, -1.0))
    request = parse(logprobs=True)
    choice = json.loads(CHAT.message(with_logprobs, request, GatewaySession("attempt", {}), "msg_1").body)[
        "choices"
    ][0]
    assert choice["logprobs"] == {
        "content": [
            {"token": "token_id:7", "bytes": None, "logprob": -0.5, "top_logprobs": []},
            {"token": "token_id:8", "bytes": None, "logprob": -1.0, "top_logprobs": []},
        ]
    }
    without_logprobs = CHAT.message(generation(text="hi"), request, GatewaySession("attempt", {}), "msg_1")
    assert json.loads(without_logprobs.body)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_stream_reports_usage_only_if_requested(include_usage: bool) -> None:
    request = parse(stream=True, stream_options={"include_usage": True} if include_usage else None)
    reply = CHAT.message(generation(text="hi", usage=Usage(3, 1)), request, GatewaySession("attempt", {}), "msg_1")
    sent_chunks = chunks(CHAT.events(reply.body))
    if include_usage:
        assert sent_chunks[-1]["choices"] == [] and sent_chunks[-1]["usage"]["total_tokens"] == 4
        assert all(chunk["usage"] is None for chunk in sent_chunks[:-1])
    else:
        assert not any("usage" in chunk or chunk["choices"] == [] for chunk in sent_chunks)


@given(TEXT, st.none() | TEXT, CALLS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_stream_assembles_to_the_whole_message(
    text: str, reasoning: str | None, calls: list[ToolCall], finish: str
) -> None:
    reply = CHAT.message(
        generation(text=text, reasoning=reasoning, tool_calls=tuple(calls), finish_reason=finish),
        parse(stream=True, stream_options={"include_usage": True}),
        GatewaySession("attempt", {}),
        "msg_1",
    )
    whole, streamed = json.loads(reply.body), put_together(CHAT.events(reply.body))
    message = whole["choices"][0]["message"]
    assert streamed["content"] == (message["content"] or "") == text
    assert streamed["reasoning_content"] == message.get("reasoning_content", "") == (reasoning or "")
    flat = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
    assert list(streamed["tool_calls"].values()) == flat
    assert list(reply.sampled.values()) == calls
    assert streamed["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert streamed["usage"] == whole["usage"]


PIECES = st.lists(st.sampled_from(["a", "b{", "é", " "]), max_size=4)


@given(PIECES, PIECES, st.lists(st.tuples(TEXT, PIECES), max_size=3), st.booleans())
def test_a_writer_s_stream_assembles_to_the_message_and_ends_only_on_finish(
    reasoning_pieces: list[str], text_pieces: list[str], calls: list[tuple[str, list[str]]], text_first: bool
) -> None:
    deltas = [Delta("reasoning", piece) for piece in reasoning_pieces]
    texts = [Delta("text", piece) for piece in text_pieces]
    deltas = texts + deltas if text_first else deltas + texts
    for index, (name, pieces) in enumerate(calls):
        deltas.append(Delta("tool", index=index, id="x", name=name))
        deltas += [Delta("arguments", piece, index=index) for piece in pieces]
    whole = generation(
        text="".join(text_pieces),
        reasoning="".join(reasoning_pieces) or None,
        tool_calls=tuple(ToolCall("x", name, "".join(pieces)) for name, pieces in calls),
    )
    writer = CHAT.writer(parse(stream=True), GatewaySession("attempt", {}), "msg_1")
    early = b"".join(map(writer.feed, deltas))
    assert b"[DONE]" not in early
    assert b'"finish_reason":"' not in early
    message, tail = writer.finish(whole)
    streamed = put_together(early + tail)
    sent_message = json.loads(message.body)["choices"][0]["message"]
    assert streamed["content"] == whole.text
    assert streamed["reasoning_content"] == (whole.reasoning or "")
    assert [call["id"] for call in streamed["tool_calls"].values()] == list(message.sampled)
    assert [call["arguments"] for call in streamed["tool_calls"].values()] == [
        call["function"]["arguments"] for call in sent_message.get("tool_calls", [])
    ]
    assert len({chunk["id"] for chunk in chunks(early + tail)}) == 1


# --- faults, models, branches --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "code"),
    [
        (fault_of(ContextOverflow(101, 100)), 400, "context_length_exceeded"),
        (Fault(kind="permission", message="no"), 401, "invalid_api_key"),
        (fault_of(BackendError("slow down", status=429, retry_after_s=1.2)), 429, "rate_limit_exceeded"),
        (fault_of(BackendError("gone")), 503, "service_unavailable"),
        (fault_of(InvalidRequest("n: no")), 400, None),
        (fault_of(StoreError("disk")), 500, "server_error"),
    ],
)
def test_errors_have_the_openai_format(fault: Fault, status: int, code: str | None) -> None:
    reply = CHAT.error(fault)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"]) == (status, code)
    assert set(error) == {"message", "type", "param", "code"}
    headers = dict(reply.headers)
    assert headers.get(b"retry-after") == (b"2" if status == 429 else None)
    assert headers.get(b"x-should-retry") == (b"false" if status == 500 else None)
    event = CHAT.error_event(fault)
    assert json.loads(event.removeprefix(b"data: "))["error"] == error


def test_a_context_overflow_has_openai_s_error_message() -> None:
    error = json.loads(CHAT.error(fault_of(ContextOverflow(101, 100))).body)["error"]
    assert "maximum context length is 100 tokens" in error["message"]


def test_models_are_listed() -> None:
    listing = json.loads(CHAT.models(["a", "b"]))
    assert listing["object"] == "list"
    assert [model["id"] for model in listing["data"]] == ["a", "b"]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Branch(None, None)),
        ({b"session-id": b"s", b"thread-id": b"s"}, Branch("s", None)),
        ({b"session-id": b"s", b"thread-id": b"t"}, Branch("s", "t")),
        ({b"session_id": b"s", b"conversation_id": b"s"}, Branch("s", None)),
        ({b"conversation_id": b"c"}, Branch("c", None)),
        ({b"x-session-affinity": b"o", b"x-session-id": b"o"}, Branch("o", None)),
        ({b"x-session-id": b"o", b"x-parent-session-id": b"p"}, Branch("p", "o")),
    ],
)
def test_the_branch_is_read_from_the_headers_of_each_agent(headers: dict[bytes, bytes], expected: Branch) -> None:
    assert CHAT.branch(headers) == expected
