"""Anthropic Messages requests: their schema, and how they are read into a conversation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, field

from understudy.wire.decoding import RequestTools, ToolCache, decode, decoded, function_tool
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, Conversation, Part, ReadingState, as_stored

EXPECTED = "an Anthropic Messages request"


# --- the schema -----------------------------------------------------------------------------------------


class ContentSource(Struct, gc=False):
    """The source of an image or document: inline, or a reference."""

    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[ContentBlock] | None = None


class ContentBlock(Struct, gc=False):
    """A content block of any type; fields that its type does not have keep their defaults."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")
    tool_use_id: str = ""
    tool_name: str = ""
    content: str | list[ContentBlock] | ContentBlock | None = None
    is_error: bool | None = None
    source: str | ContentSource | None = None
    title: str | None = None
    url: str = ""
    stdout: str = ""
    stderr: str = ""
    error_code: str = ""
    tool: ToolChange | None = None
    cache_control: Any = UNSET


class MessageParam(Struct, gc=False):
    """A message of a request; the message of a response has the same content."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class ToolParam(Struct, gc=False):
    """A tool: one that the agent runs, with its schema, or one that Anthropic's servers define or run."""

    name: str = ""
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None


class ToolChange(Struct):
    """A tool that is added to a conversation or removed from it: its definition, or only its name."""

    name: str = ""
    definition: ToolParam | None = None


class AnthropicToolChoice(Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(Struct):
    type: str = ""


class AnthropicOutputFormat(Struct):
    type: str = ""
    schema: dict[str, Any] = field(default_factory=dict[str, Any])


class OutputConfig(Struct):
    format: AnthropicOutputFormat | None = None


class MessagesBody(Struct):
    """The fields of a request that contain the conversation."""

    messages: list[MessageParam]
    system: str | list[ContentBlock] | None = None
    tools: Raw = Raw()
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(MessagesBody, kw_only=True):
    """The fields that influence the request to a model; all others are ignored, whatever they contain."""

    model: str
    thinking: Thinking | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


_REQUEST = msgspec.json.Decoder(MessagesRequest)
_BODY = msgspec.json.Decoder(MessagesBody)
_MESSAGE = msgspec.json.Decoder(MessageParam)


# --- conversations --------------------------------------------------------------------------------------

# A line at the beginning of the system prompt that changes from call to call; it is removed for models.
_BILLING_PREFIX = "x-anthropic-billing-header"


def decode_request(body: bytes) -> MessagesRequest:
    """Decode a request. Raises InvalidRequest, which says what is wrong and where."""
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """Return the conversation of a stored request. Raises the exceptions in UNREADABLE."""
    return _read_stored(decoded(_BODY.decode, body))


def _read_stored(request: MessagesBody) -> Conversation:
    conversation = read_conversation(request)
    choice, output = request.tool_choice, request.output_config
    tools = bytes(request.tools)
    return as_stored(
        conversation,
        tools,
        agent_tools=not _tools.read(tools).at_provider,
        tool_is_forced=choice is not None and choice.type == "tool",
        has_output_schema=output is not None and output.format is not None and output.format.type == "json_schema",
        cache_ends_early=_cache_ends_early(request.messages),
    )


def read_outer(body: bytes, instructions: tuple[str, ...]) -> Conversation:
    """See Dialect. No message adds instructions."""
    request = decoded(_BODY.decode, body)
    if request.messages or instructions:
        raise ValueError("the outer part of this request has messages, expected none; read the request as a whole")
    return _read_stored(request)


def read_next(state: ReadingState, body: bytes) -> tuple[list[Block], ReadingState]:
    """See Dialect. The tools that a message adds, and the system prompt, belong to the whole request.

    The stage is 1 from the first block on: a system message before that is part of the system prompt.
    """
    message = decoded(_MESSAGE.decode, body)
    if any(_added_tools([message])) or (message.role == "system" and not state.stage):
        raise ValueError("a message changes the tools or the system prompt; read the request as a whole")
    content = _contents(message.content)
    turn = state.messages
    blocks = (
        list(_other_blocks(turn, "system", content)) if message.role == "system" else read_message(turn, message)
    )
    is_marked = any(block.cache_control is not UNSET for block in content)
    cache_ends_early = message.role == "assistant" if is_marked else state.cache_ends_early
    stage = int(bool(state.stage or blocks))
    return blocks, msgspec.structs.replace(
        state, messages=turn + 1, turn=turn, stage=stage, cache_ends_early=cache_ends_early
    )


def read_conversation(request: MessagesBody) -> Conversation:
    """Return a request's conversation, with a list of what no chat model can do."""
    tools = _tools.read(bytes(request.tools))
    added = _read_tools(list(_added_tools(request.messages)))
    instructions: list[str] = []
    blocks: list[Block] = []
    for block in _contents(request.system):
        if not block.text.startswith(_BILLING_PREFIX):
            instructions.append(block.text)
    for turn, message in enumerate(request.messages):
        if message.role != "system":
            blocks += read_message(turn, message)
        elif blocks:
            blocks += _other_blocks(turn, "system", _contents(message.content))
        elif content := _contents(message.content):
            instructions.append(
                TEXT_SEPARATOR.join(text for text, image in map(render_block, content) if not image)
            )
    return Conversation(
        instructions=tuple(instructions),
        blocks=tuple(blocks),
        tools=tools.functions + added.functions if added.functions else tools.functions,
        tools_json=None if added.functions else tools.json,
        unsupported=tools.unsupported + added.unsupported,
    )


def _cache_ends_early(messages: Sequence[MessageParam]) -> bool:
    """Return whether the last cache mark is on an assistant's turn; in requests that continue the session it is on
    a user's.
    """
    for message in reversed(messages):
        if any(block.cache_control is not UNSET for block in _contents(message.content)):
            return message.role == "assistant"
    return False


# --- tools ----------------------------------------------------------------------------------------------

_DEFERRED_TOOL = "DeferredToolPlaceholder"
_SERVER_TOOL_TYPES = ("web_search_", "web_fetch_", "code_execution_")


class _AnthropicTools(RequestTools, frozen=True):
    """The tools of a request. `at_provider`: there are some, and the provider runs all of them."""

    at_provider: bool = False


def _read_tools(tools: Sequence[ToolParam]) -> _AnthropicTools:
    functions: list[dict[str, Any]] = []
    unsupported: list[str] = []
    for index, tool in enumerate(tools):
        if tool.name == _DEFERRED_TOOL:
            continue
        if tool.input_schema is None:
            unsupported.append(
                f"tools[{index}]: missing input_schema of {tool.name[:100]!r}; add it, or leave the tool out: "
                f"tools that Anthropic's own servers define or run (type {(tool.type or 'missing')[:100]!r}) are "
                "unsupported"
            )
            if tool.type not in (None, "custom"):
                continue  # A tool of the provider; one without a type must be the agent's.
        functions.append(function_tool(tool.name, tool.description, tool.input_schema))
    at_provider = bool(tools) and all((tool.type or "").startswith(_SERVER_TOOL_TYPES) for tool in tools)
    return _AnthropicTools(functions, Raw(msgspec.json.encode(functions)), tuple(unsupported), at_provider)


_tools = ToolCache(ToolParam, EXPECTED, _read_tools)


def _added_tools(messages: Sequence[MessageParam]) -> Iterator[ToolParam]:
    """Yield tools that were added during the conversation; chat templates support tools only at its beginning."""
    for message in messages:
        if message.role == "assistant" or isinstance(message.content, str):
            continue
        for block in message.content:
            if block.type == "tool_addition" and block.tool and block.tool.definition:
                yield block.tool.definition


# --- blocks ---------------------------------------------------------------------------------------------


def read_message(turn: int, message: MessageParam) -> list[Block]:
    """Return the blocks of a user's or an assistant's message, which is number `turn` of its conversation."""
    content = _contents(message.content)
    return _assistant_blocks(turn, content) if message.role == "assistant" else _user_blocks(turn, content)


def _user_blocks(turn: int, content: Sequence[ContentBlock]) -> list[Block]:
    blocks: list[Block] = []
    for block in content:
        if block.type == "text":
            blocks.append(Block(turn, "user", "text", block.text))
        elif block.type == "tool_result":
            rendered = [render_block(inner) for inner in _contents(block.content)]
            blocks.append(
                Block(
                    turn,
                    "user",
                    "tool_result",
                    TEXT_SEPARATOR.join(text for text, _ in rendered),
                    id=block.tool_use_id,
                    is_error=bool(block.is_error),
                    images=tuple(image for _, image in rendered if image),
                )
            )
        else:
            blocks += _other_blocks(turn, "user", [block])
    return blocks


def _other_blocks(turn: int, role: str, content: Sequence[ContentBlock]) -> Iterator[Block]:
    for block in content:
        text, image = render_block(block)
        if block.type == "text":
            yield Block(turn, role, "text", text)
        elif image:
            yield Block(turn, role, "other", text, name=block.type, images=(image,))
        else:
            source = block if text == _left_out_note(block) else None
            yield Block(turn, role, "other", text, name=block.type, source=source)


def _assistant_blocks(turn: int, content: Sequence[ContentBlock]) -> list[Block]:
    blocks: list[Block] = []
    has_rendered = False
    for block in content:
        described = served_text(block)
        if block.type == "text":
            blocks.append(Block(turn, "assistant", "text", block.text))
        elif block.type == "tool_use":
            arguments = bytes(block.input).decode()
            blocks.append(Block(turn, "assistant", "tool_use", id=block.id, name=block.name, arguments=arguments))
        elif block.type == "thinking":
            blocks.append(Block(turn, "assistant", "thinking", block.thinking))
        elif described is not None:
            blocks.append(Block(turn, "assistant", "other", described, name=block.type))
        else:
            blocks.append(Block(turn, "assistant", "other", name=block.type, hidden=True, source=block))
            continue
        has_rendered = True
    if not has_rendered:
        # The model is shown that there was a turn, even if nothing in it can be read.
        blocks.append(Block(turn, "assistant", "text"))
    return blocks


def _contents(content: str | list[ContentBlock] | ContentBlock | None) -> list[ContentBlock]:
    if isinstance(content, list):
        return content
    if isinstance(content, str):
        return [ContentBlock(type="text", text=content)]
    return [] if content is None else [content]


# --- what a model is shown of a block -------------------------------------------------------------------


def render_block(block: ContentBlock) -> tuple[str, Part | None]:
    """Return what a model is shown for a block that is not an assistant's: a text, and the image in it."""
    if block.type == "image" and (url := _image_url(block)):
        return IMAGE, {"type": "image_url", "image_url": {"url": url}}
    return _USER_BLOCK_TEXTS.get(block.type, _left_out_note)(block), None


def served_text(block: ContentBlock) -> str | None:
    """Return what a model is shown of an assistant's block that is neither text, thinking nor a call of the
    agent's tools, such as one about a tool of Anthropic's servers; None if nothing is.
    """
    describe = _ASSISTANT_BLOCK_TEXTS.get(block.type)
    return None if describe is None else describe(block)


def _image_url(block: ContentBlock) -> str:
    source = block.source if isinstance(block.source, ContentSource) else ContentSource()
    return source.url or (source.data and f"data:{source.media_type};base64,{source.data}")


def _document(block: ContentBlock) -> str:
    source = block.source if isinstance(block.source, ContentSource) else ContentSource()
    texts = [source.data] if source.type == "text" else [inner.text for inner in _contents(source.content)]
    return TEXT_SEPARATOR.join(filter(None, [block.title, *texts])) if any(texts) else _left_out_note(block)


def _left_out_note(block: ContentBlock) -> str:
    return f"[{block.type} left out: the model cannot read it]"


def _readable_text(block: ContentBlock) -> str:
    """Return the readable text of a search result, or of the result of a tool that Anthropic runs."""
    source = block.source if isinstance(block.source, str) else block.source.data if block.source else ""
    texts = [block.title, source, block.url, block.text, block.stdout, block.stderr, block.error_code]
    return TEXT_SEPARATOR.join(filter(None, [*texts, *map(_readable_text, _contents(block.content))]))


def _served_call(block: ContentBlock) -> str:
    return f"[{block.name} {bytes(block.input).decode()}]"


def _changed_tool(block: ContentBlock) -> str:
    tool = block.tool.definition or block.tool if block.tool else None
    return tool.name if tool else ""


_USER_BLOCK_TEXTS: dict[str, Callable[[ContentBlock], str]] = {
    "text": lambda block: block.text,
    "document": _document,
    "search_result": _readable_text,
    "tool_reference": lambda block: f"[tool {block.tool_name}]",
    "tool_addition": lambda block: f"[tool {_changed_tool(block)} can be used from here on]",
    "tool_removal": lambda block: f"[tool {_changed_tool(block)} can no longer be used]",
}

# What a model is shown of an assistant's turn besides text and calls. Tools of Anthropic's servers, from a turn
# that Claude answered, are shown as text: no chat template has a place for a call and its result in one turn.
# Thoughts that cannot be read are left out.
_SERVER_TOOLS = (
    "web_search",
    "web_fetch",
    "code_execution",
    "bash_code_execution",
    "text_editor_code_execution",
    "mcp",
)
_ASSISTANT_BLOCK_TEXTS: dict[str, Callable[[ContentBlock], str]] = {
    "compaction": _readable_text,
    "server_tool_use": _served_call,
    "mcp_tool_use": _served_call,
    **dict.fromkeys((f"{name}_tool_result" for name in _SERVER_TOOLS), _readable_text),
}
