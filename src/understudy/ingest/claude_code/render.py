"""Renders Claude Code's records as chat messages.

Rendering is lazy: only the nodes that are needed are rendered.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct

from understudy.ingest.chat import response_message
from understudy.ingest.claude_code.records import DECODE_ERRORS, ClaudeBlock, ClaudeRecord
from understudy.ingest.claude_code.tree import ClaudeResponse, SentRecord, TrimmedResponse
from understudy.ingest.claude_code.versions import log_only_inputs
from understudy.ingest.trace import Message, TurnAction, tool_call
from understudy.wire.anthropic_request import ContentBlock, render_block, served_text
from understudy.wire.decoding import decoded

CLEARED_RESULT = "[Old tool result content cleared]"
"""What the CLI sends in place of a tool result that it cleared to save context."""

Blocks = Sequence[ClaudeBlock | str]


class _LedgerMessage(Struct):
    role: str = ""
    content: str | list[ClaudeBlock | str] | None = None


_decode_message = msgspec.json.Decoder(_LedgerMessage).decode
_decode_block = msgspec.json.Decoder(ContentBlock).decode
_FIELDS = ("title", "text", "input", "content", "source", "tool")


class ClaudeCodeRenderer:
    """Renders the nodes that `walk` and `ledger` create."""

    def history(self, body: Any) -> list[Message]:
        """Return the messages of a node without thinking."""
        if isinstance(body, ClaudeResponse):
            return _assistant((block for record in body.records for block in _blocks(record)), body)
        if isinstance(body, TrimmedResponse):
            blocks = [
                block
                for record in body.response.records
                for block in _blocks(record)
                if isinstance(block, str) or block.type != "tool_use" or block.id in body.tool_use_ids
            ]
            return _assistant(blocks, body.response)
        if isinstance(body, SentRecord):
            return _with_added(body)
        if isinstance(body, ClaudeRecord):
            return _user(_user_content(body))
        if isinstance(body, Raw):
            return _ledger_message(body)
        return []

    def action(self, bodies: Sequence[Any]) -> TurnAction:
        """Return what a response did, with the thinking that the log holds."""
        blocks = [
            block
            for body in bodies
            if isinstance(body, ClaudeResponse)
            for record in body.records
            for block in _blocks(record)
        ]
        message: Message = next(iter(_assistant(blocks)), Message())
        kinds = {block.type for block in blocks if isinstance(block, ClaudeBlock)}
        thoughts = [
            text(block.thinking) for block in blocks if isinstance(block, ClaudeBlock) and block.type == "thinking"
        ]
        thinking = "\n".join(thought for thought in thoughts if thought)
        return TurnAction(
            content=message.get("content"),
            thinking=thinking or None,
            thinking_hidden=not thinking and not kinds.isdisjoint({"thinking", "redacted_thinking"}),
            tool_calls=message.get("tool_calls", []),
        )


def value_of(raw: Raw) -> Any:
    """Decode raw JSON. Returns None if it is malformed; unpaired surrogates become question marks."""
    data = bytes(raw)
    if not data:
        return None
    try:
        return msgspec.json.decode(data)
    except DECODE_ERRORS:
        pass
    try:
        loaded = json.loads(data.decode(errors="replace"))
        return msgspec.json.decode(json.dumps(loaded, ensure_ascii=False).encode(errors="replace"))
    except DECODE_ERRORS:
        return None


def text(raw: Raw) -> str:
    """Decode raw JSON that should be a string. Returns "" if it is anything else."""
    value = value_of(raw)
    return value if isinstance(value, str) else ""


def _blocks(record: ClaudeRecord) -> Blocks:
    content = record.message.content if record.message is not None else None
    return [content] if isinstance(content, str) else content or ()


def _user_content(record: ClaudeRecord) -> Blocks:
    """Return the content of a user record: a prompt, tool results, or the output of a command."""
    if record.type == "system":
        return [text(record.content)]
    return _blocks(record)


def _ledger_message(raw: Raw) -> list[Message]:
    """Convert a message of the request ledger."""
    try:
        message = _decode_message(raw)
    except DECODE_ERRORS:
        return []
    content = message.content
    blocks = [content] if isinstance(content, str) else content or ()
    # System messages within a conversation become user messages, since chat templates allow none there.
    return _assistant(blocks) if message.role == "assistant" else _user(blocks)


def _assistant(blocks: Iterable[ClaudeBlock | str], sent_back: ClaudeResponse | None = None) -> list[Message]:
    """Build the message of a response, or, if `sent_back` is the response, the form in which its version sends it
    back later.
    """
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        if isinstance(block, str):
            texts.append(block)
        elif block.type == "text":
            texts.append(text(block.text))
        elif block.type != "tool_use":
            texts.append(served_text(_wire_block(block)) or "")
        else:
            name = (
                "Agent" if block.name == "Task" and sent_back and sent_back.renames_starter else block.name or ""
            )
            hides_plans = sent_back is not None and sent_back.hides_plans
            calls.append(tool_call(block.id or "", name, _arguments(block, hides_plans)))
    content = "\n".join(part for part in texts if part)
    if not content and not calls:
        return []
    return [response_message(content or None, calls)]


def _arguments(block: ClaudeBlock, hides_plans: bool) -> str:
    data = bytes(block.input)
    hidden = log_only_inputs(block) if hides_plans else ()
    if hidden and isinstance(value := value_of(block.input), dict):
        fields = cast(dict[str, Any], value)
        data = msgspec.json.encode({key: item for key, item in fields.items() if key not in hidden})
    return data.decode(errors="replace") or "{}"


def _user(blocks: Blocks, cleared: frozenset[str] = frozenset()) -> list[Message]:
    results: list[Message] = []
    parts: list[Any] = []
    for block in blocks:
        if isinstance(block, ClaudeBlock) and block.tool_use_id is not None:
            content = CLEARED_RESULT if block.tool_use_id in cleared else _result(value_of(block.content))
            message: Message = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            if block.is_error:
                message["is_error"] = True
            results.append(message)
        elif isinstance(block, str):
            parts.append({"type": "text", "text": block})
        else:
            parts.append(_block_part(block))
    parts = [part for part in parts if part.get("text") != ""]
    if parts:
        results.append({"role": "user", "content": _simple(parts, joined=True)})
    return results


def _with_added(sent: SentRecord) -> list[Message]:
    """Return the messages of a record with added texts; some versions merge these into the last tool result."""
    blocks = _user_content(sent.record)
    if sent.forgot_images:
        blocks = [
            f"[{block.type}]" if isinstance(block, ClaudeBlock) and block.type in ("image", "document") else block
            for block in blocks
        ]
    if not any(isinstance(block, ClaudeBlock) and block.tool_use_id is not None for block in blocks):
        return _user([*sent.added, *blocks])
    messages = _user(blocks, sent.cleared)
    added = list(sent.added)
    last_message, last_raw = (
        messages[-1],
        next((bytes(block.content) for block in reversed(blocks) if isinstance(block, ClaudeBlock)), b""),
    )
    if last_message["role"] == "tool" and last_raw.startswith(b'"'):
        texts = [part for part in added if isinstance(part, str)]
        last_message["content"] = "\n\n".join(filter(None, (last_message["content"].rstrip(), *texts)))
        added = [part for part in added if not isinstance(part, str)]
    elif last_message["role"] == "tool" and sent.extends_lists and all(isinstance(part, str) for part in added):
        parts = last_message["content"]
        if isinstance(parts, str):
            parts = [{"type": "text", "text": parts}]
        if parts[-1]["type"] == "text":
            parts = [*parts[:-1], {**parts[-1], "text": f"{parts[-1]['text']}\n"}]
        last_message["content"] = [*parts, *({"type": "text", "text": part} for part in added)]
        added = []
    return [*messages, *_user(added)]


def _result(content: Any) -> Any:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return msgspec.json.encode(content).decode()
    parts: list[Any] = []
    for item in cast(list[Any], content):
        if isinstance(item, dict):
            parts.append(_part(cast(dict[str, Any], item)))
        else:
            parts.append({"type": "text", "text": item if isinstance(item, str) else str(item)})
    return _simple(parts, joined=False)


def _block_part(block: ClaudeBlock) -> dict[str, Any]:
    if block.type in ("text", "image"):
        return _part({"type": block.type, "text": text(block.text), "source": value_of(block.source)})
    return {"type": "text", "text": render_block(_wire_block(block))[0]}


def _part(block: dict[str, Any]) -> dict[str, Any]:
    """Return a content block as a content part: an image, or the text that the gateway shows a model for it."""
    kind, value = str(block.get("type")), block.get("text")
    if kind == "text":
        return {"type": "text", "text": value if isinstance(value, str) else ""}
    if kind == "image" and (url := _url(block.get("source"))):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "text", "text": render_block(_decoded_block(msgspec.json.encode(block), kind))[0]}


def _wire_block(block: ClaudeBlock) -> ContentBlock:
    """Return a block as the gateway reads it."""
    fields = {name: raw for name in _FIELDS if bytes(raw := getattr(block, name))}
    return _decoded_block(
        msgspec.json.encode({"type": block.type, "name": block.name or "", **fields}), block.type
    )


def _decoded_block(data: bytes, kind: str) -> ContentBlock:
    """Decode a block; only its type is left of one that is malformed."""
    try:
        return decoded(_decode_block, data)
    except DECODE_ERRORS:
        return ContentBlock(type=kind)


def _url(source: Any) -> str:
    """Return the address of an image, or its data as a URL; "" if there is neither."""
    fields = cast(dict[str, Any], source) if isinstance(source, dict) else {}
    if isinstance(fields.get("url"), str):
        return fields["url"]
    data = fields.get("data")
    return f"data:{fields.get('media_type') or 'image/png'};base64,{data}" if data else ""


def _simple(parts: list[Any], *, joined: bool) -> Any:
    """Return a string if the content is one text (or only texts, with `joined`), else the list of parts."""
    if all(part["type"] == "text" for part in parts) and (joined or len(parts) == 1):
        return "\n".join(part["text"] for part in parts)
    return parts
