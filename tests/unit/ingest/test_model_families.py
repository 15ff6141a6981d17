"""Families of models by name, and messages in the order of a chat template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.ingest.model_families import model_family
from understudy.ingest.trace import MISSING_RESULT, PlainRenderer, normalise_messages, text_of

from support import example_count


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("claude-opus-4-7", "claude"),
        ("us.anthropic.claude-sonnet-4-5-20250929-v1:0", "claude"),
        ("opus", "claude"),
        ("gpt-5", "gpt"),
        ("openai/gpt-oss-120b", "gpt"),
        ("o3", "gpt"),
        ("o4-mini", "gpt"),
        ("gemini-3-pro", "gemini"),
        ("deepseek/deepseek-v4-pro", "deepseek"),
        ("deepseek-r1-distill-qwen-32b", "deepseek"),
        ("glm-4.7", "glm"),
        ("zai-org/GLM-5", "glm"),
        ("Qwen/Qwen3-Coder-30B", "qwen"),
        ("moonshotai/kimi-k2", "kimi"),
        ("mistralai/Devstral-Small", "mistral"),
        ("meta-llama/Llama-4", "llama"),
        ("nvidia/llama-3.1-nemotron-70b", "nemotron"),
        ("grok-4", "grok"),
        ("EleutherAI/gpt-neo-1b", None),
        ("o3r-own-model", None),
        ("my-model", None),
        ("<synthetic>", None),
        ("", None),
        (None, None),
    ],
)
def test_a_model_name_maps_to_its_family(model: str | None, expected: str | None) -> None:
    assert model_family(model) == expected


def test_messages_are_normalised_to_a_valid_order() -> None:
    call = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "one"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "user", "content": [{"type": "text", "text": "meanwhile"}]},
        {"role": "tool", "tool_call_id": "t1", "content": "r", "is_error": True},
        {"role": "user", "content": "then"},
        {"role": "assistant", "content": ""},
    ]
    before = [dict(message) for message in messages]
    assert normalise_messages(messages) == [
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "t1", "content": "r"},
        {"role": "user", "content": [{"type": "text", "text": "meanwhile"}, {"type": "text", "text": "then"}]},
    ]
    assert messages == before


def test_every_call_has_one_result() -> None:
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ("t1", "t2")
    ]
    request = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "t2", "content": "two"}
    missing = {"role": "tool", "tool_call_id": "t1", "content": MISSING_RESULT}
    assert normalise_messages([request, result]) == [request, result, missing]
    assert normalise_messages([request, result, result, {"role": "assistant", "content": "a"}]) == [
        request,
        result,
        missing,
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "a"},
    ]
    assert normalise_messages([{**request, "tool_calls": calls[:1]}, {"role": "assistant", "content": "a"}]) == [
        {**request, "tool_calls": calls[:1]},
        missing,
        {"role": "assistant", "content": "a"},
    ]
    assert normalise_messages([{"role": "assistant", "content": None, "tool_calls": calls[:1]}, request])[0][
        "tool_calls"
    ] == [
        calls[0],
        *calls,
    ]


def test_plain_messages_keep_their_thinking_for_the_action() -> None:
    body = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert PlainRenderer().history(body) == [{"role": "assistant", "content": "yes"}]
    action = PlainRenderer().action([body, {"role": "assistant", "content": None, "thinking_hidden": True}])
    assert (action.content, action.thinking, action.thinking_hidden) == ("yes", "hm", False)
    assert text_of([{"type": "image_url"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "a\nb"


@settings(max_examples=example_count(200))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["user", "assistant", "tool", "system"]), st.sampled_from(["", "x"]), st.integers(0, 3)
        )
    )
)
def test_normalised_messages_form_a_valid_conversation(turns: list[tuple[str, str, int]]) -> None:
    messages: list[dict[str, Any]] = []
    for role, content, number in turns:
        message: dict[str, Any] = {"role": role, "content": content}
        if role == "tool":
            message["tool_call_id"] = f"t{number}"
        if role == "assistant" and number:
            message["tool_calls"] = [{"id": f"t{at}", "type": "function", "function": {}} for at in range(number)]
        messages.append(message)
    done = normalise_messages(messages)
    waiting: list[str] = []
    for message, before in zip(done, [{"role": "system"}, *done], strict=False):
        assert message["role"] in ("tool", "system") or message["role"] != before["role"]
        if message["role"] == "tool":
            waiting.remove(message["tool_call_id"])
        else:
            assert not waiting
            waiting = [call["id"] for call in message.get("tool_calls", [])]
    assert not waiting
    assert sum(len(message["content"] or "") for message in messages) <= sum(len(m["content"] or "") for m in done)
