"""Scripted servers of tokens in, tokens out, as vLLM and SGLang have it, on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import tokenizers
from aiohttp import web

from fakes.listen import listen

Body = dict[str, Any]


@dataclass(kw_only=True)
class Sample:
    """What is sampled: `text` with special tokens in it, and the token that ends the turn (none: cut off).

    `shattered`: in the smallest tokens there are, as no encoder would have it. `change` has the last word on the
    answer's body.
    """

    text: str = ""
    end: str | None = "<|im_end|>"
    finish: str = "stop"
    stop: str | None = None
    shattered: bool = False
    versions: Sequence[tuple[str, int, int]] = ()
    hold: asyncio.Event | None = None
    change: Callable[[Body], Any] | None = None


@dataclass(kw_only=True)
class Refusal:
    """A refusal by status."""

    status: int
    message: str = "no"


Step = Sample | Refusal


@dataclass
class FakeTokens:
    """Answers with `script`, or with what it returns for the prompt's text; keeps every request in `requests`."""

    definition: str
    script: list[Step] | Callable[[str], Step]
    requests: list[Body] = field(default_factory=list[Body])
    url: str = ""
    request_received: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> Self:
        self.encoder = tokenizers.Tokenizer.from_str(self.definition)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/inference/v1/generate", self._vllm)
        app.router.add_post("/generate", self._sglang)
        app.router.add_get("/v1/models", self._models)
        self._runner, url = await listen(app, handler_cancellation=True)
        self.url = f"{url}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    def encode(self, sample: Sample) -> list[int]:
        """The tokens of a sample."""
        pieces = list(sample.text) if sample.shattered else [sample.text]
        ids = [id_ for piece in pieces for id_ in self.encoder.encode(piece, add_special_tokens=False).ids]
        return ids if sample.end is None else [*ids, self.encoder.token_to_id(sample.end)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens, special ones too."""
        return self.encoder.decode(list(ids), skip_special_tokens=False)

    async def _step(self, request: web.Request, prompt_field: str) -> tuple[Sample, list[int]]:
        body = await request.json()
        self.requests.append(body)
        self.request_received.set()
        script = self.script
        step = script(self.decode(body[prompt_field])) if callable(script) else script.pop(0)
        if isinstance(step, Refusal):
            raise _Refused(step.status, {"error": {"message": step.message, "type": "error", "code": step.status}})
        if step.hold is not None:
            await step.hold.wait()
        return step, self.encode(step)

    async def _vllm(self, request: web.Request) -> web.Response:
        try:
            sample, ids = await self._step(request, "token_ids")
        except _Refused as refused:
            return refused.response()
        choice: Body = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": [{"token_id": id_, "logprob": -id_ / 1000, "rank": 1} for id_ in ids]},
            "finish_reason": sample.finish,
            "stop_reason": sample.stop,
            "weight_versions": [{"version": v, "start": a, "end": b} for v, a, b in sample.versions] or None,
        }
        usage = {"prompt_tokens_details": {"cached_tokens": 1}}
        return _changed({"request_id": "r", "choices": [choice], "usage": usage}, sample)

    async def _sglang(self, request: web.Request) -> web.Response:
        try:
            sample, ids = await self._step(request, "input_ids")
        except _Refused as refused:
            return refused.response()
        matched = sample.stop or (ids[-1] if sample.end and ids else None)
        finish = {"type": sample.finish} | ({"matched": matched} if sample.finish == "stop" else {})
        meta: Body = {
            "id": "r",
            "finish_reason": finish,
            "output_token_logprobs": [[-id_ / 1000, id_, None] for id_ in ids],
            "weight_version": sample.versions[-1][0] if sample.versions else "default",
            "cached_tokens": 1,
        }
        return _changed({"text": "", "output_ids": ids, "meta_info": meta}, sample)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})


class _Refused(Exception):
    def __init__(self, status: int, body: Body) -> None:
        super().__init__()
        self.status, self.body = status, body

    def response(self) -> web.Response:
        return web.json_response(self.body, status=self.status)


def _changed(body: Body, sample: Sample) -> web.Response:
    if sample.change is not None:
        sample.change(body)
    return web.json_response(body)
