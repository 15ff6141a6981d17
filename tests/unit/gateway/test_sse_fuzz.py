"""Laws of what is read from hostile hands: requests of any bytes, streams cut anywhere."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from understudy.errors import BackendError
from understudy.gateway.backends.anthropic import AnthropicRelay, with_model_name
from understudy.gateway.backends.base import NativeRequest, NativeResponse
from understudy.gateway.backends.http import EVENT_LIMIT, EventSplitter, ServerSentEvent
from understudy.gateway.session import GatewaySession
from understudy.wire.anthropic import Anthropic, AnthropicWriter, MessageAssembly, to_events
from understudy.wire.dialect import Branch
from understudy.wire.errors import InvalidRequest
from understudy.wire.model import Delta, Generation, ToolCall

from fakes import anthropic as fake
from fakes import sse
from fakes.anthropic import FakeAnthropic
from support import example_count

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False, width=32)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=10,
)
CUTS = st.lists(st.integers(0, 2000), max_size=12)
NOBODY = Branch(None, None)


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The data cut at these places, as far as it has them."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(places)]


# --- streams -------------------------------------------------------------------------------------------


def split(parts: Sequence[bytes]) -> list[ServerSentEvent]:
    splitter = EventSplitter()
    events = [event for part in parts for event in splitter.feed(part)]
    return events + ([rest] if (rest := splitter.rest()) else [])


def test_an_event_without_an_end_is_an_error_of_its_request() -> None:
    with pytest.raises(BackendError, match="POST http://one/v1: invalid stream: one event has more than"):
        EventSplitter("POST http://one/v1: ").feed(b"data: " + b"x" * EVENT_LIMIT)


def meaning(events: Sequence[ServerSentEvent]) -> list[tuple[bytes, bytes]]:
    return [(event.name, event.data) for event in events if event.name or event.data]


def by_the_book(stream: bytes) -> list[tuple[bytes, bytes]]:
    """What a stream of events says, read line by line as the standard has it."""
    events: list[tuple[bytes, bytes]] = []
    name, data = b"", list[bytes]()
    for line in [*re.split(rb"\r\n|\n|\r", stream), b""]:
        if not line:
            if name or data:
                events.append((name, b"\n".join(data)))
            name, data = b"", []
        field, _, value = line.partition(b":")
        if field == b"event":
            name = value.removeprefix(b" ")
        elif field == b"data":
            data.append(value.removeprefix(b" "))
    return [(name, data) for name, data in events if name or data]


SAID = [b"event: a", b"event:b", b"data: x", b"data:y:z", b"data", b": ping", b"id: 1", b"", b"odd"]
LINE = st.tuples(st.sampled_from(SAID), st.sampled_from([b"\n", b"\r\n", b"\r"])).map(b"".join)
STREAMS = st.lists(LINE, max_size=14).map(b"".join)


@settings(max_examples=example_count(400))
@given(STREAMS | st.binary(max_size=60), CUTS | st.just(list(range(100))))
@example(b"data: a\r\n\r\ndata: b\r\n\r\n", list(range(30)))
def test_events_do_not_depend_on_how_the_stream_is_split(stream: bytes, cuts: list[int]) -> None:
    events = split(pieces(stream, cuts))
    assert b"".join(event.raw for event in events) == stream
    assert meaning(events) == meaning(split([stream]))


@settings(max_examples=example_count(400))
@given(STREAMS, CUTS)
def test_events_match_a_line_by_line_reading_of_the_sse_standard(stream: bytes, cuts: list[int]) -> None:
    assert meaning(split(pieces(stream, cuts))) == by_the_book(stream)


PLAIN = st.sampled_from([b"data: x\n\n", b"data: {}\n\n", b"data: \n\n", b"data: [DONE]\n\n"])


@settings(max_examples=example_count(400))
@given(STREAMS | st.lists(PLAIN | LINE, max_size=14).map(b"".join), CUTS)
def test_data_read_by_itself_is_that_of_the_events(stream: bytes, cuts: list[int]) -> None:
    splitter = EventSplitter()
    data = [data for piece in pieces(stream, cuts) for data in splitter.feed_data(piece)]
    rest = splitter.rest()
    data += [rest.data] if rest is not None and rest.data else []
    assert data == [event.data for event in split(pieces(stream, cuts)) if event.data]


OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
BLOCK = st.one_of(
    TEXT.map(lambda text: {"type": "text", "text": text}),
    st.tuples(TEXT, TEXT).map(lambda pair: {"type": "thinking", "thinking": pair[0], "signature": pair[1]}),
    st.tuples(TEXT, OBJECT).map(lambda u: {"type": "tool_use", "id": "t", "name": u[0], "input": u[1]}),
    OBJECT.map(lambda data: {"type": "server_tool_use", "id": "s", "name": "n", "input": data}),
    TEXT.map(lambda data: {"type": "redacted_thinking", "data": data}),
    JSON.map(lambda content: {"type": "web_search_tool_result", "tool_use_id": "s", "content": content}),
)
MESSAGE = st.fixed_dictionaries(
    {
        "id": TEXT,
        "type": st.just("message"),
        "role": st.just("assistant"),
        "model": TEXT,
        "content": st.lists(BLOCK, max_size=4),
        "stop_reason": st.none() | TEXT,
        "stop_sequence": st.none() | TEXT,
        "usage": st.dictionaries(st.sampled_from(["input_tokens", "output_tokens"]), st.integers(0, 9)),
    }
)


def assembled(events: Sequence[ServerSentEvent]) -> Any:
    assembly = MessageAssembly()
    for event in events:
        assembly.add(event.name, event.data)
    return json.loads(assembly.message())


@settings(max_examples=example_count(200))
@given(MESSAGE, CUTS, st.sampled_from([b"\n", b"\r\n", b"\r"]))
def test_a_message_is_the_same_after_streaming_and_assembly(
    message: dict[str, Any], cuts: list[int], end: bytes
) -> None:
    stream = to_events(msgspec.json.encode(message)).replace(b"\n", end)
    parsed = assembled(split(pieces(stream, cuts)))
    assert parsed | {"usage": {"output_tokens": 0} | message["usage"]} == message | {"usage": parsed["usage"]}


BLOCKS = ["content_block_start", "content_block_delta", "content_block_stop"]
NAMES = st.sampled_from(["message_start", *BLOCKS, "message_delta", "message_stop", "ping", "other"])
EVENTS = st.fixed_dictionaries(
    {},
    optional={
        "index": st.integers(-1, 2) | JSON,
        "message": OBJECT | JSON,
        "content_block": BLOCK | JSON,
        "delta": JSON
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["text_delta", "thinking_delta", "input_json_delta", "citations_delta"])},
            optional={"text": JSON, "thinking": TEXT, "partial_json": TEXT, "citation": JSON},
        ),
        "usage": JSON,
    },
)


@settings(max_examples=example_count(300))
@given(st.lists(st.tuples(NAMES, EVENTS | JSON | st.binary(max_size=8)), max_size=8))
def test_any_stream_of_events_assembles_to_a_message_or_a_backend_error(events: list[tuple[str, Any]]) -> None:
    assembly = MessageAssembly()
    try:
        for name, data in events:
            assembly.add(name.encode(), data if isinstance(data, bytes) else json.dumps(data).encode())
        assert isinstance(json.loads(assembly.message()), dict)
    except BackendError:
        pass


@settings(max_examples=25)
@given(MESSAGE, CUTS, st.booleans())
def test_a_relayed_stream_is_unchanged_however_it_is_split(
    message: dict[str, Any], cuts: list[int], emits: bool
) -> None:
    stream = to_events(msgspec.json.encode(message))
    emitted: list[bytes] = []

    async def relay() -> NativeResponse:
        async with FakeAnthropic(fake.stream(*pieces(stream, cuts))) as provider:
            relay = AnthropicRelay(provider.url, "ours", "key")
            request = NativeRequest(path="/v1/messages", headers={}, body=b'{"model": "m"}', stream=True)
            try:
                return await relay.relay(request, emitted.append if emits else None)
            finally:
                await relay.close()

    answer = asyncio.run(relay())
    got = b"".join(emitted) + (answer.events or b"")
    assert sorted(got.split(b"\n\n")) == sorted(stream.split(b"\n\n"))
    assert emits or got == stream
    assert json.loads(answer.message)["content"] == message["content"]


# --- requests ------------------------------------------------------------------------------------------

CONTENT = st.recursive(
    TEXT
    | st.fixed_dictionaries(
        {
            "type": TEXT
            | st.sampled_from(["text", "image", "document", "thinking", "tool_use", "search_result", "compaction"])
        },
        optional={
            "text": TEXT,
            "id": TEXT,
            "input": JSON,
            "source": JSON | TEXT,
            "is_error": st.none() | st.booleans(),
            "tool": JSON,
            "cache_control": JSON,
        },
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries(
            {"type": st.sampled_from(["tool_result", "web_search_tool_result", "document"]), "content": inner},
            optional={"tool_use_id": TEXT, "source": st.fixed_dictionaries({"content": inner})},
        )
    ),
    max_leaves=6,
)
REQUEST = st.fixed_dictionaries(
    {"model": TEXT},
    optional={
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system"]), "content": CONTENT}),
            max_size=3,
        ),
        "system": CONTENT | JSON,
        "tools": st.lists(st.dictionaries(st.sampled_from(["name", "type", "input_schema"]), JSON), max_size=2),
        "tool_choice": JSON,
        "max_tokens": st.integers(-1, 5) | JSON,
        "thinking": JSON,
        "output_config": JSON,
        "stream": st.booleans() | JSON,
    },
)


def spelled(value: Any, escapes: bool) -> bytes:
    return json.dumps(value, ensure_ascii=escapes).encode()


@settings(max_examples=example_count(400))
@given(st.binary(max_size=40) | st.builds(spelled, JSON | REQUEST, st.booleans()))
@example(
    b'{"model": "m", "messages": [{"role": "assistant", "content": [{"type": "tool_use", "input": "\xff"}]}]}'
)
@example(b'{"model": "m", "messages": [{"role": "user", "content": ' + b'{"type": "x", "content": ' * 300)
def test_any_request_is_parsed_or_refused(body: bytes) -> None:
    dialect, session = Anthropic(), GatewaySession("attempt", {})
    for read in (dialect.peek, lambda body: dialect.parse(body, session, NOBODY)):
        try:
            understood = read(body)
        except InvalidRequest as error:
            assert str(error)
        else:
            msgspec.json.encode(understood if isinstance(understood, tuple) else understood.chat.messages)


@pytest.mark.parametrize("depth", [50, 500, 900, 2_000, 100_000])
@pytest.mark.parametrize(("opens", "closes"), [('{"type":"tool_result","content":[', "]}"), ("[", "]")])
def test_deeply_nested_requests_are_parsed_or_refused(depth: int, opens: str, closes: str) -> None:
    inner = opens * depth + closes * depth
    for content in (f"[{inner}]", f'[{{"type": "tool_use", "input": {inner}}}]'):
        body = f'{{"model": "m", "messages": [{{"role": "user", "content": {content}}}]}}'.encode()
        try:
            chat = Anthropic().parse(body, GatewaySession("attempt", {}), NOBODY).chat
        except InvalidRequest:
            continue
        assert len(chat.messages) <= 1


SPACE = st.sampled_from(["", " ", "\n\t", " \r\n"])
KEYS = st.sampled_from(['"model"', '"mod\\u0065l"', '"a"', '"model "', '"\\""'])
VALUES = JSON.map(json.dumps) | st.sampled_from(['"m"', '{"model": "inner"}', '["model", "x"]', '"\\\\"', "1E5"])


@settings(max_examples=example_count(200))
@given(st.lists(st.tuples(SPACE, KEYS, SPACE, SPACE, VALUES, SPACE), min_size=1, max_size=5), SPACE, TEXT)
def test_replacing_the_model_name_leaves_all_other_bytes_of_a_request(
    parts: list[tuple[str, ...]], space: str, name: str
) -> None:
    def body(value: str | None) -> str:
        fields = [
            f"{before}{key}{after}:{middle}{value if value and json.loads(key) == 'model' else original}{end}"
            for before, key, after, middle, original, end in parts
        ]
        return f"{space}{{{','.join(fields)}}}{space}"

    assert with_model_name(body(None).encode(), name) == body(json.dumps(name)).encode()


# --- what is said while it is generated ----------------------------------------------------------------

PIECE = st.one_of(
    st.builds(Delta, st.just("reasoning"), TEXT),
    st.builds(Delta, st.just("text"), TEXT),
    st.builds(lambda text, index: Delta("arguments", text, index), TEXT, st.integers(0, 2)),
)


@settings(max_examples=example_count(200))
@given(st.lists(PIECE, max_size=10), st.sampled_from(["", "call_0", "odd id!"]))
def test_streamed_deltas_assemble_to_the_stored_message(candidates: list[Delta], tool_id: str) -> None:
    deltas: list[Delta] = []
    calls: dict[int, str] = {}
    for delta in candidates:
        if delta.kind == "arguments" and delta.index not in calls:
            if delta.index != len(calls):
                continue
            deltas.append(Delta("tool", "", delta.index, tool_id, "Bash"))
            calls[delta.index] = ""
        if delta.kind == "arguments":
            calls[delta.index] += delta.text
        deltas.append(delta)
    generation = Generation(
        model="m",
        text="".join(delta.text for delta in deltas if delta.kind == "text"),
        reasoning="".join(delta.text for delta in deltas if delta.kind == "reasoning"),
        tool_calls=tuple(ToolCall(tool_id, "Bash", raw) for raw in calls.values()),
        finish_reason="stop",
    )
    writer = AnthropicWriter("asked", GatewaySession("attempt", {}), "msg_1")
    stream = b"".join(map(writer.feed, deltas))
    message, rest = writer.finish(generation)
    assert b"content_block_stop" not in stream
    assert b"event: message_delta" not in stream
    streamed_message = sse.message(stream + rest, overlapping=True)
    whole_message = json.loads(message.body)
    for block in streamed_message["content"]:
        if block["type"] == "tool_use":
            raw = block["input"]
            assert message.sampled[block["id"]].arguments == raw
            parsed = _object(raw)
            block["input"] = {"__unparsedToolInput": {"raw": raw, "len": len(raw)}} if parsed is None else parsed
    assert streamed_message == whole_message
    assert len(message.sampled) == len(calls)


def _object(raw: str) -> dict[str, Any] | None:
    try:
        value = json.loads(raw or "{}", parse_constant=lambda _: None)
    except ValueError:
        return None if raw.strip() else {}
    return value if isinstance(value, dict) else None
