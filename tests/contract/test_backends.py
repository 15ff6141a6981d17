"""Backends over real sockets: whole and streamed answers, as every kind of server says them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import BackendError
from understudy.gateway.backends.chat import (
    ChatBackend,
    EmbeddedBackend,
    OpenAIBackend,
    SGLangBackend,
    VLLMBackend,
)
from understudy.gateway.backends.chat_response import LONG, ResponseAssembly, StreamError
from understudy.gateway.backends.chunks import ChunkReader
from understudy.gateway.backends.http import EventSplitter
from understudy.model.process import start_server
from understudy.types import PolicySpan
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, Delta, Generation, ToolCall

from fakes.sglang import FakeSGLang
from fakes.vllm import FakeVLLM, Raw, Refuse, Say, Step, event

KINDS: dict[str, tuple[type[ChatBackend], type[FakeVLLM]]] = {
    "vllm": (VLLMBackend, FakeVLLM),
    "embedded": (EmbeddedBackend, FakeVLLM),
    "sglang": (SGLangBackend, FakeSGLang),
    "openai": (OpenAIBackend, FakeVLLM),
}
DONE = event(b"[DONE]")


def request(**fields: Any) -> ChatRequest:
    defaults: dict[str, Any] = {"model": "asked", "messages": [{"role": "user", "content": "hi"}]}
    return ChatRequest(**(defaults | fields))


def summed(deltas: Sequence[Delta]) -> tuple[str, str, tuple[ToolCall, ...]]:
    """What a client that only sees the pieces makes of them."""
    text = "".join(delta.text for delta in deltas if delta.kind == "text")
    thought = "".join(delta.text for delta in deltas if delta.kind == "reasoning")
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.kind == "tool":
            assert delta.index == len(calls), "calls open in their order"
            calls.append(ToolCall(delta.id, delta.name, ""))
        elif delta.kind == "arguments":
            call = calls[delta.index]
            calls[delta.index] = ToolCall(call.id, call.name, call.arguments + delta.text)
    return text, thought, tuple(calls)


async def answer(kind: str, *script: Step, stream: bool = True, **fields: Any) -> tuple[Generation, Any]:
    make, fake = KINDS[kind]
    async with fake(*script) as model:
        model.version = "v7"
        backend = make(model.url, "fake")
        deltas: list[Delta] = []
        try:
            got = await backend.generate(request(**fields), deltas.append if stream else None)
        finally:
            await backend.close()
        if stream:
            assert summed(deltas) == (got.text, got.reasoning or "", got.tool_calls)
        return got, model


ANSWER = Say(
    text="Héllo, wörld: it is all said",
    reasoning="let me think about it",
    tools=[("call_1", "Edit", '{"file_path" : "/a",  "n":5000.0}'), ("call_2", "Bash", "{}"), ("", "Note", "")],
    cached=4,
)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_gives_the_same_answer_whole_and_streamed(kind: str, stream: bool) -> None:
    got, model = await answer(kind, ANSWER, stream=stream, sampling={"max_tokens": 50})
    assert (got.text, got.reasoning) == (ANSWER.text, ANSWER.reasoning)
    assert got.tool_calls == tuple(ToolCall(*call) for call in ANSWER.tools)
    assert got.finish_reason == "tool_calls"
    completion = (ANSWER.reasoning or "") + (ANSWER.text or "") + "".join(raw for _, _, raw in ANSWER.tools)
    ids = (*completion.encode(), 256)
    assert (got.usage.completion_tokens, got.usage.cached_tokens) == (len(ids), 4)
    assert got.sampling == {"max_tokens": 50}
    sent = model.requests[0]
    assert sent["stream"] is stream
    assert sent["model"] == "fake"
    if kind == "openai":
        # A strict provider refuses fields that it does not know.
        assert set(sent) == {"model", "messages", "stream", "max_tokens"} | (
            {"stream_options"} if stream else set()
        )
    else:
        assert got.completion_token_ids == ids
        assert got.logprobs == tuple(-i / 1000 for i in ids)
        assert len(got.prompt_token_ids or ()) == got.usage.prompt_tokens
    if kind != "openai" and not (kind == "sglang" and stream):
        assert got.policy_spans == (PolicySpan("v7", 0, len(ids)),)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_stop_string_is_told(kind: str, stream: bool) -> None:
    got, _ = await answer(kind, Say(text="a", stop="X"), stream=stream)
    assert (got.stop, got.finish_reason) == ("X", "stop")


@pytest.mark.parametrize(
    ("kind", "name"), [("vllm", "reasoning"), ("sglang", "reasoning_content"), ("openai", None)]
)
async def test_earlier_reasoning_goes_back_under_the_name_that_the_server_reads(
    kind: str, name: str | None
) -> None:
    turn = {"role": "assistant", "content": "x", "reasoning": "hm"}
    _, model = await answer(kind, messages=[turn])
    rest = {"role": "assistant", "content": "x"}
    assert model.requests[0]["messages"] == [rest if name is None else rest | {name: "hm"}]


async def test_our_own_server_streams_what_it_says() -> None:
    tools = [
        {"type": "function", "function": {"name": "Bash", "description": "d", "parameters": {"type": "object"}}}
    ]
    async with start_server("idle", model_name="m") as server:
        backend = EmbeddedBackend(f"{server.url}/v1", "m")
        deltas: list[Delta] = []
        whole = await backend.generate(request(tools=tools))
        streamed = await backend.generate(request(tools=tools), deltas.append)
        await backend.close()
    assert msgspec.structs.replace(streamed, usage=whole.usage) == whole
    assert whole.completion_token_ids and whole.logprobs and whole.prompt_token_ids
    assert summed(deltas) == (whole.text, whole.reasoning or "", whole.tool_calls)


async def test_a_template_has_its_arguments_also_when_tokens_are_counted() -> None:
    async with FakeVLLM() as model:
        backend = VLLMBackend(model.url, "fake", template_args={"effort": "high"})
        await backend.generate(request(enable_thinking=False))
        assert await backend.count_tokens(request()) > 0
        await backend.close()
    assert model.requests[0]["chat_template_kwargs"] == {"effort": "high", "enable_thinking": False}
    assert model.tokenized[0]["chat_template_kwargs"] == {"effort": "high"}


# --- streams as providers really send them -------------------------------------------------------------


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def tool(
    index: int | None, id: str | None = None, name: str | None = None, args: str | None = None
) -> dict[str, Any]:
    piece: dict[str, Any] = {} if index is None else {"index": index}
    if id is not None:
        piece["id"] = id
    function = {key: value for key, value in (("name", name), ("arguments", args)) if value is not None}
    return delta(tool_calls=[piece | {"function": function}])


def stream(*deltas: dict[str, Any], finish: str = "stop") -> Raw:
    return Raw(pieces=[*map(event, [*deltas, delta(finish)]), DONE])


A, B = ToolCall("a", "Read", '{"p":1}'), ToolCall("b", "Bash", '{"c":2}')
TOOL_STREAMS: dict[str, tuple[list[dict[str, Any]], tuple[ToolCall, ...]]] = {
    "in pieces": ([tool(0, "a", "Read", ""), tool(0, args='{"p"'), tool(0, args=":1}")], (A,)),
    "whole": ([tool(0, "a", "Read", '{"p":1}'), tool(1, "b", "Bash", '{"c":2}')], (A, B)),
    "whole, all with index 0": ([tool(0, "a", "Read", '{"p":1}'), tool(0, "b", "Bash", '{"c":2}')], (A, B)),
    "pieces, all with index 0": (
        [tool(0, "a", "Read", ""), tool(0, args='{"p":1}'), tool(0, "b", "Bash", ""), tool(0, args='{"c":2}')],
        (A, B),
    ),
    "without index": (
        [tool(None, "a", "Read", '{"p"'), tool(None, args=":1}"), tool(None, "b", "Bash", '{"c":2}')],
        (A, B),
    ),
    "without index, in one chunk": (
        [
            delta(
                tool_calls=[
                    {"id": "a", "function": {"name": "Read", "arguments": '{"p":1}'}},
                    {"id": "b", "function": {"name": "Bash", "arguments": {"c": 2}}},
                ]
            )
        ],
        (A, B),
    ),
    "without index and id": (
        [tool(None, None, "Read", '{"p":1}'), tool(None, None, "Read", '{"p":1}')],
        (ToolCall("", "Read", '{"p":1}'),) * 2,
    ),
    "id and name repeated with each piece": (
        [tool(0, "a", "Read", '{"p"'), tool(0, "a", "Read", ":1}"), tool(1, "b", "Bash", '{"c":2}')],
        (A, B),
    ),
    "name in pieces": ([tool(0, "a", "Re", ""), tool(0, None, "ad", ""), tool(0, args='{"p":1}')], (A,)),
    "id in pieces": (
        [tool(0, "call", "Read", ""), tool(0, "_1", None, '{"p":1}')],
        (ToolCall("call_1", A.name, A.arguments),),
    ),
    "name after arguments": ([tool(0, "a", None, '{"p"'), tool(0, None, "Read"), tool(0, args=":1}")], (A,)),
    "id after name": ([tool(0, None, "Read"), tool(0, "a"), tool(0, args='{"p":1}')], (A,)),
    "interleaved": (
        [
            *(tool(0, "a", "Read"), tool(1, "b", "Bash")),
            *(tool(0, args='{"p"'), tool(1, args='{"c"'), tool(0, args=":1}"), tool(1, args=":2}")),
        ],
        (A, B),
    ),
    "no arguments at all": (
        [tool(0, "a", "Read"), tool(1, "b", "Bash", '{"c":2}')],
        (ToolCall("a", "Read", ""), B),
    ),
    "empty arguments, said so": ([tool(0, "a", "Read", "{}")], (ToolCall("a", "Read", "{}"),)),
    "text before and after": ([delta(content="x"), tool(0, "a", "Read", '{"p":1}'), delta(content="y")], (A,)),
}


@pytest.mark.parametrize("name", TOOL_STREAMS)
async def test_tool_calls_are_put_together_however_they_are_cut(name: str) -> None:
    deltas, expected = TOOL_STREAMS[name]
    got, _ = await answer("openai", stream(*deltas, finish="tool_calls"))
    assert got.tool_calls == expected


async def test_a_tool_call_that_never_gets_a_name_is_an_error() -> None:
    with pytest.raises(BackendError, match="expected a name in each tool call"):
        await answer("openai", stream(tool(0, "a", None, "{}")))


TEXT_STREAMS: dict[str, tuple[list[dict[str, Any]], str, str | None]] = {
    "the first delta has role and text": (
        [delta(role="assistant", content="Hel"), delta(content="lo")],
        "Hello",
        None,
    ),
    "the same piece a thousand times": ([delta(content="x")] * 1000, "x" * 1000, None),
    "reasoning": ([delta(reasoning="hm"), delta(content="Hi")], "Hi", "hm"),
    "reasoning_content": ([delta(reasoning_content="hm"), delta(content="Hi")], "Hi", "hm"),
    "both, the same": ([delta(reasoning="hm", reasoning_content="hm"), delta(content="Hi")], "Hi", "hm"),
    "both in one chunk": ([delta(reasoning="hm", content="Hi")], "Hi", "hm"),
    "nulls": ([delta(content=None, reasoning=None, tool_calls=None), delta(content="Hi")], "Hi", None),
    "empty choices": ([{"choices": []}, delta(content="Hi"), {"choices": [], "usage": None}], "Hi", None),
    "a choice without delta": ([{"choices": [{"index": 0}]}, delta(content="Hi")], "Hi", None),
    "unknown fields": ([delta(content="Hi", audio={"x": 1}) | {"x_groq": {"id": 1}}], "Hi", None),
    "nothing": ([], "", None),
}


@pytest.mark.parametrize("name", TEXT_STREAMS)
async def test_text_and_reasoning_are_kept_whole_and_apart(name: str) -> None:
    deltas, text, reasoning = TEXT_STREAMS[name]
    got, _ = await answer("openai", stream(*deltas))
    assert (got.text, got.reasoning, got.finish_reason) == (text, reasoning, "stop")


async def test_the_last_usage_counts() -> None:
    first = delta(content="x") | {"usage": {"prompt_tokens": 9, "completion_tokens": 1}}
    details = {"cached_tokens": 4, "cache_write_tokens": 2}
    last = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": details}}
    pieces = [event(first), event(delta("stop")), event(last), DONE]
    got, _ = await answer("openai", Raw(pieces=pieces))
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.cache_write_tokens) == (
        9,
        3,
        4,
        2,
    )


async def test_an_end_that_was_never_told_is_no_end() -> None:
    got, _ = await answer("openai", Raw(pieces=[event(delta(content="x")), DONE]))
    assert got.finish_reason == "none"  # which no dialect takes for an answer


X = event(delta(content="x"))
BROKEN: dict[str, tuple[Sequence[bytes], str]] = {
    "no end": ([X, event(delta("stop"))], "broke off|incomplete stream"),
    "in the middle of a chunk": ([X, event(delta(content="yy"))[:20]], "broke off|incomplete stream|invalid"),
    "nothing at all": ([], "broke off|incomplete stream"),
    "comments only": ([b": ping\n\n"], "broke off|incomplete stream"),
    "no JSON": ([X, b"data: {oops\n\n", DONE], "invalid"),
    "an array": ([X, b"data: []\n\n", DONE], "invalid"),
    "nested beyond reason": ([X, b"data: " + b"[" * 100_000 + b"\n\n", DONE], "invalid"),
    "an error": ([X, event({"error": {"message": "engine died", "code": 500}}), DONE], "engine died"),
    "an error as text": ([X, event({"error": "engine died"}), DONE], "engine died"),
    "a second choice": (
        [X, event({"choices": [{"index": 1, "delta": {"content": "y"}}]}), DONE],
        r"^POST http://.*/chat/completions: invalid stream: expected choice 0 only, got choice 1 of 1 ",
    ),
    "two choices": ([event({"choices": [delta()["choices"][0]] * 2}), DONE], "got choice 0 of 2 in a chunk"),
    "a token beyond any": (
        [event({"choices": [{"index": 0, "delta": {}, "token_ids": [2**40]}]}), DONE],
        "invalid chunk",
    ),
}


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("name", BROKEN)
async def test_a_stream_that_breaks_is_an_error_and_never_asked_again(name: str, lost: bool) -> None:
    pieces, message = BROKEN[name]
    async with FakeVLLM(Raw(pieces=pieces, lost=lost)) as model:
        backend = VLLMBackend(model.url, "fake")
        with pytest.raises(BackendError, match=message):
            await backend.generate(request(), lambda _: None)
        await backend.close()
        assert len(model.requests) == 1


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("cut", range(12))
async def test_a_server_lost_after_any_chunk_gives_no_answer(kind: str, cut: int) -> None:
    step = Say(text="hello", tools=[("a", "Read", '{"p":1}')], piece=2, cut=cut)
    with pytest.raises(BackendError, match="broke off"):
        await answer(kind, step)


async def test_a_stream_that_lost_tokens_on_its_way_is_an_error() -> None:
    chunk = {"choices": [{"index": 0, "delta": {"content": "x"}, "token_ids": [1], "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
    with pytest.raises(BackendError, match="1 token ids, expected 2"):
        await answer("vllm", Raw(pieces=[event(chunk), event(usage), DONE]))


SAID_BYTES = b"".join(
    [
        *(b": hello\n\n", b"event: x\r\ndata: 1\r\n\r\n", b"data:2\n\n", b"data: a\ndata: b\n\n"),
        *("data: é🙂\n\n".encode(), b"id: 3\nretry: 4\ndata: c\n\n", b"data: d\r\r", b"data: [DONE]\n"),
    ]
)
EVENTS = [b"", b"1", b"2", b"a\nb", "é🙂".encode(), b"c", b"d", b"[DONE]"]


def split_events(pieces: Sequence[bytes]) -> tuple[list[bytes], bytes]:
    splitter = EventSplitter()
    events = [payload for piece in pieces for payload in splitter.feed(piece)]
    rest = splitter.rest()
    events += [rest] if rest else []
    return [one.data for one in events if one.raw.strip()], b"".join(one.raw for one in events)


@given(st.lists(st.integers(0, len(SAID_BYTES)), max_size=12))
def test_events_are_the_same_at_any_boundary(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(SAID_BYTES)]
    pieces = [SAID_BYTES[start:end] for start, end in pairwise(ends)]
    assert split_events(pieces) == (EVENTS, SAID_BYTES)
    assert split_events([bytes([byte]) for byte in SAID_BYTES]) == (EVENTS, SAID_BYTES)


@given(st.lists(st.binary(max_size=40)))
def test_no_byte_of_a_stream_is_lost(pieces: list[bytes]) -> None:
    assert split_events(pieces)[1] == b"".join(pieces)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *("choices", "delta", "index", "content", "tool_calls", "function"),
                    *("name", "arguments", "id", "usage", "error"),
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(JSON, max_size=5))
def test_whatever_a_server_says_is_an_answer_or_a_backend_error(chunks: list[Any]) -> None:
    deltas: list[Delta] = []
    assembly, reader = ResponseAssembly(deltas.append), ChunkReader(str)
    try:
        for chunk in chunks:
            assembly.add_chunks(reader.read_all([json.dumps(chunk).encode()]))
        got = assembly.generation("m", {})
    except BackendError:
        return
    assert summed(deltas) == (got.text, got.reasoning or "", got.tool_calls)


# --- strict providers ----------------------------------------------------------------------------------


class Strict(FakeVLLM):
    """Refuses the parameters in `refused` with the words given for them."""

    refused: dict[str, str]

    async def _chat(self, request: Any) -> Any:
        body = await request.json()
        for name, message in self.refused.items():
            if name in body:
                self.script.insert(0, Refuse(status=400, message=message))
                break
        return await super()._chat(request)


REFUSALS = {
    "temperature": "Unsupported value: 'temperature' does not support 0.2 with this model. Only 1 is supported.",
    "top_k": "Unrecognized request argument supplied: top_k",
    "seed": "property 'seed' is unsupported",
    "parallel_tool_calls": '[{"loc":["body","parallel_tool_calls"],"msg":"Extra inputs are not permitted"}]',
    "stream_options": "Unknown parameter: 'stream_options'.",
}


async def test_what_a_strict_provider_refuses_is_learned_once() -> None:
    limit = "Unsupported parameter: 'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    async with Strict() as model:
        model.refused = REFUSALS | {"max_tokens": limit}
        backend = OpenAIBackend(model.url, "fake")
        sampling = {"max_tokens": 9, "temperature": 0.2, "top_k": 5, "seed": 1, "top_p": 0.5}
        tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
        got = await backend.generate(
            request(sampling=sampling, tools=tools, parallel_tool_calls=False), lambda _: None
        )
        assert got.sampling == {"max_completion_tokens": 9, "top_p": 0.5}
        tries = len(model.requests)
        assert tries == 1 + len(REFUSALS) + 1
        await backend.generate(request(sampling=sampling))
        assert len(model.requests) == tries + 1
        assert model.requests[-1]["max_completion_tokens"] == 9
        await backend.close()


async def test_requests_at_once_all_learn_from_one_refusal() -> None:
    async with Strict() as model:
        model.refused = REFUSALS
        backend = OpenAIBackend(model.url, "fake")
        sampling = {"temperature": 0.2, "top_k": 5, "seed": 1}
        answers = await asyncio.gather(*(backend.generate(request(sampling=sampling)) for _ in range(8)))
        await backend.close()
    assert [got.sampling for got in answers] == [{}] * 8


async def test_a_lost_request_is_not_sent_again_though_another_has_learned_meanwhile() -> None:
    lost, learned = asyncio.Event(), asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        received.append(body["messages"][0]["content"])
        if body["messages"][0]["content"] == "lost":
            lost.set()
            await learned.wait()
        elif "top_k" in body:
            refusal = json.dumps({"error": {"message": "Unsupported parameter: 'top_k'"}}).encode()
            writer.write(
                b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
                % (len(refusal), refusal)
            )
            await writer.drain()
        writer.close()

    received: list[str] = []
    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    backend = OpenAIBackend(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", "fake", resend=False)
    sampling = {"top_k": 5}
    first = asyncio.ensure_future(
        backend.generate(request(messages=[{"role": "user", "content": "lost"}], sampling=sampling))
    )
    await lost.wait()
    with pytest.raises(BackendError):
        await backend.generate(request(messages=[{"role": "user", "content": "other"}], sampling=sampling))
    learned.set()
    with pytest.raises(BackendError, match="no response"):
        await first
    await backend.close()
    server.close()
    assert received == ["lost", "other", "other"], "the second try of the other one is without the parameter"


async def test_a_provider_that_wants_the_reasoning_back_gets_it() -> None:
    refusal = "Missing `reasoning_content` field in the assistant message at message index 1"
    async with FakeVLLM(Refuse(status=400, message=refusal)) as model:
        backend = OpenAIBackend(model.url, "fake")
        await backend.generate(request(messages=[{"role": "assistant", "content": "", "reasoning": "hm"}]))
        await backend.close()
    assert [message.get("reasoning_content") for sent in model.requests for message in sent["messages"]] == [
        None,
        "hm",
    ]


@pytest.mark.parametrize(
    "message",
    [
        "Invalid value for 'temperature': must be at most 2",
        "'tools' is not supported",
        "no",
    ],
)
async def test_nothing_else_is_learned(message: str) -> None:
    async with FakeVLLM(default=Refuse(status=400, message=message)) as model:
        backend = OpenAIBackend(model.url, "fake")
        with pytest.raises(BackendError):
            await backend.generate(request(sampling={"temperature": 3}))
        await backend.close()
        assert len(model.requests) == 1


async def test_a_provider_that_cannot_count_says_so() -> None:
    async with FakeVLLM() as model:
        backend = OpenAIBackend(model.url, "fake")
        with pytest.raises(BackendError, match="does not count tokens") as refused:
            await backend.count_tokens(request())
        await backend.close()
        assert refused.value.status == 404
        assert model.tokenized == []


# --- what does not fit ---------------------------------------------------------------------------------

OVERFLOWS = {
    "vLLM": "This model's maximum context length is 4096 tokens. However, your prompt contains 5000 input tokens, "
    "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
    "vLLM, short": "Input length (5000) exceeds model's maximum context length (4096).",
    "SGLang": "The input (5000 tokens) is longer than the model's context length (4096 tokens).",
    "SGLang, pool": "Input length (5000 tokens) exceeds the maximum allowed length (4096 tokens).",
    "OpenAI": "This model's maximum context length is 4096 tokens. However, your messages resulted in 5000 tokens",
    "DeepSeek": "This model's maximum context length is 4096 tokens. However, you requested 5010 tokens "
    "(5000 in the messages, 10 in the completion).",
}


@pytest.mark.parametrize("name", OVERFLOWS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_that_does_not_fit_is_told_with_its_numbers(name: str, stream: bool) -> None:
    with pytest.raises(ContextOverflow) as overflow:
        await answer("openai", Refuse(status=400, message=OVERFLOWS[name]), stream=stream)
    assert (overflow.value.prompt_tokens, overflow.value.limit) == (5000, 4096)


@pytest.mark.parametrize("stream", [False, True])
async def test_max_tokens_gives_way_to_a_prompt_that_fits(stream: bool) -> None:
    message = (
        "Requested token count exceeds the model's maximum context length of 4096 tokens. You requested a total "
        "of 5000 tokens: 4000 tokens from the input messages and 1000 tokens for the completion."
    )
    got, model = await answer(
        "openai", Refuse(status=400, message=message), Say(text="ok"), stream=stream, sampling={"max_tokens": 1000}
    )
    assert got.text == "ok"
    assert [sent["max_tokens"] for sent in model.requests] == [1000, 96]


@pytest.mark.parametrize("code", [400, "context_length_exceeded", None])
async def test_an_overflow_told_in_a_stream_is_not_asked_again(code: Any) -> None:
    error = {"error": {"message": OVERFLOWS["OpenAI"], "code": code}}
    async with FakeVLLM(Raw(pieces=[X, event(error), DONE])) as model:
        backend = OpenAIBackend(model.url, "fake")
        with pytest.raises(ContextOverflow):
            await backend.generate(request(sampling={"max_tokens": 10}), lambda _: None)
        await backend.close()
        assert len(model.requests) == 1


# --- halves of surrogate pairs ----------------------------------------------------------------------------


def delta(finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]}


def arguments_of_call(text: str, **fields: Any) -> dict[str, Any]:
    return delta(tool_calls=[{"index": 0, "function": {"arguments": text} | fields}])


SMILE = "\U0001f600"
HALVES: dict[str, tuple[list[dict[str, Any]], tuple[str, str, str]]] = {
    "pair in one chunk": ([delta(content="a\ud83d\ude00b")], (f"a{SMILE}b", "", "")),
    "pair over two chunks": ([delta(content="a\ud83d"), delta(content="\ude00b")], (f"a{SMILE}b", "", "")),
    "chunks without text between": (
        [delta(content="a\ud83d"), {"choices": []}, delta(content=""), delta(content="\ude00")],
        (f"a{SMILE}", "", ""),
    ),
    "reasoning": ([delta(reasoning="\ud83d"), delta(reasoning="\ude00")], ("", SMILE, "")),
    "arguments": (
        [arguments_of_call('{"a": "\ud83d', name="x"), arguments_of_call('\ude00"}')],
        ("", "", f'{{"a": "{SMILE}"}}'),
    ),
    "first half alone": ([delta(content="a\ud83d"), delta(content="b")], ("a\ufffdb", "", "")),
    "second half alone": ([delta(content="a"), delta(content="\ude00b")], ("a\ufffdb", "", "")),
    "two first halves": ([delta(content="\ud83d"), delta(content="\ud83d\ude00")], (f"\ufffd{SMILE}", "", "")),
    "half at the end of the reasoning": (
        [delta(reasoning="a\ud83d"), delta(content="\ude00")],
        ("\ufffd", "a\ufffd", ""),
    ),
    "half before a call": (
        [delta(content="a\ud83d"), arguments_of_call("{}", name="x")],
        ("a\ufffd", "", "{}"),
    ),
    "half at the end of a call": (
        [
            arguments_of_call("{\ud83d", name="x"),
            delta(tool_calls=[{"index": 1, "function": {"name": "y", "arguments": "{}"}}]),
        ],
        ("", "", "{\ufffd|{}"),
    ),
    "half at the end": ([delta(content="a\ud83d")], ("a\ufffd", "", "")),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("ending", ["own chunk", "last chunk"])
def test_halves_of_characters_in_a_stream_are_joined_or_replaced(name: str, ending: str) -> None:
    chunks, expected = HALVES[name]
    chunks = json.loads(json.dumps(chunks))
    if ending == "own chunk":
        chunks.append(delta("stop"))
    else:
        chunks[-1]["choices"][0]["finish_reason"] = "stop"
    deltas: list[Delta] = []
    assembly, reader = ResponseAssembly(deltas.append), ChunkReader(str)
    for chunk in chunks:
        assembly.add_chunks(reader.read_all([json.dumps(chunk).encode()]))
        assembly.flush()
    got = assembly.generation("m", {})
    assert (got.text, got.reasoning or "", "|".join(call.arguments for call in got.tool_calls)) == expected
    assert summed(deltas) == (got.text, got.reasoning or "", got.tool_calls)


KINDS_OF_CHUNKS: tuple[dict[str, Any] | bytes, ...] = (
    delta(content="a"),
    delta(content="\ud83d"),
    delta(content="\ude00"),
    delta(reasoning="r"),
    delta(reasoning_content="R"),
    delta(tool_calls=[{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{}"}}]),
    delta(tool_calls=[{"index": 0, "function": {"arguments": " "}}]),
    delta("stop"),
    delta(content="b") | {"prompt_token_ids": [1] * LONG},
    {"choices": [{"token_ids": [7], "logprobs": {"content": [{"logprob": -0.5}]}, "delta": {"content": "c"}}]},
    {"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": 1}},
    {"choices": [{"index": 1, "delta": {"content": "of another choice"}}]},
    {"error": {"message": "overloaded"}},
    b'{"choices":[{}',
    b'{"choices":[]},{"choices":[]}',
    b'{"choices":[]}{"choices":[]}',
    b'{"model":"\xff"}',
    b"[" * 2000,
)


def read_in(groups: Sequence[Sequence[bytes]]) -> tuple[list[Delta], Generation | str]:
    """What is made of chunks that arrive in groups: what is passed on, and the generation or the error."""
    deltas: list[Delta] = []
    assembly, reader = ResponseAssembly(deltas.append), ChunkReader(str)
    try:
        for group in groups:
            try:
                assembly.add_chunks(reader.read_all(group))
            finally:
                assembly.flush()
        return deltas, assembly.generation("m", {})
    except BackendError as error:
        return deltas, str(error)


@given(st.data())
def test_chunks_mean_the_same_however_many_arrive_together(data: st.DataObject) -> None:
    chunks = data.draw(st.lists(st.one_of(JSON, *map(st.just, KINDS_OF_CHUNKS)), min_size=1, max_size=8))
    lines = [json.dumps(chunk).encode() if not isinstance(chunk, bytes) else chunk for chunk in chunks]
    cuts = data.draw(st.lists(st.integers(0, len(lines)), max_size=3))
    groups = [lines[start:end] for start, end in pairwise(sorted({0, len(lines), *cuts}))]
    (alone, expected), (together, got) = read_in([[line] for line in lines]), read_in(groups)
    assert got == expected
    assert summed(together) == summed(alone)


def test_a_chunk_that_is_not_utf8_is_an_error_of_the_stream() -> None:
    with pytest.raises(StreamError, match="invalid chunk in the stream"):
        ChunkReader(str).read(b'{"model":"\xff"}')


def test_a_chunk_with_half_of_a_character_has_its_tokens_and_its_error() -> None:
    reader = ChunkReader(str)
    chunk = delta(content="\ud83d") | {"prompt_token_ids": [1, 2]}
    chunk["choices"][0]["token_ids"] = [7]
    assembly = ResponseAssembly()
    assembly.add_chunks(reader.read_all([json.dumps(chunk).encode()]))
    assembly.add_chunks(reader.read_all([json.dumps(delta("stop", content="\ude00")).encode()]))
    got = assembly.generation("m", {})
    assert (got.text, list(got.prompt_token_ids or ()), got.completion_token_ids) == (SMILE, [1, 2], (7,))
    with pytest.raises(BackendError, match="cut \ufffd here"):
        reader.read(json.dumps({"error": {"message": "cut \ud83d here"}}).encode())
