"""A state as a request to a teacher, in the dialect that its backend takes, and the most that it can cost."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from typing import Any, cast

import msgspec
from msgspec import Raw, Struct, field

from understudy.gateway.prices import Price
from understudy.ingest.trace import MISSING_RESULT, Message, Trace, text_of
from understudy.preference.proposals import sent_name
from understudy.replay.teachers import TeacherConfig
from understudy.wire.arguments import parse_object, tool_input

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


_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "number"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
)


class _Seen(Struct):
    """A tool as it was called: how often, and of each argument how often, and with what types."""

    calls: int = 0
    arguments: dict[str, int] = field(default_factory=dict[str, int])
    types: dict[str, set[str]] = field(default_factory=dict[str, set[str]])


def inferred(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """The tools called in messages, by name, in OpenAI form: each takes the arguments that it was seen with.

    One that it had in each call is required, and may be of the types it had; anything more is allowed.
    """
    tools: dict[str, _Seen] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function: dict[str, Any] = call.get("function") or {}
            arguments = parse_object(str(function.get("arguments") or ""))
            name = function.get("name")
            if not isinstance(name, str) or not name or arguments is None:
                continue
            seen = tools.setdefault(name, _Seen())
            seen.calls += 1
            for argument, value in arguments.items():
                seen.arguments[argument] = seen.arguments.get(argument, 0) + 1
                seen.types.setdefault(argument, set()).add(_type(value))
    return [_inferred_tool(name, seen) for name, seen in sorted(tools.items())]


def sendable(tools: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools as every API takes them: functions, each name once, with a schema that is an object's.

    Those of other kinds are a provider's own, and are left out. Names are those of `sent_name`.
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


def tools_of(trace: Trace) -> list[dict[str, Any]]:
    """The tools that were called anywhere in a trace, on whichever branch.

    Not only in a state's own history: before its first call, that would leave a teacher without any.
    """
    return inferred(message for node in trace.nodes for message in trace.renderer.history(node.body))


def _inferred_tool(name: str, seen: _Seen) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for argument, types in seen.types.items():
        type_names = sorted(types - {""})
        # Where several types were seen, or none is known, any is allowed.
        properties[argument] = {"type": type_names[0]} if len(type_names) == 1 and "" not in types else {}
    parameters = {
        "type": "object",
        "properties": properties,
        "required": [argument for argument, count in seen.arguments.items() if count == seen.calls],
        "additionalProperties": True,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def _type(value: object) -> str:
    return next((name for kind, name in _TYPES if isinstance(value, kind)), "")


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
