"""Runs versions of test files inside a sandbox: `twin_driver.py REPORTER REPORT ROOT SELECTION`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of
ours but REPORTER, the path of `report_plugin.py`. SELECTION is a JSON file `{"seed", "files", "nodes"}`: of the
tests in the files those nodes run, in an order that the seed decides. To the report's lines it adds `{"node",
"site", "held"}` for every site of a version (see `twins`) that held or failed while a test ran.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import random
import sys
from typing import Any, cast

_FAR = 1_000_003  # further than any tolerance, and no element of a small container


class Unexpected(Exception):  # it stands where a test names an exception or a warning
    """An exception that nothing raises."""


class UnexpectedWarning(Warning):
    """A warning that nothing issues."""


def decides(key: int) -> bool:
    """Whether a key says that a value is to be changed."""
    return bool(hashlib.blake2s(str(key).encode(), digest_size=1).digest()[0] & 1)


def key_for(changed: bool, seed: int) -> int:
    """A key that says `changed`, one of many."""
    source = random.Random(seed)
    while decides(key := source.getrandbits(48)) is not changed:
        pass
    return key


def change(value: Any, key: int) -> Any:
    """The value, or another one of its kind where the key says so."""
    return another(value) if decides(key) else value


def another(value: Any) -> Any:
    """A value of the same kind that differs, from that of a container in every element too."""
    if isinstance(value, type):
        return UnexpectedWarning if issubclass(value, Warning) else Unexpected
    if value is None or isinstance(value, bool):
        return not value
    if isinstance(value, str):
        return value[:1] + value or "x"
    if isinstance(value, bytes):
        return value[:1] + value or b"x"
    if isinstance(value, (int, float, complex)):
        return value + _FAR + abs(value)
    if type(value) in (list, tuple, set, frozenset):
        elements: list[Any] = list(value)
        if elements and all(isinstance(element, type) for element in elements):
            return Unexpected  # the exceptions of `raises((A, B))`
        try:
            return type(value)([another(element) for element in elements] or [object()])
        except TypeError:
            return object()
    if type(value) is dict:
        pairs = cast("dict[Any, Any]", value)
        return {key: another(element) for key, element in pairs.items()} or {object(): 0}
    if hasattr(value, "expected") and type(value).__name__.startswith("Approx"):
        return type(value)(another(value.expected), rel=value.rel, abs=value.abs, nan_ok=value.nan_ok)
    try:  # numbers and arrays of all kinds
        other = value + 1
    except Exception:  # noqa: BLE001  # it is the task's own object, which may raise anything
        return object()
    return other if type(other) is type(value) else object()


_write: Any = None
_node = ""
_seen: set[tuple[str, int, int]] = set()


def report(site: int, held: int) -> None:
    """Report that a site of the running test held (1) or failed (0)."""
    if (_node, site, held) not in _seen:
        _seen.add((_node, site, held))
        _write(node=_node, site=site, held=held)


class Selection:
    """A pytest plugin that runs the selected tests in a random order, and knows which one is running."""

    def __init__(self, nodes: list[str], seed: int) -> None:
        self._nodes = set(nodes)
        self._seed = seed

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Keep the selected tests, shuffled."""
        items[:] = [item for item in items if item.nodeid in self._nodes]
        random.Random(self._seed).shuffle(items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test that starts."""
        global _node
        _node = nodeid


def main(reporter_path: str, report_path: str, root: str, selection_path: str) -> int:
    """Run the selected tests; return pytest's exit code."""
    spec = importlib.util.spec_from_file_location("understudy_report_plugin", reporter_path)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)
    with open(selection_path, encoding="utf-8") as file:  # noqa: PTH123
        selection = json.load(file)

    def start(reporter: Any) -> list[Any]:
        global _write
        _write = reporter.write
        return [Selection(selection["nodes"], selection["seed"])]

    sys.modules["understudy_twin_driver"] = sys.modules[__name__]
    return int(plugin.main(report_path, root, *selection["files"], plugins=start))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
