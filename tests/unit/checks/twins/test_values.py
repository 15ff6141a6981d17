"""Values that are equal in Python are equal for twins, whatever their types; what differs still is told apart."""

from __future__ import annotations

import abc
import array
import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import itertools
import pathlib
import re
import sys
import types
import unittest.mock
import uuid
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from understudy.checks.twins import twin_driver
from understudy.checks.twins.judge import Observation, holds, judge
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.twin_driver import encode
from understudy.checks.twins.versions import write_version

EQUAL = TwinSite("equal")
PAIR = TwinSite("pair", operator="==", withheld=False)
UTC = dt.UTC
BERLIN = zoneinfo.ZoneInfo("Europe/Berlin")


class Text(str):
    """A subclass without a comparison of its own."""


class Caseless(str):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str) and self.lower() == other.lower()

    __hash__ = str.__hash__


class Proxy:
    """Says that it is of another class."""

    def __init__(self, stands_for: type) -> None:
        self._stands_for = stands_for

    @property
    def __class__(self) -> Any:
        return self._stands_for


class Open(abc.ABC):  # noqa: B024
    """An abstract class that takes any object for its own, and says that it is the standard library's."""

    __module__ = "collections.abc"

    @classmethod
    def __subclasshook__(cls, subclass: type) -> bool:
        return True


class Opened(Open): ...


class Row(Sequence[Any]):
    """Compares like a list, and is none."""

    def __init__(self, *values: Any) -> None:
        self._values = values

    def __getitem__(self, index: Any) -> Any:
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return list(self) == other

    __hash__ = None  # type: ignore[assignment]


class Headers(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Meters:
    def __init__(self, value: float) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return self.value == other

    def __hash__(self) -> int:
        return hash(self.value)

    def __add__(self, other: float) -> float:
        return self.value + other

    def __int__(self) -> int:
        return int(self.value)

    def __float__(self) -> float:
        return float(self.value)


class Moment(dt.datetime):
    """A subclass, as libraries that freeze time have."""


class Number(enum.IntEnum):
    TWO = 2


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: int
    y: int
    note: str = dataclasses.field(default="", compare=False)


class Anything:
    """Equal to everything."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


class Guarded:
    """Equal to everything of a builtin type."""

    def __eq__(self, other: object) -> bool:
        return type(other).__module__ == "builtins"

    __hash__ = None  # type: ignore[assignment]


class Unreadable:
    def __eq__(self, other: object) -> bool:
        return other == 3

    __hash__ = None  # type: ignore[assignment]


_ONE = {"a": 1, "b": [1, 2]}
_NOON = dt.datetime(2024, 5, 1, 12, tzinfo=UTC)

ALIKE: dict[str, tuple[Any, ...]] = {
    "mappings": (
        _ONE,
        collections.OrderedDict(reversed(_ONE.items())),
        collections.defaultdict(list, _ONE),
        collections.UserDict(_ONE),
        collections.ChainMap({"b": [1, 2]}, {"a": 1}),
        types.MappingProxyType(_ONE),
        Headers(**_ONE),
    ),
    "a counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "numbers": (2, 2.0, decimal.Decimal("2.0"), fractions.Fraction(4, 2), 2 + 0j, Number.TWO, Meters(2.0)),
    "one": (1, True, 1.0),
    "an infinity": (float("inf"), decimal.Decimal("Infinity")),
    "sums of floats": (0.3, 0.1 + 0.2),
    "texts": ("ab", Text("ab"), collections.UserString("ab"), Caseless("ab")),
    "bytes": (b"ab", bytearray(b"ab"), memoryview(b"ab"), array.array("B", b"ab")),
    "other arrays": (array.array("i", [1, 2]), memoryview(array.array("i", [1, 2]))),
    "lists": ([1, "x"], collections.UserList([1, "x"]), collections.deque([1, "x"]), Row(1, "x")),
    "tuples": ((1, 2), collections.namedtuple("Pair", "x y")(1, 2)),
    "ranges": (range(0, 3, 2), range(0, 4, 2)),
    "empty ranges": (range(0), range(5, 5)),
    "sets": ({1, 2}, frozenset({2, 1}), dict.fromkeys((1, 2)).keys()),
    "items": ({"a": 1}.items(), {("a", 1)}),
    "paths": (pathlib.Path("a/b"), pathlib.PurePosixPath("a/./b")),
    "instants": (_NOON, _NOON.astimezone(BERLIN), Moment(2024, 5, 1, 12, tzinfo=UTC)),
    "moments": (_NOON.replace(tzinfo=None), Moment.combine(_NOON.date(), _NOON.time())),
    "times": (dt.time(12, tzinfo=UTC), dt.time(14, tzinfo=dt.timezone(dt.timedelta(hours=2)))),
    "durations": (dt.timedelta(days=1), dt.timedelta(hours=24)),
    "zones": (UTC, dt.timezone(dt.timedelta(0))),
    "ids": (uuid.UUID(int=5), type("Id", (uuid.UUID,), {})(int=5)),
    "addresses": (ipaddress.ip_address("10.0.0.1"), ipaddress.IPv4Address(0x0A000001)),
    "patterns": (re.compile("a"), re.compile("a")),
    "namespaces": (types.SimpleNamespace(a=1, b=2), types.SimpleNamespace(b=2, a=1.0)),
    "dataclasses": (Point(1, 2), Point(1, 2, note="other")),
    "members": (Colour.RED, Colour(1)),
}
"""Values of which each equals the first one."""


def value(each: Any) -> list[Observation]:
    return [["value", encode(each)]]


@pytest.mark.parametrize("name", ALIKE)
def test_equal_values_of_other_types_agree(name: str):
    first, *others = ALIKE[name]
    for other in others:
        assert judge(EQUAL, value(first), value(other)) == "agrees", (other, encode(other))
        assert judge(EQUAL, value([first]), value([other])) == "agrees"
        assert judge(EQUAL, value(other), value(first)) == "agrees"


UNLIKE = {
    "a mapping with another value": (_ONE, collections.ChainMap({"b": [1, 3]}, {"a": 1})),
    "a mapping with less": (_ONE, collections.OrderedDict(a=1)),
    "another number": (2, decimal.Decimal("2.1")),
    "the next number": (1_000_000, 1_000_001),
    "another float": (0.3, 0.31),
    "another text": ("ab", Text("aB")),
    "other bytes": (b"ab", memoryview(b"ac")),
    "a longer range": (range(0, 3, 2), range(0, 5, 2)),
    "another instant": (_NOON, _NOON.astimezone(BERLIN) + dt.timedelta(microseconds=1)),
    "a moment without a zone": (_NOON, _NOON.replace(tzinfo=None)),
    "another path": (pathlib.Path("a/b"), pathlib.PurePosixPath("a/c")),
    "another member": (Colour.RED, Colour.BLUE),
    "none": (0, None),
    "what equals everything": (3, Anything()),
    "what equals everything, inside": ([3], [Anything()]),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unequal_values_are_judged_contradictory(name: str):
    one, other = UNLIKE[name]
    assert judge(EQUAL, value(one), value(other)) == "contradicts"


@pytest.mark.parametrize("other", [Guarded(), Unreadable(), object(), iter([3]), Caseless("X"), Meters(4.0)])
def test_opaque_values_and_custom_equality_are_judged_unclear(other: Any):
    assert judge(EQUAL, value(3), value(other)) == "unclear"


def test_encoding_a_mock_does_not_call_it():
    mock = unittest.mock.MagicMock()
    assert encode([mock]) == ["?"]
    assert mock.mock_calls == []


def pair(left: Any, right: Any, operator: str = "==") -> list[Observation]:
    result = twin_driver._OPERATORS[operator](left, right)  # pyright: ignore[reportPrivateUsage]
    return [["pair", encode(left), encode(right), int(bool(result))]]


NAMED = collections.namedtuple("NAMED", "x y")


@pytest.mark.parametrize(
    ("gold", "observed", "judgement"),
    [
        (pair(NAMED(1, 2), NAMED(1, 2)), pair(Point(1, 2), Point(1, 2)), "agrees"),
        (pair("A", "A"), pair(Caseless("a"), "A"), "unclear"),
        (pair(Caseless("a"), "A"), pair(Caseless("a"), "A"), "agrees"),
        (pair(Unreadable(), 3), pair(Unreadable(), 3), "agrees"),
        (pair(3, 3), pair(Unreadable(), 3), "unclear"),
        (pair(3, 3), pair(Anything(), 3), "contradicts"),
        (pair(3, 3), pair(3, 4), "contradicts"),
    ],
)
def test_a_comparison_in_the_process_is_judged_by_its_values(
    gold: list[Observation], observed: list[Observation], judgement: str
):
    assert judge(PAIR, gold, observed) == judgement


@pytest.mark.parametrize(
    ("left", "right", "judgement"),
    [
        (1, 2, "agrees"),
        (object(), object(), "unclear"),
        (decimal.Decimal("0.5"), fractions.Fraction(1, 2), "unclear"),  # which Python does not have as equal
        (Colour.RED, Colour.BLUE, "agrees"),
        (2, 2.0, "contradicts"),
    ],
)
def test_inequality_is_judged_for_distinct_equal_and_opaque_values(left: Any, right: Any, judgement: str):
    site = TwinSite("pair", operator="!=", withheld=False)
    assert judge(site, pair(1, 2, "!="), pair(left, right, "!=")) == judgement


@pytest.mark.parametrize(
    ("gold", "observed", "judgement"),
    [
        ([1, 2, 3], [2, 3, 1], "agrees"),
        ([3, 3, 3], [3], "unclear"),
        ([3], [3, 3, 3], "agrees"),
        ([1, 2], [1, 2, 2, 1], "agrees"),
        ([1, 2, 3], [1, 2], "unclear"),
        ([1, 2], [1, 2, 4], "unclear"),
        ([True, False], [True, True], "unclear"),
        ([1, 2, 3], [1, 2, 4], "contradicts"),
    ],
)
def test_observed_values_may_come_in_another_order_or_more_often(
    gold: list[Any], observed: list[Any], judgement: str
):
    def values(each: list[Any]) -> list[Observation]:
        return [observation for one in each for observation in value(one)]

    assert judge(EQUAL, values(gold), values(observed)) == judgement


@pytest.mark.parametrize(
    ("one", "other", "judgement"),
    [
        ([{"a": 1, "b": 2}, 3], [3.0, {"b": 2, "a": 1}], "agrees"),
        ([0.3, 1], [1, 0.1 + 0.2], "agrees"),
        ([1, 2], {2, 1}, "agrees"),
        ([[1], [2]], ([2], [1]), "agrees"),
        ([1, 2], [1, 1], "contradicts"),
        ([1, 2], [1, 2, 2], "contradicts"),
    ],
)
def test_count_assertions_compare_elements_in_any_order(one: Any, other: Any, judgement: str):
    assert judge(TwinSite("count"), value(one), value(other)) == judgement


NODES = itertools.count()


def observe(text: str, **names: Any) -> tuple[dict[int, TwinSite], dict[int, list[Observation]]]:
    """The sites of a test's body, and what they send."""
    version = write_version("def test_it():\n    " + text + "\n")
    observations: dict[int, list[Observation]] = {}
    sites = types.ModuleType("understudy_sites")
    sites.__dict__.update(vars(twin_driver))

    def write(node: str, site: int, saw: Observation) -> None:
        observations.setdefault(site, []).append(saw)

    before = sys.modules.get("understudy_sites"), twin_driver.__dict__["_write"]
    sys.modules["understudy_sites"] = twin_driver
    twin_driver.__dict__["_write"] = write
    twin_driver.__dict__["_node"] = f"test {next(NODES)}"
    try:
        scope: dict[str, Any] = {"__name__": "version", **names}
        exec(compile(version.source, "version.py", "exec"), scope)  # our own text
        scope["test_it"]()
    finally:
        twin_driver.__dict__["_write"] = before[1]
        sys.modules.pop("understudy_sites") if before[0] is None else None
    return version.sites, observations


def mocked(make: Callable[[], Any], *calls: unittest.mock._Call) -> Any:
    mock = make()
    for call in calls:
        mock(*call.args, **call.kwargs)
    return mock


def signed(x: int, y: int = 0) -> None: ...


def autospecced() -> Any:
    return unittest.mock.create_autospec(signed)


call = unittest.mock.call


@pytest.mark.parametrize(
    ("assertion", "make", "gold", "observed", "agrees"),
    [
        ("m.assert_called_once_with(1, y=2)", autospecced, [call(1, 2)], [call(x=1, y=2)], True),
        ("m.assert_called_once_with(1, y=2)", autospecced, [call(1, 2)], [call(1, 3)], False),
        (
            "m.assert_called_once_with({'a': 1.0})",
            unittest.mock.Mock,
            [call({"a": 1})],
            [call(Headers(a=1))],
            True,
        ),
        ("m.assert_called_once()", unittest.mock.Mock, [call(1)], [call(2)], True),
        ("m.assert_called_once()", unittest.mock.Mock, [call(1)], [call(1), call(1)], False),
        ("m.assert_not_called()", unittest.mock.Mock, [], [], True),
        ("m.assert_not_called()", unittest.mock.Mock, [], [call()], False),
        ("m.assert_called_with(2)", unittest.mock.Mock, [call(1), call(2)], [call(2)], True),
        ("m.assert_called_with(2)", unittest.mock.Mock, [call(2)], [call(2), call(1)], False),
        ("m.assert_has_calls([1])", unittest.mock.Mock, [call(1)], [call(0), call(1), call(2)], True),
        ("m.assert_has_calls([1])", unittest.mock.Mock, [call(1)], [call(2)], False),
        ("m.assert_called_once_with(ANY, 3)", unittest.mock.Mock, [call(1, 3)], [call(2, 3)], True),
        ("m.assert_called_once_with(ANY, 3)", unittest.mock.Mock, [call(1, 3)], [call(2, 4)], False),
    ],
)
def test_mock_calls_are_compared_as_far_as_the_assertion_checks_them(
    assertion: str, make: Callable[[], Any], gold: list[Any], observed: list[Any], agrees: bool
):
    (sites, of_gold), (_, of_patch) = (
        observe(assertion, m=mocked(make, *calls), ANY=unittest.mock.ANY) for calls in (gold, observed)
    )
    assert holds(sites[0], of_gold[0], of_gold[0])
    assert holds(sites[0], of_gold[0], of_patch[0]) is agrees


@pytest.mark.parametrize(
    ("assertion", "gold", "observed", "judgement"),
    [
        ("assert isinstance(f, Mapping)", Headers(), {}, "agrees"),
        ("assert isinstance(f, IOError)", OSError(), OSError(), "agrees"),
        ("assert isinstance(f, Number)", 1, decimal.Decimal(1), "agrees"),
        ("assert isinstance(f, Mapping)", {}, [], "unclear"),
        # what only claims a class is not of it, unless the gold patch's object only claims it too
        ("assert isinstance(f, Row)", Row(), Proxy(Row), "unclear"),
        ("assert isinstance(f, Row)", Row(), unittest.mock.Mock(spec=Row), "unclear"),
        ("assert isinstance(f, Row)", Proxy(Row), Proxy(Row), "agrees"),
        ("assert isinstance(f, Row)", Proxy(Row), Row(), "agrees"),
        ("assert not isinstance(f, Row)", 1, Proxy(Row), "unclear"),
        ("assert isinstance(f, Open)", Opened(), "", "unclear"),
        ("assert isinstance(f, Open)", 1, "", "agrees"),
    ],
)
def test_isinstance_assertions_are_judged_by_real_classes_including_abstract_ones(
    assertion: str, gold: Any, observed: Any, judgement: str
):
    (sites, of_gold), (_, of_patch) = (observe(assertion, f=each) for each in (gold, observed))
    assert holds(sites[0], of_gold[0], of_gold[0])
    assert judge(sites[0], of_gold[0], of_patch[0]) == judgement


class Missing(KeyError, AttributeError): ...


class Everything(KeyError, ValueError, TypeError, RuntimeError, ArithmeticError, EOFError, AssertionError): ...


def raises(error: BaseException | None) -> Any:
    def function() -> None:
        if error is not None:
            raise error

    return function


def noted() -> KeyError:
    error = KeyError("bad")
    error.add_note("in line 3")
    return error


@pytest.mark.parametrize(
    ("expected", "error", "judgement"),
    [
        ("KeyError", Missing("bad"), "agrees"),
        ("LookupError", KeyError("bad"), "agrees"),
        ("KeyError, match='line 3'", noted(), "agrees"),
        ("KeyError", ValueError("bad"), "unclear"),
        ("KeyError", Everything("bad"), "contradicts"),
        ("KeyError", None, "contradicts"),
    ],
)
def test_raises_is_judged_by_the_classes_an_exception_derives_from(
    expected: str, error: BaseException | None, judgement: str
):
    text = f"with pytest.raises({expected}):\n        f()"
    gold = noted()
    (sites, of_gold), (_, of_patch) = (observe(text, pytest=pytest, f=raises(each)) for each in (gold, error))
    assert judge(sites[0], of_gold[0], of_patch[0]) == judgement
