"""One conversation, told in each dialect: a model is shown the same, whatever the agent speaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.session import GatewaySession
from understudy.wire.dialect import Branch
from understudy.wire.dialects import DIALECTS
from understudy.wire.model import ToolCall

MAIN = Branch("s", None)
TEXT = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)
IMAGE = "data:image/png;base64,AA=="
SAMPLED, ECHOED = '{ "n": 5000.0 }', '{"n":5000}'
"""What the model wrote in calls that this session sampled, and what agents make of it."""


@dataclass(frozen=True)
class Words:
    """What somebody other than the model says: text and, for None, an image."""

    parts: list[str | None]
    role: str = "user"


@dataclass(frozen=True)
class Turn:
    """What the model said, what its tools gave in the order in which they ended, and what was said then."""

    text: str
    reasoning: str
    calls: list[str]
    results: list[tuple[str, list[str | None]]]
    then: list[Words] = field(default_factory=list[Words])


@dataclass(frozen=True)
class Conversation:
    system: list[str]
    asked: Words
    turns: list[Turn]


PARTS = st.lists(TEXT | st.none(), min_size=1, max_size=3)
SYSTEM = st.builds(Words, st.lists(TEXT, min_size=1, max_size=1), st.just("system"))
USER = st.builds(Words, PARTS)


@st.composite
def conversations(draw: st.DrawFn) -> Conversation:
    numbers = iter(range(100))
    turns: list[Turn] = []
    for _ in range(draw(st.integers(0, 3))):
        calls = [f"t{next(numbers)}" for _ in range(draw(st.integers(0, 3)))]
        results = [(id_, draw(PARTS)) for id_ in draw(st.permutations(calls))]
        then = draw(st.lists(USER | SYSTEM, min_size=0 if calls else 1, max_size=2))
        turns.append(Turn(draw(TEXT), draw(st.just("") | TEXT), calls, results, then))
    return Conversation(draw(st.lists(TEXT, max_size=2)), draw(USER), turns)


def arguments(call_id: str) -> str:
    """Every other call is one that this session sampled."""
    return ECHOED if int(call_id[1:]) % 2 else '{"a": [1, "é"]}'


def anthropic(conversation: Conversation, *, merged: bool) -> dict[str, Any]:
    def parts(contents: list[str | None]) -> list[dict[str, Any]]:
        image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        return [image if part is None else {"type": "text", "text": part} for part in contents]

    def encode_turn(turn: Turn) -> Iterator[dict[str, Any]]:
        thinking = [{"type": "thinking", "thinking": turn.reasoning, "signature": ""}] if turn.reasoning else []
        calls = [
            {"type": "tool_use", "id": id_, "name": "run", "input": Raw(arguments(id_))} for id_ in turn.calls
        ]
        yield {"role": "assistant", "content": [*thinking, *parts([turn.text]), *calls]}
        results = [
            {"type": "tool_result", "tool_use_id": i, "content": parts(output)} for i, output in turn.results
        ]
        then = list(turn.then)
        if merged and results and then and then[0].role == "user":
            results += parts(then.pop(0).parts)
        if results:
            yield {"role": "user", "content": results}
        for message in then:
            yield {"role": message.role, "content": parts(message.parts)}

    messages = [
        {"role": "user", "content": parts(conversation.asked.parts)},
        *(m for t in conversation.turns for m in encode_turn(t)),
    ]
    return {"model": "m", "max_tokens": 9, "system": parts([*conversation.system]), "messages": messages}


def chat(conversation: Conversation) -> dict[str, Any]:
    def parts(contents: list[str | None]) -> list[dict[str, Any]]:
        image = {"type": "image_url", "image_url": {"url": IMAGE}}
        return [image if part is None else {"type": "text", "text": part} for part in contents]

    def encode_turn(turn: Turn) -> Iterator[dict[str, Any]]:
        calls = [
            {"id": id_, "type": "function", "function": {"name": "run", "arguments": arguments(id_)}}
            for id_ in turn.calls
        ]
        reasoning = {"reasoning_content": turn.reasoning} if turn.reasoning else {}
        yield {"role": "assistant", "content": turn.text, "tool_calls": calls} | reasoning
        for id_, output in turn.results:
            yield {"role": "tool", "tool_call_id": id_, "content": parts(output)}
        for message in turn.then:
            yield {"role": message.role, "content": parts(message.parts)}

    system = [{"role": "system", "content": text} for text in conversation.system]
    question = {"role": "user", "content": parts(conversation.asked.parts)}
    return {
        "model": "m",
        "messages": [*system, question, *(m for t in conversation.turns for m in encode_turn(t))],
    }


def responses(conversation: Conversation) -> dict[str, Any]:
    def parts(contents: list[str | None], kind: str = "input_text") -> list[dict[str, Any]]:
        image = {"type": "input_image", "image_url": IMAGE}
        return [image if part is None else {"type": kind, "text": part} for part in contents]

    def encode_turn(turn: Turn) -> Iterator[dict[str, Any]]:
        if turn.reasoning:
            yield {"type": "reasoning", "summary": [], "content": parts([turn.reasoning], "reasoning_text")}
        yield {"type": "message", "role": "assistant", "content": parts([turn.text], "output_text")}
        for id_ in turn.calls:
            yield {"type": "function_call", "call_id": id_, "name": "run", "arguments": arguments(id_)}
        for id_, output in turn.results:
            yield {"type": "function_call_output", "call_id": id_, "output": parts(output)}
        for message in turn.then:
            role = "developer" if message.role == "system" else message.role
            yield {"type": "message", "role": role, "content": parts(message.parts)}

    system = [{"role": "developer", "content": text} for text in conversation.system[1:]]
    question = {"role": "user", "content": parts(conversation.asked.parts)}
    items = [*system, question, *(item for t in conversation.turns for item in encode_turn(t))]
    return {"model": "m", "instructions": conversation.system[0] if conversation.system else None, "input": items}


def gemini(conversation: Conversation) -> dict[str, Any]:
    image = {"inlineData": {"mimeType": "image/png", "data": "AA=="}}

    def parts(texts: list[str | None]) -> list[dict[str, Any]]:
        return [image if part is None else {"text": part} for part in texts]

    def result(id_: str, output: list[str | None]) -> dict[str, Any]:
        text = "\n".join(part for part in output if part is not None)
        response = {"response": {"output": text}, "parts": [image for part in output if part is None]}
        return {"functionResponse": {"id": id_, "name": "run"} | response}

    def encode_turn(turn: Turn) -> Iterator[dict[str, Any]]:
        thoughts = [{"text": turn.reasoning, "thought": True}] if turn.reasoning else []
        calls = [
            {"functionCall": {"id": id_, "name": "run", "args": Raw(arguments(id_))}, "thoughtSignature": "c2ln"}
            for id_ in turn.calls
        ]
        yield {"role": "model", "parts": [*thoughts, *parts([turn.text]), *calls]}
        if turn.results:
            yield {"role": "user", "parts": [result(id_, output) for id_, output in turn.results]}
        for message in turn.then:
            yield {"role": "user", "parts": parts(message.parts)}

    contents = [
        {"role": "user", "parts": parts(conversation.asked.parts)},
        *(c for t in conversation.turns for c in encode_turn(t)),
    ]
    return {"systemInstruction": {"parts": parts([*conversation.system])}, "contents": contents}


def as_gemini_can_say(conversation: Conversation) -> Conversation:
    """The same where all that follows the instructions is the user's, and images of results follow their texts."""

    def convert_turn(turn: Turn) -> Turn:
        results = [(id_, sorted(output, key=lambda part: part is None)) for id_, output in turn.results]
        return replace(turn, results=results, then=[replace(message, role="user") for message in turn.then])

    return replace(conversation, turns=[convert_turn(each) for each in conversation.turns])


class Raw(str):
    """JSON text that stands in a body as it is."""


def encoded(body: dict[str, Any]) -> bytes:
    raws: list[str] = []

    def swapped(value: Any) -> Any:
        if isinstance(value, Raw):
            raws.append(value)
            return f"«raw {len(raws) - 1}»"
        if isinstance(value, dict):
            return {key: swapped(inner) for key, inner in value.items()}
        return [swapped(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(swapped(body), ensure_ascii=False)
    for number, raw in enumerate(raws):
        text = text.replace(f'"«raw {number}»"', raw)
    return text.encode()


def shown(dialect: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    session = GatewaySession("attempt", {})
    sampled = {f"t{n}": ToolCall(f"backend-{n}", "run", SAMPLED) for n in range(1, 100, 2)}
    session.record_response(MAIN, "call_0", sampled)
    target = DIALECTS[dialect].target("m")
    return DIALECTS[dialect].parse(encoded(body), session, MAIN, target).chat.messages


@given(conversations(), st.booleans())
def test_a_conversation_becomes_the_same_messages_from_every_dialect(
    conversation: Conversation, merged: bool
) -> None:
    expected = shown("openai-chat", chat(conversation))
    assert shown("openai-responses", responses(conversation)) == expected
    assert shown("anthropic", anthropic(conversation, merged=merged)) == expected
    same = as_gemini_can_say(conversation)
    assert shown("gemini", gemini(same)) == shown("openai-chat", chat(same))


CONVERSATION = Conversation(
    ["Be brief.", "Be kind."],
    Words(["Look.", None]),
    [
        Turn(
            "I look.",
            "hm",
            ["t0", "t1", "t2"],
            [("t2", ["two"]), ("t0", ["zero", None]), ("t1", ["one"])],
            [Words(["Well?"]), Words(["Hurry."], "system")],
        ),
        Turn("Done.", "", ["t3"], [("t3", [None])], [Words(["Stop."], "system")]),
    ],
)


@pytest.mark.parametrize("dialect", ["anthropic", "openai-chat", "openai-responses"])
def test_the_example_conversation_becomes_the_expected_messages(dialect: str) -> None:
    encode_conversation = {"openai-chat": chat, "openai-responses": responses}.get(
        dialect, lambda c: anthropic(c, merged=True)
    )
    image = {"type": "image_url", "image_url": {"url": IMAGE}}

    def call(id_: str, written: str) -> dict[str, Any]:
        return {"id": id_, "type": "function", "function": {"name": "run", "arguments": written}}

    calls = [call("t0", '{"a": [1, "é"]}'), call("backend-1", SAMPLED), call("t2", '{"a": [1, "é"]}')]
    assert shown(dialect, encode_conversation(CONVERSATION)) == [
        {"role": "system", "content": "Be brief.\n\nBe kind."},
        {"role": "user", "content": [{"type": "text", "text": "Look."}, image]},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "t0", "content": "zero\n[image]"},
        {"role": "tool", "tool_call_id": "backend-1", "content": "one"},
        {"role": "tool", "tool_call_id": "t2", "content": "two"},
        {"role": "user", "content": [image, {"type": "text", "text": "Well?"}]},
        {"role": "user", "content": "Hurry."},
        {"role": "assistant", "content": "Done.", "tool_calls": [call("backend-3", SAMPLED)]},
        {"role": "tool", "tool_call_id": "backend-3", "content": "[image]"},
        {"role": "user", "content": [image]},
        {"role": "user", "content": "Stop."},
    ]
