"""Runs a version of test files inside a sandbox: `twin_driver.py REPORTER REPORT ROOT FILE...`.

This file is mounted into sandboxes and run there by the task's own Python, so it needs pytest and nothing of ours
but REPORTER, the path of `report_plugin.py`. To the report's lines it adds `{"node", "site", "saw"}` for
everything that a version (see `twins`) observes while a test runs. `saw` is `[kind, ...]`, in which values are
written by `encode`. Expected values are not known here: code that forges an observation has to know them itself.

In suites with their own command the version's files load this module (see `twin_suite`), and `record` and
`running` take the place of pytest's reporter. Their Pythons may be as old as 3.6.
"""

import atexit
import hashlib
import importlib.util
import json
import operator
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

_MOST_NODES = 20_000
_MOST_TEXT = 400_000
_MOST_RESULTS = 100  # maximum number of results of a comparison outside of assertions, in one test
_MOST_COMPARED = 500  # maximum number of values within a compared value
_MOST_REPORTS = 1_000  # maximum number for one site in one test; of later ones only a digest is sent

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
    "count": lambda left, right: _same_elements(list(left), list(right)),
    "approx": lambda left, right: True,
}


def _same_elements(left: "list[Any]", right: "list[Any]") -> bool:
    for each in left:
        if each not in right:
            return False
        right.remove(each)
    return not right


class _Opaque(Exception):
    """A value that cannot be encoded."""


class _Anything(_Opaque):
    """A value that equals whatever it is compared with."""


class _Unknown:
    """A value that no code under test has seen, so that nothing can honestly be equal to it."""


# Modules whose comparison methods are known: values that they treat as equal are equal in `twin_judge` too.
_KNOWN_EQUALITY = {
    *("builtins", "collections", "collections.abc", "_collections_abc", "types", "array", "enum", "re", "uuid"),
    *("decimal", "_decimal", "_pydecimal", "fractions", "datetime", "_pydatetime", "zoneinfo", "ipaddress"),
    *("pathlib", "pathlib._local", "numpy"),
}
_IN_LIST, _IN_TUPLE, _IN_DICT = cast("Any", list).__iter__, cast("Any", tuple).__iter__, cast("Any", dict).items
_MOCKS = frozenset({"unittest.mock", "mock.mock", "mock"})
_ABSTRACT = frozenset({"collections.abc", "contextlib", "importlib.abc", "io", "numbers", "os", "typing"})
_TEXT_OF = frozenset({"uuid", "ipaddress", "zoneinfo"})  # their values are equal if class and text are


def encode(value: Any, most: int = _MOST_NODES) -> Any:
    """Return a value as JSON, `[type, content]`, if it has at most so many values in it.

    Equal values of Python's own types are encoded alike, or are equal after decoding. `["o", ...]` is the builtin
    value that an object with its own comparison claims to equal, `["!"]` an object that equals everything, and
    `["?"]` a value that cannot be encoded.
    """
    try:
        return _encode(value, [most])
    except _Anything:
        return ["!"]
    except Exception:  # noqa: BLE001  # the tested code's own objects, which may raise anything
        return ["?"]


def _encode(value: Any, left: "list[int]", depth: int = 0) -> Any:
    left[0] -= 1
    if left[0] < 0 or depth > 60:
        raise _Opaque
    kind = cast("Any", type(value))
    if not _has_own_equality(kind):
        content = _encode_builtin(value, kind, left, depth) or _encode_other(value, kind, left, depth)
        if content is None:
            raise _Opaque
        return content
    if any(base.__module__ in _MOCKS for base in kind.__mro__):
        raise _Opaque  # checked first, because a mock would record that it was compared
    if _equals_anything(value):
        raise _Anything
    content = _encode_builtin(value, kind, left, depth) or _encode_other(value, kind, left, depth)
    return ["o", content or _encode_equal(value, kind, left, depth)]


def _has_own_equality(kind: Any) -> bool:
    """Return whether a class has a comparison method that is not known here."""
    for base in kind.__mro__:
        if "__eq__" in vars(base):
            return base.__module__ not in _KNOWN_EQUALITY or base.__name__ == "Counter"
    return False


def _equals_anything(value: Any) -> bool:
    """Return whether a value claims to equal a value that it cannot know."""
    try:
        return (value == _Unknown()) is True
    except Exception:  # noqa: BLE001  # the tested code's own
        return False


def _known(module: str, name: str) -> Any:
    """Return a class of an imported module; if it is not imported, (), which has no instances."""
    return getattr(sys.modules.get(module), name, ())


def _encode_builtin(value: Any, kind: Any, left: "list[int]", depth: int) -> Any:
    """Return the encoding of a value of a builtin type, or of a subclass as the builtin type's methods read it;
    None for others.
    """
    items: Any = value  # typed Any, to drop what the type checker derives from isinstance
    if value is None:
        return ["n"]
    if value is NotImplemented or value is Ellipsis:
        return ["z", repr(value)]
    if kind is bool:
        return ["b", int(value)]
    if isinstance(value, int):
        return ["i", hex(int.__int__(value))]
    if isinstance(value, float):
        return ["f", float.hex(float.__float__(value))]
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, str):
        return ["s", _bounded(str.__str__(value))]
    if isinstance(value, (bytes, bytearray)):
        return ["y", _bounded(bytes(value)).hex()]
    if isinstance(value, memoryview):
        if value.format in ("B", "b", "c"):
            return ["y", _bounded(value.tobytes()).hex()]
        return ["l", _encode_all(value.tolist(), left, depth)]
    if isinstance(value, range):
        return ["r", *map(hex, (value.start, value.stop, value.step))]
    # The content is read by the builtin's methods, whatever the iteration of a subclass yields.
    if isinstance(value, list):
        return ["l", _encode_all(_IN_LIST(items), left, depth)]
    if isinstance(value, tuple):
        return ["t", _encode_all(_IN_TUPLE(items), left, depth)]
    if isinstance(value, (set, frozenset)):
        return ["e", _encode_all(items, left, depth)]
    if isinstance(value, dict):
        return ["d", [_encode_all(pair, left, depth) for pair in _IN_DICT(items)]]
    return None


def _bounded(value: Any) -> Any:
    if len(value) > _MOST_TEXT:
        raise _Opaque
    return value


def _encode_all(values: Any, left: "list[int]", depth: int) -> "list[Any]":
    return [_encode(each, left, depth + 1) for each in values]


def _encode_other(value: Any, kind: Any, left: "list[int]", depth: int) -> Any:
    """Return the encoding of a value of the standard library, or of one that lists its fields; None for others."""
    if isinstance(value, _known("enum", "Enum")):
        # a combination of several flags has no name of its own
        name = value.name or _encode(value.value, left, depth + 1)
        return ["z", "enum " + kind.__qualname__ + "." + str(name)]
    for module, name in (("decimal", "Decimal"), ("fractions", "Fraction")):
        if isinstance(value, _known(module, name)):
            return _encode_ratio(value)
    if isinstance(value, type):
        return ["z", "class " + value.__qualname__]
    moment = _encode_moment(value)
    if moment is not None:
        return moment
    if isinstance(value, _known("pathlib", "PurePath")):
        windows = isinstance(value, _known("pathlib", "PureWindowsPath"))
        return ["z", "path of Windows " + str(value).lower() if windows else "path " + str(value)]
    for base in kind.__mro__:
        if (base.__module__ or "").partition(".")[0] in _TEXT_OF:
            return ["z", base.__name__ + " " + str(value)]
    if isinstance(value, _known("array", "array")):
        return (
            ["y", value.tobytes().hex()]
            if value.typecode in "Bb"
            else ["l", _encode_all(value.tolist(), left, depth)]
        )
    if isinstance(value, _known("re", "Pattern")):
        return ["k", "pattern", {"pattern": _encode(value.pattern, left, depth), "flags": ["i", hex(value.flags)]}]
    if (kind.__module__ or "").partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return ["a", _encode(value.tolist(), left, depth + 1)]
    return _encode_collection(value, kind, left, depth)


def _encode_ratio(value: Any) -> Any:
    """Return the encoding of a decimal number or fraction; NaN and infinities are encoded as floats."""
    if value != value or value in (float("inf"), float("-inf")):
        return ["f", float(value).hex()]
    top, bottom = value.as_integer_ratio() if hasattr(value, "as_tuple") else (value.numerator, value.denominator)
    return ["q", hex(top), hex(bottom)]


def _encode_moment(value: Any) -> Any:
    """Return the encoding of a value of `datetime`; with a time zone in UTC, in which such values are compared."""
    library = sys.modules.get("datetime")
    if library is None:
        return None
    none, unit = library.timedelta(0), library.timedelta(microseconds=1)
    if isinstance(value, library.timedelta):
        name, number = "timedelta", value // unit
    elif isinstance(value, library.datetime):
        zone, bare = value.utcoffset(), value.replace(tzinfo=None)
        name = "datetime" if zone is None else "instant"
        number = (bare - library.datetime(1970, 1, 1) - (zone or none)) // unit
    elif isinstance(value, library.date):
        name, number = "date", value.toordinal()
    elif isinstance(value, library.time):
        zone, seconds = value.utcoffset(), (value.hour * 60 + value.minute) * 60 + value.second
        name = "time" if zone is None else "time of UTC"
        number = seconds * 1_000_000 + value.microsecond - (zone or none) // unit
    elif isinstance(value, library.timezone):
        name, number = "timezone", value.utcoffset(None) // unit
    else:
        return None
    return ["z", name + " " + str(number)]


def _encode_collection(value: Any, kind: Any, left: "list[int]", depth: int) -> Any:
    if isinstance(value, _known("collections.abc", "Mapping")):
        return ["d", [_encode_all(pair, left, depth) for pair in value.items()]]
    if isinstance(value, _known("collections", "UserString")):
        return ["s", _bounded(str(value))]
    if isinstance(value, (_known("collections", "deque"), _known("collections", "UserList"))):
        return ["l", _encode_all(value, left, depth)]
    if kind.__name__ in ("dict_values", "odict_values"):
        return ["l", _encode_all(value, left, depth)]
    if isinstance(value, _known("collections.abc", "Set")):
        return ["e", _encode_all(value, left, depth)]
    if isinstance(value, _known("types", "SimpleNamespace")):
        return [
            "k",
            "SimpleNamespace",
            {name: _encode(each, left, depth + 1) for name, each in cast("Any", vars(value)).items()},
        ]
    names = _compared_fields(kind)
    if names is None:
        return None
    return ["k", kind.__qualname__, {name: _encode(getattr(value, name), left, depth + 1) for name in names}]


def _compared_fields(kind: Any) -> "list[str] | None":
    """Return the names of the fields that instances of a dataclass or attrs class are compared by."""
    fields: Any = getattr(kind, "__dataclass_fields__", None)
    if fields is not None and kind.__dataclass_params__.eq:
        return [name for name, field in fields.items() if field.compare and field._field_type.name == "_FIELD"]
    attributes: Any = getattr(kind, "__attrs_attrs__", None)
    return None if attributes is None else [each.name for each in attributes if getattr(each, "eq", True)]


def _encode_equal(value: Any, kind: Any, left: "list[int]", depth: int) -> Any:
    """Return the encoding of the builtin value that an object with its own comparison claims to equal."""
    for make in _candidates(kind):
        try:
            builtin = make(value)
            if type(builtin) is not kind and (value == builtin) is True:
                return _encode(builtin, left, depth + 1)
        except _Opaque:
            raise
        except Exception:  # noqa: BLE001, S112  # it is not of that kind after all
            continue
    raise _Opaque


def _candidates(kind: Any) -> "list[Callable[[Any], Any]]":
    """Return the conversions to try on an object of class `kind`, by its methods: `dict` if it has `keys`, …"""

    def has(*names: str) -> bool:
        return all(hasattr(kind, name) for name in names)

    if has("keys", "__getitem__"):
        return [dict]
    if has("encode", "split", "__str__"):
        return [str]
    if has("__fspath__"):
        return [os.fspath]
    if has("__index__"):
        return [operator.index]
    if has("__float__", "__int__", "__add__"):
        return [int, float]
    if has("__len__", "__iter__"):
        return [_short(list), _short(tuple), _short(set)]
    return [bytes] if has("__bytes__") else []


def _short(make: "Callable[[Any], Any]") -> "Callable[[Any], Any]":
    def bounded(value: Any) -> Any:
        if len(value) > _MOST_NODES:
            raise _Opaque
        return make(value)

    return bounded


_write: Any = None
_node = ""


def _reporting() -> "tuple[Callable[..., None], Callable[[], None], Callable[[int], int]]":
    """Return functions that report an observation, report the ending test's later ones, and count a site's.

    Counters and limit are variables here: tested code would find a module's. Later observations are reported as a
    count and a sum of digests, independent of order.
    """
    counts, left, most = cast("dict[tuple[str, int], int]", {}), cast("dict[int, list[int]]", {}), _MOST_REPORTS

    def report(site: int, *saw: Any) -> None:
        counts[_node, site] = counts.get((_node, site), 0) + 1
        if counts[_node, site] <= most:
            return _write(node=_node, site=site, saw=list(saw))
        content = _coarse(saw[1]) if saw[0] == "value" else saw
        digest = hashlib.sha256(json.dumps(content).encode()).digest()
        rest = left.setdefault(site, [0, 0])
        rest[0] += 1
        rest[1] = (rest[1] + int.from_bytes(digest[:8], "big")) % (1 << 64)

    def report_rest() -> None:
        for site, (count, total) in sorted(left.items()):
            _write(node=_node, site=site, saw=["rest", count, hex(total)])
        left.clear()

    return report, report_rest, lambda site: counts.get((_node, site), 0)


_report, _report_rest, _count = _reporting()


def _coarse(encoded: Any) -> Any:
    """Return a coarser form of an encoded value, mostly the same for values that the judge treats as equal."""
    if isinstance(encoded, dict):
        fields = cast("dict[str, Any]", encoded)
        return {name: _coarse(fields[name]) for name in sorted(fields)}
    if not isinstance(encoded, list) or not encoded:
        return cast("Any", encoded)
    parts = cast("list[Any]", encoded)
    kind = parts[0]
    if kind in ("b", "i"):
        return str(int(parts[1], 16) if kind == "i" else parts[1])
    if kind == "f":
        number = float.fromhex(parts[1])
        if number - number == 0 and abs(number - round(number)) <= 1e-9 * abs(number):
            return str(round(number))
        return f"{number:.6g}"
    if kind in ("a", "o"):
        return _coarse(parts[1])
    if kind in ("l", "t"):
        return ["l", _coarse(parts[1])]
    if kind in ("e", "d"):
        return [kind, sorted(map(_coarse, parts[1]), key=json.dumps)]
    return [_coarse(each) for each in parts]


def send(site: int, value: Any, second: "int | None" = None) -> None:
    """Report an observed value for the assertion `site`, and for `second` if it compares the same value."""
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


def result(site: int, name: str, left: Any, right: Any) -> Any:
    """Return the result of a comparison. The first ones of a test are reported, if they are truth values."""
    saw = _OPERATORS[name](left, right)
    if (saw is True or saw is False) and _count(site) < _MOST_RESULTS and _write is not None:
        _report(site, "result", encode(left, _MOST_COMPARED), encode(right, _MOST_COMPARED), int(saw))
    return saw


def kind(site: int, value: Any) -> None:
    """Report the names of a value's classes, and of those that it only claims to be of.

    Claims are what the tested code can say of any object: `__class__`, and being registered for its own abstract
    classes. The standard library's abstract classes are kinds of their own, because builtin types are registered.
    """
    names = {each.__name__ for each in type(value).__mro__}
    claims: set[str] = set()
    stands_for = getattr(value, "__class__", None)
    if isinstance(stands_for, type):
        claims.update(each.__name__ for each in stands_for.__mro__)
    for each in _abstract_classes(value):
        (names if _is_standard(each) else claims).add(each.__name__)
    _report(site, "kind", sorted(names), sorted(claims - names))


def _is_standard(kind: type) -> bool:
    """Return whether an abstract class belongs to the standard library, regardless of its `__module__`."""
    return kind.__module__ in _ABSTRACT and _known(kind.__module__, kind.__name__) is kind


def _abstract_classes(value: Any) -> "Iterator[type]":
    seen: set[type] = {object}
    left: list[type] = [object]
    while left:
        for each in type.__subclasses__(left.pop()):
            if each in seen:
                continue
            seen.add(each)
            left.append(each)
            try:
                if type(each).__name__ == "ABCMeta" and isinstance(value, each):
                    yield each
            except Exception:  # noqa: BLE001, S112  # the tested code's own
                continue


def calls(site: int, mock: Any) -> None:
    """Report the calls of a mock, each as its positional and its named arguments.

    For a mock with a signature the arguments are bound to it first, so that naming an argument makes no
    difference.
    """
    # An autospecced mock is a function, with the real mock in an attribute.
    bind = getattr(mock.mock if type(mock).__name__ == "function" else mock, "_call_matcher", None)
    made: list[Any] = []
    for each in mock.call_args_list:
        bound: Any = bind(each) if callable(bind) else each
        arguments, named = tuple(each if isinstance(bound, Exception) else bound)[-2:]
        made.append(
            [[encode(value) for value in arguments], {name: encode(value) for name, value in named.items()}]
        )
    _report(site, "calls", made)


def called(site: int, assertion: "Callable[..., Any]", *arguments: Any, **named: Any) -> None:
    """Report whether an assertion of a mock holds."""
    try:
        assertion(*arguments, **named)
    except AssertionError:
        _report(site, "truth", 0)
    else:
        _report(site, "truth", 1)


class block:  # lower case, because tests use it like a function
    """A context manager that reports which exception or warnings occurred inside, and suppresses them."""

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
                return False  # nothing was raised inside, so there is nothing to suppress; the test continues
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
        notes = getattr(error, "__notes__", ())  # pytest's `match` is also searched in an exception's notes
        return "\n".join([str(error), *map(str, notes)])[:_MOST_TEXT]
    except Exception:  # noqa: BLE001  # the tested code's own
        return ""


def record(path: str) -> None:
    """Write observations to a file from now on.

    What this needs is bound now, because tests may replace functions in the modules that it uses.
    """
    global _write
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    atexit.register(_report_rest)
    dumps, write_bytes = json.dumps, os.write

    def write(**line: Any) -> None:
        write_bytes(descriptor, (dumps(line) + "\n").encode())

    _write = write


def program(file: str) -> None:
    """Report that a version's file begins: what its process observes outside of tests counts as the file's own."""
    global _node
    _report_rest()
    _node = file + "::"
    _write(test=_node, passed=True)


class running:  # lower case, because tests use it like a function
    """A context manager around a test: reports which test runs, and whether it came to its end.

    For a method, `owner` is the object that it is called on, whose class is a part of the test's name.
    """

    def __init__(self, file: str, name: str, owner: Any = None) -> None:
        if owner is not None:
            kind: Any = owner if isinstance(owner, type) else type(owner)
            name = kind.__qualname__.replace(".", "::") + "::" + name
        self._name = file + "::" + name
        self._outer = ""

    def __enter__(self) -> None:
        global _node
        _report_rest()
        self._outer, _node = _node, self._name

    def __exit__(self, *details: Any) -> None:
        global _node
        _report_rest()
        _node = self._outer
        _write(test=self._name, passed=details[0] is None)


class NodeTracker:
    """A pytest plugin that knows which test is running."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note the test that starts."""
        global _node
        _node = nodeid

    def pytest_runtest_logfinish(self) -> None:
        """Report the remaining observations of the ending test."""
        _report_rest()


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
