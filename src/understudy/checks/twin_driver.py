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
import math
import random
import string
import sys
from typing import Any, cast

_ESCAPES = ("\\", "%", "{")  # a character after one of these need not stand for itself


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
    return another(value, random.Random(key)) if decides(key) else value


def another(value: Any, choice: random.Random) -> Any:
    """A value of the same kind that differs, and shares no element with it where it is a container."""
    for _ in range(8):
        other = _another(value, choice)
        try:
            if bool(other != value):
                return other
        except Exception:  # noqa: BLE001  # arrays, and the task's own objects, which may raise anything
            return other
    return object()


def _another(value: Any, choice: random.Random) -> Any:
    if isinstance(value, type):
        return UnexpectedWarning if issubclass(value, Warning) else Unexpected
    if type(value) in (type(None), bool, int, float, complex, str, bytes):
        return another_constant(value, choice)
    if type(value) in (list, tuple, set, frozenset):
        elements: list[Any] = list(value)
        if elements and all(isinstance(element, type) for element in elements):
            return Unexpected  # the exceptions of `raises((A, B))`
        try:
            return type(value)(_others(elements, choice) or [object()])
        except TypeError:
            return object()
    if type(value) is dict:
        pairs = cast("dict[Any, Any]", value)
        keys, values = _others(list(pairs), choice), (another(element, choice) for element in pairs.values())
        return dict(zip(keys, values, strict=True)) or {object(): 0}
    if hasattr(value, "expected") and type(value).__name__.startswith("Approx"):
        return type(value)(another(value.expected, choice), rel=value.rel, abs=value.abs, nan_ok=value.nan_ok)
    try:  # numbers and arrays of all kinds
        other = value + 1
    except Exception:  # noqa: BLE001  # it is the task's own object, which may raise anything
        return object()
    return other if type(other) is type(value) else object()


def _others(elements: list[Any], choice: random.Random) -> list[Any]:
    """As many other values, none of which is among the elements, where that can be told."""
    others = [another(element, choice) for element in elements]
    for _ in range(8):
        shared = [other in elements for other in others]
        if not any(shared):
            break
        others = [another(o, choice) if again else o for o, again in zip(others, shared, strict=True)]
    return others


def another_constant(value: Any, choice: random.Random) -> Any:
    """A constant of the same kind that might as well be the expected one."""
    if value is None or value is Ellipsis:
        return choice.choice((0, 1, ""))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = range(7) if 0 <= value <= 3 else range(value - 3, value + 4)
        return choice.choice([number for number in near if number != value])
    if isinstance(value, float):  # by more than a tolerance usually is
        if not math.isfinite(value):
            return 0.0
        return round(value * choice.choice((0.5, 2.0)), 6) or choice.choice((-1.0, 0.5, 1.0, 2.0))
    if isinstance(value, complex):
        return value * 2 or 1j
    if isinstance(value, bytes):
        return _another_text(value.decode("latin-1"), choice).encode("latin-1")
    return _another_text(value, choice)


def _another_text(text: str, choice: random.Random) -> str:
    """A text with one letter or digit changed to another of its kind, where it has one that stands for itself."""
    places = [
        n for n, c in enumerate(text) if c.isascii() and c.isalnum() and text[max(n - 1, 0) : n] not in _ESCAPES
    ]
    if not places:
        return text + choice.choice(string.ascii_lowercase)
    at = choice.choice(places)
    kind = next(
        kind for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase) if text[at] in kind
    )
    return text[:at] + choice.choice(kind.replace(text[at], "")) + text[at + 1 :]


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
