"""Records what an agent and the gateway sent each other in scripted runs, compactly and without keys."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from hashlib import blake2b
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.agents.packages import AgentPackage
from understudy.gateway.server.app import Gateway
from understudy.gateway.server.http import Receive, Send
from understudy.trajectory.request_wordings import wording_pattern
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import Node, build
from understudy.types import Call, CallStatus

_NOT_RECORDED = frozenset(
    (
        "accept-encoding", "authorization", "connection", "content-encoding", "content-length", "host",
        "transfer-encoding", "x-api-key", "x-goog-api-key",
    )
)  # fmt: skip
"""Headers of the connection, and those with the key."""

_UNCUT_CHARACTERS = 300
_KEPT_CHARACTERS = 150
"""A prompt of an agent that is longer than `_UNCUT_CHARACTERS` characters is cut to `_KEPT_CHARACTERS`."""


class Reply(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model answered, or how it failed: see ScriptStep. `tool_calls` are (id, name, arguments)."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[tuple[str, str, str], ...] = ()
    finish_reason: str = "stop"
    status: int = 0
    retry_after_s: float | None = None
    overflow: bool = False
    breaks_after: int | None = None
    hangs: bool = False


class CallRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request as a call of the tree: see Node. `parent` is the number of the exchange that it follows, and
    `response` the message as JSON.
    """

    status: CallStatus
    role: Role
    branch: str
    parent: int | None = None
    origin: str | None = None
    superseded: bool = False
    session_id: str | None = None
    agent_id: str | None = None
    response: str = ""


class ExchangeRecord(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request, the status of its response (None if there was none), the model's reply, and its call."""

    method: str
    target: str
    headers: dict[str, str]
    body: str = ""
    status: int | None = None
    reply: Reply | None = None
    call: CallRecord | None = None


class RunRecord(Struct, frozen=True, kw_only=True):
    """A scripted run. `streaming` and `calls_limit` are settings of the gateway, `outcome` is how the agent
    ended.
    """

    agent: str
    version: str
    behaviour: str
    outcome: str
    streaming: bool
    exchanges: list[ExchangeRecord]
    calls_limit: int | None = None


class Exchange(Struct, kw_only=True):
    """A request while it is answered."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""
    status: int | None = None
    reply: Reply | None = None
    call_id: str = ""


_current: ContextVar[Exchange] = ContextVar("exchange")


class RecordingGateway(Gateway):
    """A gateway that keeps all exchanges, in the order of their beginnings."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """See Gateway."""
        query = scope["query_string"].decode("latin-1")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(
            method=scope["method"], target=scope["path"] + (f"?{query}" if query else ""), headers=headers
        )
        self.exchanges.append(exchange)
        # The tasks that this request starts inherit the variable, among them the one that calls the model.
        _current.set(exchange)

        async def received() -> Any:
            event = await receive()
            if event["type"] == "http.request":
                exchange.body += event.get("body", b"")
            return event

        async def sent(event: Any) -> None:
            if event["type"] == "http.response.start":
                exchange.status = event["status"]
            await send(event)

        await super().__call__(scope, received, sent)


def record_reply(reply: Reply) -> None:
    """Keep what the model answers the current request."""
    _current.get().reply = reply


def record_call(call: Call, headers: Mapping[bytes, bytes]) -> None:
    """Keep which call the current request became. An observer of a gateway."""
    exchange = _current.get()
    exchange.call_id, exchange.body = call.id, call.request


# --- files ------------------------------------------------------------------------------------------------


def run_record(
    package: AgentPackage,
    behaviour: str,
    outcome: str,
    calls: Sequence[Call],
    exchanges: Sequence[Exchange],
    *,
    streaming: bool,
    calls_limit: int | None,
) -> RunRecord:
    """Return the record of a run with its calls."""
    numbers = {exchange.call_id: number for number, exchange in enumerate(exchanges) if exchange.call_id}
    nodes = {node.call.id: node for node in build(calls).nodes}
    return RunRecord(
        agent=package.agent,
        version=package.version,
        behaviour=behaviour,
        outcome=outcome,
        streaming=streaming,
        calls_limit=calls_limit,
        exchanges=[_exchange_record(exchange, nodes, numbers) for exchange in exchanges],
    )


def _exchange_record(exchange: Exchange, nodes: Mapping[str, Node], numbers: Mapping[str, int]) -> ExchangeRecord:
    node = nodes.get(exchange.call_id)
    return ExchangeRecord(
        method=exchange.method,
        target=exchange.target,
        headers={name: value for name, value in exchange.headers.items() if name not in _NOT_RECORDED},
        body=msgspec.json.encode(_cut(msgspec.json.decode(exchange.body))).decode() if exchange.body else "",
        status=exchange.status,
        reply=exchange.reply,
        call=call_record(node, numbers) if node else None,
    )


def call_record(node: Node, numbers: Mapping[str, int]) -> CallRecord:
    """Return the record of a call; `numbers` are those of the exchanges by their calls' ids."""
    call = node.call
    return CallRecord(
        status=call.status,
        role=node.role,
        branch=node.branch,
        parent=None if node.parent is None else numbers[node.parent.call.id],
        origin=node.origin,
        superseded=node.superseded,
        session_id=call.session_id,
        agent_id=call.agent_id,
        response=call.response.decode(),
    )


def _cut(body: Any) -> Any:
    """Cut the agent's own prompts in a request: its system prompt, what it says of its tools, and long notes.

    They are most of a request, and belong to the agent's makers. What tools returned and models wrote stays whole.
    """
    return {
        name: _cut_all(value) if name in _PROMPT_FIELDS else _cut_messages(value) for name, value in body.items()
    }


_SUMMARY_REQUEST = wording_pattern("compaction", "question")
_PROMPT_FIELDS = ("instructions", "system", "systemInstruction", "tools")
_UNCUT_ROLES = ("assistant", "model", "tool")
_UNCUT_ITEMS = (
    "tool_result",
    "function_call_output",
    "custom_tool_call_output",
    "function_call",
    "custom_tool_call",
)


def _cut_messages(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [_cut_all(message) if _is_prompt(message) else message for message in cast(list[Any], value)]


def _is_prompt(message: Any) -> bool:
    match message:
        case {"role": role}:
            return role not in _UNCUT_ROLES
        case {"type": kind}:
            return kind not in _UNCUT_ITEMS
        case _:
            return False


def _cut_all(value: Any) -> Any:
    match value:
        case {"type": "tool_result"} | {"functionResponse": _}:
            return cast(dict[str, Any], value)
        case dict():
            return {name: _cut_all(inner) for name, inner in cast(dict[str, Any], value).items()}
        case list():
            return [_cut_all(inner) for inner in cast(list[Any], value)]
        case str() if len(value) > _UNCUT_CHARACTERS:
            digest = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=6).hexdigest()
            # The wording by which a request for a summary is recognised stays, wherever it is.
            request = _SUMMARY_REQUEST.match(value)
            end = request.end() if request else 0
            wording = value[max(_KEPT_CHARACTERS, end - _KEPT_CHARACTERS) : end]
            return f"{value[:_KEPT_CHARACTERS]}{wording} «{len(value)} characters, {digest}»"
        case _:
            return value


def write_records(directory: Path, records: Iterable[RunRecord]) -> Path:
    """Write the runs of one agent to a file of the directory, a line each, compressed. Returns its path.

    Raises OSError.
    """
    lines = list(records)
    path = directory / f"{lines[0].agent}.jsonl.xz"
    directory.mkdir(parents=True, exist_ok=True)
    text = b"".join(msgspec.json.encode(record) + b"\n" for record in lines)
    path.write_bytes(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
    return path


def read_records(path: Path) -> list[RunRecord]:
    """Return the runs of a file. Raises OSError, lzma.LZMAError and msgspec.ValidationError."""
    lines = lzma.decompress(path.read_bytes()).splitlines()
    return [msgspec.json.decode(line, type=RunRecord) for line in lines]
