"""The names in `--tools`: those that an agent cannot have are refused before a run begins.

Agents ignore such names, and would work with fewer tools than were asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from understudy.errors import ConfigError
from understudy.util.text import closest

_NAME = re.compile(r"\w[\w.-]*")


def read_tool_names(
    tools: str, agent: str, available: Collection[str], usual: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the names in a list separated by commas; empty for "".

    `agent` names the program in errors, `available` are all tools that it can have, of which errors list the
    `usual` ones, if there are some. Raises ConfigError for anything else.
    """
    listed = sorted(usual or available)
    names = tuple(name.strip() for name in tools.split(",")) if tools else ()
    if any(_NAME.fullmatch(name) is None for name in names):
        example = ",".join(listed[:2])
        raise ConfigError(
            f"--tools: expected names separated by commas, got {tools!r}; give names of its tools, as in {example}"
        )
    for name in names:
        if name not in available:
            raise ConfigError(
                f"--tools: {agent} has no tool {name!r}{_suggestion(name, available)}; give some of: "
                f"{', '.join(listed)}"
            )
    return names


def _suggestion(name: str, available: Collection[str]) -> str:
    similar = closest(name, available)
    return f", did you mean {similar!r}?" if similar else ""
