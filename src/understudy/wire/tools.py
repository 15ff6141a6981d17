"""Lists of tools: a large part of a request, and the same in every call of a session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")

LISTS, LARGEST = 64, 256 << 10
"""How many lists of tools are cached for a dialect, and of how many bytes each at most."""


class ToolCache(Generic[_T]):
    """What `read` makes of a request's `tools`, cached by their bytes.

    Lists are looked up by their length, which costs less than a hash; those as long as each other take turns.
    """

    def __init__(self, read: Callable[[bytes], _T]) -> None:
        self._read = read
        self._lists: dict[int, tuple[bytes, _T]] = {}

    def read(self, sent: bytes) -> _T:
        """The tools of a request. Raises what the function does that reads them."""
        cached = self._lists.get(len(sent))
        if cached is not None and cached[0] == sent:
            return cached[1]
        tools = self._read(sent)
        if len(sent) <= LARGEST:
            self._lists[len(sent)] = sent, tools
            if len(self._lists) > LISTS:
                del self._lists[next(iter(self._lists))]
        return tools


def function_tool(
    name: str, description: str | None, parameters: dict[str, Any] | None, strict: bool | None = None
) -> dict[str, Any]:
    """A tool as models are shown it: the function of a chat completion, without fields that are None."""
    function: dict[str, Any] = {"name": name}
    if description is not None:
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": {}} if parameters is None else parameters
    if strict:
        function["strict"] = True
    return {"type": "function", "function": function}
