"""Turns a state into a request to a teacher, in its backend's dialect, and bounds its cost.

The messages of a state are read into the conversation model and laid out as the gateway does it (`wire.layout`),
so that a teacher is shown what a model behind the gateway would be shown.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct, structs

from understudy.gateway.prices import Price
from understudy.ingest.prompt_sizes import PromptSize, escaped_bytes
from understudy.ingest.trace import MISSING_RESULT, Message, text_of
from understudy.preference.proposals import sent_name
from understudy.replay.teachers import TeacherConfig
from understudy.wire.arguments import tool_input
from understudy.wire.chat_request import ChatBody, read_conversation
from understudy.wire.layout import lay_out

UNKNOWN_START = "[The beginning of this conversation is not known.]"
"""The first user message if a log begins with an answer, because the API requires one."""

CONTINUE_PROMPT = "Continue."
"""The user message after a state that ends with an answer, because providers refuse to continue from one."""

MAX_ID_CHARS = 40
PRICED_TOKENS = 1_000_000
"""Prices are in US dollars for this many tokens."""

_ROLES_NOT_LAST = ("assistant", "system")
_VALID_ID = re.compile(r"[a-zA-Z0-9_-]{1,200}")
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)


class TeacherRequest(Struct, frozen=True):
    """A request to send: its path, body and size."""

    path: str
    body: bytes
    size: PromptSize


def build_request(
    config: TeacherConfig, messages: list[Message], tools: list[dict[str, Any]] | None
) -> TeacherRequest:
    """Return the request that asks a teacher for the next turn of a conversation with these tools."""
    try:
        return _request(config, messages, tools)
    except UnicodeEncodeError:
        # A log may contain half of a surrogate pair, which UTF-8 cannot encode.
        encoded = json.dumps([messages, tools], ensure_ascii=False).encode(errors="replace")
        return _request(config, *json.loads(encoded))


def _request(config: TeacherConfig, messages: list[Message], tools: list[dict[str, Any]] | None) -> TeacherRequest:
    messages = _answerable(shown_messages(messages))
    data = msgspec.json.encode(_body(config, messages, sendable(tools or ())))
    path = "/v1/messages" if config.backend == "anthropic" else "/v1/chat/completions"
    return TeacherRequest(path, data, _size(data, messages))


def _answerable(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] in _ROLES_NOT_LAST:
        messages.append({"role": "user", "content": CONTINUE_PROMPT})
    return messages


def _body(config: TeacherConfig, messages: list[Message], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the request."""
    fields: dict[str, Any] = {"model": config.model, "max_tokens": config.max_tokens}
    if config.temperature is not None:
        fields["temperature"] = config.temperature
    if config.backend == "anthropic":
        return fields | as_anthropic(messages, tools)
    return fields | {"messages": messages} | ({"tools": tools} if tools else {})


def _size(data: bytes, messages: Sequence[Message]) -> PromptSize:
    """Return the size of a request whose JSON is `data`."""
    images = [len(str(part["image_url"].get("url"))) for part in _parts(messages) if part["type"] == "image_url"]
    hidden = sum(images)
    return PromptSize(len(data) - hidden, escaped_bytes(data) - hidden, len(messages), len(images))


def shown_messages(messages: list[Message]) -> list[Message]:
    """Return the chat messages that a teacher is shown, with tool names and call ids that every API accepts.

    Thinking is left out, because it is the student's own. A part that a chat model cannot be shown is replaced by
    its type in brackets.
    """
    try:
        body = msgspec.convert({"messages": messages}, ChatBody)
    except msgspec.ValidationError:
        # A log may contain parts in an invalid form, of which only the texts can be shown.
        texts = [message | {"content": text_of(message.get("content"))} for message in messages]
        body = msgspec.convert({"messages": texts}, ChatBody)
    return _laid_out(body)


def _laid_out(body: ChatBody) -> list[Message]:
    conversation, _ = read_conversation(body)
    blocks = [
        structs.replace(
            block, id=_sent_id(block.id), name=sent_name(block.name) if block.kind == "tool_use" else block.name
        )
        for block in conversation.blocks
        if block.kind != "thinking"
    ]
    return lay_out(conversation.instructions, blocks, lambda _: None)


def as_anthropic(messages: list[Message], tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Return laid out chat messages, and tools, as the fields of a request of Anthropic's Messages API.

    Turns alternate, beginning with a user's, and the result of each tool call follows in the next turn. Ids of
    tool calls that are duplicates or that the API would refuse are replaced.
    """
    request: dict[str, Any] = {}
    if messages and messages[0]["role"] == "system":
        request["system"] = messages[0]["content"]
        messages = messages[1:]
    turns = _AnthropicTurns()
    for message in messages:
        turns.add(message)
    request["messages"] = turns.end()
    if tools:
        request["tools"] = [
            {"input_schema" if key == "parameters" else key: value for key, value in tool["function"].items()}
            for tool in tools
        ]
    return request


class _AnthropicTurns:
    """Converts chat messages into turns of Anthropic's API."""

    def __init__(self) -> None:
        self._turns: list[dict[str, Any]] = []
        self._open: dict[str, str] = {}
        """The calls without a result: our id of each, by the one that the messages have."""
        self._used = set[str]()
        self._results: dict[str, str] = {}
        self._content: list[dict[str, Any]] = []

    def add(self, message: Message) -> None:
        """Add a chat message. A result without its call becomes text of the user."""
        if message["role"] == "assistant":
            self._assistant(message)
        elif message["role"] == "tool" and message["tool_call_id"] in self._open:
            self._results[self._open.pop(message["tool_call_id"])] = message["content"]
        else:
            self._content += _blocks(message)

    def end(self) -> list[dict[str, Any]]:
        """Return the turns, after all messages were added."""
        self._user()
        return self._turns

    def _assistant(self, message: Message) -> None:
        blocks = _blocks(message)
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if not blocks and not calls:
            return
        self._user()
        for call in calls:
            # If two calls have the same id, the result belongs to the second; the first has none, and is closed
            # below.
            self._open[call["id"]] = own_id = self._new_id(call["id"])
            function = call["function"]
            arguments = tool_input(function["arguments"])
            blocks.append({"type": "tool_use", "id": own_id, "name": function["name"], "input": arguments})
        self._append("assistant", blocks)

    def _user(self) -> None:
        last: list[dict[str, Any]] = self._turns[-1]["content"] if self._turns else []
        calls: list[str] = [block["id"] for block in last if block["type"] == "tool_use"]
        blocks: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": id_, "content": self._results.get(id_, MISSING_RESULT)}
            for id_ in calls
        ]
        blocks += self._content
        if not blocks and not self._turns:
            blocks = [{"type": "text", "text": UNKNOWN_START}]
        self._open, self._results, self._content = {}, {}, []
        if blocks:
            self._append("user", blocks)

    def _append(self, role: str, blocks: list[dict[str, Any]]) -> None:
        if self._turns and self._turns[-1]["role"] == role:
            self._turns[-1]["content"] += blocks
        else:
            self._turns.append({"role": role, "content": blocks})

    def _new_id(self, offered: str) -> str:
        chosen = (
            offered if _VALID_ID.fullmatch(offered) and offered not in self._used else f"call_{len(self._used)}"
        )
        while chosen in self._used:
            chosen += "_"
        self._used.add(chosen)
        return chosen


def _parts(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """Return the content parts of laid out messages; a text counts as one part."""
    parts: list[dict[str, Any]] = []
    for message in messages:
        content: str | list[dict[str, Any]] = message["content"]
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _blocks(message: Message) -> list[dict[str, Any]]:
    """Return a content as Anthropic's blocks, without blank texts, which the API refuses."""
    blocks = [_image(part) if part["type"] == "image_url" else part for part in _parts([message])]
    return [block for block in blocks if block["type"] != "text" or block["text"].strip()]


def _image(part: dict[str, Any]) -> dict[str, Any]:
    url = str(part["image_url"].get("url"))
    if data := _DATA_URL.fullmatch(url):
        return {"type": "image", "source": {"type": "base64", "media_type": data[1], "data": data[2]}}
    if url.startswith(("http://", "https://")):
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "text", "text": "[image_url]"}


def worst_cost(price: Price, prompt_tokens: int, max_tokens: int) -> float:
    """Return the highest possible cost of a request in US dollars."""
    highest_price = max(price.input, price.cached or 0.0, price.cache_write or 0.0)
    return (prompt_tokens * highest_price + max_tokens * price.output) / PRICED_TOKENS


def likely_cost(price: Price, prompt_tokens: int, completion_tokens: int) -> float:
    """Return the estimated cost of a request in US dollars, without cached tokens."""
    return (prompt_tokens * price.input + completion_tokens * price.output) / PRICED_TOKENS


def _sent_id(id_: str) -> str:
    """Return the id to send for a tool call, shortened because OpenAI refuses long ones."""
    if len(id_) <= MAX_ID_CHARS:
        return id_
    return "call_" + hashlib.blake2b(id_.encode(errors="surrogatepass"), digest_size=16).hexdigest()


# --- tools ---------------------------------------------------------------------------------------------


def sendable(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the tools in a form that every API accepts: functions with unique names and schemas of objects.

    Other kinds are provider-specific, and are left out. Names are those of `sent_name`.
    """
    tools_by_name: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function")
        if not isinstance(function, dict) or not (name := cast("dict[str, Any]", function).get("name")):
            continue
        fields = cast("dict[str, Any]", function)
        sent: dict[str, Any] = {"name": sent_name(str(name))}
        if fields.get("description"):
            sent["description"] = str(fields["description"])
        schema = fields.get("parameters")
        parameters = cast("dict[str, Any]", schema) if isinstance(schema, dict) else {}
        properties = parameters.get("properties")
        sent["parameters"] = parameters | {
            "type": "object",
            "properties": properties if isinstance(properties, dict) else {},
        }
        tools_by_name.setdefault(sent["name"], {"type": "function", "function": sent})
    return list(tools_by_name.values())
