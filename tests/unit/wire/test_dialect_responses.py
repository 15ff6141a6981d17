"""OpenAI Responses: items as messages, tools of every kind as functions, and the events of an answer."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import BackendError
from understudy.gateway.errors import fault_of
from understudy.gateway.session import GatewaySession
from understudy.types import Usage
from understudy.wire.dialect import Branch, DialectRequest
from understudy.wire.errors import ContextOverflow, InvalidRequest
from understudy.wire.model import ChatRequest, Delta, Generation, ToolCall
from understudy.wire.responses import OpenAIResponses

MAIN = Branch("s", None)
RESPONSES = OpenAIResponses()
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)

FUNCTION = {
    "type": "function",
    "name": "run",
    "description": "d",
    "parameters": {"type": "object"},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"},
}
AGENTS = {"type": "namespace", "name": "agents", "description": "d", "tools": [FUNCTION | {"name": "spawn"}]}
TOOLS = [FUNCTION, PATCH, AGENTS]


def parse(input_: Any = "hi", *, session: GatewaySession | None = None, **fields: Any) -> DialectRequest:
    data = json.dumps({"model": "asked", "input": input_} | fields).encode()
    return RESPONSES.parse(data, session or GatewaySession("attempt", {}), MAIN)


def chat(input_: Any = "hi", *, session: GatewaySession | None = None, **fields: Any) -> ChatRequest:
    return parse(input_, session=session, **fields).chat


def says(role: str, text: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text}]}


def generation(**fields: Any) -> Generation:
    return Generation(**({"model": "m", "text": "", "finish_reason": "stop"} | fields))


def answer(
    generated: Generation, incoming: DialectRequest | None = None, session: GatewaySession | None = None
) -> dict[str, Any]:
    request = incoming or parse(tools=TOOLS)
    return json.loads(
        RESPONSES.message(generated, request, session or GatewaySession("attempt", {}), "msg_1").body
    )


def events_of(stream: bytes) -> list[dict[str, Any]]:
    frames = stream.decode().split("\n\n")
    assert frames.pop() == ""
    events: list[dict[str, Any]] = []
    for frame in frames:
        name, data = frame.split("\n", 1)
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


_TEXTS = {
    "response.output_text": "text",
    "response.reasoning_text": "text",
    "response.function_call_arguments": "arguments",
    "response.custom_tool_call_input": "input",
}


def put_together(stream: bytes) -> dict[str, Any]:
    """The response that a stream says; every rule that a client may rely on is checked on the way."""
    events = events_of(stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    texts: Counter[int] = Counter()
    added: dict[int, str] = {}
    pieces: dict[int, str] = {}
    done: dict[int, dict[str, Any]] = {}
    for event in events[2:-1]:
        name, _, action = event["type"].rpartition(".")
        index = event["output_index"]
        if event["type"] == "response.output_item.added":
            assert index == len(added)
            added[index], pieces[index] = event["item"]["id"], ""
        elif event["type"] == "response.output_item.done":
            assert event["item"]["id"] == added[index] and index not in done
            done[index] = event["item"]
        elif name in _TEXTS:
            assert event["item_id"] == added[index] and index not in done
            if action == "delta":
                pieces[index] += event["delta"]
            else:
                assert event[_TEXTS[name]] == pieces[index]
                texts[index] += 1
    assert set(done) == set(added) and all(count == 1 for count in texts.values())
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == [done[index] for index in sorted(done)]
    assert last["id"] == events[0]["response"]["id"]
    return last


# --- requests ------------------------------------------------------------------------------------------


def test_a_codex_request_is_translated() -> None:
    request = chat(
        [says("developer", "a"), says("developer", "b"), says("user", "env"), says("user", "do it")],
        instructions="be good",
        tools=[*TOOLS, {"type": "web_search", "external_web_access": False}, {"type": "tool_search"}],
        tool_choice="auto",
        parallel_tool_calls=True,
        reasoning={"effort": "high", "summary": "auto"},
        store=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        text={"verbosity": "low"},
        client_metadata={"x": "y"},
        max_output_tokens=9,
    )
    assert request.messages == [
        {"role": "system", "content": "be good\n\na\n\nb"},
        {"role": "user", "content": "env"},
        {"role": "user", "content": "do it"},
    ]
    functions = {tool["function"]["name"]: tool["function"] for tool in request.tools}
    assert list(functions) == ["run", "apply_patch", "agents__spawn"]
    assert functions["run"] == {"name": "run", "description": "d", "parameters": {"type": "object"}}
    assert functions["apply_patch"]["parameters"]["required"] == ["input"]
    assert "start: x" in functions["apply_patch"]["description"]
    assert request.sampling == {"max_tokens": 9, "reasoning_effort": "high"}
    assert (request.tool_choice, request.parallel_tool_calls, request.response_format) == ("auto", True, None)


def test_the_output_items_of_one_response_merge_into_one_assistant_message() -> None:
    call = {"type": "function_call", "name": "run", "arguments": "{}"}
    request = chat(
        [
            says("user", "go"),
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            says("assistant", "I will"),
            call | {"call_id": "1"},
            call | {"call_id": "2", "name": "spawn", "namespace": "agents"},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
            says("assistant", "Done."),
            {"role": "user", "content": "more"},
        ],
        tools=TOOLS,
    )
    calls = [
        {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{}"}},
        {"id": "2", "type": "function", "function": {"name": "agents__spawn", "arguments": "{}"}},
    ]
    assert request.messages == [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "I will", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": "Done.", "reasoning": "so"},
        {"role": "user", "content": "more"},
    ]


def test_images_in_messages_and_tool_results_are_translated() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "low"}
    request = chat(
        [
            {"role": "user", "content": [{"type": "input_text", "text": "see"}, image]},
            {"type": "function_call", "call_id": "1", "name": "view", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [image]},
        ]
    )
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": "low"}}
    assert request.messages[0]["content"] == [{"type": "text", "text": "see"}, part]
    assert request.messages[2:] == [
        {"role": "tool", "tool_call_id": "1", "content": "[image]"},
        {"role": "user", "content": [part]},
    ]


@pytest.mark.parametrize(
    ("sampled", "expected"),
    [('{ "input": "*** é\\n" }', "*** é\n"), ("*** bare", "*** bare"), ('{"other": 1}', '{"other": 1}')],
)
def test_a_custom_tool_call_has_plain_text_input_and_is_echoed_as_sampled(sampled: str, expected: str) -> None:
    session = GatewaySession("attempt", {})
    call = ToolCall("", "apply_patch", sampled)
    message = RESPONSES.message(generation(tool_calls=(call,)), parse(tools=TOOLS), session, "msg_1")
    session.record_response(MAIN, "call_1", message.sampled)
    item = json.loads(message.body)["output"][0]
    assert (item["type"], item["name"], item["input"]) == ("custom_tool_call", "apply_patch", expected)
    result = {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "ok"}
    again = chat([says("user", "go"), item, result], session=session, tools=TOOLS)
    arguments = again.messages[1]["tool_calls"][0]["function"]["arguments"]
    assert arguments == (sampled if sampled.startswith("{") else '{"input":"*** bare"}')
    assert again.messages[2]["content"] == "ok"


def test_a_call_of_a_namespaced_tool_is_returned_with_its_name_and_namespace() -> None:
    item = answer(generation(tool_calls=(ToolCall("1", "agents__spawn", "{}"),)))["output"][0]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "spawn", "agents")


def test_tools_of_an_additional_tools_item_are_offered() -> None:
    request = chat([{"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}, says("user", "hi")])
    assert [tool["function"]["name"] for tool in request.tools] == ["run"]
    assert request.messages == [{"role": "user", "content": "hi"}]


def test_invalid_tools_are_refused_even_beside_additional_tools() -> None:
    items = [{"type": "additional_tools", "role": "developer", "tools": [FUNCTION]}, says("user", "hi")]
    with pytest.raises(InvalidRequest, match="tools"):
        chat(items, tools=[{"type": "function", "name": 7}])


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ("required", 3, "required"),
        ({"type": "function", "name": "run"}, 3, {"type": "function", "function": {"name": "run"}}),
        ({"type": "custom", "name": "apply_patch"}, 3, {"type": "function", "function": {"name": "apply_patch"}}),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "run"}]}, 1, "auto"),
    ],
)
def test_each_form_of_tool_choice_is_translated(choice: Any, names: int, expected: Any) -> None:
    request = chat(tools=TOOLS, tool_choice=choice)
    assert (len(request.tools), request.tool_choice) == (names, expected)


def test_a_text_format_becomes_a_response_format() -> None:
    schema = {"type": "object", "properties": {}}
    request = chat(text={"format": {"type": "json_schema", "name": "out", "schema": schema, "strict": True}})
    assert request.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "out", "schema": schema, "strict": True},
    }
    assert chat(text={"format": {"type": "text"}}).response_format is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "computer_use_preview"}]}, "tools"),
        ({"tools": [AGENTS | {"tools": [AGENTS]}]}, "tools"),
        ({"tools": [FUNCTION, FUNCTION]}, "tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "run", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": 5}, "$.input"),
        ({"reasoning": "high"}, "$.reasoning"),
    ],
)
def test_unsupported_fields_are_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**({"input_": fields.pop("input", "hi")} | fields))
    assert field in str(error.value)


FIELDS = ["model", "input", "role", "content", "type", "text", "tools", "name", "id", "call_id", "arguments"]
FIELDS += ["tool_choice", "mode", "namespace", "output", "summary", "format", "image_url", "instructions"]

KINDS = ["message", "reasoning", "function_call", "custom_tool_call", "function_call_output", "additional_tools"]
KINDS += ["user", "assistant", "input_text", "input_image", "function", "custom", "namespace", "allowed_tools"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8))
def test_any_request_is_parsed_or_refused(fields: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        parse(fields.pop("input", "hi"), **fields)


# --- answers -------------------------------------------------------------------------------------------


def test_a_generation_becomes_a_response_object() -> None:
    whole = answer(
        generation(
            text="hi",
            reasoning="hm",
            tool_calls=(ToolCall("id", "run", '{"a": 1}'),),
            usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4),
        ),
        parse(tools=TOOLS, temperature=0.5, tool_choice="required"),
    )
    assert (whole["id"], whole["object"], whole["status"], whole["model"]) == (
        "resp_1",
        "response",
        "completed",
        "asked",
    )
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
    assert [item["id"] for item in whole["output"]] == ["rs_1", "msg_1", "fc_1_0"]
    assert whole["output"][2] == {
        "type": "function_call",
        "id": "fc_1_0",
        "call_id": "id",
        "name": "run",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    assert whole["usage"]["total_tokens"] == 12 and whole["usage"]["input_tokens_details"]["cached_tokens"] == 4
    assert (whole["temperature"], whole["tool_choice"]) == (0.5, "required")


@pytest.mark.parametrize(
    ("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")]
)
def test_a_truncated_generation_is_an_incomplete_response(finish: str, reason: str) -> None:
    whole = answer(generation(text="hi", finish_reason=finish))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert whole["output"][-1]["status"] == "incomplete"


def test_an_aborted_generation_is_a_backend_error() -> None:
    with pytest.raises(BackendError, match="incomplete"):
        answer(generation(text="hi", finish_reason="abort"))


NAMES = st.sampled_from(["run", "apply_patch", "agents__spawn", "unheard_of"])
ARGUMENTS = TEXT | TEXT.map(lambda text: json.dumps({"input": text}))
CALLS = st.lists(st.builds(ToolCall, TEXT, NAMES, ARGUMENTS), max_size=4)
FINISH = st.sampled_from(["stop", "length", "tool_calls"])


@given(TEXT, st.none() | TEXT, CALLS, FINISH)
def test_the_stream_assembles_to_the_whole_response(
    text: str, reasoning: str | None, calls: list[ToolCall], finish: str
) -> None:
    reply = RESPONSES.message(
        generation(text=text, reasoning=reasoning, tool_calls=tuple(calls), finish_reason=finish),
        parse(tools=TOOLS, stream=True),
        GatewaySession("attempt", {}),
        "msg_1",
    )
    assert put_together(RESPONSES.events(reply.body)) == json.loads(reply.body)
    assert list(reply.sampled.values()) == calls


@given(TEXT, TEXT, CALLS, FINISH, st.randoms(use_true_random=False), st.integers(1, 5))
def test_a_writer_s_stream_assembles_to_the_response_and_ends_only_on_finish(
    text: str, reasoning: str, calls: list[ToolCall], finish: str, order: Any, size: int
) -> None:
    def cut(whole: str) -> list[str]:
        return [whole[start : start + size] for start in range(0, len(whole), size)]

    parts = [
        [Delta("reasoning", piece) for piece in cut(reasoning)],
        [Delta("text", piece) for piece in cut(text)],
    ]
    order.shuffle(parts)
    for index, call in enumerate(calls):
        opening = Delta("tool", index=index, id=call.id, name=call.name)
        parts.append([opening, *(Delta("arguments", piece, index=index) for piece in cut(call.arguments))])
    writer = RESPONSES.writer(parse(tools=TOOLS, stream=True), GatewaySession("attempt", {}), "msg_1")
    early = b"".join(writer.feed(delta) for part in parts for delta in part)
    assert b".done" not in early
    assert b"response.completed" not in early
    message, tail = writer.finish(
        generation(text=text, reasoning=reasoning or None, tool_calls=tuple(calls), finish_reason=finish)
    )
    assert put_together(early + tail) == json.loads(message.body)
    assert list(message.sampled.values()) == calls


# --- pings and faults ----------------------------------------------------------------------------------


def test_a_ping_repeats_the_response_created_event_with_the_same_id() -> None:
    (ping,) = events_of(RESPONSES.ping("msg_1"))
    assert (ping["type"], ping["response"]["id"]) == ("response.created", answer(generation())["id"])


def test_an_error_in_a_stream_is_a_response_failed_event() -> None:
    (event,) = events_of(RESPONSES.error_event(fault_of(ContextOverflow(101, 100))))
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("status", "asked", "pause"), [(429, None, b"3"), (429, 7.0, b"7"), (503, None, None), (400, None, None)]
)
def test_a_rate_limit_always_has_a_pause_because_codex_retries_no_other(
    status: int, asked: float | None, pause: bytes | None
) -> None:
    response = RESPONSES.error(fault_of(BackendError("slow down", status=status, retry_after_s=asked)))
    assert response.status == status
    assert dict(response.headers).get(b"retry-after") == pause


def test_a_token_count_has_the_responses_format() -> None:
    assert json.loads(RESPONSES.token_count(5)) == {"object": "response.input_tokens", "input_tokens": 5}
