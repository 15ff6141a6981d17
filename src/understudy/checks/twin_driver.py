"""Runs a version of test files inside a sandbox: `twin_driver.py REPORTER REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of
ours but REPORTER, the path of `report_plugin.py`. To the report's lines it adds `{"node", "site", "saw"}` for
everything that a version (see `twins`) observes while a test runs. `saw` is `[kind, …]`, in which values are
written by `encode`. Nothing here knows what is expected; a caller that sends something else than it observed
needs to know it.

In suites with their own command the version's files load this module themselves (see `twin_suite`), and `record`
and `running` take the place of pytest's reporter. Their Pythons may be as old as 3.6.
"""

import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable
from typing import Any, cast

_MOST_NODES = 20_000
_MOST_TEXT = 400_000
_MOST_REPORTS = 1_000  # of one site in one test

_OPERATORS: "dict[str, Callable[[Any, Any], Any]]" = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda left, right: left in right,
    "not in": lambda left, right: left not in right,
    "is": operator.is_,
    "count": lambda left, right: sorted(map(repr, left)) == sorted(map(repr, right)),
    "approx": lambda left, right: True,
}


class _Opaque(Exception):
    """A value that cannot be written."""


def encode(value: Any) -> Any:
    """A value as JSON, `[type, content]`: of builtin types and some of the standard library; `["?"]` else."""
    try:
        return _encode(value, [_MOST_NODES])
    except Exception:  # noqa: BLE001  # the tested code's own objects, which may raise anything
        return ["?"]


def _encode(value: Any, left: "list[int]", depth: int = 0) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > 60:
        raise _Opaque
    if value is None:
        return ["n"]
    if value is NotImplemented or value is Ellipsis:
        return ["z", repr(value)]
    items: Any = value  # without what isinstance says of it
    kind = cast("Any", type(value))
    if kind is bool:
        return ["b", int(value)]
    if any(base.__name__ == "Enum" for base in kind.__mro__) and not isinstance(value, (int, str)):
        raise _Opaque
    if isinstance(value, int):
        return ["i", hex(int.__int__(value))]
    if isinstance(value, float):
        return ["f", float.hex(float.__float__(value))]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        if len(value) > _MOST_TEXT:
            raise _Opaque
        return ["s", str.__str__(value)]
    if isinstance(value, (bytes, bytearray)):
        if len(value) > _MOST_TEXT:
            raise _Opaque
        return ["y", bytes(value).hex()]
    if isinstance(value, (list, tuple)):
        return ["l" if isinstance(value, list) else "t", [_encode(each, left, depth + 1) for each in items]]
    if isinstance(value, (set, frozenset)) or kind.__name__ == "dict_keys":
        return ["e", [_encode(each, left, depth + 1) for each in items]]
    if isinstance(value, dict) or kind.__name__ == "mappingproxy":
        pairs = [[_encode(k, left, depth + 1), _encode(v, left, depth + 1)] for k, v in items.items()]
        return ["d", pairs]
    return _encode_other(value, kind, left, depth)


def _encode_other(value: Any, kind: type, left: "list[int]", depth: int) -> Any:
    module = (kind.__module__ or "").partition(".")[0]
    if module in ("decimal", "fractions") and kind.__name__ in ("Decimal", "Fraction"):
        if value != value:  # not a number
            return ["f", "nan"]
        top, bottom = value.as_integer_ratio() if module == "decimal" else (value.numerator, value.denominator)
        return ["q", hex(top), hex(bottom)]
    if module in ("datetime", "pathlib", "uuid", "ipaddress", "zoneinfo") or kind is range:
        return ["z", kind.__name__ + " " + str(value)]
    if isinstance(value, type):
        return ["z", "class " + value.__qualname__]
    if module == "collections" and kind.__name__ in ("deque", "UserList"):
        return ["l", [_encode(each, left, depth + 1) for each in value]]
    if module == "numpy" and hasattr(value, "tolist"):
        return ["a", _encode(value.tolist(), left, depth + 1)]
    raise _Opaque


_write: Any = None
_node = ""


_counts: "dict[Any, int]" = {}


def _report(site: int, *saw: Any) -> None:
    count = _counts[_node, site] = _counts.get((_node, site), 0) + 1
    if count <= _MOST_REPORTS:
        _write(node=_node, site=site, saw=list(saw))


def send(site: int, value: Any, second: "int | None" = None) -> None:
    """Report a value, for a second site too where one value is compared twice."""
    encoded = encode(value)
    _report(site, "value", encoded)
    if second is not None:
        _report(second, "value", encoded)


def holds(site: int, result: Any, second: "int | None" = None) -> None:
    """Report whether a condition is true."""
    saw = int(bool(result))
    _report(site, "truth", saw)
    if second is not None:
        _report(second, "truth", saw)


def pair(site: int, name: str, left: Any, right: Any) -> None:
    """Report two values and whether a comparison of them is true."""
    saw = _OPERATORS[name](left, right)
    saw = saw.all() if hasattr(saw, "all") and not isinstance(saw, bool) else saw
    _report(site, "pair", encode(left), encode(right), int(bool(saw)))


def kind(site: int, value: Any) -> None:
    """Report the names of a value's classes."""
    _report(site, "kind", [each.__name__ for each in type(value).__mro__])


def calls(site: int, mock: Any, last: bool) -> None:
    """Report the arguments with which a mock was called."""
    made = [[tuple(each[0]), dict(each[1])] for each in mock.call_args_list]
    _report(site, "value", encode(made[-1:] if last else made))


class block:  # it stands in tests as a function does
    """A context that reports what was raised in it, or warned of, and lets nothing out."""

    def __init__(self, site: int, context: Any, expects: str) -> None:
        self._site = site
        self._context = context
        self._expects = expects
        self._entered: Any = None

    def __enter__(self) -> Any:
        self._entered = self._context.__enter__()
        return self._entered

    def __exit__(self, *details: Any) -> bool:
        kind, error = details[0], details[1]
        if self._expects == "raises":
            names = [] if kind is None else [each.__name__ for each in kind.__mro__]
            _report(self._site, "kind", names, "" if error is None else _text(error))
            if kind is None:
                return False  # there is nothing that the context could hold; the test goes on without
            self._context.__exit__(*details)
            return True
        held = 1
        try:
            passed = bool(self._context.__exit__(*details))
        except BaseException:  # noqa: BLE001  # what pytest raises when nothing was raised is no Exception
            held, passed = 0, kind is not None
        if self._expects == "plain":
            _report(self._site, "truth", int(held and (kind is None or passed)))
            return True
        caught = cast(
            "Any", getattr(self._entered, "list", None) or getattr(self._entered, "warnings", None) or []
        )
        found = [[[each.__name__ for each in entry.category.__mro__], str(entry.message)] for entry in caught]
        _report(self._site, "warnings", found)
        return passed


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_MOST_TEXT]
    except Exception:  # noqa: BLE001  # the tested code's own
        return ""


def record(path: str) -> None:
    """Write what is observed to a file from now on. Tests may replace what the modules used here hold."""
    global _write
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    dumps, write_bytes = json.dumps, os.write

    def write(**line: Any) -> None:
        write_bytes(descriptor, (dumps(line) + "\n").encode())

    _write = write


class running:  # it stands in tests as a function does
    """A context that is a test: it says which one runs, and whether it came to its end.

    A method's name has the class of its `owner`, the object that it is called with.
    """

    def __init__(self, file: str, name: str, owner: Any = None) -> None:
        if owner is not None:
            kind: Any = owner if isinstance(owner, type) else type(owner)
            name = kind.__qualname__.replace(".", "::") + "::" + name
        self._name = file + "::" + name
        self._outer = ""

    def __enter__(self) -> None:
        global _node
        self._outer, _node = _node, self._name

    def __exit__(self, *details: Any) -> None:
        global _node
        _node = self._outer
        _write(test=self._name, passed=details[0] is None)


class NodeTracker:
    """A pytest plugin that knows which test is running."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test that starts."""
        global _node
        _node = nodeid


def main(reporter_path: str, report_path: str, root: str, *files: str) -> int:
    """Run the files; return pytest's exit code."""
    spec = importlib.util.spec_from_file_location("understudy_report_plugin", reporter_path)
    assert spec is not None and spec.loader is not None
    plugin = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plugin)

    def start(reporter: Any) -> "list[Any]":
        global _write
        _write = reporter.write
        return [NodeTracker()]

    sys.modules["understudy_sites"] = sys.modules[__name__]
    return int(plugin.main(report_path, root, *files, plugins=start))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
