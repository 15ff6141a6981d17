"""Recordings of real agents, sent again to the gateway: it answers as it did, and the store has the same tree.

Made by `understudy agents try AGENT --record tests/data/agents`. The agents' own prompts are cut.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from understudy.agents.packages import AGENT_PACKAGES
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.budget import Budget
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.run.behaviours import BEHAVIOURS, DIFFERENCES, behaviours_of
from understudy.run.recording import Reply, RunRecord, call_record, read_records
from understudy.store import Store
from understudy.trajectory.tree import build
from understudy.types import Call
from understudy.wire.arguments import parse_object

from fakes.attempts import start_attempts
from fakes.vllm import END, FakeVLLM, Hang, Refuse, Say, Step

FOLDER = Path(__file__).parents[1] / "data" / "agents"
RECORDS = [record for path in sorted(FOLDER.glob("*.xz")) for record in read_records(path)]
RECORDED = tuple(sorted(AGENT_PACKAGES))

OVERFLOW = (
    "This model's maximum context length is 100000 tokens. However, your request has 200000 input tokens. "
    "Please reduce the length of the input messages."
)

module_wide = pytest_asyncio.fixture(scope="module", loop_scope="module")


class Rig:
    """A gateway in each mode, with one model behind them and one store."""

    def __init__(self, model: FakeVLLM, store: Store, keys: Keys, urls: dict[bool, str]) -> None:
        self.model, self.store, self.keys, self.urls = model, store, keys, urls
        self.http = aiohttp.ClientSession()
        self._attempts = iter(start_attempts(store, count=len(RECORDS)))

    async def replay(self, record: RunRecord) -> list[Call | None]:
        """Send all requests of a run in their order; returns the call that each became, if it became one."""
        attempt = next(self._attempts)
        budget = Budget(calls=record.calls_limit) if record.calls_limit else None
        key = self.keys.issue(attempt, budget=budget)
        self.model.requests.clear()
        became: list[Call | None] = []
        for exchange in record.exchanges:
            stored = self.store.calls.count(attempt)
            headers = exchange.headers | {"authorization": f"Bearer {key}"}
            url = self.urls[record.streaming] + exchange.target
            body = exchange.body.encode()
            sending = self.http.request(exchange.method, url, data=body, headers=headers)
            if exchange.reply is not None:
                self.model.script.append(step_of(exchange.reply))
                # Else the gateway counts the tokens of the prompt, which is short.
                self.model.tokenizes = not exchange.reply.overflow
            if exchange.reply is not None and exchange.reply.hangs:
                await self._leave(asyncio.ensure_future(sending))
                while self.store.calls.count(attempt) == stored:  # noqa: ASYNC110 - it happens behind a socket
                    await asyncio.sleep(0.005)
            else:
                async with sending as response:
                    await response.read()
                assert response.status == exchange.status, f"{exchange.target}: {await response.text()}"
            calls = list(self.store.calls.of_attempt(attempt))
            assert len(calls) == stored + (exchange.call is not None)
            became.append(calls[-1] if exchange.call is not None else None)
        assert self.model.script == []
        return became

    async def _leave(self, sending: asyncio.Future[Any]) -> None:
        """Go away once the model has the request."""
        asked = len(self.model.requests)
        async with asyncio.timeout(10):
            while len(self.model.requests) == asked:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.005)
        sending.cancel()


def step_of(reply: Reply) -> Step:
    """What the model's server does for a reply."""
    if reply.hangs:
        return Hang()
    if reply.overflow:
        return Refuse(status=400, message=OVERFLOW)
    if reply.status:
        wait = {} if reply.retry_after_s is None else {"retry-after": f"{reply.retry_after_s:g}"}
        return Refuse(status=reply.status, headers=wait)
    # The first chunk has only the role.
    cut = None if reply.breaks_after is None else 1 + reply.breaks_after
    return Say(
        text=reply.text,
        reasoning=reply.reasoning or None,
        tools=reply.tool_calls,
        finish=reply.finish_reason,
        piece=10_000,
        cut=cut,
    )


@module_wide
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    with Store.open(tmp_path_factory.mktemp("store")) as store:
        async with FakeVLLM(max_model_len=1_000_000) as model:
            keys, models = Keys(), ModelRouter(VLLMBackend(model.url, "fake"))
            gateways = [Gateway(models, store.calls, keys, streaming=streaming) for streaming in (False, True)]
            urls = [await each.start_tcp("127.0.0.1", 0) for each in gateways]
            rig = Rig(model, store, keys, dict(zip((False, True), urls, strict=True)))
            try:
                yield rig
            finally:
                await rig.http.close()
                for each in gateways:
                    await each.stop()
                await models.close()


def test_each_recorded_agent_has_a_recording_of_every_behaviour() -> None:
    recorded = {agent: {record.behaviour for record in RECORDS if record.agent == agent} for agent in RECORDED}
    assert recorded == {agent: {each.name for each in behaviours_of(agent)} for agent in RECORDED}
    assert all(len(behaviours) >= 15 for behaviours in recorded.values())


def test_the_table_of_differences_names_agents_and_behaviours() -> None:
    names = {behaviour.name for behaviour in BEHAVIOURS}
    assert all(agent in AGENT_PACKAGES and of_agent.keys() <= names for agent, of_agent in DIFFERENCES.items())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("record", RECORDS, ids=lambda record: f"{record.agent}-{record.behaviour}")
async def test_the_gateway_answers_and_stores_what_it_did(rig: Rig, record: RunRecord) -> None:
    became = await rig.replay(record)
    calls = [call for call in became if call is not None]
    numbers = {call.id: number for number, call in enumerate(became) if call is not None}
    nodes = {node.call.id: node for node in build(calls).nodes}
    for exchange, call in zip(record.exchanges, became, strict=True):
        if call is None or exchange.call is None:
            continue
        was, now = exchange.call, call_record(nodes[call.id], numbers)
        assert msgspec.structs.replace(now, response=was.response) == was
        assert call.request == exchange.body.encode()
        if call.status == "ok":
            assert stable(json.loads(now.response)) == stable(json.loads(was.response))
            assert exchange.reply is not None
            check_tokens(call, exchange.reply)
    check_history(record, rig.model.requests)


def check_tokens(call: Call, reply: Reply) -> None:
    """All tokens of the answer are stored, with a logprob each."""
    said = reply.reasoning + reply.text + "".join(arguments for _, _, arguments in reply.tool_calls)
    assert call.completion_token_ids is not None and call.logprobs is not None
    assert bytes(call.completion_token_ids[:-1]).decode() == said and call.completion_token_ids[-1] == END
    assert len(call.logprobs) == len(call.completion_token_ids) == call.usage.completion_tokens
    assert call.prompt_token_ids is not None and len(call.prompt_token_ids) == call.usage.prompt_tokens


def check_history(record: RunRecord, requests: list[dict[str, Any]]) -> None:
    """Each request that follows an answer shows the model its tool calls as it wrote them, with their results."""
    asked = [exchange for exchange in record.exchanges if exchange.reply is not None]
    for exchange, request in zip(asked, requests, strict=True):
        call = exchange.call
        if call is None or call.parent is None:
            continue
        answer = record.exchanges[call.parent].reply
        assert answer is not None
        shown = {
            tool["id"]: (tool["function"]["name"], tool["function"]["arguments"])
            for message in request["messages"]
            for tool in message.get("tool_calls", ())
        }
        results = [message["tool_call_id"] for message in request["messages"] if message["role"] == "tool"]
        for id_, name, arguments in answer.tool_calls:
            # A chat template takes JSON only: the agent or the gateway makes some of what is none. OpenCode puts a
            # call of its tool `invalid` in the place of one that it cannot run.
            invalid = record.agent == "opencode" and name == "no_such_tool" and shown[id_][0] == "invalid"
            assert shown[id_] == (name, arguments) or parse_object(arguments) is None or invalid
            assert id_ in results


def stable(value: Any) -> Any:
    """A response without what differs from time to time, and without the tokens that the other model counted."""
    match value:
        case dict():
            return {name: stable(inner) for name, inner in value.items() if name not in _CHANGING}
        case list():
            return [stable(inner) for inner in value]
        case str() if value.startswith(("msg_", "resp_", "chatcmpl", "fc_", "ctc_", "rs_", "call_", "toolu_")):
            return value if value.startswith("call_") else ""
        case _:
            return value


_CHANGING = ("created", "created_at", "usage", "usageMetadata", "model", "modelVersion", "responseId")
