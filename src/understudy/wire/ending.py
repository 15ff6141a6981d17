"""How an answer ended, in the words of chat completions."""

from __future__ import annotations

from typing import Literal

from understudy.errors import BackendError
from understudy.wire.model import Generation

Ending = Literal["stop", "length", "tool_calls", "content_filter"]

_ENDINGS: dict[str, Ending] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def ending(generation: Generation) -> Ending:
    """How an answer ended; one with tool calls ended for them, whatever its server says.

    Raises BackendError for an end that no answer can have: an aborted generation must not pass for a short one.
    """
    reason = _ENDINGS.get(generation.finish_reason)
    if reason is None:
        raise BackendError(
            f"the backend ended its answer with finish_reason {generation.finish_reason[:100]!r}, expected one of "
            f"{', '.join(_ENDINGS)}; the answer is not whole"
        )
    return "tool_calls" if reason == "stop" and generation.tool_calls else reason
