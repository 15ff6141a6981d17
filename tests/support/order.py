"""In which order tests are run, so that processes side by side end together."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def longest_first(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the tests in the order in which so many processes begin with the longest modules.

    xdist gives each process an equal part of the tests, in order, and what is left of a part to a process that has
    finished its own. A test of minutes in the middle of a part would begin late, and the others would wait for it.
    A module is long if one of its tests has a longer time limit than tests have by default.
    """
    modules: dict[str, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(_module(item), []).append(item)
    limits = {key: max(map(_time_limit, each)) for key, each in modules.items()}
    long = sorted((key for key in modules if limits[key] > 0), key=lambda key: -limits[key])
    rest = [item for item in items if _module(item) not in long]
    ordered: list[pytest.Item] = []
    for number in range(workers):
        ordered += [item for key in long[number::workers] for item in modules[key]]
        end = len(items) * (number + 1) // workers - len(ordered)
        ordered += rest[: max(end, 0)]
        del rest[: max(end, 0)]
    return ordered


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def _time_limit(item: pytest.Item) -> float:
    """Return the time limit of a test if it is longer than the default, else 0."""
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0]) if marker is not None else 0.0
    return limit if limit > float(item.config.getini("timeout")) else 0.0
