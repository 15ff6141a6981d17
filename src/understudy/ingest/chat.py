"""Chat messages of every dialect that logs hold, in the one form that traces have."""

from __future__ import annotations

from collections import Counter
from typing import Any

from understudy.ingest.log_reader import items, mapping, string
from understudy.ingest.trace import Message, tool_call

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}
_TEXTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text", "refusal"})


def chat(raw: Any, losses: Counter[str]) -> Message | None:
    """A message of a chat completion, of Anthropic's or of SWE-agent's kind; None where it is no message.

    Thinking is in `reasoning_content`, or `thinking_hidden` is True. What is not understood is counted.
    """
    source = mapping(raw)
    role = ROLES.get(str(source.get("role")))
    if role is None:
        losses["not_a_message" if not source else "unknown_role"] += 1
        return None
    message: Message = {"role": role, "content": content(source.get("content"), losses)}
    if role == "tool":
        ids = items(source.get("tool_call_ids"))
        call_id = string(source.get("tool_call_id")) or (string(ids[0]) if ids else None)
        if call_id is None:
            # Without its call it can only be said as the user's words.
            losses["result_without_id"] += 1
            message["role"] = "user"
            return message
        message["tool_call_id"] = call_id
        message["content"] = message["content"] or ""
    elif role == "assistant":
        tool_calls = calls(source.get("tool_calls"), losses)
        if tool_calls:
            message["tool_calls"] = tool_calls
        thought = string(source.get("reasoning_content")) or string(source.get("reasoning"))
        think(message, thought, items(source.get("thinking_blocks")))
    return message


def think(message: Message, thought: str | None, blocks: list[Any] | None = None) -> None:
    """Puts the thinking into a message: the text, else that of Anthropic's blocks, else that it is hidden."""
    thoughts = [text for block in blocks or () if (text := string(mapping(block).get("thinking")))]
    if thought or thoughts:
        message["reasoning_content"] = thought or "\n".join(thoughts)
    elif blocks:
        message["thinking_hidden"] = True


def calls(raw: Any, losses: Counter[str]) -> list[dict[str, Any]]:
    """The tool calls of a message, in OpenAI's form or as `{id, name, arguments}`."""
    tool_calls: list[dict[str, Any]] = []
    for at, entry in enumerate(items(raw)):
        call = mapping(entry)
        function = mapping(call.get("function")) or call
        title = string(function.get("name"))
        if title is None:
            losses["unknown_call"] += 1
            continue
        call_id = string(call.get("id")) or string(call.get("call_id"))
        if call_id is None:
            losses["call_without_id"] += 1
            call_id = f"call_{at}"
        arguments = function.get("arguments")
        tool_calls.append(tool_call(call_id, title, {} if arguments is None else arguments))
    return tool_calls


def content(raw: Any, losses: Counter[str]) -> str | list[dict[str, Any]] | None:
    """The content of a message: a text where it is only one, else OpenAI's parts; None where it is empty.

    Parts that are neither text nor an image are counted as `unknown_part`.
    """
    if isinstance(raw, str):
        return raw
    if raw is None:
        return None
    parts: list[dict[str, Any]] = []
    for entry in items(raw) if isinstance(raw, list) else [raw]:
        parts.extend(_part(entry, losses))
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts or None


def _part(entry: Any, losses: Counter[str]) -> list[dict[str, Any]]:
    if isinstance(entry, str):
        return [{"type": "text", "text": entry}]
    part = mapping(entry)
    part_text = part.get("text") if str(part.get("type")) in _TEXTS or "type" not in part else None
    if isinstance(part_text, str):
        return [{"type": "text", "text": part_text}]
    addresses = [address for address in _images(part) if address]
    if not addresses:
        losses["unknown_part"] += 1
    return [{"type": "image_url", "image_url": {"url": address}} for address in addresses]


def _images(part: dict[str, Any]) -> list[str | None]:
    """The addresses of a part that is an image: OpenAI's, the Responses API's, Anthropic's, OpenHands', ATIF's."""
    if (address := part.get("image_url")) is not None:
        return [string(address) or string(mapping(address).get("url"))]
    if urls := items(part.get("image_urls")):
        return [string(url) for url in urls]
    source = mapping(part.get("source"))
    if data := string(source.get("data")):
        return [f"data:{source.get('media_type') or 'image/png'};base64,{data}"]
    media = source.get("media_type")
    if part.get("type") == "image" or (isinstance(media, str) and media.startswith("image/")):
        return [string(source.get("url")) or string(source.get("path"))]
    return []


def blocks(role: str, raw: Any, losses: Counter[str]) -> list[Message]:
    """The messages that one of Anthropic's is: the tool results, then the words; or an answer with its calls."""
    if isinstance(raw, str):
        return [{"role": role, "content": raw}]
    parts: list[Any] = []
    results: list[Message] = []
    tool_calls: list[dict[str, Any]] = []
    thoughts: list[Any] = []
    for entry in items(raw):
        block = mapping(entry)
        kind = block.get("type")
        if kind == "tool_result" and role == "user":
            call_id = string(block.get("tool_use_id"))
            if call_id is None:
                losses["result_without_id"] += 1
                continue
            result: Message = {"role": "tool", "content": content(block.get("content"), losses) or ""}
            results.append(
                {**result, "tool_call_id": call_id, **({"is_error": True} if block.get("is_error") else {})}
            )
        elif kind == "tool_use":
            tool_calls.extend(calls([{**block, "arguments": block.get("input") or {}}], losses))
        elif kind in ("thinking", "redacted_thinking"):
            thoughts.append(block)
        else:
            parts.append(entry)
    message: Message = {"role": role, "content": content(parts, losses)}
    if tool_calls:
        message["tool_calls"] = tool_calls
    think(message, None, thoughts)
    return results + ([message] if len(message) > 2 or message["content"] else [])
