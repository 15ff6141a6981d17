"""A local server between our gateway and another trainer's model servers: requests of token ids, by session."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from typing import Any, Self

import msgspec
from aiohttp import web
from msgspec import Struct, field

_BODY_LIMIT = 64 << 20


class BridgeResponse(Struct, frozen=True, kw_only=True):
    """The sampled tokens. `stopped`: the model ended by itself; `aborted`: sampling was interrupted from outside.

    `step` is the training step of the weights that sampled, None if unknown.
    """

    ids: list[int]
    logprobs: list[float] | None
    stopped: bool = True
    aborted: bool = False
    step: int | None = None


Generate = Callable[[list[int], dict[str, Any]], Awaitable[BridgeResponse]]
"""Samples from a prompt, with sampling parameters by vLLM's names."""


class BridgeSession:
    """The requests of one rollout: the URL that it sends them to, and the steps of the weights that answered."""

    def __init__(self, generate: Generate, sampling: dict[str, Any]) -> None:
        self.generate = generate
        self.sampling = sampling
        """Sampling parameters that override those of the agent's requests."""
        self.steps: set[int] = set()
        self.url = ""


class _BridgeRequest(Struct):
    token_ids: list[int]
    sampling_params: dict[str, Any] = field(default_factory=dict[str, Any])


class Bridge:
    """A local HTTP server, used as a context manager. `context` is the maximum length of prompt and answer, in
    tokens.
    """

    def __init__(self, model: str, context: int) -> None:
        self._model = model
        self._context = context
        self._sessions: dict[str, BridgeSession] = {}
        self._base = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=_BODY_LIMIT)
        app.router.add_post("/{session}/inference/v1/generate", self._generate)
        app.router.add_get("/{session}/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self._base = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def open(self, generate: Generate, sampling: dict[str, Any]) -> BridgeSession:
        """Start a session under an unguessable URL and return it."""
        name = secrets.token_urlsafe(16)
        session = self._sessions[name] = BridgeSession(generate, sampling)
        session.url = f"{self._base}/{name}/v1"
        return session

    def close(self, session: BridgeSession) -> None:
        """End a session: its URL answers 404 from now on."""
        self._sessions = {name: other for name, other in self._sessions.items() if other is not session}

    async def _generate(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["session"])
        if session is None:
            return _error_response(
                404, "the rollout of this address has ended, or never began; start a new rollout"
            )
        try:
            request_body = msgspec.json.decode(await request.read(), type=_BridgeRequest)
        except msgspec.DecodeError as error:
            return _error_response(
                400, f"invalid request body: {error}; expected a body of /inference/v1/generate: correct it"
            )
        room = self._context - len(request_body.token_ids)
        if room < 1:
            return _error_response(
                400,
                f"This model's maximum context length is {self._context} tokens. However, your request has "
                f"{len(request_body.token_ids)} input tokens. Please reduce the length of the input.",
            )
        limit = min(int(request_body.sampling_params.get("max_tokens") or room), room)
        sampling = {
            key: value for key, value in request_body.sampling_params.items() if key in ("stop", "logit_bias")
        }
        response = await session.generate(
            request_body.token_ids, {**sampling, **session.sampling, "max_tokens": limit}
        )
        if response.aborted:
            return _error_response(503, "the request was aborted for new weights; send it again")
        if response.step is not None:
            session.steps.add(response.step)
        return web.json_response(_response_body(request_body.token_ids, response, limit))

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self._model, "object": "model", "max_model_len": self._context}
        return web.json_response({"object": "list", "data": [card]})


def _response_body(prompt: list[int], response: BridgeResponse, limit: int) -> dict[str, Any]:
    choice: dict[str, Any] = {
        "index": 0,
        "token_ids": response.ids,
        "finish_reason": "stop" if response.stopped and len(response.ids) < limit else "length",
        "logprobs": None,
    }
    if response.logprobs is not None:
        pairs = zip(response.ids, response.logprobs, strict=True)
        choice["logprobs"] = {"content": [{"token_id": id_, "logprob": min(value, 0.0)} for id_, value in pairs]}
    if response.step is not None:
        choice["weight_versions"] = [{"version": str(response.step), "start": 0, "end": len(response.ids)}]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(response.ids)}
    return {"choices": [choice], "usage": usage}


def _error_response(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)
