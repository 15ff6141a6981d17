"""OpenAI's own client against the gateway: real sockets, the real client, both dialects, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from typing import Any

import pytest

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import RequestLimits
from understudy.types import Call

from fakes.vllm import FakeVLLM, Refuse, Say, Step
from support import optional

openai: Any = optional("openai")


RUN = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
CHAT_TOOLS: Any = [{"type": "function", "function": {"name": "run", "description": "d", "parameters": RUN}}]
TOOLS: Any = [{"type": "function", "name": "run", "description": "d", "parameters": RUN, "strict": False}]
ANSWER = Say(text="hello there", reasoning="hm", tools=[("t1", "run", '{"command": "ls"}')])


class RecordedCalls:
    """Keeps calls in memory."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def append(self, call: Call) -> Future[None]:
        self.calls.append(call)
        done: Future[None] = Future()
        done.set_result(None)
        return done


class Front:
    def __init__(self, model: FakeVLLM, recorded: RecordedCalls, url: str, key: str) -> None:
        self.model, self.recorded, self.url, self.key = model, recorded, f"{url}/v1", key
        self.client = openai.AsyncOpenAI(api_key=key, base_url=self.url, max_retries=2)


@asynccontextmanager
async def running(*script: Step, **options: Any) -> AsyncIterator[Front]:
    async with FakeVLLM(*script) as model:
        backend, keys, recorded = VLLMBackend(model.url, "fake"), Keys(), RecordedCalls()
        gateway = Gateway(ModelRouter(backend), recorded, keys, **options)
        url = await gateway.start_tcp("127.0.0.1", 0)
        front = Front(model, recorded, url, keys.issue("attempt"))
        try:
            yield front
        finally:
            await front.client.close()
            await gateway.stop()
            await backend.close()


streaming = pytest.mark.parametrize("streaming", [False, True], ids=["atomic", "streaming"])


# --- chat completions ----------------------------------------------------------------------------------


async def test_chat_completions() -> None:
    async with running(ANSWER) as front:
        made = await front.client.chat.completions.create(
            model="any", messages=[{"role": "user", "content": "hi"}], tools=CHAT_TOOLS, logprobs=True
        )
        (call,) = front.recorded.calls
    choice = made.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hello there", "tool_calls")
    assert choice.message.tool_calls[0].function.arguments == '{"command": "ls"}'
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens > 0
    assert [token.token for token in choice.logprobs.content] == [
        f"token_id:{token}" for token in call.completion_token_ids or ()
    ]
    assert (call.dialect, call.status, json.loads(call.response)) == (
        "openai-chat",
        "ok",
        json.loads(made.model_dump_json(exclude_unset=True)),
    )


@streaming
async def test_the_chat_accumulator_takes_the_stream(streaming: bool) -> None:
    async with running(ANSWER, streaming=streaming) as front:
        async with front.client.chat.completions.stream(
            model="any",
            messages=[{"role": "user", "content": "hi"}],
            tools=CHAT_TOOLS,
            stream_options={"include_usage": True},
        ) as stream:
            kinds = {event.type async for event in stream}
        made = await stream.get_final_completion()
        (call,) = front.recorded.calls
    assert {"chunk", "content.delta", "content.done", "tool_calls.function.arguments.done"} <= kinds
    assert made.choices[0].message.content == "hello there"
    assert made.choices[0].message.tool_calls[0].function.arguments == '{"command": "ls"}'
    assert json.loads(call.response)["usage"]["total_tokens"] == made.usage.total_tokens
    assert json.loads(call.response)["choices"][0]["finish_reason"] == made.choices[0].finish_reason


async def test_the_synchronous_client_and_the_list_of_models() -> None:
    def talk(front: Front) -> tuple[list[str], str]:
        with openai.OpenAI(api_key=front.key, base_url=front.url) as client:
            names = [model.id for model in client.models.list()]
            chunks = client.chat.completions.create(
                model="any", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            return names, "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    async with running(Say(text="hello")) as front:
        names, text = await asyncio.to_thread(talk, front)
    assert "high" in names and "fake" in names
    assert text == "hello"


async def test_a_chat_conversation_with_a_tool_extends_its_prompt() -> None:
    async with running(ANSWER, Say(text="done")) as front:
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        first = await front.client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
        answer = first.choices[0].message
        messages += [
            answer.model_dump(),
            {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "a.py"},
        ]
        await front.client.chat.completions.create(model="any", messages=messages, tools=CHAT_TOOLS)
        messages_sent = front.model.requests[1]["messages"]
    assert messages_sent[1]["tool_calls"][0] == {
        "id": "t1",
        "type": "function",
        "function": {"name": "run", "arguments": '{"command": "ls"}'},
    }
    assert (messages_sent[1]["content"], messages_sent[1]["reasoning"]) == ("hello there", "hm")
    assert messages_sent[2] == {"role": "tool", "tool_call_id": "t1", "content": "a.py"}


# --- responses -----------------------------------------------------------------------------------------


async def test_responses() -> None:
    async with running(ANSWER) as front:
        made = await front.client.responses.create(model="any", input="hi", tools=TOOLS)
        (call,) = front.recorded.calls
    assert (made.output_text, made.status) == ("hello there", "completed")
    assert [item.type for item in made.output] == ["reasoning", "message", "function_call"]
    assert made.output[2].arguments == '{"command": "ls"}'
    assert made.usage.output_tokens > 0
    assert (call.dialect, call.status) == ("openai-responses", "ok")


@streaming
async def test_the_responses_accumulator_takes_the_stream(streaming: bool) -> None:
    async with running(ANSWER, streaming=streaming) as front:
        async with front.client.responses.stream(model="any", input="hi", tools=TOOLS) as stream:
            kinds = {event.type async for event in stream}
        made = await stream.get_final_response()
        (call,) = front.recorded.calls
    assert {"response.created", "response.output_text.delta", "response.completed"} <= kinds
    assert made.output_text == "hello there"
    assert made.output[2].arguments == '{"command": "ls"}'
    stored = json.loads(call.response)["output"]
    assert [item["id"] for item in stored] == [item.id for item in made.output]
    assert [item["status"] for item in stored] == [item.status for item in made.output]


async def test_pings_are_no_trouble_to_either_accumulator() -> None:
    holds = [asyncio.Event(), asyncio.Event()]
    async with running(
        *(Say(text="late", hold=hold) for hold in holds),
        limits=RequestLimits(headers_after_s=0.01, ping_every_s=0.01),
    ) as front:
        for hold in holds:
            asyncio.get_running_loop().call_later(0.2, hold.set)
        async with front.client.responses.stream(model="any", input="hi") as stream:
            created = [event async for event in stream if event.type == "response.created"]
        assert len(created) > 2
        assert (await stream.get_final_response()).output_text == "late"
        async with front.client.chat.completions.stream(
            model="any", messages=[{"role": "user", "content": "hi"}]
        ) as chunks:
            made = await chunks.get_final_completion()
        assert made.choices[0].message.content == "late"


async def test_a_responses_conversation_with_a_tool_extends_its_prompt() -> None:
    async with running(ANSWER, Say(text="done")) as front:
        first = await front.client.responses.create(model="any", input="hi", tools=TOOLS)
        result = {"type": "function_call_output", "call_id": first.output[2].call_id, "output": "a.py"}
        items: Any = [{"role": "user", "content": "hi"}, *first.output, result]
        await front.client.responses.create(model="any", input=items, tools=TOOLS)
        messages_sent = front.model.requests[1]["messages"]
    assert [message["role"] for message in messages_sent] == ["user", "assistant", "tool"]
    assert (messages_sent[1]["content"], messages_sent[1]["reasoning"]) == ("hello there", "hm")
    assert messages_sent[1]["tool_calls"][0]["function"]["arguments"] == '{"command": "ls"}'


# --- faults --------------------------------------------------------------------------------------------


async def ask(front: Front, dialect: str, **fields: Any) -> Any:
    if dialect == "chat":
        messages: Any = [{"role": "user", "content": "hi"}]
        return await front.client.chat.completions.create(model="any", messages=messages, **fields)
    return await front.client.responses.create(model="any", input="hi", **fields)


both = pytest.mark.parametrize("dialect", ["chat", "responses"])


@both
async def test_a_wrong_key_is_told_once(dialect: str) -> None:
    async with running() as front:
        front.client = front.client.with_options(api_key="sk-wrong")
        with pytest.raises(openai.AuthenticationError) as refused:
            await ask(front, dialect)
        assert refused.value.code == "invalid_api_key"
        assert front.model.requests == [] and front.recorded.calls == []


@both
async def test_a_refusal_that_passes_is_waited_out(dialect: str) -> None:
    refusals = [Refuse(status=429, headers={"retry-after": "0"}), Refuse(status=503, headers={"retry-after": "0"})]
    async with running(*refusals, Say(text="at last")) as front:
        made = await ask(front, dialect)
        statuses = [call.status for call in front.recorded.calls]
    assert "at last" in made.model_dump_json()
    assert statuses == ["error", "error", "ok"]


@both
async def test_a_prompt_that_is_too_long_is_told_by_its_code(dialect: str) -> None:
    message = "This model's maximum context length is 10 tokens. However, your request has 20 input tokens."
    async with running(Refuse(status=400, message=message)) as front:
        front.model.max_model_len = 10
        with pytest.raises(openai.BadRequestError) as refused:
            await ask(front, dialect)
    assert refused.value.code == "context_length_exceeded"


@both
async def test_what_cannot_be_done_is_told_by_name_and_kept(dialect: str) -> None:
    async with running() as front:
        with pytest.raises(openai.BadRequestError, match="top_logprobs"):
            await ask(front, dialect, top_logprobs=2)
        (call,) = front.recorded.calls
    assert call.status == "error"


async def test_a_fault_in_a_chat_stream_is_raised() -> None:
    hold = asyncio.Event()
    async with running(
        Say(text="x", finish="abort", hold=hold), limits=RequestLimits(headers_after_s=0.01, ping_every_s=0.01)
    ) as front:
        stream = await ask(front, "chat", stream=True)
        hold.set()
        with pytest.raises(openai.APIError, match="incomplete"):
            [chunk async for chunk in stream]


async def test_a_fault_in_a_responses_stream_is_a_failed_response() -> None:
    hold = asyncio.Event()
    async with running(
        Say(text="x", finish="abort", hold=hold), limits=RequestLimits(headers_after_s=0.01, ping_every_s=0.01)
    ) as front:
        stream = await ask(front, "responses", stream=True)
        hold.set()
        events = [event async for event in stream]
    assert {event.type for event in events[:-1]} == {"response.created"}
    assert events[-1].type == "response.failed"
    assert "incomplete" in events[-1].response.error.message
