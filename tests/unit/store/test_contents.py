"""Request bodies: whatever the bytes, cutting and joining gives them back; and a conversation shares its parts."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from understudy.errors import StoreError
from understudy.store.contents import MAX_MESSAGES, Parts, join_body, split_body

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(["system", "tools", "messages", "input", "instructions", "model", 'a"b\\', "é"]) | st.text(
    max_size=3
)
objects = st.dictionaries(names, values | st.lists(values, max_size=6), max_size=6)


def rejoin(parts: Parts) -> bytes:
    return join_body(parts.skeleton, parts.system, parts.tools, parts.messages)


@given(st.binary(max_size=200))
@example(b"")
@example(b"{}")
@example(b'{"messages":[1,2,25]}')
@example(b'{"messages":[],"messages":[1]}')
@example(b'{"messages":[1],"tools":2,"messages":[3,4]}')
@example(b' {"messages" : [ 1 ,  2,3 ] , "system":"\xff" } ')
@example(b'{"\xff":1}')
@example(b'{"messages":' + b"[" * 100_000)
@example(b'{"messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
def test_any_bytes_come_back(body: bytes) -> None:
    assert rejoin(split_body(body)) == body


@given(objects, st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]), st.sampled_from([None, 1, "\t"]))
def test_any_object_in_any_spacing_comes_back(
    value: dict[str, object], separators: tuple[str, str], indent: int | str | None
) -> None:
    body = json.dumps(value, separators=separators, indent=indent, ensure_ascii=False)
    assert rejoin(split_body(body.encode("utf-8", "surrogatepass"))) == body.encode("utf-8", "surrogatepass")


@pytest.mark.parametrize(("messages_key", "system_key"), [("messages", "system"), ("input", "instructions")])
@given(st.lists(values, min_size=1, max_size=6), values, values, st.sampled_from([(",", ":"), (", ", ": ")]))
def test_an_ordinary_body_is_cut_into_system_tools_and_messages(
    messages_key: str,
    system_key: str,
    messages: list[object],
    system: object,
    tools: object,
    separators: tuple[str, str],
) -> None:
    body = json.dumps(
        {"model": "m", messages_key: messages, system_key: system, "tools": tools}, separators=separators
    )
    parts = split_body(body.encode())
    assert [json.loads(bytes(message)) for message in parts.messages] == messages
    assert parts.system is not None and json.loads(bytes(parts.system)) == system
    assert parts.tools is not None and json.loads(bytes(parts.tools)) == tools


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_two_turns_of_a_conversation_differ_only_in_the_new_messages(separators: tuple[str, str]) -> None:
    def body(count: int) -> bytes:
        messages = [{"role": "user", "content": f"message {n}"} for n in range(count)]
        whole = {"messages": messages, "system": [{"text": "s"}], "model": "m", "stream": True}
        return json.dumps(whole, separators=separators).encode()

    before, after = split_body(body(4)), split_body(body(6))
    assert before.skeleton == after.skeleton
    assert [bytes(m) for m in before.messages] == [bytes(m) for m in after.messages][:4]


def test_an_input_that_is_one_string_stays_in_its_place() -> None:
    body = b'{"input":"do it","instructions":"you are","tools":[1]}'
    parts = split_body(body)
    assert not parts.messages and parts.system is not None and parts.tools is not None
    assert (bytes(parts.system), bytes(parts.tools)) == (b'"you are"', b"[1]")
    assert rejoin(parts) == body


def test_of_two_keys_for_one_part_the_first_fills_it() -> None:
    body = b'{"input":[1],"messages":[2],"system":"a","instructions":"b"}'
    parts = split_body(body)
    assert parts.system is not None
    assert ([bytes(m) for m in parts.messages], bytes(parts.system)) == ([b"1"], b'"a"')
    assert rejoin(parts) == body


def test_more_messages_than_any_conversation_has_stay_one_part() -> None:
    body = b'{"messages":[' + b",".join([b"0"] * (MAX_MESSAGES + 1)) + b"]}"
    parts = split_body(body)
    assert not parts.messages
    assert rejoin(parts) == body


def test_parts_that_do_not_fit_together_are_refused() -> None:
    parts = split_body(b'{"system":"s","messages":[1]}')
    with pytest.raises(StoreError, match="lacks its part 'system'"):
        join_body(parts.skeleton, None, None, parts.messages)
    with pytest.raises(StoreError, match="the store is damaged: a request cannot be decoded"):
        join_body(b"\xc1", None, None, [])
