"""Converts the chat messages of logs, whatever their dialect, to the OpenAI form that traces use."""

from __future__ import annotations

from collections import Counter
from typing import Any

from understudy.ingest.json_values import first_string, items, mapping, string
from understudy.ingest.trace import Message, tool_call

_ROLE_ALIASES = {
    "system": ("system", "developer"),
    "user": ("user", "human"),
    "assistant": ("assistant", "ai", "model"),
    "tool": ("tool", "function"),
}
ROLES = {name: role for role, names in _ROLE_ALIASES.items() for name in names}
_TEXT_TYPES = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})


def chat(raw: Any, losses: Counter[str]) -> Message | None:
    """Convert a message in the form of chat completions, Anthropic or SWE-agent. Returns None if it is not a
    message.

    Thinking becomes `reasoning_content`; if the log has thinking blocks without text, `thinking_hidden` is True.
    What cannot be interpreted is counted in `losses`.
    """
    fields = mapping(raw)
    role = ROLES.get(str(fields.get("role")))
    if role is None:
        losses["not_a_message" if not fields else "unknown_role"] += 1
        return None
    text = content(fields.get("content"), losses)
    if role == "assistant":
        text = text or string(fields.get("refusal"))
        blocks = items(fields.get("thinking_blocks"))
        thinking = first_string(fields, "reasoning_content", "reasoning") or thinking_text(blocks)
        return response_message(text, calls(fields.get("tool_calls"), losses), thinking, hidden=bool(blocks))
    if role != "tool":
        return {"role": role, "content": text}
    call_id = string(fields.get("tool_call_id")) or next(map(string, items(fields.get("tool_call_ids"))), None)
    if call_id is None:
        # Without an id it is unknown which call this is the result of, so it becomes a user message.
        losses["result_without_id"] += 1
        return {"role": "user", "content": text}
    return result_message(call_id, text or "", is_error=fields.get("is_error") is True)


def response_message(
    content: Any, calls: list[dict[str, Any]], thinking: str | None = None, *, hidden: bool = False
) -> Message:
    """Build an assistant message. `hidden`: the model did think, but the log may lack the text."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = calls
    if thinking:
        message["reasoning_content"] = thinking
    elif hidden:
        message["thinking_hidden"] = True
    return message


def result_message(call_id: str, content: Any, *, is_error: bool = False) -> Message:
    """Build a message with the result of a tool call."""
    message: Message = {"role": "tool", "content": content, "tool_call_id": call_id}
    return {**message, "is_error": True} if is_error else message


def thinking_text(blocks: list[Any], key: str = "thinking") -> str:
    """Return the text of thinking blocks, which each has under `key`, joined by line breaks."""
    return "\n".join(text for block in blocks if (text := string(mapping(block).get(key))))


def calls(raw: Any, losses: Counter[str]) -> list[dict[str, Any]]:
    """Convert the tool calls of a message to OpenAI's form.

    They may be in OpenAI's form or `{id, name, arguments}`.
    """
    tool_calls: list[dict[str, Any]] = []
    for index, entry in enumerate(items(raw)):
        call = mapping(entry)
        function = mapping(call.get("function")) or call
        name = string(function.get("name"))
        if name is None:
            losses["unknown_call"] += 1
            continue
        call_id = first_string(call, "id", "call_id")
        if call_id is None:
            losses["call_without_id"] += 1
            call_id = f"call_{index}"
        arguments = function.get("arguments")
        tool_calls.append(tool_call(call_id, name, {} if arguments is None else arguments))
    return tool_calls


def content(raw: Any, losses: Counter[str]) -> str | list[dict[str, Any]] | None:
    """Convert the content of a message: a string if it is a single text, else a list of OpenAI content parts.

    Returns None for empty content. Parts that are neither text nor an image are counted as `unknown_part`.
    """
    if raw is None or isinstance(raw, str):
        return raw
    entries = items(raw) if isinstance(raw, list) else [raw]
    parts = [part for entry in entries for part in _parts(entry, losses)]
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or None


def _parts(entry: Any, losses: Counter[str]) -> list[dict[str, Any]]:
    if isinstance(entry, str):
        return [{"type": "text", "text": entry}]
    part = mapping(entry)
    kind = str(part.get("type"))
    part_text = part.get("text") if kind in _TEXT_TYPES or "type" not in part else None
    if kind == "refusal":
        part_text = part.get("refusal", part_text)
    if isinstance(part_text, str):
        return [{"type": "text", "text": part_text}]
    addresses = [address for address in _images(part) if address]
    if not addresses:
        losses["unknown_part"] += 1
    return [{"type": "image_url", "image_url": {"url": address}} for address in addresses]


def _images(part: dict[str, Any]) -> list[str | None]:
    """Return the URLs of an image part of any dialect: OpenAI, Responses API, Anthropic, OpenHands or ATIF."""
    if (address := part.get("image_url")) is not None:
        return [string(address) or string(mapping(address).get("url"))]
    if urls := items(part.get("image_urls")):
        return [string(url) for url in urls]
    source = mapping(part.get("source"))
    if data := string(source.get("data")):
        return [f"data:{source.get('media_type') or 'image/png'};base64,{data}"]
    media_type = source.get("media_type")
    if part.get("type") == "image" or (isinstance(media_type, str) and media_type.startswith("image/")):
        return [string(source.get("url")) or string(source.get("path"))]
    return []


def blocks(role: str, raw: Any, losses: Counter[str]) -> list[Message]:
    """Convert the content blocks of one Anthropic message to chat messages.

    A user message gives its tool results first, then its text; an assistant message gives one message with its
    tool calls.
    """
    if isinstance(raw, str):
        return [{"role": role, "content": raw}]
    parts: list[Any] = []
    results: list[Message] = []
    tool_calls: list[dict[str, Any]] = []
    thinking_blocks: list[Any] = []
    for entry in items(raw):
        block = mapping(entry)
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            if call_id := string(block.get("tool_use_id")):
                text = content(block.get("content"), losses) or ""
                results.append(result_message(call_id, text, is_error=bool(block.get("is_error"))))
            else:
                losses["result_without_id"] += 1
        elif kind == "tool_use":
            tool_calls.extend(calls([{**block, "arguments": block.get("input") or {}}], losses))
        elif kind in ("thinking", "redacted_thinking"):
            thinking_blocks.append(block)
        else:
            parts.append(entry)
    message = response_message(
        content(parts, losses), tool_calls, thinking_text(thinking_blocks), hidden=bool(thinking_blocks)
    )
    return results + ([{**message, "role": role}] if len(message) > 2 or message["content"] else [])
