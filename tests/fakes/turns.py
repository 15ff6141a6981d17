"""One scripted conversation, to be said by a model behind either wire: what is said, not how."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self

from aiohttp import web

from fakes import vllm
from fakes.listen import listen
from fakes.vllm import END, FakeVLLM, Hang, Raw, Refuse, Say, cut_up

Wire = Literal["chat", "messages"]

Stop = Literal["end", "tools", "length", "refusal"]


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool call: `arguments` is the raw string that the model wrote, `id` what its server calls it."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """An answer. `stop` is what fits when it is None; `prompt_tokens` is told instead of the true count."""

    text: str = ""
    thinking: str | None = None
    tools: Sequence[Tool] = ()
    stop: Stop | None = None
    prompt_tokens: int | None = None
    hold: asyncio.Event | None = None


@dataclass(frozen=True, kw_only=True)
class Fail:
    """A refusal by status; `raw` is a body that is no JSON."""

    status: int
    message: str = "no"
    headers: dict[str, str] = field(default_factory=dict[str, str])
    raw: bytes | None = None


Where = Literal["nothing", "text", "tool", "block", "end"]


@dataclass(frozen=True, kw_only=True)
class Drop:
    """The connection is lost while `turn` is said.

    `where`: before the first byte, in the middle of its text, in the middle of its tool call's arguments, after
    its whole text, or after all of it but the mark that ends a stream.
    """

    turn: Turn
    where: Where


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Never answers; `disconnected` is set when the client goes away."""

    disconnected: asyncio.Event = field(default_factory=asyncio.Event)


Step = Turn | Fail | Drop | Stall


def tool(name: str, id: str = "", **arguments: Any) -> Tool:
    """A tool call with these arguments."""
    return Tool(name=name, arguments=json.dumps(arguments), id=id)


def bash(command: str, id: str = "", **more: Any) -> Tool:
    """A call of the Bash tool."""
    return tool("Bash", id, command=command, description="d", **more)


def say(text: str, *tools: Tool, **more: Any) -> Turn:
    """An answer of text and tool calls."""
    return Turn(text=text, tools=tools, **more)


class Script:
    """What is said to whom: `steps` in their order, but a conversation that names a lane first has that lane's."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.lanes: dict[str, list[Step]] = {}

    def next(self, body: dict[str, Any]) -> Step:
        """The next step for a request; a request that nobody foresaw is refused for good."""
        first = json.dumps([message for message in body["messages"] if message["role"] == "user"][:1])
        queue = next((steps for lane, steps in self.lanes.items() if lane in first), self.steps)
        return queue.pop(0) if queue else Fail(status=400, message="the script has ended")


class _Reachable:
    """A server that can go away and come back."""

    _runner: web.AppRunner

    async def leave(self) -> None:
        """Refuse connections."""
        (site,) = self._runner.sites
        self._address = self._runner.addresses[0]
        await site.stop()

    async def come_back(self) -> None:
        """Accept them again, at the same address."""
        await web.TCPSite(self._runner, *self._address[:2]).start()


class ChatModel(FakeVLLM, _Reachable):
    """The script as vLLM says it, by chat completions."""

    wire: ClassVar[Wire] = "chat"

    def __init__(self) -> None:
        super().__init__()
        self.play = Script()

    @property
    def counted(self) -> list[dict[str, Any]]:
        """The requests for a token count."""
        return self.tokenized

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        step = self.play.next(body)
        if isinstance(step, Drop) and step.where == "nothing":
            self.requests.append(body)
            assert request.transport is not None
            request.transport.close()
            return web.Response()
        self.script[:] = [_chat_step(step, body)]
        return await super()._chat(request)


_FINISH: dict[Stop, str] = {"end": "stop", "tools": "tool_calls", "length": "length", "refusal": "content_filter"}


def _chat_step(step: Step, body: dict[str, Any]) -> vllm.Step:
    match step:
        case Fail():
            return Refuse(status=step.status, message=step.message, headers=step.headers, raw=step.raw)
        case Stall():
            return Hang(disconnected=step.disconnected)
        case Drop() if body.get("stream"):
            answer = _chat_say(step.turn, body)
            answer.cut = _chunks_before(step, answer.piece)
            return answer
        case Drop():
            # A whole answer is one JSON object, and lost is lost, wherever it breaks off.
            return Raw(pieces=[b'{"id": "chatcmpl-1", "choices": [{"message": {"content": "This te'], lost=True)
        case Turn():
            return _chat_say(step, body)


def _chat_say(turn: Turn, body: dict[str, Any]) -> Say:
    extra: dict[str, Any] = {"prompt_token_ids": prompt_ids(body)}
    if turn.prompt_tokens is not None:
        extra["usage"] = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": 10}
    return Say(
        text=turn.text,
        reasoning=turn.thinking,
        tools=[(call.id, call.name, call.arguments) for call in turn.tools],
        finish=turn.stop and _FINISH[turn.stop],
        hold=turn.hold,
        extra=extra,
    )


def _chunks_before(drop: Drop, piece: int) -> int:
    """How many chunks come before a stream is lost."""
    text = len(cut_up(drop.turn.text, piece))
    arguments = len(cut_up(drop.turn.tools[0].arguments, piece))
    thinking = len(cut_up(drop.turn.thinking or "", piece))
    after: dict[Where, int] = {
        "nothing": 0,
        "text": 1 + thinking + text // 2,
        "block": 1 + thinking + text,
        "tool": 1 + thinking + text + 1 + arguments // 2,
        "end": -1,
    }
    return after[drop.where]


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """A prompt as tokens: an assistant's turn comes back as just the tokens that `FakeVLLM` says it in."""
    ids = list(json.dumps(body.get("tools", [])).encode())
    for message in body["messages"]:
        ids += message["role"].encode()
        if message["role"] == "assistant":
            calls = message.get("tool_calls", [])
            texts = [message.get("reasoning") or "", message["content"]]
            ids += [*"".join(texts + [call["function"]["arguments"] for call in calls]).encode(), END]
        else:
            ids += json.dumps(message, sort_keys=True).encode()
    return [*ids, *b"assistant"]


# --- Anthropic's wire ----------------------------------------------------------------------------------


class MessagesModel(_Reachable):
    """The script as Anthropic's API says it."""

    wire: ClassVar[Wire] = "messages"

    def __init__(self) -> None:
        self.play = Script()
        self.requests: list[dict[str, Any]] = []
        self.counted: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count)
        self._runner, self.url = await listen(app, handler_cancellation=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _messages(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        match step := self.play.next(body):
            case Fail():
                return self._refusal(step)
            case Stall():
                try:
                    await asyncio.Event().wait()
                finally:
                    step.disconnected.set()
            case Drop():
                return await self._say(request, body, step.turn, step.where)
            case Turn():
                return await self._say(request, body, step)
        raise AssertionError

    async def _count(self, request: web.Request) -> web.Response:
        self.counted.append(await request.json())
        return web.json_response({"input_tokens": len(await request.read())})

    def _refusal(self, step: Fail) -> web.Response:
        kind = _KINDS.get(step.status, "api_error")
        error = {"type": "error", "error": {"type": kind, "message": step.message}, "request_id": "req_1"}
        data = step.raw if step.raw is not None else json.dumps(error).encode()
        return web.Response(status=step.status, headers=step.headers, body=data)

    async def _say(
        self, request: web.Request, body: dict[str, Any], turn: Turn, lost: Where | None = None
    ) -> web.StreamResponse:
        assert request.transport is not None
        if turn.hold is not None:
            await turn.hold.wait()
        if lost == "nothing":
            request.transport.close()
            return web.Response()
        message = self._message(body, turn)
        if not body.get("stream"):
            data = json.dumps(message).encode()
            response = web.StreamResponse(headers={"content-type": "application/json", "request-id": "req_1"})
            await response.prepare(request)
            await response.write(data[: len(data) // 2] if lost else data)
        else:
            response = web.StreamResponse(headers={"content-type": "text/event-stream", "request-id": "req_1"})
            await response.prepare(request)
            for event in _until(lost, list(_events(message))):
                await response.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())
        if lost:
            request.transport.close()
        return response

    def _message(self, body: dict[str, Any], turn: Turn) -> dict[str, Any]:
        number = len(self.requests)
        content: list[dict[str, Any]] = []
        if turn.thinking is not None:
            content.append({"type": "thinking", "thinking": turn.thinking, "signature": "c2ln"})
        if turn.text:
            content.append({"type": "text", "text": turn.text})
        for index, call in enumerate(turn.tools):
            id_ = call.id or f"toolu_{number:04}{index:04}"
            content.append({"type": "tool_use", "id": id_, "name": call.name, "input": call.arguments})
        usage = {"input_tokens": turn.prompt_tokens or 1000, "output_tokens": 20}
        return {
            "id": f"msg_{number:024}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": content,
            "stop_reason": _STOPS[turn.stop or ("tools" if turn.tools else "end")],
            "stop_sequence": None,
            "usage": usage | {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
        }


_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}
_STOPS: dict[Stop, str] = {"end": "end_turn", "tools": "tool_use", "length": "max_tokens", "refusal": "refusal"}
_FIELDS = {"thinking": "thinking", "text": "text", "tool_use": "input"}
_DELTAS = {"thinking": "thinking", "text": "text", "tool_use": "partial_json"}
_DELTA_TYPES = {"thinking": "thinking_delta", "text": "text_delta", "tool_use": "input_json_delta"}


def _events(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    opening: dict[str, Any] = {**message, "content": [], "stop_reason": None}
    yield {"type": "message_start", "message": opening}
    yield {"type": "ping"}
    for index, block in enumerate(message["content"]):
        kind = block["type"]
        empty: Any = {} if kind == "tool_use" else ""
        start = {name: value for name, value in block.items() if name != "signature"} | {_FIELDS[kind]: empty}
        yield {"type": "content_block_start", "index": index, "content_block": start}
        for part in cut_up(block[_FIELDS[kind]], 24):
            delta = {"type": _DELTA_TYPES[kind], _DELTAS[kind]: part}
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        if "signature" in block:
            signed = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": signed}
        yield {"type": "content_block_stop", "index": index}
    ending = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _until(lost: Where | None, events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is said before the connection is lost."""
    if lost is None:
        return events
    if lost == "end":
        return events[:-1]
    kind = "tool_use" if lost == "tool" else "text"
    starts = [e for e in events if e["type"] == "content_block_start" and e["content_block"]["type"] == kind]
    start = events.index(starts[0])
    stop = next(i for i, e in enumerate(events) if i > start and e["type"] == "content_block_stop")
    return events[: stop + 1] if lost == "block" else events[: (start + stop) // 2 + 1]


Scripted = ChatModel | MessagesModel


def scripted(wire: Wire) -> Scripted:
    """The server that says a script over a wire."""
    return ChatModel() if wire == "chat" else MessagesModel()
