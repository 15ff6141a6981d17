"""Loads adapters by name: agents, sandboxes and export formats are entry points, imported when they are used."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Any

from understudy.errors import ConfigError


@cache
def _points(kind: str) -> EntryPoints:
    """Return the entry points of a kind, cached because each lookup reads a file of every installed package."""
    return entry_points(group=f"understudy.{kind}")


def names(kind: str) -> list[str]:
    """Return the sorted names of a kind's adapters ("agents", "sandboxes", "exports"), without importing them."""
    return sorted({point.name for point in _points(kind)})


def load(kind: str, name: str) -> Any:
    """Import and return the adapter called `name`.

    Raises ConfigError when there is none, naming those that exist.
    """
    for point in _points(kind).select(name=name):
        return point.load()
    raise ConfigError(f"{name!r} is not one of the installed {kind}; give one of: {', '.join(names(kind))}")
