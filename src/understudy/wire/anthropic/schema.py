"""What an Anthropic Messages request may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, Struct, field

from understudy.wire.decoding import decode

WHAT = "an Anthropic Messages request"


class Source(Struct, gc=False):
    """Where an image or a document is: in place, or somewhere else."""

    type: str = ""
    media_type: str = ""
    data: str = ""
    url: str = ""
    content: str | list[Block] | None = None


class Block(Struct, gc=False):
    """A content block of any type; a field that its type does not have keeps the default."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Raw = Raw(b"{}")
    tool_use_id: str = ""
    tool_name: str = ""
    content: str | list[Block] | Block | None = None
    is_error: bool | None = None
    source: str | Source | None = None
    title: str | None = None
    url: str = ""
    stdout: str = ""
    stderr: str = ""
    error_code: str = ""
    tool: ToolChange | None = None


class InMessage(Struct, gc=False):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(Struct, gc=False):
    name: str = ""
    type: str | None = None
    description: str = ""
    input_schema: dict[str, Any] | None = None


class ToolChange(Struct):
    """A tool that comes into a conversation, or leaves it: its definition, or its name alone."""

    name: str = ""
    definition: Tool | None = None


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
    tools: Raw = Raw()
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False


_DECODER = msgspec.json.Decoder(MessagesRequest)


def decode_request(body: bytes) -> MessagesRequest:
    """A request from its bytes. Raises InvalidRequest naming what is wrong, and where."""
    return decode(body, _DECODER, WHAT)
