"""OpenAI Responses requests: their schema, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import freeform_arguments, wrapped
from understudy.wire.decoding import decode, decoded
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, Conversation, Part, setting_digest
from understudy.wire.responses.tools import (
    EXPECTED,
    ResponsesTool,
    ResponsesToolChoice,
    Toolbox,
    choose,
    flat_name,
    new_toolbox,
    read_toolbox,
)

# --- the schema -----------------------------------------------------------------------------------------


class ResponsesContentPart(Struct, gc=False):
    """A part of a content, of any type."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(Struct, gc=False):
    """An input item of any type; a field that its type does not have keeps the default."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ResponsesContentPart] | None = None
    summary: list[ResponsesContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: str | list[ResponsesContentPart] | None = None
    tools: list[ResponsesTool] = field(default_factory=list[ResponsesTool])


class TextFormat(Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextOptions(Struct):
    format: TextFormat | None = None


class ReasoningOptions(Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesBody(Struct):
    """The fields of a request that make up the conversation."""

    input: str | list[Item]
    instructions: str | None = None
    tools: Raw = Raw()
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None


class ResponsesRequest(ResponsesBody, kw_only=True):
    """The fields that change what is asked of a model, and those that ask for what is unsupported.

    All others (`store`, `include`, `truncation`, `metadata`, `user`, `service_tier`, `prompt_cache_key`,
    `max_tool_calls`, `text.verbosity`, `stream_options`, `client_metadata`, …) are ignored, whatever they
    hold.
    """

    model: str
    stream: bool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    # Refused, but for values that change nothing.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    top_logprobs: Any = None


_REQUEST = msgspec.json.Decoder(ResponsesRequest)
_BODY = msgspec.json.Decoder(ResponsesBody)


# --- conversations --------------------------------------------------------------------------------------


class ReadRequest(Struct, frozen=True):
    """A request that was read: the conversation, the choice between its tools, and what the tools were."""

    conversation: Conversation
    tool_choice: str | dict[str, Any] | None
    toolbox: Toolbox


def decode_request(body: bytes) -> ResponsesRequest:
    """A request from its bytes. Raises InvalidRequest naming what is wrong, and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """The conversation of a stored request, with all that is known of it. Raises what UNREADABLE lists."""
    request = decoded(_BODY.decode, body)
    conversation, tools = read_conversation(request).conversation, bytes(request.tools)
    return msgspec.structs.replace(
        conversation,
        setting=setting_digest(conversation.system, tools),
        has_tools=tools not in (b"", b"[]", b"null"),
        forced=isinstance(request.tool_choice, ResponsesToolChoice),
    )


def read_conversation(request: ResponsesBody) -> ReadRequest:
    """What a request asks, and what of it no chat model can do."""
    items = [Item(role="user", content=request.input)] if isinstance(request.input, str) else request.input
    toolbox = read_toolbox(bytes(request.tools))
    if added := [tool for item in items if item.type == "additional_tools" for tool in item.tools]:
        toolbox = new_toolbox([*toolbox.tools, *added])
    functions, choice, unsupported = choose(toolbox, request.tool_choice)
    reader = _ResponsesReader([*toolbox.unsupported, *unsupported])
    if request.instructions:
        reader.instructions.append(request.instructions)
    for index, item in enumerate(items):
        reader.read(index, item)
    conversation = Conversation(
        instructions=tuple(reader.instructions),
        blocks=tuple(reader.blocks),
        tools=functions,
        tools_json=toolbox.json if functions is toolbox.functions else None,
        unsupported=tuple(reader.unsupported),
    )
    return ReadRequest(conversation, choice, toolbox)


# --- items ----------------------------------------------------------------------------------------------

_CLOSED, _THOUGHT, _SPOKE, _CALLED = range(4)
"""How far an assistant's turn has come: it is thinking, then text, then calls, each of which may be missing."""


class _ResponsesReader:
    """Reads items into blocks. The items of one response become one turn again."""

    def __init__(self, unsupported: Sequence[str] = (), *, response: bool = False) -> None:
        self.instructions: list[str] = []
        self.blocks: list[Block] = []
        self.unsupported = list(unsupported)
        self._response = response
        self._index = 0
        self._turn = -1
        self._stage = _CLOSED

    def read(self, index: int, item: Item) -> None:
        """Take the next item in."""
        self._index = index
        if take := _ITEMS.get(item.type):
            take(self, item)
            return
        self._refuse(f"type: unsupported value {item.type!r}, expected one of {', '.join(_ITEMS)}")
        role = "user" if item.type.endswith("_output") else "assistant"
        self._begin(role, _CALLED if role == "assistant" else _CLOSED)
        self._add(role, "other", f"[{item.type}]", name=item.type, source=item)

    def message(self, item: Item) -> None:
        if item.role == "assistant":
            self._begin("assistant", _SPOKE)
            self._add("assistant", "text", self._text(item.content))
        elif item.role == "user":
            self._begin("user")
            self._user(item.content)
        elif self._turn < 0:
            self.instructions.append(self._text(item.content))
        else:
            self._begin("system")
            self._add("system", "text", self._text(item.content))

    def reasoning(self, item: Item) -> None:
        """The reasoning itself where there is any, else its summary; what is only encrypted cannot be read."""
        self._begin("assistant", _THOUGHT)
        self._add("assistant", "thinking", self._text(item.content) or self._text(item.summary))

    def call(self, item: Item) -> None:
        arguments = item.arguments if isinstance(item.arguments, str) else ""
        self._call(item, arguments if self._response else wrapped(arguments))

    def freeform_call(self, item: Item) -> None:
        self._call(item, freeform_arguments(item.input or ""), freeform=True)

    def _call(self, item: Item, arguments: str, *, freeform: bool = False) -> None:
        if not item.call_id or not item.name:
            self._refuse("call_id: missing call_id or name of a call")
        name = flat_name(item.name or "", item.namespace)
        self._begin("assistant", _CALLED)
        self._add(
            "assistant", "tool_use", id=item.call_id or "", name=name, arguments=arguments, freeform=freeform
        )

    def result(self, item: Item) -> None:
        if not item.call_id:
            self._refuse("call_id: missing; an output must name its call")
        self._begin("user")
        parts = self._parts(item.output)
        images = tuple(image for _, image in parts if image is not None)
        text = TEXT_SEPARATOR.join(text for text, _ in parts)
        self._add("user", "tool_result", text, id=item.call_id or "", images=images)

    def skip(self, item: Item) -> None:
        """Nothing that a model is shown."""

    def _begin(self, role: str, stage: int = _CLOSED) -> None:
        """Begin another turn, unless the item belongs to the assistant's turn that is open."""
        goes_on = role == "assistant" and (self._stage < stage or self._stage == stage == _CALLED)
        if not goes_on or self._stage == _CLOSED:
            self._turn += 1
        self._stage = stage

    def _user(self, content: str | list[ResponsesContentPart] | None) -> None:
        if not isinstance(content, list):
            content = [ResponsesContentPart("input_text", content)]
        for part in content:
            text, image = self._part(part)
            if image is not None:
                self._add("user", "other", text, name="image", images=(image,))
            elif part.type in _TEXTS or part.type == "refusal":
                self._add("user", "text", text)
            else:
                self._add("user", "other", text, name=part.type, source=part)
        if not content:
            self._add("user", "text")

    def _text(self, content: str | list[ResponsesContentPart] | None) -> str:
        """The texts of a content, without its images."""
        return TEXT_SEPARATOR.join(text for text, image in self._parts(content) if image is None)

    def _parts(self, content: str | list[ResponsesContentPart] | None) -> list[tuple[str, Part | None]]:
        if isinstance(content, list):
            return [self._part(part) for part in content]
        return [(content, None)] if content else []

    def _part(self, part: ResponsesContentPart) -> tuple[str, Part | None]:
        """What a model is shown of a part: a text, and the image that it stands for."""
        if part.type in _TEXTS:
            return part.text or "", None
        if part.type == "refusal":
            return part.refusal or "", None
        if part.type == "input_image" and part.image_url:
            image = {"url": part.image_url} | ({"detail": part.detail} if part.detail else {})
            return IMAGE, {"type": "image_url", "image_url": image}
        self._refuse(f"content: unsupported part of type {part.type!r}, expected texts or images with a URL")
        return f"[{part.type}]", None

    def _add(self, role: str, kind: Any, text: str = "", **fields: Any) -> None:
        self.blocks.append(Block(self._turn, role, kind, text, **fields))

    def _refuse(self, why: str) -> None:
        self.unsupported.append(f"input[{self._index}].{why}")


_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ITEMS: dict[str, Callable[[_ResponsesReader, Item], None]] = {
    "message": _ResponsesReader.message,
    "reasoning": _ResponsesReader.reasoning,
    "function_call": _ResponsesReader.call,
    "function_call_output": _ResponsesReader.result,
    "custom_tool_call": _ResponsesReader.freeform_call,
    "custom_tool_call_output": _ResponsesReader.result,
    "additional_tools": _ResponsesReader.skip,
    # Done by another provider's tools, whose results are not in the items.
    "web_search_call": _ResponsesReader.skip,
    "image_generation_call": _ResponsesReader.skip,
}


def read_items(items: Sequence[Item]) -> list[Block]:
    """The blocks of a response's items, tool calls as the model wrote them, as one turn."""
    reader = _ResponsesReader(response=True)
    for index, item in enumerate(items):
        reader.read(index, item)
    return [msgspec.structs.replace(block, turn=0) if block.turn else block for block in reader.blocks]
