"""Writes values as JSON inside a sandbox, for `twin_driver`, which loads this file from beside itself.

It runs in the task's own Python, which may be as old as 3.6, and needs nothing of ours. The grader decodes what it
wrote (`twins.judge`).
"""

import operator
import os
import sys
from collections.abc import Callable
from typing import Any, cast

MAX_NODES = 20_000
"""How many values a value that is written has at most."""
MAX_TEXT = 400_000
"""The length of the longest text that is written."""


class _Opaque(Exception):
    """A value that cannot be encoded."""


class _Anything(_Opaque):
    """A value that equals whatever it is compared with."""


class _Unknown:
    """A value that no code under test has seen, so that nothing can honestly be equal to it."""


# Modules whose comparison methods are known: values that they treat as equal are equal in `twins.judge` too.
_MODULES_OF_KNOWN_EQUALITY = {
    *("builtins", "collections", "collections.abc", "_collections_abc", "types", "array", "enum", "re", "uuid"),
    *("decimal", "_decimal", "_pydecimal", "fractions", "datetime", "_pydatetime", "zoneinfo", "ipaddress"),
    *("pathlib", "pathlib._local", "numpy"),
}
_LIST_ITEMS, _TUPLE_ITEMS, _DICT_ITEMS = (
    cast("Any", list).__iter__,
    cast("Any", tuple).__iter__,
    cast("Any", dict).items,
)
_MOCKS = frozenset({"unittest.mock", "mock.mock", "mock"})
_COMPARED_AS_TEXT = frozenset({"uuid", "ipaddress", "zoneinfo"})  # their values are equal if class and text are


def encode(value: Any, limit: int = MAX_NODES) -> Any:
    """Return a value as JSON, `[type, content]`, if it has at most so many values in it.

    Equal values of Python's own types are encoded alike, or are equal after decoding. `["o", ...]` is the builtin
    value that an object with its own comparison claims to equal, `["!"]` an object that equals everything, and
    `["?"]` a value that cannot be encoded.
    """
    try:
        return _encode(value, [limit])
    except _Anything:
        return ["!"]
    except Exception:  # noqa: BLE001  # the tested code's own objects, which may raise anything
        return ["?"]


def _encode(value: Any, budget: "list[int]", depth: int = 0) -> Any:
    budget[0] -= 1
    if budget[0] < 0 or depth > 60:
        raise _Opaque
    kind = cast("Any", type(value))
    if not _has_own_equality(kind):
        content = _encode_builtin(value, kind, budget, depth) or _encode_other(value, kind, budget, depth)
        if content is None:
            raise _Opaque
        return content
    if any(base.__module__ in _MOCKS for base in kind.__mro__):
        raise _Opaque  # checked first, because a mock would record that it was compared
    if _equals_anything(value):
        raise _Anything
    content = _encode_builtin(value, kind, budget, depth) or _encode_other(value, kind, budget, depth)
    return ["o", content or _encode_equal(value, kind, budget, depth)]


def _has_own_equality(kind: Any) -> bool:
    """Return whether a class has a comparison method that is not known here."""
    for base in kind.__mro__:
        if "__eq__" in vars(base):
            return base.__module__ not in _MODULES_OF_KNOWN_EQUALITY or base.__name__ == "Counter"
    return False


_OPERATIONS = frozenset(
    {
        "__abs__",
        "__bool__",
        "__ceil__",
        "__complex__",
        "__contains__",
        "__eq__",
        "__float__",
        "__floor__",
        "__ge__",
    }
    | {"__getitem__", "__gt__", "__index__", "__int__", "__invert__", "__iter__", "__le__", "__len__", "__lt__"}
    | {"__ne__", "__neg__", "__next__", "__pos__", "__round__", "__trunc__", "__divmod__", "__rdivmod__"}
    | {"__add__", "__and__", "__floordiv__", "__lshift__", "__matmul__", "__mod__", "__mul__", "__or__", "__pow__"}
    | {"__rshift__", "__sub__", "__truediv__", "__xor__", "__radd__", "__rand__", "__rfloordiv__", "__rlshift__"}
    | {"__rmatmul__", "__rmod__", "__rmul__", "__ror__", "__rpow__", "__rrshift__", "__rsub__", "__rtruediv__"}
    | {"__rxor__"}
)


def has_own_code(value: Any, method: str = "") -> bool:
    """Return whether a class that is not known here decides what operators, or a method, make of a value."""
    for base in _BASES(type(value)):
        if not _has_known_equality(base):
            names = _CONTENT(base)
            if method in names or not _OPERATIONS.isdisjoint(names):
                return True
    return False


# What `type` itself says of a class, because a metaclass can say anything.
_BASES, _CONTENT, _FLAGS = (vars(type)[name].__get__ for name in ("__mro__", "__dict__", "__flags__"))
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: all classes but those that are built into an interpreter or library


def _has_known_equality(kind: Any) -> bool:
    """Return whether a class is one of those whose comparison is known, rather than says so (`__module__`)."""
    if kind.__module__ not in _MODULES_OF_KNOWN_EQUALITY:
        return False
    return not _FLAGS(kind) & _HEAP_TYPE or _loaded_class(kind.__module__, kind.__name__) is kind


def _equals_anything(value: Any) -> bool:
    """Return whether a value claims to equal a value that it cannot know."""
    try:
        return (value == _Unknown()) is True
    except Exception:  # noqa: BLE001  # the tested code's own
        return False


def _loaded_class(module: str, name: str) -> Any:
    """Return a class of an imported module; if it is not imported, (), which has no instances."""
    return getattr(sys.modules.get(module), name, ())


def _encode_builtin(value: Any, kind: Any, budget: "list[int]", depth: int) -> Any:
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
        return ["l", _encode_all(value.tolist(), budget, depth)]
    if isinstance(value, range):
        return ["r", *map(hex, (value.start, value.stop, value.step))]
    # The content is read by the builtin's methods, whatever the iteration of a subclass yields.
    if isinstance(value, list):
        return ["l", _encode_all(_LIST_ITEMS(items), budget, depth)]
    if isinstance(value, tuple):
        return ["t", _encode_all(_TUPLE_ITEMS(items), budget, depth)]
    if isinstance(value, (set, frozenset)):
        return ["e", _encode_all(items, budget, depth)]
    if isinstance(value, dict):
        return ["d", [_encode_all(pair, budget, depth) for pair in _DICT_ITEMS(items)]]
    return None


def _bounded(value: Any) -> Any:
    if len(value) > MAX_TEXT:
        raise _Opaque
    return value


def _encode_all(values: Any, budget: "list[int]", depth: int) -> "list[Any]":
    return [_encode(item, budget, depth + 1) for item in values]


def _encode_other(value: Any, kind: Any, budget: "list[int]", depth: int) -> Any:
    """Return the encoding of a value of the standard library, or of one that lists its fields; None for others."""
    if isinstance(value, _loaded_class("enum", "Enum")):
        # a combination of several flags has no name of its own
        name = value.name or _encode(value.value, budget, depth + 1)
        return ["z", "enum " + kind.__qualname__ + "." + str(name)]
    for module, name in (("decimal", "Decimal"), ("fractions", "Fraction")):
        if isinstance(value, _loaded_class(module, name)):
            return _encode_ratio(value)
    if isinstance(value, type):
        return ["z", "class " + value.__qualname__]
    moment = _encode_moment(value)
    if moment is not None:
        return moment
    if isinstance(value, _loaded_class("pathlib", "PurePath")):
        windows = isinstance(value, _loaded_class("pathlib", "PureWindowsPath"))
        return ["z", "path of Windows " + str(value).lower() if windows else "path " + str(value)]
    for base in kind.__mro__:
        if (base.__module__ or "").partition(".")[0] in _COMPARED_AS_TEXT:
            return ["z", base.__name__ + " " + str(value)]
    if isinstance(value, _loaded_class("array", "array")):
        return (
            ["y", value.tobytes().hex()]
            if value.typecode in "Bb"
            else ["l", _encode_all(value.tolist(), budget, depth)]
        )
    if isinstance(value, _loaded_class("re", "Pattern")):
        return [
            "k",
            "pattern",
            {"pattern": _encode(value.pattern, budget, depth), "flags": ["i", hex(value.flags)]},
        ]
    if (kind.__module__ or "").partition(".")[0] == "numpy" and hasattr(value, "tolist"):
        return ["a", _encode(value.tolist(), budget, depth + 1)]
    return _encode_collection(value, kind, budget, depth)


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


def _encode_collection(value: Any, kind: Any, budget: "list[int]", depth: int) -> Any:
    if isinstance(value, _loaded_class("collections.abc", "Mapping")):
        return ["d", [_encode_all(pair, budget, depth) for pair in value.items()]]
    if isinstance(value, _loaded_class("collections", "UserString")):
        return ["s", _bounded(str(value))]
    if isinstance(value, (_loaded_class("collections", "deque"), _loaded_class("collections", "UserList"))):
        return ["l", _encode_all(value, budget, depth)]
    if kind.__name__ in ("dict_values", "odict_values"):
        return ["l", _encode_all(value, budget, depth)]
    if isinstance(value, _loaded_class("collections.abc", "Set")):
        return ["e", _encode_all(value, budget, depth)]
    if isinstance(value, _loaded_class("types", "SimpleNamespace")):
        return [
            "k",
            "SimpleNamespace",
            {name: _encode(field, budget, depth + 1) for name, field in cast("Any", vars(value)).items()},
        ]
    names = _compared_fields(kind)
    if names is None:
        return None
    return ["k", kind.__qualname__, {name: _encode(getattr(value, name), budget, depth + 1) for name in names}]


def _compared_fields(kind: Any) -> "list[str] | None":
    """Return the names of the fields that instances of a dataclass or attrs class are compared by."""
    fields: Any = getattr(kind, "__dataclass_fields__", None)
    if fields is not None and kind.__dataclass_params__.eq:
        return [name for name, field in fields.items() if field.compare and field._field_type.name == "_FIELD"]
    attributes: Any = getattr(kind, "__attrs_attrs__", None)
    return (
        None
        if attributes is None
        else [attribute.name for attribute in attributes if getattr(attribute, "eq", True)]
    )


def _encode_equal(value: Any, kind: Any, budget: "list[int]", depth: int) -> Any:
    """Return the encoding of the builtin value that an object with its own comparison claims to equal."""
    for make in _candidates(kind):
        try:
            builtin = make(value)
            if type(builtin) is not kind and (value == builtin) is True:
                return _encode(builtin, budget, depth + 1)
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
        if len(value) > MAX_NODES:
            raise _Opaque
        return make(value)

    return bounded
