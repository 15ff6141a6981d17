"""Looks up which tools a version of Claude Code offers, in a table of what real versions sent (`tools.json.xz`).

`scripts/record_claude_tools.py` makes the table; its docstring describes the format.
"""

from __future__ import annotations

import calendar
import json
import lzma
import re
from bisect import bisect_right
from collections.abc import Collection
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from msgspec import Struct

_FILE = "tools.json.xz"
_VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_DATE = re.compile(r"(\d{4})-(0[1-9]|1[0-2])-\d{2}")
_DATE_MARK, _MONTH_MARK = "{{DATE}}", "{{MONTH}}"


class RecordedTools(Struct, frozen=True):
    """The tools, in OpenAI's form, that Claude Code `version` offers."""

    version: str
    tools: list[dict[str, Any]]


class _Table(Struct, frozen=True):
    """The table: tool definitions as JSON text in OpenAI's form, their names, and for each version the tool lists
    of its modes.
    """

    definitions: list[str]
    names: list[str]
    versions: dict[tuple[int, ...], list[dict[str, list[int]]]]


def tool_names() -> frozenset[str]:
    """Return the names of all tools that any recorded version of Claude Code offers."""
    return frozenset(_table().names)


def claude_tools(
    version: str, called: Collection[str], *, subagent: bool = False, date: str | None = None
) -> RecordedTools | None:
    """Return the tools of the recorded version nearest to `version`; None if `version` is not a version number.

    A version has several lists (terminal, print mode, tools found by search). The one with the most of the
    `called` tools is used, and called tools that it lacks are taken from any version. `date` (ISO date or time)
    replaces the current day in tool descriptions that mention it.
    """
    version_match = _VERSION.match(version)
    if version_match is None:
        return None
    table = _table()
    nearest = _nearest(sorted(table.versions), tuple(map(int, version_match.groups())))
    modes = table.versions[nearest[0]]
    lists = [mode.get("subagent" if subagent else "main") or mode["main"] for mode in modes]
    tool_indexes = list(
        max(lists, key=lambda indexes: len({table.names[index] for index in indexes}.intersection(called)))
    )
    for name in sorted(set(called).difference(table.names[index] for index in tool_indexes)):
        elsewhere = (index for version in nearest for mode in table.versions[version] for index in mode["main"])
        tool_indexes += [index for index in elsewhere if table.names[index] == name][:1]
    date_match = _DATE.match(date or "")
    tools = _tools(tuple(tool_indexes), None if date_match is None else date_match[0])
    return RecordedTools(".".join(map(str, nearest[0])), tools.copy())


def _nearest(versions: list[tuple[int, ...]], version: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the versions from the nearest to `version` to the farthest, by their distance in the list."""
    index = bisect_right(versions, version)
    neighbours = range(max(index - 1, 0), min(index + 1, len(versions)))
    nearest = min(
        neighbours,
        key=lambda index: [
            abs(number - sought_number) for number, sought_number in zip(versions[index], version, strict=True)
        ],
    )
    return [versions[index] for index in sorted(range(len(versions)), key=lambda index: abs(index - nearest))]


@lru_cache(maxsize=256)
def _tools(tool_indexes: tuple[int, ...], date: str | None) -> list[dict[str, Any]]:
    """Return tool definitions with the day of a session in their texts."""
    definitions = _table().definitions
    return [json.loads(_dated(definitions[index], date)) for index in tool_indexes]


def _dated(definition: str, date: str | None) -> str:
    if _DATE_MARK not in definition and _MONTH_MARK not in definition:
        return definition
    date_match = _DATE.match(date or "")
    day, month = (
        (date_match[0], f"{calendar.month_name[int(date_match[2])]} {date_match[1]}")
        if date_match
        else ("unknown",) * 2
    )
    return definition.replace(_DATE_MARK, day).replace(_MONTH_MARK, month)


@cache
def _table() -> _Table:
    data = json.loads(lzma.decompress(resources.files(__package__ or "").joinpath(_FILE).read_bytes()))
    definitions: list[dict[str, Any]] = data["definitions"]
    return _Table(
        definitions=[json.dumps(_openai_form(definition), ensure_ascii=False) for definition in definitions],
        names=[definition["name"] for definition in definitions],
        versions={
            tuple(map(int, version.split("."))): list(modes.values())
            for version, modes in data["versions"].items()
        },
    )


def _openai_form(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool["description"], "parameters": tool["input_schema"]}
    return {"type": "function", "function": function}
