"""A state as a request to a teacher, in the dialect that its backend takes, and the most that it can cost."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any, cast

import msgspec
from msgspec import Struct

from understudy.gateway.prices import Price
from understudy.ingest.trace import Message
from understudy.preference.proposals import sent_name
from understudy.replay.messages import as_anthropic
from understudy.replay.teachers import TeacherConfig
from understudy.replay.tools import sendable

GO_ON = "Continue."
"""What the user says behind an answer that was the last thing in a state: providers refuse to go on from there."""

MESSAGE_TOKENS, REQUEST_TOKENS, IMAGE_TOKENS = 32, 4096, 50_000
"""What is added to the bytes of a request to bound its prompt's tokens: what a chat template, or a provider, puts
around each message and around all of them, and what one image is counted as at the most (a large one by OpenAI's
small models; others stay below 5,000)."""

TOKEN_BYTES = 3.5
"""Bytes of a request in a token, as it is estimated: code and JSON have three to four."""

LONGEST_ID = 40
MILLIONTH = 1_000_000
_BEYOND_ASCII = bytes(range(128, 256))


class TeacherRequest(Struct, frozen=True):
    """What is sent: the path and body, and the most tokens that the prompt can have and be estimated to have."""

    path: str
    body: bytes
    most_tokens: int
    likely_tokens: int


def build_request(
    config: TeacherConfig, messages: list[Message], tools: list[dict[str, Any]] | None
) -> TeacherRequest:
    """What asks a teacher about a conversation: what comes next, with these tools.

    Names of tools, ids of their calls and texts that APIs refuse are sent as others.
    """
    try:
        return _request(config, messages, tools)
    except UnicodeEncodeError:
        # A log may hold half of a letter.
        whole = json.dumps([messages, tools], ensure_ascii=False).encode(errors="replace")
        return _request(config, *json.loads(whole))


def _request(config: TeacherConfig, messages: list[Message], tools: list[dict[str, Any]] | None) -> TeacherRequest:
    if _answered(messages):
        messages = [*messages, {"role": "user", "content": GO_ON}]
    messages = [_called(message) for message in messages]
    tools = sendable(tools or ())
    fields: dict[str, Any] = {"model": config.model, "max_tokens": config.max_tokens}
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    if config.backend == "anthropic":
        body, path = fields | as_anthropic(messages, tools), "/v1/messages"
    else:
        body, path = fields | {"messages": [_plain(message) for message in messages]}, "/v1/chat/completions"
        if tools:
            body["tools"] = tools
    data = msgspec.json.encode(body)
    images = _image_sizes(messages)
    text = max(_escaped(data) - sum(images), 0)
    return TeacherRequest(
        path,
        data,
        most_tokens=text + MESSAGE_TOKENS * len(messages) + REQUEST_TOKENS + IMAGE_TOKENS * len(images),
        likely_tokens=math.ceil((len(data) - sum(images)) / TOKEN_BYTES) + 1500 * len(images),
    )


def worst_cost(price: Price, prompt_tokens: int, max_tokens: int) -> float:
    """The most that a request can cost in US dollars."""
    dearest = max(price.input, price.cached or 0.0, price.cache_write or 0.0)
    return (prompt_tokens * dearest + max_tokens * price.output) / MILLIONTH


def likely_cost(price: Price, prompt_tokens: int, completion_tokens: int) -> float:
    """What a request is estimated to cost in US dollars, nothing of it cached."""
    return (prompt_tokens * price.input + completion_tokens * price.output) / MILLIONTH


def _escaped(data: bytes) -> int:
    """The size of JSON with every letter beyond ASCII as \\uXXXX: some chat templates write it so."""
    if data.isascii():
        return len(data)
    plain = len(data.translate(None, delete=_BEYOND_ASCII))
    return plain + 6 * (len(data.decode().encode("utf-16-le")) // 2 - plain)


def _answered(messages: list[Message]) -> bool:
    last = messages[-1] if messages else {"role": "assistant"}
    return last["role"] in ("assistant", "system")


def _called(message: Message) -> Message:
    """A message with the names of tools that a teacher knows them by."""
    if not message.get("tool_calls"):
        return message
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function: dict[str, Any] = call.get("function") or {}
        named = function | {"name": sent_name(str(function.get("name") or ""))}
        calls.append(call | {"type": "function", "function": named})
    return message | {"tool_calls": calls}


def _plain(message: Message) -> Message:
    """A message with what chat completions have and nothing else; parts that are no text and no image as text."""
    fields = {key: message[key] for key in ("role", "content", "tool_calls", "tool_call_id") if key in message}
    content = fields.get("content")
    if isinstance(content, list):
        fields["content"] = [_part(part) for part in cast("list[Any]", content)]
    if "tool_call_id" in fields:
        fields["tool_call_id"] = _id(fields["tool_call_id"])
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [call | {"id": _id(call.get("id"))} for call in calls]
    return fields


def _id(offered: object) -> str:
    """The id of a tool call as it is sent: OpenAI refuses long ones."""
    id_ = str(offered or "")
    if len(id_) <= LONGEST_ID:
        return id_
    return "call_" + hashlib.blake2b(id_.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def _part(part: Any) -> dict[str, Any]:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if kind == "image_url" and fields.get("image_url"):
        return fields
    return {"type": "text", "text": str(fields.get("text") or "") if kind == "text" else f"[{kind}]"}


def _image_sizes(messages: list[Message]) -> list[int]:
    """How many bytes the address of each image has, which no tokenizer sees."""
    sizes: list[int] = []
    for message in messages:
        content = message.get("content")
        for part in cast("list[Any]", content) if isinstance(content, list) else ():
            if isinstance(part, dict) and cast("dict[str, Any]", part).get("type") == "image_url":
                image: Any = cast("dict[str, Any]", part).get("image_url")
                url: Any = cast("dict[str, Any]", image).get("url") if isinstance(image, dict) else image
                sizes.append(len(url) if isinstance(url, str) else 0)
    return sizes
