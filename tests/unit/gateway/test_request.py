"""Anthropic Messages requests, recorded and made up, as chat requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from understudy.gateway.session import GatewaySession
from understudy.wire.anthropic import Anthropic
from understudy.wire.dialect import Branch
from understudy.wire.errors import InvalidRequest
from understudy.wire.model import ChatRequest, ToolCall

RECORDINGS = Path(__file__).parents[3].parent / "shared" / "claude-code-traffic"


@cache
def _blobs() -> dict[str, Any]:
    return json.loads((RECORDINGS / "_blobs.json").read_text())


def _whole(value: Any) -> Any:
    if isinstance(value, dict):
        if "$blob" in value:
            return _whole(_blobs()[value["$blob"]])
        return {key: _whole(inner) for key, inner in value.items()}
    return [_whole(inner) for inner in value] if isinstance(value, list) else value


def _bodies(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as lines:
        for line in lines:
            request = json.loads(line).get("request")
            if isinstance(request, dict) and isinstance(request.get("body"), dict):
                yield _whole(request["body"])


def _session(**sampling: Any) -> GatewaySession:
    return GatewaySession("attempt", sampling)


def translate(body: dict[str, Any], session: GatewaySession | None = None) -> ChatRequest:
    return Anthropic().parse(json.dumps(body).encode(), session or _session(), Branch(None, None)).chat


def ask(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 100, "messages": list(messages), **fields}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


# --- every recording -----------------------------------------------------------------------------------


def _texts_in(body: dict[str, Any]) -> Iterator[str]:
    """What a model must be told, in order: an own, plain walk over the request."""
    for block in body["system"]:
        if "x-anthropic-billing-header" not in block["text"]:
            yield block["text"]
    for message in body["messages"]:
        content = message["content"]
        for block in [text(content)] if isinstance(content, str) else content:
            match block["type"]:
                case "text":
                    yield block["text"]
                case "tool_use":
                    yield block["name"]
                case "tool_result":
                    inner = block["content"]
                    for part in [text(inner)] if isinstance(inner, str) else inner:
                        yield part.get("text", "[image]")


def _texts_out(chat: ChatRequest) -> str:
    out: list[str] = []
    for message in chat.messages:
        content = message["content"]
        parts = [text(content)] if isinstance(content, str) else content
        out += [part["text"] for part in parts if part["type"] == "text"]
        out += [call["function"]["name"] for call in message.get("tool_calls", [])]
    return "\n".join(out)


def _answer_in_the_order_of_calls(body: dict[str, Any]) -> None:
    """Put the tool results of each message in the order of their calls."""
    for call, answer in pairwise(body["messages"]):
        if isinstance(answer["content"], list):
            call_ids = [block.get("id") for block in call["content"] if isinstance(block, dict)]
            positions = [n for n, block in enumerate(answer["content"]) if block["type"] == "tool_result"]
            results = sorted(
                (answer["content"][n] for n in positions), key=lambda b: call_ids.index(b["tool_use_id"])
            )
            for position, result in zip(positions, results, strict=True):
                answer["content"][position] = result


def _recordings() -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted(RECORDINGS.glob("*.jsonl"))]


@pytest.mark.skipif(not RECORDINGS.exists(), reason="the recordings are not here")
@pytest.mark.parametrize("path", _recordings())
def test_translated_recordings_keep_all_text_in_order(path: Path) -> None:
    for body in _bodies(path):
        if any("input_schema" not in tool for tool in body["tools"]):
            with pytest.raises(InvalidRequest, match="web_search"):
                translate(body)
            continue
        chat = translate(body)
        _answer_in_the_order_of_calls(body)
        output, position = _texts_out(chat), 0
        for expected in _texts_in(body):
            position = output.index(expected, position) + len(expected)
        assert "x-anthropic-billing-header" not in output

        blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        tool_calls = [block for block in blocks if block["type"] == "tool_use"]
        calls = [call for message in chat.messages for call in message.get("tool_calls", [])]
        assert [call["id"] for call in calls] == [block["id"] for block in tool_calls]
        assert [json.loads(call["function"]["arguments"]) for call in calls] == [b["input"] for b in tool_calls]

        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        answers = [message for message in chat.messages if message["role"] == "tool"]
        assert [message["tool_call_id"] for message in answers] == results

        images = json.dumps(body["messages"]).count('"type": "image"')
        assert json.dumps(chat.messages).count('"type": "image_url"') == images
        assert [tool["function"]["name"] for tool in chat.tools] == [tool["name"] for tool in body["tools"]]
        assert chat.sampling["max_tokens"] == body["max_tokens"]
        assert chat.enable_thinking is (False if body.get("thinking") == {"type": "disabled"} else None)
        assert (chat.response_format is not None) == ("format" in body.get("output_config", {}))
        _check_tool_messages_follow_their_calls(chat)


def _check_tool_messages_follow_their_calls(chat: ChatRequest) -> None:
    before = ""
    for message in chat.messages:
        if message["role"] == "tool":
            assert before in ("tool", "assistant")
        before = message["role"]


@pytest.mark.skipif(not RECORDINGS.exists(), reason="the recordings are not here")
def test_the_translation_of_a_longer_conversation_extends_the_shorter_one() -> None:
    bodies = list(_bodies(RECORDINGS / "26b_long_horizon_qwen.jsonl"))
    chats = [translate(body) for body in bodies]
    extended_count = 0
    for before, after in pairwise(chats):
        if len(after.messages) > len(before.messages):
            assert after.messages[: len(before.messages)] == before.messages
            extended_count += 1
    assert extended_count > 10


# --- single rules --------------------------------------------------------------------------------------


def test_system_blocks_are_joined_and_the_billing_block_dropped() -> None:
    system = [text("x-anthropic-billing-header: cc_version=1"), text("one"), text("two")]
    assert translate(ask(system=system)).messages == [{"role": "system", "content": "one\n\ntwo"}]
    assert translate(ask(system="plain")).messages == [{"role": "system", "content": "plain"}]


def test_an_inline_system_message_becomes_a_user_message_in_its_place() -> None:
    chat = translate(ask(user(text("a")), {"role": "system", "content": "rule"}, user(text("b"))))
    assert chat.messages == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "rule"},
        {"role": "user", "content": "b"},
    ]


def test_tool_results_and_user_parts_keep_their_order_and_images_follow() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    chat = translate(
        ask(
            user(
                text("before"),
                {"type": "tool_result", "tool_use_id": "t1", "content": [image, text("seen")]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "bad", "is_error": True},
                {"type": "tool_result", "tool_use_id": "t3"},
                text("after"),
            )
        )
    )
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert chat.messages == [
        {"role": "user", "content": "before"},
        {"role": "tool", "tool_call_id": "t1", "content": "[image]\nseen"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: bad"},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
        {"role": "user", "content": [url, text("after")]},
    ]


def test_tool_results_come_in_the_order_of_their_calls() -> None:
    calls = [{"type": "tool_use", "id": f"t{n}", "name": "Bash", "input": {}} for n in range(3)]
    results = [{"type": "tool_result", "tool_use_id": f"t{n}", "content": str(n)} for n in (2, 0, 1)]
    messages = [
        user(text("go")),
        {"role": "assistant", "content": calls},
        user(*results[:2], text("x"), results[2]),
    ]
    chat = translate(ask(*messages))
    assert [(m["role"], m["content"]) for m in chat.messages[2:]] == [
        ("tool", "0"),
        ("tool", "1"),
        ("user", "x"),
        ("tool", "2"),
    ]


def test_thinking_becomes_reasoning_and_redacted_thinking_is_left_out() -> None:
    blocks = [
        {"type": "redacted_thinking", "data": "zzz"},
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        text("said"),
    ]
    assert translate(ask({"role": "assistant", "content": blocks})).messages == [
        {"role": "assistant", "content": "said", "reasoning": "hm"}
    ]


@pytest.mark.parametrize(
    ("choice", "expected", "parallel"),
    [
        ({"type": "auto"}, "auto", None),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "none"}, "none", None),
        ({"type": "tool", "name": "T"}, {"type": "function", "function": {"name": "T"}}, None),
    ],
)
def test_each_tool_choice_is_translated_and_placeholder_tools_are_dropped(
    choice: dict[str, Any], expected: Any, parallel: bool | None
) -> None:
    tools = [
        {"name": "T", "description": "d", "input_schema": {"type": "object"}},
        {"name": "DeferredToolPlaceholder", "input_schema": {}},
    ]
    chat = translate(ask(tools=tools, tool_choice=choice))
    assert (chat.tool_choice, chat.parallel_tool_calls) == (expected, parallel)
    function = {"name": "T", "description": "d", "parameters": {"type": "object"}}
    assert chat.tools == [{"type": "function", "function": function}]


def test_the_sampling_of_the_attempt_overrides_that_of_the_agent() -> None:
    body = ask(temperature=1, top_p=0.5, stop_sequences=["X"], thinking={"type": "disabled"})
    chat = translate(body, _session(seed=7, temperature=0.2))
    assert chat.sampling == {"max_tokens": 100, "temperature": 0.2, "top_p": 0.5, "stop": ["X"], "seed": 7}
    assert chat.enable_thinking is False


def test_an_output_format_becomes_a_json_schema_response_format() -> None:
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    chat = translate(ask(output_config={"format": format_, "effort": "high"}))
    assert chat.response_format == {
        "type": "json_schema",
        "json_schema": {"name": "output", "schema": {"type": "object"}, "strict": True},
    }


def test_echoed_tool_calls_are_sent_with_the_sampled_arguments_and_ids() -> None:
    session = _session()
    raw = '{"new_string" : "b", "file_path":"/x"}'
    session.record_response(Branch(None, None), "call_1", {"toolu_1": ToolCall("functions.Edit:0", "Edit", raw)})
    echo = {"file_path": "/x", "new_string": "b", "replace_all": False}
    turn = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "Edit", "input": echo}]}
    result = user({"type": "tool_result", "tool_use_id": "toolu_1", "content": "ok"})
    assistant, tool = translate(ask(turn, result), session).messages
    assert assistant["tool_calls"][0]["function"]["arguments"] == raw
    assert assistant["tool_calls"][0]["id"] == tool["tool_call_id"] == "functions.Edit:0"


def test_a_lone_surrogate_in_a_request_is_replaced() -> None:
    body = b'{"model": "m", "messages": [{"role": "user", "content": "cut \\ud83d here \\ud83d\\ude00"}]}'
    chat = Anthropic().parse(body, _session(), Branch(None, None)).chat
    assert chat.messages == [{"role": "user", "content": "cut \ufffd here \U0001f600"}]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"model": "m", "tools": [' + b'{"input_schema": ' * 100_000, "not valid JSON"),
        (b'{"model": NaN, "messages": []}', "not valid JSON"),
        (b"[]", "Expected `object`, got `array`"),
        (b'{"model": "m"}', "missing required field `messages`"),
        (b'{"model": 1, "messages": []}', r"Expected `str`, got `int` - at `\$.model`"),
        (
            b'{"model": "m", "messages": [{"role": "tool", "content": ""}]}',
            r"expected one of .*user.* at `\$.messages\[0\].role",
        ),
        (b'{"model": "m", "messages": [{"role": "user", "content": [1]}]}', r"\$.messages\[0\].content\[0\]"),
        (
            b'{"model": "m", "messages": [], "tools": [{"name": "web_search", "type": "w"}]}',
            "missing input_schema",
        ),
        (b'{"model": "m", "messages": [], "output_config": {"format": {"type": "x"}}}', "expected json_schema"),
    ],
)
def test_an_invalid_request_is_refused_with_the_reason(body: bytes, expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        Anthropic().parse(body, _session(), Branch(None, None))


# --- every kind of block -------------------------------------------------------------------------------

PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AA=="}}
LEFT_OUT = "[{} left out: the model cannot read it]"


@pytest.mark.parametrize(
    ("block", "part"),
    [
        (
            {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}},
            {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
        ),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, text(LEFT_OUT.format("image"))),
        (PDF, text(LEFT_OUT.format("document"))),
        ({"type": "document", "source": {"type": "text", "data": "plain"}, "title": "T"}, text("T\nplain")),
        ({"type": "document", "source": {"type": "content", "content": [text("a"), text("b")]}}, text("a\nb")),
        ({"type": "document", "source": {"type": "content", "content": "c"}}, text("c")),
        (
            {"type": "search_result", "source": "https://example.com", "title": "T", "content": [text("found")]},
            text("T\nhttps://example.com\nfound"),
        ),
        ({"type": "container_upload", "file_id": "f"}, text(LEFT_OUT.format("container_upload"))),
        ({"type": "of_tomorrow", "content": {"type": "x", "y": 1}}, text(LEFT_OUT.format("of_tomorrow"))),
    ],
)
def test_each_user_content_block_is_translated_in_messages_and_tool_results(
    block: dict[str, Any], part: dict[str, Any]
) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    (message,) = translate(ask(user(image, block))).messages
    assert message["content"][1] == part
    answered, *_ = translate(ask(user({"type": "tool_result", "tool_use_id": "t", "content": [block]}))).messages
    assert answered["content"] == part.get("text", "[image]")


def test_results_of_anthropic_server_tools_become_text() -> None:
    search_result = {
        "type": "web_search_result",
        "title": "T",
        "url": "https://example.com",
        "encrypted_content": "x",
    }
    execution_result = {
        "type": "bash_code_execution_result",
        "stdout": "out",
        "stderr": "err",
        "return_code": 1,
        "content": [],
    }
    failed = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
    fetched = {"type": "web_fetch_result", "url": "https://example.com/b", "content": {"type": "document"}}
    blocks = [
        text("Looking."),
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [search_result]},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": failed},
        {"type": "web_fetch_tool_result", "tool_use_id": "s", "content": fetched},
        {"type": "bash_code_execution_tool_result", "tool_use_id": "s", "content": execution_result},
        {"type": "mcp_tool_use", "id": "m", "name": "find", "server_name": "s", "input": {}},
        {"type": "mcp_tool_result", "tool_use_id": "m", "is_error": False, "content": [text("mcp")]},
        {"type": "compaction", "content": "so far"},
        {"type": "fallback", "from": "a", "to": "b"},
    ]
    (turn,) = translate(ask({"role": "assistant", "content": blocks})).messages
    assert turn["content"].split("\n") == [
        "Looking.",
        '[web_search {"query": "q"}]',
        "T",
        "https://example.com",
        "unavailable",
        "https://example.com/b",
        "out",
        "err",
        "[find {}]",
        "mcp",
        "so far",
    ]


def test_deferred_and_later_added_tools_are_all_offered_and_changes_become_text() -> None:
    schema = {"type": "object"}
    deferred = {"name": "Later", "input_schema": schema, "defer_loading": True, "type": "custom", "strict": True}
    tool_result = {
        "type": "tool_result",
        "tool_use_id": "t",
        "content": [{"type": "tool_reference", "tool_name": "Later"}],
    }
    added = {"type": "tool_definition", "definition": {"name": "New", "input_schema": schema}}
    changes = [
        {"type": "tool_addition", "tool": added},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "Later"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Old"}},
    ]
    chat = translate(ask(user(tool_result), {"role": "system", "content": changes}, tools=[deferred]))
    assert [tool["function"]["name"] for tool in chat.tools] == ["Later", "New"]
    assert chat.messages[0]["content"] == "[tool Later]"
    assert chat.messages[1]["content"].split("\n") == [
        "[tool New can be used from here on]",
        "[tool Later can be used from here on]",
        "[tool Old can no longer be used]",
    ]


def test_fields_that_only_anthropic_uses_are_ignored() -> None:
    extra: dict[str, Any] = {
        "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "thinking": {"type": "adaptive"},
        "cache_control": {"type": "ephemeral"},
        "container": None,
        "mcp_servers": [],
        "service_tier": "auto",
        "speed": "fast",
        "of_tomorrow": {"a": [1]},
    }
    plain, more = translate(ask(user(text("hi")))), translate(ask(user(text("hi")), **extra))
    assert (more.messages, more.tools, more.sampling) == (plain.messages, plain.tools, plain.sampling)
    assert more.enable_thinking is None
    assert more.response_format is None


def test_a_token_count_request_needs_no_max_tokens() -> None:
    body = ask(user(text("hi")))
    del body["max_tokens"]
    assert translate(body).sampling == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 0}, r"\$.max_tokens"),
        ({"temperature": -1}, r"\$.temperature"),
        ({"top_p": 2}, r"\$.top_p"),
        ({"stop_sequences": "X"}, r"\$.stop_sequences"),
        ({"tool_choice": {"type": "some"}}, r"\$.tool_choice.type"),
        ({"tools": [{"type": "mcp_toolset", "mcp_server_name": "s"}]}, "mcp_toolset"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash'"),
        ({"stream": "yes"}, r"\$.stream"),
    ],
)
def test_an_invalid_field_is_named_in_the_error(fields: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidRequest, match=expected):
        translate(ask(user(text("hi")), **fields))


def test_the_branch_is_read_from_the_headers() -> None:
    headers = {b"x-claude-code-session-id": b"s", b"x-claude-code-agent-id": b"a"}
    assert Anthropic().branch(headers) == Branch("s", "a")
    assert Anthropic().branch({b"x-claude-code-agent-id": b""}) == Branch(None, None)
    session = _session()
    chat = Anthropic().parse(json.dumps(ask(user(text("hi")))).encode(), session, Branch("s", "a")).chat
    assert chat.conversation is session.conversation(Branch("s", "a"))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"stream": true, "model": "m", "messages": 1}', ("m", True)),
        (b'{"model": "a", "messages": [], "model": "b"}', ("b", False)),
    ],
)
def test_peek_reads_model_and_stream_without_the_messages(body: bytes, expected: tuple[str, bool]) -> None:
    assert Anthropic().peek(body) == expected


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"model": 1}', b'{"model": "m", "stream": 1}', b"\xff"])
def test_peek_refuses_an_invalid_request(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        Anthropic().peek(body)
