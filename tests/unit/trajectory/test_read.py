"""Every dialect is read into the same shape: the same session makes the same tree whatever the agent speaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.trajectory.samples import merge
from understudy.trajectory.tree import build
from understudy.types import Call
from understudy.wire.stored import read_request, read_response, response_message, shown_messages

Item = dict[str, Any]


def call(number: int, dialect: str, request: object, response: object, **changes: Any) -> Call:
    default_call = Call(
        id=f"c{number}",
        attempt_id="a1",
        sequence=number,
        dialect=dialect,
        requested_model="m",
        backend="openai",
        backend_model="m",
        request=json.dumps(request).encode(),
        response=json.dumps(response).encode(),
        status="ok",
        started_at=number,
        ended_at=number + 0.5,
    )
    return msgspec.structs.replace(default_call, **changes)


def kinds(call: Call) -> list[tuple[int, str, str, str]]:
    return [(b.turn, b.role, b.kind, b.text or b.id) for b in read_request(call).blocks]


CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Mend it."}, {"type": "image_url", "image_url": {}}]},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": "t1", "type": "function", "function": {"name": "sh", "arguments": '{"cmd": "ls"}'}},
            {"id": "t2", "type": "function", "function": {"name": "sh", "arguments": "{broken"}},
        ],
    },
    {"role": "tool", "tool_call_id": "t1", "content": "a.py"},
    {"role": "tool", "tool_call_id": "t2", "content": [{"type": "text", "text": "no"}]},
    {"role": "user", "content": "Go on."},
]

RESPONSES: list[Item] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "Mend it."}, {"type": "input_image", "image_url": ""}],
    },
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
    {"type": "function_call", "call_id": "t1", "name": "shell", "arguments": '{"cmd": "ls"}'},
    {"type": "custom_tool_call", "call_id": "t2", "name": "apply_patch", "input": "*** Begin"},
    {"type": "function_call_output", "call_id": "t1", "output": "a.py"},
    {"type": "custom_tool_call_output", "call_id": "t2", "output": [{"type": "input_text", "text": "no"}]},
    {"type": "message", "role": "user", "content": "Go on."},
]


def test_chat_completions_are_read():
    recorded = call(0, "openai-chat", {"model": "m", "messages": CHAT, "tools": [{"type": "function"}]}, {})
    conversation = read_request(recorded)
    assert (conversation.system, conversation.has_tools) == ("Be brief.", True)
    assert kinds(recorded) == [
        (0, "user", "text", "Mend it."),
        (0, "user", "other", "[image_url]"),
        (1, "assistant", "thinking", "hm"),
        (1, "assistant", "tool_use", "t1"),
        (1, "assistant", "tool_use", "t2"),
        (2, "user", "tool_result", "a.py"),
        (3, "user", "tool_result", "no"),
        (4, "user", "text", "Go on."),
    ]
    messages = shown_messages(conversation)
    assert [message["role"] for message in messages] == [message["role"] for message in CHAT]
    arguments = [call["function"]["arguments"] for call in messages[2]["tool_calls"]]
    assert arguments == ['{"cmd": "ls"}', '{"__unparsedToolInput":{"raw":"{broken","len":7}}']
    assert conversation.blocks[4].inputs() == {}


@pytest.mark.parametrize("dialect", ["openai-chat", "openai-responses"])
def test_tool_results_are_laid_out_in_the_order_of_their_calls(dialect: str):
    def called(number: int) -> Item:
        return {"id": f"t{number}", "type": "function", "function": {"name": "sh", "arguments": "{}"}}

    if dialect == "openai-chat":
        results = [{"role": "tool", "tool_call_id": f"t{n}", "content": f"r{n}"} for n in (2, 0, 1)]
        turn: Item = {"role": "assistant", "content": "", "tool_calls": [called(n) for n in range(3)]}
        body: Item = {"messages": [{"role": "user", "content": "go"}, turn, *results, turn, results[0]]}
    else:
        calls = [{"type": "function_call", "call_id": f"t{n}", "name": "sh", "arguments": "{}"} for n in range(3)]
        outputs = [{"type": "function_call_output", "call_id": f"t{n}", "output": f"r{n}"} for n in (2, 0, 1)]
        body = {"input": [{"role": "user", "content": "go"}, *calls, *outputs, *calls, outputs[0]]}
    messages = shown_messages(read_request(call(0, dialect, {"model": "m"} | body, {})))
    assert [message["content"] for message in messages] == ["go", "", "r0", "r1", "r2", "", "r2"]
    assert [message["tool_call_id"] for message in messages[2:5]] == ["t0", "t1", "t2"]


def test_responses_are_read():
    body = {"model": "m", "instructions": "Be brief.", "input": RESPONSES, "tools": []}
    recorded = call(0, "openai-responses", body, {})
    conversation = read_request(recorded)
    assert (conversation.system, conversation.has_tools) == ("Be brief.\n\nSandboxed.", False)
    assert kinds(recorded) == [
        (0, "user", "text", "Mend it."),
        (0, "user", "other", "[input_image]"),
        (1, "assistant", "thinking", "hm"),
        (1, "assistant", "tool_use", "t1"),
        (1, "assistant", "tool_use", "t2"),
        (2, "user", "tool_result", "a.py"),
        (3, "user", "tool_result", "no"),
        (4, "user", "text", "Go on."),
    ]
    assert conversation.blocks[4].inputs() == {"input": "*** Begin"}
    assert kinds(call(0, "openai-responses", {"input": "Do it."}, {})) == [(0, "user", "text", "Do it.")]


@pytest.mark.parametrize("dialect", ["openai-chat", "openai-responses"])
def test_a_session_of_any_dialect_is_one_branch_and_one_segment(dialect: str):
    def turn(number: int) -> list[Item]:
        arguments = json.dumps({"n": number})
        if dialect == "openai-chat":
            function = {"name": "sh", "arguments": arguments}
            calls = [{"id": f"t{number}", "type": "function", "function": function}]
            return [{"role": "assistant", "content": f"step {number}", "tool_calls": calls}]
        text = [{"type": "output_text", "text": f"step {number}"}]
        return [
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": text},
            {"type": "function_call", "call_id": f"t{number}", "name": "sh", "arguments": arguments},
        ]

    def result(number: int) -> Item:
        if dialect == "openai-chat":
            return {"role": "tool", "tool_call_id": f"t{number}", "content": "ok"}
        return {"type": "function_call_output", "call_id": f"t{number}", "output": "ok"}

    def request(items: Sequence[Item]) -> Item:
        if dialect == "openai-chat":
            return {"messages": [{"role": "system", "content": "S"}, *items], "tools": [{}]}
        return {"instructions": "S", "input": list(items), "tools": [{}]}

    def answer(items: list[Item]) -> Item:
        if dialect == "openai-chat":
            return {"choices": [{"message": items[0], "finish_reason": "tool_calls"}]}
        return {"output": items}

    history: list[Item] = [{"role": "user", "content": "Mend it."}]
    calls: list[Call] = []
    ids: tuple[int, ...] = (1,)
    for number in range(4):
        tokens = (100 + number,)
        token_fields = {"prompt_token_ids": ids, "completion_token_ids": tokens}
        calls.append(call(number, dialect, request(history), answer(turn(number)), **token_fields))
        history = [*history, *turn(number), result(number)]
        ids = (*ids, *tokens, 2)
    tree = build(calls)
    assert {name: len(nodes) for name, nodes in tree.branches.items()} == {"main": 4}
    assert all(node.verbatim for node in tree.nodes)
    assert [block.kind for block in tree.nodes[0].answer or ()][-2:] == ["text", "tool_use"]
    (segment,) = merge(tree).segments
    assert sum(segment.loss_mask) == 4


def test_an_answer_that_is_none_is_told_apart():
    for dialect, bodies in {
        "openai-chat": [{"choices": []}, {"error": {}}, {"choices": [{"message": {"role": "user"}}]}],
        "openai-responses": [{"error": {}}, {"output": "x"}, {"output": [1]}],
        "anthropic": [{"type": "error"}, {"role": "user", "content": []}],
        "unheard of": [{"role": "assistant", "content": []}],
    }.items():
        for body in bodies:
            assert read_response(call(0, dialect, {}, body)) is None
            assert read_request(call(0, dialect, body, {})).blocks == ()


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "role",
                    "content",
                    "text",
                    "id",
                    "call_id",
                    "name",
                    "arguments",
                    "input",
                    "output",
                    "message",
                ]
            ),
            inner
            | st.sampled_from(["message", "assistant", "tool", "reasoning", "function_call", "text", "tool_use"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    ["messages", "input", "system", "instructions", "tools", "tool_choice", "output", "choices", "role", "content"]
)


@given(
    st.sampled_from(["anthropic", "openai-chat", "openai-responses"]),
    st.dictionaries(fields, values | st.lists(values, max_size=3), max_size=5),
    st.dictionaries(fields, values | st.lists(values, max_size=3), max_size=5),
)
def test_whatever_a_body_holds_it_is_a_call_like_any_other(dialect: str, request: Item, response: Item):
    (node,) = build([call(0, dialect, request, response)]).nodes
    assert node.role in ("main", "auxiliary")
    shown_messages(node.conversation)
    response_message(node.answer or ())
