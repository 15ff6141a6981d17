"""A scripted model server that speaks vLLM's chat completions on a real loopback socket.

Its tokens are the UTF-8 bytes of what it sees and says, so that a test can read them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from aiohttp import web

from fakes.listen import listen

END = 256
"""The token that ends an answer."""


@dataclass(kw_only=True)
class Say:
    """A scripted answer. `tools` are (id, name, raw argument string); `hold` delays it until it is set.

    `extra` replaces top-level fields of it. Streamed, it comes in pieces of `piece` characters; with `cut`, the
    connection is lost after so many chunks.
    """

    text: str | None = ""
    reasoning: str | None = None
    tools: Sequence[tuple[str, str, str]] = ()
    finish: str | None = None
    stop: str | None = None
    cached: int = 0
    hold: asyncio.Event | None = None
    extra: dict[str, Any] = field(default_factory=dict[str, Any])
    piece: int = 7
    cut: int | None = None


@dataclass(kw_only=True)
class Raw:
    """A scripted stream, byte for byte, each of its pieces in a write of its own; `lost` closes the connection."""

    pieces: Sequence[bytes]
    lost: bool = False


@dataclass(kw_only=True)
class Refuse:
    """A scripted refusal: a status, headers and a body."""

    status: int
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    raw: bytes | None = None


@dataclass(kw_only=True)
class Hang:
    """Never answers; `asked` is set by its request, `disconnected` when the client goes away."""

    asked: asyncio.Event = field(default_factory=asyncio.Event)
    disconnected: asyncio.Event = field(default_factory=asyncio.Event)


Step = Say | Raw | Refuse | Hang


def event(chunk: Any) -> bytes:
    """A chunk as an event of a stream."""
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"


def chunks(answer: dict[str, Any], piece: int) -> Iterator[dict[str, Any]]:
    """A whole answer as vLLM streams it: the prompt first, tokens and logprobs with each piece, usage last."""
    head = {"id": answer["id"], "object": "chat.completion.chunk", "model": answer["model"]}
    (choice,) = answer["choices"]
    message, ids = choice["message"], list(choice["token_ids"])
    logprobs = list(choice["logprobs"]["content"])

    def chunk(delta: dict[str, Any], text: str | None, **more: Any) -> dict[str, Any]:
        count = len(ids) if text is None else len(text.encode())
        tokens = {"token_ids": ids[:count], "logprobs": {"content": logprobs[:count]}} if text != "" else {}
        del ids[:count], logprobs[:count]
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None} | tokens | more]}

    yield chunk({"role": "assistant", "content": ""}, "") | {"prompt_token_ids": answer["prompt_token_ids"]}
    for name in ("reasoning", "content"):
        for part in cut_up(message[name] or "", piece):
            yield chunk({name: part}, part)
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        opening = {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [{"index": index} | opening]}, "")
        for part in cut_up(function["arguments"], piece):
            yield chunk({"tool_calls": [{"index": index, "function": {"arguments": part}}]}, part)
    ends = {key: choice[key] for key in ("finish_reason", "stop_reason", "weight_versions") if key in choice}
    yield chunk({}, None, **ends)
    yield head | {"choices": [], "usage": answer["usage"]}


def cut_up(text: str, piece: int) -> list[str]:
    """A text in pieces of so many characters."""
    return [text[start : start + piece] for start in range(0, len(text), piece)]


def render(body: dict[str, Any]) -> str:
    """The prompt text of a request; what follows in a longer conversation extends it."""
    lines = [json.dumps(body.get("tools", []))]
    lines += [json.dumps(message, ensure_ascii=False, sort_keys=True) for message in body["messages"]]
    return "\n".join(lines)


class FakeVLLM:
    """Answers the steps of `script` in order, then `default`; keeps every request in `requests`."""

    def __init__(self, *script: Step, max_model_len: int = 100_000, default: Step | None = None) -> None:
        self.script = list(script)
        self.default = default or Say(text="ok")
        self.max_model_len = max_model_len
        self.requests: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.tokenizes = True
        self.version: str | None = None
        self.url = ""

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listen, at a free port when `port` is 0."""
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        self._runner, url = await listen(app, port, handler_cancellation=True)
        self.port = self._runner.addresses[0][1]
        self.url = f"{url}/v1"

    async def stop(self) -> None:
        """Listen no more; `start` may be called again."""
        await self._runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        load = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
        lines = [f'vllm:{name}{{engine="0",model_name="fake"}} 0.0\n' for name in load]
        return web.Response(text="".join(lines))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        step = self.script.pop(0) if self.script else self.default
        return await self._steps[type(step)](self, request, body, step)

    async def _say(self, request: web.Request, body: dict[str, Any], step: Say) -> web.StreamResponse:
        if step.hold is not None:
            await step.hold.wait()
        answer = self.answer(body, step)
        if not body.get("stream"):
            return web.json_response(self.whole(answer, body))
        pieces = [*map(event, self.chunks(answer, body, step.piece)), event(b"[DONE]")]
        return await self._raw(request, body, Raw(pieces=pieces[: step.cut], lost=step.cut is not None))

    def whole(self, answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        """An answer that is not streamed."""
        return answer

    def chunks(self, answer: dict[str, Any], body: dict[str, Any], piece: int) -> Iterator[dict[str, Any]]:
        """The chunks of one that is."""
        return chunks(answer, piece)

    def answer(self, body: dict[str, Any], step: Say) -> dict[str, Any]:
        """What a step says to a request, with all there is to tell."""
        calls = [
            {"id": id_, "type": "function", "function": {"name": name, "arguments": raw}}
            for id_, name, raw in step.tools
        ]
        completion = (step.reasoning or "") + (step.text or "") + "".join(raw for _, _, raw in step.tools)
        ids = [*completion.encode(), END]
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
        if self.version is not None:
            choice["weight_versions"] = [{"version": self.version, "start": 0, "end": len(ids)}]
        return answer | step.extra

    async def _raw(self, request: web.Request, body: dict[str, Any], step: Raw) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for piece in step.pieces:
            await response.write(piece)
        if step.lost:
            assert request.transport is not None
            request.transport.close()
        return response

    async def _refuse(self, request: web.Request, body: dict[str, Any], step: Refuse) -> web.StreamResponse:
        error = {"error": {"message": step.message, "type": "error", "code": step.status}}
        data = step.raw if step.raw is not None else json.dumps(error).encode()
        return web.Response(status=step.status, headers=step.headers, body=data)

    async def _hang(self, request: web.Request, body: dict[str, Any], step: Hang) -> web.StreamResponse:
        step.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            step.disconnected.set()
        raise AssertionError

    _steps: ClassVar[dict[type, Callable[..., Awaitable[web.StreamResponse]]]] = {
        Say: _say,
        Raw: _raw,
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
