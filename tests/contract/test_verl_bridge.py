"""The bridge to verl's servers, asked by our own gateway's client of token servers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from understudy.errors import BackendError
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.token_servers import VLLMTokens
from understudy.train.engines.bridge import Bridge, BridgeResponse, BridgeSession
from understudy.types import PolicySpan


class Sampler:
    """Says what is scripted; keeps what it was asked."""

    def __init__(self, *script: BridgeResponse) -> None:
        self.script = list(script)
        self.requests: list[tuple[Sequence[int], dict[str, Any]]] = []

    async def __call__(self, prompt: list[int], sampling: dict[str, Any]) -> BridgeResponse:
        self.requests.append((prompt, sampling))
        return self.script.pop(0)


@asynccontextmanager
async def asked(sampler: Sampler, context: int = 100) -> AsyncGenerator[tuple[VLLMTokens, Bridge, BridgeSession]]:
    async with Bridge("m", context) as bridge:
        session = bridge.open(sampler, {"temperature": 0.7, "top_k": -1})
        client = HttpClient(session.url, resend=False)
        try:
            yield VLLMTokens(client, "m"), bridge, session
        finally:
            await client.close()


async def test_ids_logprobs_and_the_weights_come_through():
    sampler = Sampler(
        BridgeResponse(ids=[5, 6], logprobs=[-0.5, 1e-9], step=7),
        BridgeResponse(ids=[5], logprobs=None, stopped=False, step=8),
    )
    async with asked(sampler) as (server, _, session):
        assert await server.client.models(f"{server.client.base}/models") == ["m"]
        first = await server.generate([1, 2, 3], {"temperature": 0.0, "stop": ["x"], "max_tokens": 9}, None)
        assert (first.ids, first.logprobs, first.finish_reason) == ([5, 6], [-0.5, 0.0], "stop")
        assert first.policy_spans == (PolicySpan("7", 0, 2),)
        second = await server.generate([1], {}, None)
        assert second.logprobs is None and second.finish_reason == "length"
        assert session.steps == {7, 8}
    # What verl says of sampling holds; the rest is the agent's.
    assert sampler.requests[0] == ([1, 2, 3], {"temperature": 0.7, "top_k": -1, "stop": ["x"], "max_tokens": 9})
    assert sampler.requests[1][1]["max_tokens"] == 99


async def test_what_does_not_fit_what_was_aborted_and_who_is_not_known():
    sampler = Sampler(BridgeResponse(ids=[], logprobs=None, aborted=True))
    async with asked(sampler, context=4) as (server, bridge, session):
        with pytest.raises(BackendError, match="maximum context length is 4 tokens") as refused:
            await server.generate([1, 2, 3, 4], {}, None)
        assert refused.value.status == 400
        with pytest.raises(BackendError, match="new weights") as refused:
            await server.generate([1], {}, None)
        assert refused.value.status == 503
        bridge.close(session)
        with pytest.raises(BackendError, match="has ended, or never began"):
            await server.generate([1], {}, None)
    assert len(sampler.requests) == 1
