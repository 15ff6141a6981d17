"""A conversation in OpenAI's form as a request of Anthropic's Messages API."""

from __future__ import annotations

import re
from typing import Any, cast

from msgspec import Raw

from understudy.ingest.normalise import MISSING_RESULT
from understudy.ingest.trace import Message, text_of
from understudy.wire.arguments import tool_input

UNKNOWN_START = "[The beginning of this conversation is not known.]"
"""What the user says first where a log begins with an answer: the API wants the user to begin."""

_ID = re.compile(r"[a-zA-Z0-9_-]{1,200}")
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)

Block = dict[str, Any]


def as_anthropic(messages: list[Message], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The messages, system prompt and tools that say the same.

    Turns alternate, the user's first, and each tool call has its result next.
    Ids of tool calls that the API would refuse, or that come twice, are others. What is no text and no image is
    its type in brackets.
    """
    built = _Built()
    system: list[str] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        if role == "system" and not built.messages:
            system.append(text_of(content))
        elif role == "assistant":
            built.assistant(content, message.get("tool_calls") or ())
        elif role == "tool":
            built.result(str(message.get("tool_call_id") or ""), content)
        else:
            built.user(_blocks(content))
    request: dict[str, Any] = {"messages": built.done()}
    if system:
        request["system"] = "\n\n".join(system)
    if tools:
        request["tools"] = [_tool(tool) for tool in tools]
    return request


class _Built:
    """The messages in the making."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._open: dict[str, str] = {}
        """The calls without a result: our id of each, by the one that the messages have."""
        self._used: set[str] = set()
        self._results: list[Block] = []
        self._text_parts: list[Block] = []

    def user(self, blocks: list[Block]) -> None:
        self._text_parts += blocks

    def result(self, call_id: str, content: Any) -> None:
        ours = self._open.pop(call_id, None)
        if ours is None:
            self._text_parts += _blocks(content)
            return
        blocks = _blocks(content)
        only = len(blocks) == 1 and blocks[0]["type"] == "text"
        shown: Any = blocks[0]["text"] if only else blocks or ""
        self._results.append({"type": "tool_result", "tool_use_id": ours, "content": shown})

    def assistant(self, content: Any, calls: Any) -> None:
        blocks = [block for block in _blocks(content) if block["type"] == "text"]
        if not blocks and not calls:
            return
        self._user_turn()
        for call in calls:
            function: dict[str, Any] = call.get("function") or {}
            ours = self._id(str(call.get("id") or ""))
            # A second call of the same id gets its result by its own: the first, which has none, is closed below.
            self._open[str(call.get("id") or "")] = ours
            name = str(function.get("name") or "")
            arguments: Raw = tool_input(str(function.get("arguments") or ""))
            blocks.append({"type": "tool_use", "id": ours, "name": name, "input": arguments})
        self._add("assistant", blocks)

    def done(self) -> list[dict[str, Any]]:
        self._user_turn()
        return self.messages

    def _user_turn(self) -> None:
        last = self.messages[-1] if self.messages else None
        wanted = [block["id"] for block in last["content"] if block["type"] == "tool_use"] if last else []
        have = {block["tool_use_id"] for block in self._results}
        missing = [id_ for id_ in wanted if id_ not in have]
        results = [{"type": "tool_result", "tool_use_id": id_, "content": MISSING_RESULT} for id_ in missing]
        blocks = [*self._results, *results, *self._text_parts]
        self._open.clear()
        self._results, self._text_parts = [], []
        if not blocks and last is None:
            blocks = [{"type": "text", "text": UNKNOWN_START}]
        if blocks:
            self._add("user", blocks)

    def _add(self, role: str, blocks: list[Block]) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += blocks
        else:
            self.messages.append({"role": role, "content": blocks})

    def _id(self, offered: str) -> str:
        chosen = offered if _ID.fullmatch(offered) and offered not in self._used else f"call_{len(self._used)}"
        while chosen in self._used:
            chosen += "_"
        self._used.add(chosen)
        return chosen


def _blocks(content: Any) -> list[Block]:
    """A content as blocks. The API refuses text that is nothing but space."""
    if content is None or isinstance(content, str):
        return [{"type": "text", "text": content}] if content and content.strip() else []
    blocks: list[Block] = []
    for part in cast("list[Any]", content):
        block = _block(part)
        if block["type"] != "text" or block["text"].strip():
            blocks.append(block)
    return blocks


def _block(part: Any) -> Block:
    if not isinstance(part, dict):
        return {"type": "text", "text": str(part)}
    fields = cast("dict[str, Any]", part)
    if fields.get("type") == "text":
        return {"type": "text", "text": str(fields.get("text") or "")}
    if fields.get("type") == "image_url":
        image = fields.get("image_url")
        url: Any = cast("dict[str, Any]", image).get("url") if isinstance(image, dict) else image
        if isinstance(url, str) and (data := _DATA.fullmatch(url)):
            return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}
        if isinstance(url, str) and url.startswith(("http://", "https://")):
            return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "text", "text": f"[{fields.get('type')}]"}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool.get("function") or {}
    sent: dict[str, Any] = {"name": str(function.get("name") or "")}
    if function.get("description"):
        sent["description"] = function["description"]
    schema: dict[str, Any] = function.get("parameters") or {}
    return sent | {"input_schema": {"type": "object", "properties": {}} | schema}
