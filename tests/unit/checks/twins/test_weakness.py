"""What agrees with the gold patch and proves less; differences that versions do not compute; operands."""

from __future__ import annotations

import itertools
import sys
from collections import namedtuple
from decimal import Decimal
from typing import Any

import pytest

from understudy.checks.twins import twin_driver
from understudy.checks.twins.judge import Observation, holds
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.twin_encoding import encode, has_own_code
from understudy.checks.twins.versions import TwinVersion, write_version
from understudy.checks.twins.weakness import is_far_more, weakness

NODES = itertools.count()


def seen(version: TwinVersion, monkeypatch: pytest.MonkeyPatch, **names: object) -> dict[int, list[Observation]]:
    """What the version's one test sends, by site."""
    observations: dict[int, list[Observation]] = {}
    write = lambda node, site, saw: observations.setdefault(site, []).append(saw)  # noqa: E731
    monkeypatch.setitem(sys.modules, "understudy_sites", twin_driver)
    monkeypatch.setattr(twin_driver, "_write", write)
    monkeypatch.setattr(twin_driver, "_node", f"weakness {next(NODES)}")  # counted by node; an id may come again
    scope: dict[str, Any] = {"__name__": "version", **names}
    exec(compile(version.source, "version.py", "exec"), scope)  # our own text
    scope["test_it"]()
    return observations


NEAR = [
    "abs(f(1) - 417.5) / 417.5 < 1e-3",
    "abs((f(1) - 417.5) / 417.5) <= 1e-3",
    "1e-3 > abs(f(1) - 417.5) / abs(417.5)",
    "abs(f(1) - 417.5) < 1e-3 * 417.5",
    "abs(417.5 - f(1)) < abs(417.5) * 1e-3",
    "math.fabs(f(1) - 417.5) < 0.1",
    "-0.1 < f(1) - 417.5 < 0.1",
    "(f(1) - 417.5) ** 2 < 0.01",
    "round(f(1) - 417.5) == 0",
    "0 == round(f(1) - 417.5, 1)",
]


@pytest.mark.parametrize("test", NEAR)
def test_what_is_near_is_sent_however_it_is_compared(test: str):
    version = write_version(f"import math\ndef test_it():\n    assert {test}\n")
    assert "_send_(0, f(1))" in version.source and "417" not in version.source
    assert version.sites[0].withheld
    near, far = (["value", encode(number)] for number in (417.5001, 420.5))
    assert (holds(version.sites[0], [near], [near]), holds(version.sites[0], [near], [far])) == (True, False)


class Length(float):
    def __sub__(self, other: float) -> float:
        return 0.0


class Line(str):
    def count(self, *part: Any) -> int:
        return 1


class Digits(list[int]):
    def __iter__(self) -> Any:
        return iter(())


COMPUTED = {
    "a helper": (
        "def away(a, b):\n    return a - b\ndef test_it():\n    assert away(f(1), 4.5) < 1\n",
        Length(3),
        3.0,
    ),
    "a name": ("def test_it():\n    d = f(1) - 4.5\n    assert abs(d) < 1\n", Length(3), 3.0),
    "a method": ("def test_it():\n    assert f(1).count('x') == 1\n", Line("a"), "xa"),
    "a function": ("def test_it():\n    assert len(set(f(1)) ^ {2}) == 0\n", Digits([3]), [2]),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_operands_of_own_classes_are_seen(name: str, monkeypatch: pytest.MonkeyPatch):
    text, forged, honest = COMPUTED[name]
    version = write_version(text)
    gold = seen(version, monkeypatch, f=lambda _: honest)
    assert not any(version.sites[number].operation == "own" for number in gold)
    now = seen(version, monkeypatch, f=lambda _: forged)
    assert "classes that decide the result" in weakness(version.sites, gold, now)
    assert weakness(version.sites, gold, gold) == ""
    assert weakness(version.sites, now, now) == "", "the gold patch has such values too"


@pytest.mark.parametrize("test", ["away(f(1), 4.5) < 1", "abs(d) < 1", "f(1) - 4.5 < 1", "len(f(1) - {3}) == 0"])
def test_what_an_operand_can_make_nothing_of_is_not_withheld(test: str):
    text = f"def away(a, b):\n    return a - b\ndef test_it():\n    d = f(1) - 4.5\n    assert {test}\n"
    assert not write_version(text).sites[0].withheld


def test_operands_in_formatted_texts_are_left_as_they_are():
    text = "def test_it():\n    assert f(1) == f'{g(1) - h(2)!r:>{w.count(3)}}'\n"
    assert "_own_(" not in write_version(text).source.partition("def test_it")[2]


def test_a_sum_of_any_length_has_a_version(monkeypatch: pytest.MonkeyPatch):
    version = write_version(f"def test_it():\n    assert {' + '.join(['f(1)'] * 220)} == 660\n")
    assert seen(version, monkeypatch, f=lambda _: 3)[0] == [["value", encode(660)]]


@pytest.mark.parametrize("test", ["f(1) < 5", "f(len(a) - 1) < 5", "f(1) - 3 == 4"])
def test_other_arithmetic_is_withheld(test: str):
    assert write_version(f"def test_it():\n    a = [1]\n    assert {test}\n").sites[0].withheld


def test_classes_that_are_known_decide_nothing_of_their_own():
    point = namedtuple("point", "x y")
    assert not any(map(has_own_code, (1, Decimal(1), point(1, 2), {}, range(3))))
    disguised = type("int", (int,), {"__sub__": lambda *_: 0, "__module__": "builtins"})
    lying = type("Lying", (type,), {"__mro__": property(lambda _: (int, object)), "__flags__": 0})
    assert has_own_code(lying("int", (int,), {"__sub__": lambda *_: 0})(3))
    assert has_own_code(disguised(3)) and has_own_code(Line("a"), "count") and not has_own_code(Line("a"))


@pytest.mark.parametrize("test", ["3 in f(1)", "3 in f(1) and 5 in f(1)", "g in f(1)"])
def test_iterators_are_read_where_something_is_looked_for_in_them(test: str, monkeypatch: pytest.MonkeyPatch):
    version = write_version(
        f"from core import g\ndef test_it():\n    assert {test}\n".replace("from core import g\n", "")
    )
    gold = seen(version, monkeypatch, f=lambda _: [1, 3, 5], g=3)
    reader = iter([3, 1, 5])
    now = seen(version, monkeypatch, f=lambda _: reader, g=3)
    for number, observed in gold.items():
        assert holds(version.sites[number], observed, now[number]), version.source
    without = seen(version, monkeypatch, f=lambda _: iter([1]), g=3) if "g" not in test else {0: [["?"]]}
    assert not holds(version.sites[0], gold[0], without[0])


TEXT = TwinSite("compare", "'use 118'", "holds")
MATCH = TwinSite("raises", "('ValueError',)", "'use 118'")
WARNS = TwinSite("warns", "('UserWarning',)", "'use 118'")


def warned(*texts: str) -> list[Observation]:
    return [["warnings", [[["UserWarning"], text] for text in texts]]]


@pytest.mark.parametrize(
    ("site", "gold", "now", "more"),
    [
        (TEXT, "117 is odd: use 118", " ".join(f"use {n}" for n in range(1000)), True),
        (TEXT, "117 is odd: use 118", "117 is an odd number, but even ones are expected here: use 118", False),
        (TEXT, "the help text\n" * 50, "another help text\n" * 80, False),
        (TEXT, ["use 118"], [f"use {n}" for n in range(1000)], True),
        (TEXT, ["use 118"], ["begun", "use 118", "ended"], False),
        (TEXT, [0, 118], range(10**30), True),
        (TwinSite("compare", "{118}", ">="), {118}, set(range(200)), True),
        (TwinSite("compare", "118", ">="), 118, 1180, False),
    ],
)
def test_far_more_than_the_gold_patch_emits(site: TwinSite, gold: Any, now: Any, more: bool):
    then, after = ([["value", encode(value)]] for value in (gold, now))
    assert is_far_more(site, then, after) is more
    assert is_far_more(site, then, then) is False


def test_far_more_messages_and_warnings():
    many = [f"use {number}" for number in range(100)]
    assert is_far_more(MATCH, [["kind", ["ValueError"], "use 118"]], [["kind", ["ValueError"], " ".join(many)]])
    assert not is_far_more(TwinSite("raises", "('ValueError',)"), [["kind", [], "a"]], [["kind", [], "a" * 9000]])
    assert is_far_more(WARNS, warned("use 118"), warned(*many)) and is_far_more(
        WARNS, warned("use 118"), warned(" ".join(many))
    )
    assert not is_far_more(WARNS, warned("use 118"), warned("odd", "use 118"))
