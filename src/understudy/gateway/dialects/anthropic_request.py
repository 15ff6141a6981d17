"""Anthropic Messages requests, understood and translated to the neutral chat request."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.gateway.backends.base import ChatRequest
from understudy.gateway.dialects.arguments import upstream_arguments
from understudy.gateway.faults import InvalidRequest
from understudy.gateway.keys import Session

SYSTEM_SEPARATOR = "\n\n"
TEXT_SEPARATOR = "\n"
"""Frozen: another separator gives other tokens, and every conversation that was begun with this one is split."""

_BILLING = "x-anthropic-billing-header"
_DEFERRED = "DeferredToolPlaceholder"
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Source(Struct):
    """Where the bytes of an image or a document are."""

    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""


class Block(Struct):
    """A content block of any type; a field that its type does not have keeps the default."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool | None = None
    source: Source | None = None


class InMessage(Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct):
    name: str
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None


class ToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Struct):
    type: str = ""


class Format(Struct):
    type: str = ""
    schema: dict[str, Any] = field(default_factory=dict[str, Any])


class OutputConfig(Struct):
    format: Format | None = None


class MessagesRequest(Struct):
    """The fields that change what is asked of a model; all others are left aside, whatever they hold."""

    model: str
    messages: list[InMessage]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


_DECODER = msgspec.json.Decoder(MessagesRequest)


def decode(body: bytes) -> MessagesRequest:
    """A request from its bytes. Raises InvalidRequest naming what is wrong, and where."""
    try:
        try:
            return _DECODER.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            return _DECODER.decode(_without_lone_surrogates(body))
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"the request is not an Anthropic Messages request: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error


def _without_lone_surrogates(body: bytes) -> bytes:
    """The body with halves of surrogate pairs replaced.

    JavaScript cuts strings between the halves of an emoji and sends the rest as an escape; no UTF-8 can carry it
    on to a model.
    """
    value = json.loads(body)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _LONE_SURROGATE.sub("\ufffd", text).encode()


def to_chat(request: MessagesRequest, session: Session) -> ChatRequest:
    """Translate a request. Raises InvalidRequest for what no chat backend can do."""
    tools = _tools(request.tools or [])
    choice = request.tool_choice if tools else None
    format_ = request.output_config.format if request.output_config else None
    return ChatRequest(
        model=request.model,
        messages=_messages(request, session),
        tools=tools,
        tool_choice=_tool_choice(choice) if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(format_) if format_ else None,
        enable_thinking=False if request.thinking and request.thinking.type == "disabled" else None,
        sampling=_sampling(request) | session.sampling,
    )


def _sampling(request: MessagesRequest) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences or None,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    translated: list[dict[str, Any]] = []
    for tool in tools:
        if tool.name == _DEFERRED:
            continue
        if tool.input_schema is None:
            raise InvalidRequest(
                f"tools: {tool.name!r} has no input_schema; tools that run at the server "
                f"(type {tool.type!r}) do not exist here"
            )
        function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
        translated.append({"type": "function", "function": function})
    return translated


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(format_: Format) -> dict[str, Any]:
    if format_.type != "json_schema":
        raise InvalidRequest(f"output_config.format.type: {format_.type!r} is not known; json_schema is")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.schema, "strict": True}}


# --- messages ------------------------------------------------------------------------------------------


def _messages(request: MessagesRequest, session: Session) -> list[dict[str, Any]]:
    chat: list[dict[str, Any]] = []
    system = [block.text for block in _blocks(request.system or []) if not block.text.startswith(_BILLING)]
    if system:
        chat.append({"role": "system", "content": SYSTEM_SEPARATOR.join(system)})
    for message in request.messages:
        blocks = _blocks(message.content)
        if message.role == "assistant":
            chat.append(_assistant(blocks, session))
        else:
            # A system message among the others stays where it is: most chat templates know only a first one.
            chat.extend(_user(blocks, session))
    return chat


def _blocks(content: str | list[Block]) -> list[Block]:
    return [Block(type="text", text=content)] if isinstance(content, str) else content


def _assistant(blocks: Sequence[Block], session: Session) -> dict[str, Any]:
    said = [block.text for block in blocks if block.type == "text"]
    thought = [block.thinking for block in blocks if block.type == "thinking"]
    calls = [_tool_call(block, session) for block in blocks if block.type == "tool_use"]
    message: dict[str, Any] = {"role": "assistant", "content": TEXT_SEPARATOR.join(said)}
    if thought:
        message["reasoning"] = TEXT_SEPARATOR.join(thought)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_call(block: Block, session: Session) -> dict[str, Any]:
    sampled = session.sampled(block.id)
    arguments = upstream_arguments(sampled.arguments if sampled else None, bytes(block.input))
    function = {"name": block.name, "arguments": arguments}
    return {"id": _backend_id(block.id, session), "type": "function", "function": function}


def _backend_id(tool_id: str, session: Session) -> str:
    """The id that the model's server gave, where there was one: some templates render it."""
    sampled = session.sampled(tool_id)
    return sampled.id if sampled and sampled.id else tool_id


def _user(blocks: Sequence[Block], session: Session) -> list[dict[str, Any]]:
    """User turns and tool results in their order; the images of tool results follow the last of them."""
    chat: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []

    def flush() -> None:
        if images or parts:
            chat.append({"role": "user", "content": _joined([*images, *parts])})
            images.clear()
            parts.clear()

    for block in blocks:
        if block.type != "tool_result":
            parts.append(_part(block))
            continue
        if parts:
            flush()
        inner = [_part(inner) for inner in _blocks(block.content or [])]
        images.extend(part for part in inner if part["type"] != "text")
        texts = [part["text"] if part["type"] == "text" else "[image]" for part in inner]
        text = TEXT_SEPARATOR.join(texts)
        chat.append(
            {
                "role": "tool",
                "tool_call_id": _backend_id(block.tool_use_id, session),
                "content": f"Error: {text}" if block.is_error else text,
            }
        )
    flush()
    return chat


def _joined(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if all(part["type"] == "text" for part in parts):
        return TEXT_SEPARATOR.join(part["text"] for part in parts)
    return list(parts)


def _part(block: Block) -> dict[str, Any]:
    render = _PARTS.get(block.type)
    return render(block) if render else _text(f"[{block.type} left out: the model cannot read it]")


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _image(block: Block) -> dict[str, Any]:
    source = block.source or Source()
    url = source.url or f"data:{source.media_type};base64,{source.data}"
    return {"type": "image_url", "image_url": {"url": url}}


def _document(block: Block) -> dict[str, Any]:
    source = block.source or Source()
    if source.type == "text":
        return _text(source.data)
    return _text(f"[document {source.media_type} left out: the model cannot read it]")


_PARTS: dict[str, Callable[[Block], dict[str, Any]]] = {
    "text": lambda block: _text(block.text),
    "image": _image,
    "document": _document,
}
