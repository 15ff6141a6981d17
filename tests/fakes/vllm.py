"""A scripted model server that speaks vLLM's chat completions on a real loopback socket.

Its tokens are the UTF-8 bytes of what it sees and says, so that a test can read them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from aiohttp import web

END = 256
"""The token that ends an answer."""


@dataclass(kw_only=True)
class Say:
    """A scripted answer. `tools` are (id, name, raw argument string); `hold` delays it until it is set."""

    text: str | None = ""
    reasoning: str | None = None
    tools: Sequence[tuple[str, str, str]] = ()
    finish: str | None = None
    stop: str | None = None
    cached: int = 0
    hold: asyncio.Event | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(kw_only=True)
class Refuse:
    """A scripted refusal: a status, headers and a body."""

    status: int
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    raw: bytes | None = None


@dataclass(kw_only=True)
class Hang:
    """Never answers; `left` is set when the client goes away."""

    left: asyncio.Event = field(default_factory=asyncio.Event)


Step = Say | Refuse | Hang


def render(body: dict[str, Any]) -> str:
    """The prompt text of a request; what follows in a longer conversation extends it."""
    lines = [json.dumps(body.get("tools", []))]
    lines += [json.dumps(message, ensure_ascii=False, sort_keys=True) for message in body["messages"]]
    return "\n".join(lines)


class FakeVLLM:
    """Answers the steps of `script` in order, then `default`; keeps every request in `seen`."""

    def __init__(self, *script: Step, max_model_len: int = 100_000, default: Step | None = None) -> None:
        self.script = list(script)
        self.default = default or Say(text="ok")
        self.max_model_len = max_model_len
        self.seen: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.tokenizes = True
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append(body)
        self.headers.append(dict(request.headers))
        step = self.script.pop(0) if self.script else self.default
        return await self._steps[type(step)](self, body, step)

    async def _say(self, body: dict[str, Any], step: Say) -> web.StreamResponse:
        if step.hold is not None:
            await step.hold.wait()
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": raw}}
            for id_, name, raw in step.tools
        ]
        said = (step.reasoning or "") + (step.text or "") + "".join(raw for _, _, raw in step.tools)
        ids = [*said.encode(), END]
        prompt = list(render(body).encode())
        message = {"role": "assistant", "content": step.text, "reasoning": step.reasoning, "tool_calls": calls}
        choice: dict[str, Any] = {
            "index": 0,
            "message": message,
            "finish_reason": step.finish or ("tool_calls" if calls else "stop"),
            "stop_reason": step.stop,
            "token_ids": ids,
            "logprobs": {"content": [{"token": str(i), "logprob": -i / 1000, "top_logprobs": []} for i in ids]},
        }
        answer: dict[str, Any] = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [choice],
            "prompt_token_ids": prompt,
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(ids),
                "prompt_tokens_details": {"cached_tokens": step.cached},
            },
        }
        return web.json_response(answer | step.extra)

    async def _refuse(self, body: dict[str, Any], step: Refuse) -> web.StreamResponse:
        error = {"error": {"message": step.message, "type": "error", "code": step.status}}
        data = step.raw if step.raw is not None else json.dumps(error).encode()
        return web.Response(status=step.status, headers=step.headers, body=data)

    async def _hang(self, body: dict[str, Any], step: Hang) -> web.StreamResponse:
        try:
            await asyncio.Event().wait()
        finally:
            step.left.set()
        raise AssertionError

    _steps: ClassVar[dict[type, Callable[..., Awaitable[web.StreamResponse]]]] = {
        Say: _say,
        Refuse: _refuse,
        Hang: _hang,
    }

    async def _tokenize(self, request: web.Request) -> web.Response:
        if not self.tokenizes:
            return web.json_response({"error": {"message": "Not Found"}}, status=404)
        body = await request.json()
        self.tokenized.append(body)
        tokens = list(render(body).encode())
        return web.json_response({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake", "object": "model"}]})
