"""The tools of an Anthropic request, understood and translated: a large part of it, and the same in every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Raw, Struct

from understudy.wire.anthropic.schema import WHAT, Tool
from understudy.wire.decoding import decode
from understudy.wire.errors import InvalidRequest
from understudy.wire.layout import function_tool

KNOWN, LARGEST = 64, 256 << 10
"""How many lists of tools are remembered, and of how many bytes each at most."""

_DEFERRED = "DeferredToolPlaceholder"


class _Sent(Struct):
    tools: list[Tool] | None = None


class Tools(Struct, frozen=True):
    """A list of tools: `sent` by the agent, as models are `shown` it, and that as `json`."""

    sent: bytes
    shown: list[dict[str, Any]]
    json: Raw


_SENT = msgspec.json.Decoder(_Sent)
_NONE = Tools(b"", [], Raw(b"[]"))
_known: dict[int, Tools] = {}
"""By the number of their bytes, which costs less than a hash; lists as long as each other take turns."""


def read_tools(sent: bytes) -> Tools:
    """A request's `tools` from their JSON. Raises InvalidRequest."""
    if not sent:
        return _NONE
    tools = _known.get(len(sent))
    if tools is None or tools.sent != sent:
        shown = shown_tools(decode(b'{"tools":%b}' % sent, _SENT, WHAT).tools or ())
        tools = Tools(sent, shown, Raw(msgspec.json.encode(shown)))
        if len(sent) <= LARGEST:
            _known[len(sent)] = tools
            if len(_known) > KNOWN:
                del _known[next(iter(_known))]
    return tools


def shown_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as models are shown them. Raises InvalidRequest for one that only Anthropic can run."""
    shown: list[dict[str, Any]] = []
    for tool in tools:
        if tool.name == _DEFERRED:
            continue
        if tool.input_schema is None:
            raise InvalidRequest(
                f"tools: {tool.name!r} has no input_schema; a tool that Anthropic's own servers define or run "
                f"(type {tool.type!r}) does not exist here"
            )
        shown.append(function_tool(tool.name, tool.description, tool.input_schema))
    return shown
