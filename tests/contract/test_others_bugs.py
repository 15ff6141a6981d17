"""What users of other gateways ran into with Claude Code, each shown to be absent here.

A test is named by the project and the number of its report; where one cause has several reports, by all of them.
Of claude-code-router 1220 and 1019, and SGLang 36877 no more than the numbers could be had: what stands below for
their projects are the reports that could be read.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from understudy.gateway.backends.anthropic import AnthropicRelay
from understudy.gateway.backends.base import Backend, Relay
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.store import Store
from understudy.types import Call

from fakes import anthropic as fake
from fakes import sse
from fakes.anthropic import FakeAnthropic
from fakes.attempts import start_attempts
from fakes.vllm import FakeVLLM, Raw, Refuse, Say, Step, event

both_modes = pytest.mark.parametrize("streaming", [False, True], ids=["atomic", "streaming"])


class Front:
    """A gateway as an agent sees it, and the calls that it kept."""

    def __init__(self, url: str, key: str, store: Store, attempt: str) -> None:
        self._url, self._key, self._store, self._attempt = url, key, store, attempt
        self.pieces: list[bytes] = []

    async def post(self, body: dict[str, Any], path: str = "/v1/messages?beta=true") -> tuple[int, bytes]:
        request = {"model": "claude", "max_tokens": 50, "messages": [{"role": "user", "content": "go"}]} | body
        headers = {"authorization": f"Bearer {self._key}", "x-claude-code-session-id": "s"}
        async with (
            aiohttp.ClientSession() as http,
            http.post(self._url + path, json=request, headers=headers) as got,
        ):
            self.pieces = [piece async for piece in got.content.iter_any()]
            return got.status, b"".join(self.pieces)

    async def streamed(self, **body: Any) -> dict[str, Any]:
        """The message that a strict reader puts together from a streamed answer."""
        status, data = await self.post({"stream": True} | body)
        assert status == 200, data
        return sse.message(data, overlapping=True)

    def calls(self) -> list[Call]:
        return list(self._store.calls.of_attempt(self._attempt))


@asynccontextmanager
async def fronting(folder: Path, answerer: Backend | Relay, *, streaming: bool) -> AsyncIterator[Front]:
    with Store.open(folder / "store") as store:
        keys, models = Keys(), ModelRouter(answerer)
        gateway = Gateway(models, store.calls, keys, streaming=streaming)
        (attempt,) = start_attempts(store)
        try:
            yield Front(await gateway.start_tcp("127.0.0.1", 0), keys.issue(attempt), store, attempt)
        finally:
            await gateway.stop()
            await models.close()


@asynccontextmanager
async def running(folder: Path, *script: Step, streaming: bool = False) -> AsyncIterator[tuple[Front, FakeVLLM]]:
    async with (
        FakeVLLM(*script) as model,
        fronting(folder, VLLMBackend(model.url, "fake"), streaming=streaming) as front,
    ):
        yield front, model


def chunk(delta: dict[str, Any], **choice: Any) -> bytes:
    return event({"model": "fake", "choices": [{"index": 0, "delta": delta, "finish_reason": None} | choice]})


def call(index: int, arguments: str | None, **opening: str) -> dict[str, Any]:
    function: dict[str, Any] = {} if arguments is None else {"arguments": arguments}
    if "name" in opening:
        function["name"] = opening.pop("name")
    return {"tool_calls": [{"index": index, "function": function} | opening]}


END = [
    chunk({}, finish_reason="tool_calls"),
    event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}),
    event(b"[DONE]"),
]


# --- LiteLLM: arguments ---------------------------------------------------------------------------------

ARGUMENTS = '{"file_path" : "/a", "old_string": "x"}'
SERVERS: dict[str, Sequence[dict[str, Any]]] = {
    "all with the name": [call(0, ARGUMENTS, id="a", name="Edit")],
    "after the name": [call(0, "", id="a", name="Edit"), call(0, ARGUMENTS)],
    "without a first piece": [call(0, None, id="a", name="Edit"), call(0, ARGUMENTS)],
    "byte by byte": [call(0, "", id="a", name="Edit"), *(call(0, letter) for letter in ARGUMENTS)],
    "the name in each": [call(0, part, id="a", name="Edit") for part in (ARGUMENTS[:9], ARGUMENTS[9:])],
}


@pytest.mark.parametrize("deltas", SERVERS.values(), ids=SERVERS.keys())
async def test_litellm_25321_29491_the_arguments_of_a_streamed_call_arrive(
    deltas: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    async with running(tmp_path, Raw(pieces=[*map(chunk, deltas), *END]), streaming=True) as (front, _):
        (block,) = (await front.streamed())["content"]
        (stored,) = front.calls()
    assert (block["name"], block["input"]) == ("Edit", ARGUMENTS)
    assert json.loads(stored.response)["content"][0]["input"] == json.loads(ARGUMENTS)
    assert stored.finish_reason == "tool_calls"


@both_modes
async def test_litellm_25321_29491_so_do_those_of_calls_side_by_side(streaming: bool, tmp_path: Path) -> None:
    tools = [(f"call_{n}", "Bash", f'{{"command": "echo {n}"}}') for n in range(3)]
    async with running(tmp_path, Say(tools=tools), streaming=streaming) as (front, _):
        blocks = (await front.streamed())["content"]
    assert [(block["id"], block["input"]) for block in blocks] == [(id_, raw) for id_, _, raw in tools]


@both_modes
async def test_litellm_13373_every_piece_belongs_to_a_block_that_was_opened(
    streaming: bool, tmp_path: Path
) -> None:
    chunks = [chunk({"role": "assistant", "content": ""}), chunk({"content": "I look."})]
    tools = [chunk(call(n, part, id=f"c{n}", name="Grep")) for n in range(2) for part in ("", '{"a": 1}')]
    script = (
        Raw(pieces=[*chunks, *tools, *END])
        if streaming
        else Say(text="I look.", tools=[(f"c{n}", "Grep", '{"a": 1}') for n in range(2)])
    )
    async with running(tmp_path, script, streaming=streaming) as (front, _):
        _, data = await front.post({"stream": True})
    open_blocks: set[int] = set()
    for events in sse.events(data):
        if events["type"] == "content_block_start":
            open_blocks.add(events["index"])
        elif events["type"].startswith("content_block"):
            assert events["index"] in open_blocks
    assert [block["type"] for block in sse.message(data, overlapping=True)["content"]] == [
        "text",
        *["tool_use"] * 2,
    ]


# --- LiteLLM: thinking ----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
async def test_litellm_32357_33224_thoughts_have_a_block_of_their_own_and_a_message_begins_once(
    field: str, tmp_path: Path
) -> None:
    chunks = [chunk({"role": "assistant", "content": ""}), chunk({field: "h"}), chunk({field: "m", "content": ""})]
    pieces = [
        *chunks,
        chunk({"content": "Hel"}),
        chunk({"content": "lo"}),
        chunk({}, finish_reason="stop"),
        *END[1:],
    ]
    async with running(tmp_path, Raw(pieces=pieces), streaming=True) as (front, _):
        status, data = await front.post({"stream": True})
    message = sse.message(data, overlapping=True)
    assert status == 200
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert (message["content"][0]["thinking"], message["content"][1]["text"]) == ("hm", "Hello")
    assert data.count(b"event: message_start") == 1
    assert b"signature_delta" in data


@both_modes
async def test_litellm_32357_33224_an_answer_of_thoughts_alone_is_not_empty(
    streaming: bool, tmp_path: Path
) -> None:
    async with running(tmp_path, Say(reasoning="only thoughts"), streaming=streaming) as (front, _):
        (block,) = (await front.streamed())["content"]
    assert block == {"type": "thinking", "thinking": "only thoughts", "signature": ""}


@pytest.mark.parametrize("between", [[], [{"content": ""}], [{"reasoning": "", "content": "A"}]])
async def test_litellm_30765_the_first_piece_of_text_after_thoughts_is_not_lost(
    between: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    deltas = [{"reasoning": "x"}, *between, {"content": "ABC"}, {"content": " DEF"}]
    pieces = [*map(chunk, deltas), chunk({}, finish_reason="stop"), *END[1:]]
    async with running(tmp_path, Raw(pieces=pieces), streaming=True) as (front, _):
        blocks = (await front.streamed())["content"]
        (stored,) = front.calls()
    text = "".join(delta.get("content", "") for delta in deltas)
    assert [block.get("text") for block in blocks] == [None, text]
    assert json.loads(stored.response)["content"] == blocks


async def test_litellm_30765_nor_is_what_shares_a_piece_with_thoughts(tmp_path: Path) -> None:
    deltas = [{"reasoning": "a"}, {"reasoning": "b", "content": "One"}, {"content": " two"}]
    pieces = [*map(chunk, deltas), chunk({}, finish_reason="stop"), *END[1:]]
    async with running(tmp_path, Raw(pieces=pieces), streaming=True) as (front, _):
        thinking, text = (await front.streamed())["content"]
    assert (thinking["thinking"], text["text"]) == ("ab", "One two")


# --- LiteLLM: the rest ----------------------------------------------------------------------------------


@both_modes
async def test_litellm_34692_a_turn_of_tools_ends_as_one_and_no_block_is_empty(
    streaming: bool, tmp_path: Path
) -> None:
    step = Say(text="", tools=[("", "Bash", "{}"), ("", "Bash", "{}")], finish="stop")
    async with running(tmp_path, step, streaming=streaming) as (front, _):
        message = await front.streamed()
    assert message["stop_reason"] == "tool_use"
    assert [block["type"] for block in message["content"]] == ["tool_use", "tool_use"]
    assert len({block["id"] for block in message["content"]}) == 2


@both_modes
async def test_litellm_token_ids_and_logprobs_are_not_dropped_on_v1_messages(
    streaming: bool, tmp_path: Path
) -> None:
    async with running(tmp_path, Say(text="hello", reasoning="hm"), streaming=streaming) as (front, model):
        await front.streamed()
        (stored,) = front.calls()
    assert model.requests[0]["return_token_ids"] is True
    assert stored.completion_token_ids == (*b"hmhello", 256)
    assert stored.prompt_token_ids
    assert stored.logprobs == tuple(-token / 1000 for token in stored.completion_token_ids)


@both_modes
async def test_litellm_repeated_streaming_chunk_limit_a_looping_answer_is_kept_whole(
    streaming: bool, tmp_path: Path
) -> None:
    text = "again. " * 400
    async with running(tmp_path, Say(text=text, piece=7, finish="length"), streaming=streaming) as (front, _):
        message = await front.streamed()
        (stored,) = front.calls()
    assert message["content"] == [{"type": "text", "text": text}]
    assert (stored.status, message["stop_reason"]) == ("ok", "max_tokens")


# --- claude-code-router ---------------------------------------------------------------------------------


@both_modes
async def test_claude_code_router_1397_thoughts_before_a_call_leave_its_arguments_alone(
    streaming: bool, tmp_path: Path
) -> None:
    raw = '{"command": "ls", "description": "list"}'
    chunks = [chunk({"reasoning_content": "hm "}), chunk({"reasoning_content": "so"})]
    calls = [chunk(call(0, "", id="a", name="Bash")), *(chunk(call(0, letter)) for letter in raw)]
    whole = Say(text=None, reasoning="hm so", tools=[("a", "Bash", raw)])
    script = Raw(pieces=[*chunks, *calls, *END]) if streaming else whole
    async with running(tmp_path, script, streaming=streaming) as (front, _):
        thought, used = (await front.streamed())["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "hm so")
    assert (used["type"], used["input"]) == ("tool_use", raw)


async def test_claude_code_router_873_text_arrives_while_it_is_generated(tmp_path: Path) -> None:
    async with running(tmp_path, Say(text="word " * 200, piece=5), streaming=True) as (front, _):
        await front.streamed()
        pieces = front.pieces
    assert b"word" in pieces[0]
    assert b"message_stop" not in pieces[0]
    assert len(pieces) > 1


@both_modes
async def test_claude_code_router_560_a_page_of_html_is_an_error_to_wait_out(
    streaming: bool, tmp_path: Path
) -> None:
    page = Refuse(status=502, raw=b"<!DOCTYPE html><html>bad gateway</html>")
    async with running(tmp_path, page, streaming=streaming) as (front, _):
        status, data = await front.post({"stream": True})
    assert (status, json.loads(data)["error"]["type"]) == (529, "overloaded_error")


async def test_claude_code_router_198_a_chunk_in_two_pieces_is_one_chunk(tmp_path: Path) -> None:
    whole = b"".join([chunk({"content": "é and 漢"}), chunk({}, finish_reason="stop"), *END[1:]])
    pieces = [whole[start : start + 3] for start in range(0, len(whole), 3)]
    async with running(tmp_path, Raw(pieces=pieces), streaming=True) as (front, _):
        (block,) = (await front.streamed())["content"]
    assert block["text"] == "é and 漢"


MIXED = {
    "1356": [{"content": "Let me see. "}, call(0, "{}", id="a", name="Bash"), {"content": "Seen."}],
    "1725": [{"reasoning": "a"}, call(0, "{}", id="a", name="Bash"), {"reasoning": "b"}, {"content": "Seen."}],
}


@pytest.mark.parametrize("deltas", MIXED.values(), ids=MIXED.keys())
async def test_claude_code_router_1356_1725_what_comes_after_a_call_goes_where_it_belongs(
    deltas: Sequence[dict[str, Any]], tmp_path: Path
) -> None:
    async with running(tmp_path, Raw(pieces=[*map(chunk, deltas), *END]), streaming=True) as (front, _):
        message = await front.streamed()
        (stored,) = front.calls()
    by_type = {block["type"]: block for block in message["content"]}
    assert len(by_type) == len(message["content"])
    assert by_type["text"]["text"] == "".join(delta.get("content", "") for delta in deltas)
    assert by_type["tool_use"]["input"] == "{}"
    if "thinking" in by_type:
        assert by_type["thinking"]["thinking"] == "ab"
    by_type["tool_use"]["input"] = {}
    assert json.loads(stored.response)["content"] == message["content"]


@both_modes
async def test_the_images_of_a_tool_result_reach_the_model(streaming: bool, tmp_path: Path) -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "seen"}, image]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "Read", "input": {}}]}
    async with running(tmp_path, Say(text="ok"), streaming=streaming) as (front, model):
        await front.streamed(messages=[used, {"role": "user", "content": [result]}])
    assert [message["role"] for message in model.requests[0]["messages"]] == ["assistant", "tool", "user"]
    assert model.requests[0]["messages"][2]["content"][0]["image_url"]["url"] == "data:image/png;base64,AA=="


# --- vLLM and SGLang ------------------------------------------------------------------------------------


@both_modes
async def test_vllm_44000_48874_41114_a_system_message_on_the_way_is_no_second_one(
    streaming: bool, tmp_path: Path
) -> None:
    messages = [
        {"role": "user", "content": "task"},
        {"role": "system", "content": "Available agent types: …"},
        {"role": "assistant", "content": "ok"},
        {"role": "system", "content": [{"type": "text", "text": "more"}]},
    ]
    async with running(tmp_path, Say(text="ok"), streaming=streaming) as (front, model):
        await front.streamed(messages=messages, system=[{"type": "text", "text": "first"}])
    assert model.requests[0]["messages"] == [
        {"role": "system", "content": "first"},
        {"role": "user", "content": "task"},
        {"role": "user", "content": "Available agent types: …"},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]


async def test_vllm_36829_what_changes_with_every_request_is_no_part_of_the_prompt(tmp_path: Path) -> None:
    async with running(tmp_path, Say(text="a"), Say(text="b")) as (front, model):
        for number in range(2):
            billing = f"x-anthropic-billing-header: cc_version=2.1.197.{number}; cch={number};"
            system = [{"type": "text", "text": text} for text in (billing, "You are")]
            await front.streamed(system=system)
    assert model.requests[0] == model.requests[1]


ECHOED = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "opaque"},
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "text", "text": "said"},
        ],
    },
    {"role": "user", "content": "on"},
]


@both_modes
async def test_vllm_36992_thoughts_of_earlier_turns_are_taken_redacted_or_not(
    streaming: bool, tmp_path: Path
) -> None:
    async with running(tmp_path, Say(text="ok"), streaming=streaming) as (front, model):
        await front.streamed(messages=ECHOED)
    assert model.requests[0]["messages"][1] == {"role": "assistant", "content": "said", "reasoning": "hm"}


@both_modes
async def test_redacted_thinking_goes_back_to_the_provider_byte_for_byte(streaming: bool, tmp_path: Path) -> None:
    redacted = fake.block(0, {"type": "redacted_thinking", "data": "opaque"})
    raw = fake.answer(redacted, fake.text(1, "ok"))
    async with FakeAnthropic(fake.stream(raw)) as provider:
        relay = AnthropicRelay(provider.url, "claude-ours", "key")
        async with fronting(tmp_path, relay, streaming=streaming) as front:
            status, data = await front.post({"stream": True, "messages": ECHOED})
            (stored,) = front.calls()
    assert status == 200
    assert sorted(data.split(b"\n\n")) == sorted(raw.split(b"\n\n"))
    assert json.loads(provider.requests[0].body)["messages"] == ECHOED
    assert json.loads(stored.response)["content"][0] == {"type": "redacted_thinking", "data": "opaque"}
