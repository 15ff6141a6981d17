"""Anthropic Messages requests, understood and translated to the neutral chat request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from understudy.wire.anthropic.schema import Block, Format, MessagesRequest, Source, Tool, ToolChoice
from understudy.wire.anthropic.tools import read_tools, shown_tools
from understudy.wire.arguments import upstream_arguments
from understudy.wire.dialect import Branch, WireSession
from understudy.wire.errors import InvalidRequest, too_deep
from understudy.wire.layout import (
    TEXT_SEPARATOR,
    Part,
    Transcript,
    plain,
    text_part,
)
from understudy.wire.model import ChatRequest

_BILLING = "x-anthropic-billing-header"


def to_chat(request: MessagesRequest, session: WireSession, branch: Branch) -> ChatRequest:
    """Translate a request made on a branch. Raises InvalidRequest for what no chat backend can do."""
    try:
        return _to_chat(request, session, branch)
    except RecursionError as error:
        raise too_deep() from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"messages: the input of a tool_use block is not UTF-8: {error}") from error


def _to_chat(request: MessagesRequest, session: WireSession, branch: Branch) -> ChatRequest:
    known, added = read_tools(bytes(request.tools)), shown_tools(list(_added(request)))
    tools = known.shown + added if added else known.shown
    choice = request.tool_choice if tools else None
    format_ = request.output_config.format if request.output_config else None
    return ChatRequest(
        model=request.model,
        messages=_messages(request, session),
        tools=tools,
        tools_json=None if added else known.json,
        tool_choice=_tool_choice(choice) if choice else None,
        parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
        response_format=_response_format(format_) if format_ else None,
        enable_thinking=False if request.thinking and request.thinking.type == "disabled" else None,
        sampling=_sampling(request) | session.sampling,
        conversation=session.conversation(branch),
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


def _added(request: MessagesRequest) -> Iterator[Tool]:
    """Tools that came into the conversation on the way; templates know of tools at its beginning only."""
    for message in request.messages:
        for block in _blocks(message.content) if message.role != "assistant" else ():
            if block.type == "tool_addition" and block.tool and block.tool.definition:
                yield block.tool.definition


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any]:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(format_: Format) -> dict[str, Any]:
    if format_.type != "json_schema":
        raise InvalidRequest(f"output_config.format.type: {format_.type!r} is not known; json_schema is")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format_.schema, "strict": True}}


# --- messages ------------------------------------------------------------------------------------------


def _messages(request: MessagesRequest, session: WireSession) -> list[dict[str, Any]]:
    transcript = Transcript(session)
    for block in _blocks(request.system):
        if not block.text.startswith(_BILLING):
            transcript.instruct(block.text)
    for message in request.messages:
        _ROLES[message.role](transcript, _blocks(message.content))
    return transcript.messages()


def _user(transcript: Transcript, blocks: Sequence[Block]) -> None:
    for are_results, some in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if not are_results:
            transcript.user([_part(block) for block in some])
            continue
        for block in some:
            inner = [_part(inner) for inner in _blocks(block.content)]
            transcript.result(block.tool_use_id, inner, is_error=bool(block.is_error))


def _system(transcript: Transcript, blocks: Sequence[Block]) -> None:
    if blocks:
        transcript.instruct(plain([_part(block) for block in blocks]))


def _assistant(transcript: Transcript, blocks: Sequence[Block]) -> None:
    said = [_SAID[block.type](block) for block in blocks if block.type in _SAID]
    thought = [block.thinking for block in blocks if block.type == "thinking"]
    transcript.assistant(TEXT_SEPARATOR.join(said), TEXT_SEPARATOR.join(thought))
    for block in blocks:
        if block.type == "tool_use":
            transcript.call(block.id, block.name, partial(upstream_arguments, echoed=bytes(block.input)))


_ROLES: dict[str, Callable[[Transcript, Sequence[Block]], None]] = {
    "user": _user,
    "assistant": _assistant,
    "system": _system,
}


def _blocks(content: str | list[Block] | Block | None) -> list[Block]:
    match content:
        case None:
            return []
        case str():
            return [Block(type="text", text=content)]
        case Block():
            return [content]
        case _:
            return content


def _part(block: Block) -> Part:
    return _PARTS.get(block.type, _left_out)(block)


def _image(block: Block) -> Part:
    source = block.source if isinstance(block.source, Source) else Source()
    url = source.url or (source.data and f"data:{source.media_type};base64,{source.data}")
    return {"type": "image_url", "image_url": {"url": url}} if url else _left_out(block)


def _document(block: Block) -> Part:
    source = block.source if isinstance(block.source, Source) else Source()
    texts = [source.data] if source.type == "text" else [inner.text for inner in _blocks(source.content)]
    if not any(texts):
        return _left_out(block)
    return text_part(TEXT_SEPARATOR.join(filter(None, [block.title, *texts])))


def _left_out(block: Block) -> Part:
    return text_part(f"[{block.type} left out: the model cannot read it]")


def _readable(block: Block) -> str:
    """What there is to read in a search result, or in the result of a tool of Anthropic's."""
    source = block.source if isinstance(block.source, str) else block.source.data if block.source else ""
    own = [block.title, source, block.url, block.text, block.stdout, block.stderr, block.error_code]
    return TEXT_SEPARATOR.join(filter(None, [*own, *map(_readable, _blocks(block.content))]))


def _served_call(block: Block) -> str:
    return f"[{block.name} {bytes(block.input).decode()}]"


def _changed(block: Block) -> str:
    tool = block.tool.definition or block.tool if block.tool else None
    return tool.name if tool else ""


_PARTS: dict[str, Callable[[Block], Part]] = {
    "text": lambda block: text_part(block.text),
    "image": _image,
    "document": _document,
    "search_result": lambda block: text_part(_readable(block)),
    "tool_reference": lambda block: text_part(f"[tool {block.tool_name}]"),
    "tool_addition": lambda block: text_part(f"[tool {_changed(block)} can be used from here on]"),
    "tool_removal": lambda block: text_part(f"[tool {_changed(block)} can no longer be used]"),
}

# What an assistant's turn says in words. Tools of Anthropic's, from a turn that Claude answered, are told as text:
# no chat template has a place for a call and its result in one turn. Thoughts that cannot be read are left out.
_SERVED = ("web_search", "web_fetch", "code_execution", "bash_code_execution", "text_editor_code_execution", "mcp")
_SAID: dict[str, Callable[[Block], str]] = {
    "text": lambda block: block.text,
    "compaction": _readable,
    "server_tool_use": _served_call,
    "mcp_tool_use": _served_call,
    **dict.fromkeys((f"{name}_tool_result" for name in _SERVED), _readable),
}
