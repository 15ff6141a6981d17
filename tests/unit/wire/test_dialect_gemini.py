"""Gemini generateContent: requests read, generations as responses and as streams of events."""

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
from understudy.wire.dialect import Branch, DialectRequest
from understudy.wire.errors import ContextOverflow, Fault, InvalidRequest
from understudy.wire.gemini import Gemini, read_target, target_of
from understudy.wire.model import ChatRequest, Delta, Generation, ToolCall

MAIN = Branch(None, None)
GEMINI = Gemini()
STREAM, WHOLE = target_of("asked", "streamGenerateContent"), target_of("asked")
TEXT = st.text(st.characters(codec="utf-8"), max_size=30)
CALLS = st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=4)

Item = dict[str, Any]


def content(*parts: Item | str, role: str = "user") -> Item:
    return {"role": role, "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def called(name: str = "run", args: Any = None, **fields: Any) -> Item:
    return {"functionCall": {"name": name, "args": {"a": 1} if args is None else args} | fields}


def gave(response: Any, name: str = "run", **fields: Any) -> Item:
    return {"functionResponse": {"name": name, "response": response} | fields}


def body(*contents: Item | str, **fields: Any) -> bytes:
    sent = [content(each) if isinstance(each, str) else each for each in contents]
    return json.dumps({"contents": sent or [content("hi")]} | fields).encode()


def parse(*contents: Item | str, target: str = WHOLE, **fields: Any) -> DialectRequest:
    return GEMINI.parse(body(*contents, **fields), GatewaySession("attempt", {}), MAIN, target)


def chat(*contents: Item | str, **fields: Any) -> ChatRequest:
    return parse(*contents, **fields).chat


def config(**fields: Any) -> ChatRequest:
    return chat(generationConfig=fields)


def generation(**fields: Any) -> Generation:
    return Generation(**({"model": "m", "text": "", "finish_reason": "stop"} | fields))


def whole(written: Generation, session: GatewaySession | None = None) -> tuple[Item, dict[str, ToolCall]]:
    """The response to a generation, and the calls in it by the ids that the agent sees."""
    reply = GEMINI.message(written, parse(), session or GatewaySession("attempt", {}), "msg_1")
    return json.loads(reply.body), reply.sampled


def chunks(stream: bytes) -> list[Item]:
    events = stream.decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def assembled(stream: bytes) -> Item:
    """A stream as a client takes it in: texts of a kind that follow one another are one part."""
    parts: list[Item] = []
    finish_reasons: list[str] = []
    received = chunks(stream)
    for chunk in received:
        (candidate,) = chunk["candidates"]
        assert not finish_reasons, "nothing follows the finish reason"
        for part in candidate["content"]["parts"]:
            if "text" in part and parts and "text" in parts[-1] and _kind(parts[-1]) == _kind(part):
                parts[-1] = part | {"text": parts[-1]["text"] + part["text"]}
            elif part != {"text": ""}:
                parts.append(part)
        finish_reasons += [candidate["finishReason"]] if "finishReason" in candidate else []
    assert len(finish_reasons) == 1
    assert len({(chunk["responseId"], chunk["modelVersion"]) for chunk in received}) == 1
    return {"parts": parts, "finishReason": finish_reasons[0], "usage": received[-1]["usageMetadata"]}


def _kind(part: Item) -> bool:
    return bool(part.get("thought"))


# --- requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (WHOLE, ("asked", "generateContent", False)),
        (STREAM, ("asked", "streamGenerateContent", True)),
        ("/v1/models/org/name:countTokens", ("org/name", "countTokens", False)),
        ("/v1alpha/models/a:b:generateContent?key=x", ("a:b", "generateContent", False)),
        ("/v1beta/models/m:embedContent", None),
        ("/v1beta/models/:generateContent", None),
        ("/v1/messages", None),
    ],
)
def test_model_and_method_are_read_from_the_path(target: str, expected: tuple[str, str, bool] | None) -> None:
    request = read_target(target)
    assert (request and (request.model, request.method, request.stream)) == expected


def test_a_stream_request_without_alt_sse_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="alt=sse"):
        parse(target="/v1beta/models/asked:streamGenerateContent")


def test_a_conversation_with_tools_thinking_and_images_is_translated() -> None:
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}
    image_part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    request = chat(
        content("look", image),
        content(
            {"text": "hm", "thought": True}, "I look.", called(id="c1"), called("see", {}, id="c2"), role="model"
        ),
        content(gave({"output": "seen"}, "see", id="c2"), gave({"error": "no"}, id="c1", parts=[image])),
        systemInstruction={"parts": [{"text": "Be brief."}, {"text": "Be kind."}]},
        tools=[{"functionDeclarations": [{"name": "run", "parametersJsonSchema": {"type": "object"}}]}],
    )  # fmt: skip
    assert request.messages == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": [{"type": "text", "text": "look"}, image_part]},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning": "hm",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "run", "arguments": '{"a": 1}'}},
                {"id": "c2", "type": "function", "function": {"name": "see", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Error: no\n[image]"},
        {"role": "tool", "tool_call_id": "c2", "content": "seen"},
        {"role": "user", "content": [image_part]},
    ]
    assert request.tools == [{"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        ({"output": "a"}, "a"),
        ({"error": "a"}, "Error: a"),
        ({"output": {"n": 1}}, '{"n":1}'),
        ({"output": "a", "code": 0}, '{"output":"a","code":0}'),
        ({"result": "a"}, '{"result":"a"}'),
        ({}, "{}"),
        (None, ""),
        ("a", '"a"'),
    ],
)
def test_a_function_response_becomes_the_text_of_a_tool_message(response: Any, text: str) -> None:
    request = chat("hi", content(called(), role="model"), content(gave(response)))
    assert request.messages[-1]["content"] == text


def test_consecutive_model_contents_merge_into_one_assistant_message() -> None:
    request = chat(
        "hi",
        content("he", role="model"),
        content("llo", {"thoughtSignature": "c2ln"}, {"text": "", "thoughtSignature": "c2ln"}, role="model"),
        content(called(), role="model"),
        content(gave({"output": "x"})),
    )
    (_, answer, _) = request.messages
    assert (answer["content"], len(answer["tool_calls"])) == ("hello", 1)


def test_calls_without_ids_get_the_same_ids_in_the_response_and_in_later_requests() -> None:
    calls = [called(), called(), called("see", {"b": [1, 2.0]})]
    response = json.dumps({"candidates": [{"content": {"parts": calls, "role": "model"}}]}).encode()
    sampled = [block.id for block in GEMINI.read_response(response) or ()]
    assert len(set(sampled)) == 3
    spaced = called("see", {"b": [1, 2.0]})
    turns = ["hi", content(calls[0], calls[1], spaced, role="model")]
    results = [gave({"output": str(n)}, name) for n, name in enumerate(["run", "see", "run"])]
    conversation = GEMINI.read_request(body(*turns, content(*results)))
    blocks = conversation.blocks
    assert [block.id for block in blocks if block.kind == "tool_use"] == sampled
    results_by_id = {block.id: block.text for block in blocks if block.kind == "tool_result"}
    assert results_by_id == {sampled[0]: "0", sampled[1]: "2", sampled[2]: "1"}


def test_the_generation_config_becomes_sampling_parameters() -> None:
    request = config(
        temperature=0.5,
        topP=0.9,
        topK=40.0,
        maxOutputTokens=7,
        stopSequences=["END"],
        seed=3,
        presencePenalty=0.1,
        frequencyPenalty=0.2,
        candidateCount=1,
        responseModalities=["TEXT"],
        thinkingConfig={"includeThoughts": True, "thinkingBudget": 0, "thinkingLevel": "HIGH"},
    )
    assert request.sampling == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "max_tokens": 7,
        "stop": ["END"],
        "seed": 3,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "reasoning_effort": "high",
    }
    assert request.enable_thinking is False
    assert GEMINI.requested_max_tokens(body(generationConfig={"maxOutputTokens": 7})) == 7
    assert GEMINI.requested_max_tokens(b"{") is GEMINI.requested_max_tokens(body()) is None


def test_gemini_schemas_become_json_schema() -> None:
    declared = {
        "type": "OBJECT",
        "properties": {
            "type": {"type": "STRING", "nullable": True, "maxLength": "5"},
            "list": {"type": "ARRAY", "items": {"type": "INTEGER", "format": "int32"}, "minItems": "1"},
            "any": {"anyOf": [{"type": "NUMBER"}, {"type": "BOOLEAN"}]},
        },
        "required": ["type"],
        "propertyOrdering": ["type"],
    }
    expected = {
        "type": "object",
        "properties": {
            "type": {"type": ["string", "null"], "maxLength": 5},
            "list": {"type": "array", "items": {"type": "integer", "format": "int32"}, "minItems": 1},
            "any": {"anyOf": [{"type": "number"}, {"type": "boolean"}]},
        },
        "required": ["type"],
    }
    (tool,) = chat(tools=[{"functionDeclarations": [{"name": "f", "parameters": declared}]}]).tools
    assert tool["function"]["parameters"] == expected
    format_ = config(responseMimeType="application/json", responseSchema=declared).response_format
    assert format_ and format_["json_schema"]["schema"] == expected
    assert config(responseMimeType="application/json").response_format == {"type": "json_object"}
    assert config(responseMimeType="text/plain").response_format is None


@pytest.mark.parametrize(
    ("choice", "names", "expected"),
    [
        ({"mode": "AUTO"}, ["a", "b"], "auto"),
        ({"mode": "NONE"}, ["a", "b"], "none"),
        ({"mode": "ANY"}, ["a", "b"], "required"),
        ({"mode": "ANY", "allowedFunctionNames": ["b"]}, ["b"], {"type": "function", "function": {"name": "b"}}),
        ({"mode": "VALIDATED", "allowedFunctionNames": ["b"]}, ["b"], "auto"),
        ({"mode": "ANY", "allowedFunctionNames": ["z"]}, [], None),
    ],
)
def test_each_function_calling_mode_becomes_a_tool_choice(choice: Item, names: list[str], expected: Any) -> None:
    tools = [
        {"functionDeclarations": [{"name": "a"}]},
        {"googleSearch": {}},
        {"functionDeclarations": [{"name": "b"}]},
    ]
    request = chat(tools=tools, toolConfig={"functionCallingConfig": choice})
    assert [function["function"]["name"] for function in request.tools] == names
    assert request.tool_choice == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cachedContent": "cachedContents/x"}, "cachedContent"),
        ({"system_instruction": {"parts": []}}, "systemInstruction"),
        ({"generation_config": {}}, "generationConfig"),
        ({"generationConfig": {"candidateCount": 2}}, "candidateCount"),
        ({"generationConfig": {"responseModalities": ["AUDIO"]}}, "responseModalities"),
        ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs"),
        ({"generationConfig": {"responseMimeType": "text/x.enum"}}, "responseMimeType"),
        ({"generationConfig": {"temperature": "hot"}}, "$.generationConfig.temperature"),
        ({"tools": [{"googleSearch": {}}]}, "googleSearch"),
        ({"tools": [{"function_declarations": [{"name": "f"}]}]}, "tools[0]"),
        ({"tools": [{"functionDeclarations": [{}]}]}, "name"),
        ({"contents": [content({"inlineData": {"mimeType": "audio/wav"}})]}, "contents[0].parts[0]"),
        ({"contents": [content("a", {"fileData": {"fileUri": "files/x"}})]}, "contents[0].parts[1]: fileData"),
        ({"contents": [content({"executableCode": {"code": "1"}}, role="model")]}, "executableCode"),
        ({"contents": [content(called(""), role="model")]}, "functionCall.name"),
        ({"contents": [content("x", role="system")]}, "$.contents[0].role"),
        ({"contents": "hi"}, "$.contents"),
        ({"systemInstruction": {"parts": [{"inlineData": {}}]}}, "systemInstruction"),
    ],
)  # fmt: skip
def test_unsupported_fields_are_refused_by_name(fields: Item, field: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        parse(**fields)
    assert field in str(error.value)


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"contents": "\\ud800"'])
def test_invalid_json_requests_are_refused(junk: bytes) -> None:
    with pytest.raises(InvalidRequest):
        GEMINI.parse(junk, GatewaySession("attempt", {}), MAIN, WHOLE)


@pytest.mark.parametrize("args", [b'{"a": "\xff"}', b"{" * 3000 + b'"a":' + b"1" + b"}" * 3000, b'{"a":' * 5000])
def test_invalid_function_arguments_are_refused_or_passed_as_text(args: bytes) -> None:
    sent = body("hi", content(called(args="@"), role="model")).replace(b'"@"', args)
    with contextlib.suppress(InvalidRequest):
        GEMINI.parse(sent, GatewaySession("attempt", {}), MAIN, WHOLE)


def test_a_token_count_takes_contents_or_a_whole_request() -> None:
    count = target_of("asked", "countTokens")
    wrapped = {"generateContentRequest": json.loads(body("hi", systemInstruction=content("S")))}
    session = GatewaySession("attempt", {})
    request = GEMINI.parse(json.dumps(wrapped).encode(), session, MAIN, count)
    assert [message["role"] for message in request.chat.messages] == ["system", "user"]
    assert parse("hi", target=count).chat.messages == [{"role": "user", "content": "hi"}]
    assert json.loads(GEMINI.token_count(7)) == {"totalTokens": 7}


FIELDS = ["contents", "role", "parts", "text", "thought", "functionCall", "functionResponse", "name", "id", "args"]
FIELDS += ["response", "inlineData", "mimeType", "data", "tools", "functionDeclarations", "parameters", "type"]
FIELDS += [
    "systemInstruction",
    "toolConfig",
    "functionCallingConfig",
    "mode",
    "generationConfig",
    "responseSchema",
]
KINDS = ["user", "model", "OBJECT", "ANY", "image/png", "run"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT | st.sampled_from(KINDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=12,
)
PART = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4)
CONTENTS = st.lists(st.fixed_dictionaries({"parts": st.lists(PART, max_size=3)}), max_size=3)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=8), st.none() | CONTENTS)
def test_any_request_is_parsed_or_refused(fields: Item, contents: list[Item] | None) -> None:
    with contextlib.suppress(InvalidRequest):
        parse(**(fields | ({} if contents is None else {"contents": contents})))


# --- responses ------------------------------------------------------------------------------------------


def test_a_generation_becomes_a_gemini_response() -> None:
    response, sampled = whole(
        generation(
            text="hi",
            reasoning="hm",
            tool_calls=(ToolCall("id", "run", '{ "a": 1.0 }'), ToolCall("id", "run", "{oops")),
            usage=Usage(prompt_tokens=10, completion_tokens=2, cached_tokens=4),
        )
    )
    (first, second) = sampled
    broken = {"__unparsedToolInput": {"raw": "{oops", "len": 5}}
    assert first == "id" != second
    assert response == {
        "candidates": [
            {
                "content": {
                    "parts": [
                        {"text": "hm", "thought": True},
                        {"text": "hi"},
                        {"functionCall": {"id": "id", "name": "run", "args": {"a": 1.0}}},
                        {"functionCall": {"id": second, "name": "run", "args": broken}},
                    ],
                    "role": "model",
                },
                "finishReason": "STOP",
                "index": 0,
            }
        ],
        "usageMetadata": {
            "promptTokenCount": 10,
            "candidatesTokenCount": 2,
            "totalTokenCount": 12,
            "cachedContentTokenCount": 4,
        },
        "modelVersion": "asked",
        "responseId": "1",
    }


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("stop", "STOP"), ("tool_calls", "STOP"), ("length", "MAX_TOKENS"), ("content_filter", "SAFETY")],
)
def test_finish_reasons_map_to_gemini_s(reason: str, expected: str) -> None:
    response, _ = whole(generation(text="a", finish_reason=reason))
    assert response["candidates"][0]["finishReason"] == expected


@pytest.mark.parametrize("reason", ["abort", "none", ""])
def test_an_incomplete_generation_is_a_backend_error(reason: str) -> None:
    with pytest.raises(BackendError, match="incomplete"):
        whole(generation(finish_reason=reason))


@given(TEXT, st.none() | TEXT, CALLS)
def test_blocks_of_a_stored_response_keep_the_sampled_arguments(
    text: str, reasoning: str | None, calls: list[ToolCall]
) -> None:
    written = generation(text=text, reasoning=reasoning, tool_calls=tuple(calls))
    reply = GEMINI.message(written, parse(), GatewaySession("attempt", {}), "msg_1")
    blocks = GEMINI.read_response(reply.body) or ()
    read = [(block.id, block.name) for block in blocks if block.kind == "tool_use"]
    assert read == [(id_, call.name) for id_, call in reply.sampled.items()]
    for block, call in zip((b for b in blocks if b.kind == "tool_use"), calls, strict=True):
        assert block.arguments in (call.arguments, "{}") and (block.arguments or not call.arguments.strip())
    assert "".join(block.text for block in blocks if block.kind == "text") == text
    assert "".join(block.text for block in blocks if block.kind == "thinking") == (reasoning or "")


@pytest.mark.parametrize(
    "body", [b"{}", b'{"promptFeedback": {"blockReason": "SAFETY"}}', b'{"candidates": [{}]}']
)
def test_a_response_to_a_blocked_prompt_has_no_message(body: bytes) -> None:
    assert GEMINI.read_response(body) is None


@given(TEXT, st.none() | TEXT, CALLS, st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_stream_assembles_to_the_whole_message(
    text: str, reasoning: str | None, calls: list[ToolCall], finish: str
) -> None:
    written = generation(text=text, reasoning=reasoning, tool_calls=tuple(calls), finish_reason=finish)
    reply = GEMINI.message(written, parse(), GatewaySession("attempt", {}), "msg_1")
    response, streamed = json.loads(reply.body), assembled(GEMINI.events(reply.body))
    candidate = response["candidates"][0]
    assert streamed["parts"] == [part for part in candidate["content"]["parts"] if part != {"text": ""}]
    assert streamed["finishReason"] == candidate["finishReason"]
    assert streamed["usage"] == response["usageMetadata"]


def test_multi_line_arguments_are_streamed_as_one_event() -> None:
    written = generation(tool_calls=(ToolCall("call_1", "run", '{\r\n "command": "ls\\n",\n "n": 1\n}'),))
    reply = GEMINI.message(written, parse(), GatewaySession("attempt", {}), "msg_1")
    stream = GEMINI.events(reply.body)
    assert all(line.startswith(b"data: {") for line in stream.splitlines() if line)
    (part,) = assembled(stream)["parts"]
    assert part["functionCall"]["args"] == {"command": "ls\n", "n": 1}


def test_separators_that_end_lines_in_javascript_are_escaped_in_a_stream() -> None:
    written = generation(text="a\u2028b", tool_calls=(ToolCall("call_1", "run", '{"command": "c\u2029"}'),))
    stream = GEMINI.events(GEMINI.message(written, parse(), GatewaySession("attempt", {}), "msg_1").body)
    assert not {"\u2028", "\u2029"} & set(stream.decode())
    text, call = assembled(stream)["parts"]
    assert (text["text"], call["functionCall"]["args"]) == ("a\u2028b", {"command": "c\u2029"})


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
    written = generation(
        text="".join(text_pieces),
        reasoning="".join(reasoning_pieces) or None,
        tool_calls=tuple(ToolCall("x", name, "".join(pieces)) for name, pieces in calls),
    )
    writer = GEMINI.writer(parse(target=STREAM), GatewaySession("attempt", {}), "msg_1")
    early = b"".join(map(writer.feed, deltas))
    assert b"finishReason" not in early and b"functionCall" not in early
    message, tail = writer.finish(written)
    streamed = assembled(early + tail)
    expected = json.loads(message.body)["candidates"][0]["content"]["parts"]
    assert streamed["parts"] == [part for part in expected if part != {"text": ""}]


# --- faults, models, branches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "name"),
    [
        (fault_of(ContextOverflow(101, 100)), 400, "INVALID_ARGUMENT"),
        (Fault(kind="permission", message="no"), 401, "UNAUTHENTICATED"),
        (Fault(kind="not_found", message="no"), 404, "NOT_FOUND"),
        (fault_of(BackendError("slow down", status=429, retry_after_s=1.2)), 429, "RESOURCE_EXHAUSTED"),
        (fault_of(BackendError("gone")), 503, "UNAVAILABLE"),
        (fault_of(InvalidRequest("n: no")), 400, "INVALID_ARGUMENT"),
        (fault_of(StoreError("disk")), 400, "FAILED_PRECONDITION"),
    ],
)
def test_errors_have_the_google_format(fault: Fault, status: int, name: str) -> None:
    reply = GEMINI.error(fault)
    error = json.loads(reply.body)["error"]
    assert (reply.status, error["code"], error["status"]) == (status, status, name)
    headers = dict(reply.headers)
    assert headers.get(b"retry-after") == (b"2" if status == 429 else None)
    delays = [detail["retryDelay"] for detail in error.get("details", ())]
    assert delays == (["1.2s"] if status == 429 else [])
    assert json.loads(GEMINI.error_event(fault).removeprefix(b"data: "))["error"] == error


def test_a_context_overflow_has_gemini_s_error_message() -> None:
    error = json.loads(GEMINI.error(fault_of(ContextOverflow(101, 100))).body)["error"]
    assert "input token count (101) exceeds the maximum number of tokens allowed (100)" in error["message"]


def test_models_are_listed() -> None:
    listing = json.loads(GEMINI.models(["a", "b"]))
    assert [model["name"] for model in listing["models"]] == ["models/a", "models/b"]


def test_the_branch_is_read_from_the_x_session_id_header() -> None:
    assert GEMINI.branch({}) == Branch(None, None)
    assert GEMINI.branch({b"x-session-id": b"s"}) == Branch("s", None)
