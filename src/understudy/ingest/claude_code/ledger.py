"""Reads the request ledger that Claude Code logs from 2.1.329 on: exactly which messages each request contained.

A request is logged as a difference: `messages(request) = messages(base)[:keep] + tail`. The tail names each
message by the hash of its JSON. A message that does not occur elsewhere in the log in exactly this form is logged
as a blob.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, cast

import msgspec
import orjson
from msgspec import Raw, Struct

from understudy.ingest.claude_code.records import DECODE_ERRORS
from understudy.ingest.claude_code.render import value_of
from understudy.ingest.json_values import items, mapping
from understudy.ingest.trace import RequestShape, TraceNode


class _LedgerEntry(Struct, gc=False):
    type: str
    id: str | int | None = None
    base: str | int | None = None
    keep: int | None = None
    tail: list[str] = []
    shapeHash: str | None = None
    hash: str | None = None
    message: Raw = Raw()
    shape: Raw = Raw()


class _LedgerShape(Struct):
    system: Any = None
    systemPrompt: Any = None
    tools: Any = None


_THINKING = ("thinking", "redacted_thinking")
_entry = msgspec.json.Decoder(_LedgerEntry).decode
_shape = msgspec.json.Decoder(_LedgerShape).decode


class RequestLedger:
    """The requests of a session, and the messages that they refer to by hash. `losses` counts malformed lines."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self.losses: Counter[str] = Counter()
        self.requests: dict[str | int, _LedgerEntry] = {}
        self.blobs: dict[str, Raw] = {}
        self.shapes: dict[str, RequestShape] = {}
        for line in lines:
            try:
                self._add(_entry(line))
            except DECODE_ERRORS:
                self.losses["odd-ledger"] += 1

    def _add(self, entry: _LedgerEntry) -> None:
        if entry.type == "api-request" and entry.id is not None:
            self.requests.setdefault(entry.id, entry)
        elif entry.type == "api-request-blob" and entry.hash is not None:
            self.blobs.setdefault(entry.hash, entry.message)
        elif entry.type == "api-request-shape" and entry.shapeHash is not None:
            self.shapes.setdefault(entry.shapeHash, _shape_of(_shape(entry.shape)))
        else:
            self.losses["odd-ledger"] += 1

    def add_logged_messages(self, lines: Iterable[bytes]) -> None:
        """Index the messages of ordinary log records by hash, since the ledger does not write these a second time.

        The CLI may send records in several forms, so all candidates are added: each response, joined from all
        records with its message id, with and without thinking; and user content as single records, as consecutive
        records joined, and as the joined results of one response. A request's hash then selects the form that was
        sent.
        """
        responses: dict[str, list[Any]] = {}
        response_of_call: dict[str, str] = {}  # tool call id → message id of the response that made the call
        results: dict[str | None, list[Any]] = {}
        user_blocks: list[Any] = []
        for line in lines:
            record = mapping(value_of(Raw(line)))
            message = mapping(record.get("message"))
            content = message.get("content")
            if record.get("type") == "user" and content is not None:
                self._add_blob("user", content)
                blocks = items(content) or [{"type": "text", "text": content}]
                user_blocks += blocks
                self._add_blob("user", user_blocks)
                for block in map(mapping, blocks):
                    if (call_id := block.get("tool_use_id")) is not None:
                        results_of_response = results.setdefault(response_of_call.get(str(call_id)), [])
                        results_of_response.append(block)
                        self._add_blob("user", results_of_response)
            elif record.get("type") == "assistant":
                user_blocks = []
                key = str(message.get("id"))
                blocks = items(content)
                responses.setdefault(key, []).extend(blocks)
                response_of_call.update((str(block.get("id")), key) for block in map(mapping, blocks))
        for blocks in responses.values():
            self._add_blob("assistant", blocks)
            shown = [block for block in blocks if mapping(block).get("type") not in _THINKING]
            if len(shown) < len(blocks):
                self._add_blob("assistant", shown)

    def _add_blob(self, role: str, content: Any) -> None:
        message = {"role": role, "content": content}
        digest = message_hash(message)
        if digest not in self.blobs:
            self.blobs[digest] = Raw(msgspec.json.encode(message))

    def shape(self, request_id: str | int) -> RequestShape | None:
        """Return the system prompt and tools of a request, or None if the ledger lacks them."""
        entry = self.requests.get(request_id)
        return self.shapes.get(entry.shapeHash or "") if entry is not None else None


class LedgerRequests:
    """Adds the requests of a ledger to a tree of nodes. Requests that begin with the same messages share nodes."""

    def __init__(self, ledger: RequestLedger, nodes: list[TraceNode]) -> None:
        self._ledger = ledger
        self._nodes = nodes
        self._node_of: dict[tuple[int, str], int] = {}
        self._ends: dict[str | int, tuple[int, int] | None] = {}

    def end_node(self, request_id: str | int) -> int | None:
        """Return the last node of a request, or None if the ledger does not hold the complete request."""
        pending: list[str | int] = []
        current_id: str | int | None = request_id
        while current_id is not None and current_id not in self._ends:
            entry = self._ledger.requests.get(current_id)
            if entry is None or current_id in pending:
                self._ends[current_id] = None
                break
            pending.append(current_id)
            current_id = entry.base
        for pending_id in reversed(pending):
            if pending_id not in self._ends:
                self._ends[pending_id] = self._extend_base(self._ledger.requests[pending_id])
        end = self._ends[request_id]
        return end[0] if end is not None else None

    def _extend_base(self, entry: _LedgerEntry) -> tuple[int, int] | None:
        tip, length = -1, 0
        if entry.base is not None:
            base = self._ends.get(entry.base)
            if base is None:
                return None
            tip, length = base
            keep = length if entry.keep is None else entry.keep
            if not 0 <= keep <= length:
                self._ledger.losses["odd-ledger"] += 1
                return None
            for _ in range(length - keep):
                tip = self._nodes[tip].parent
            length = keep
        elif entry.keep:
            return None
        for digest in entry.tail:
            body = self._ledger.blobs.get(digest)
            if body is None:
                self._ledger.losses["ledger-message-missing"] += 1
                return None
            node = self._node_of.get((tip, digest))
            if node is None:
                node = self._node_of[(tip, digest)] = len(self._nodes)
                self._nodes.append(TraceNode(tip, body))
            tip = node
            length += 1
        return tip, length


def message_hash(message: Any) -> str:
    """Return the hash by which the ledger names a message: SHA-256 (hex) of its JSON with sorted keys and no
    spaces.
    """
    try:
        data = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except orjson.JSONEncodeError:  # an integer above 64 bits or an unpaired surrogate, which orjson rejects
        text = json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        data = text.encode(errors="surrogatepass")
    return hashlib.sha256(data).hexdigest()


def snapshot(attachment: Raw) -> RequestShape:
    """Return the system prompt and tools of a `prompt_snapshot` attachment; an empty shape if it is malformed."""
    try:
        return _shape_of(_shape(attachment))
    except DECODE_ERRORS:
        return RequestShape()


def _shape_of(shape: _LedgerShape) -> RequestShape:
    system: Any = shape.systemPrompt if shape.system is None else shape.system
    if isinstance(system, list):
        blocks = cast(list[Any], system)
        texts: list[Any] = [block if isinstance(block, str) else mapping(block).get("text") for block in blocks]
        system = "\n".join(text for text in texts if isinstance(text, str))
    tools = None if shape.tools is None else [_tool(mapping(tool)) for tool in items(shape.tools)]
    return RequestShape(system if isinstance(system, str) else None, tools)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.get("name") or tool.get("type") or ""}
    if "description" in tool:
        function["description"] = tool["description"]
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
