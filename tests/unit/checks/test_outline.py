"""The outline of a solution has its names and signatures, and the behaviour of before."""

from __future__ import annotations

from typing import Any

import pytest

from understudy.checks.outline import RETURNS, outline

BEFORE = '''"""Texts."""
import re

LIMIT = 3


def count(text):
    """The number of vowels."""
    return 0


class Reader:
    """Reads."""

    def __init__(self, text):
        self.text = text

    def lines(self):
        return self.text.split("\\n")

    def gone(self):
        return 5
'''
AFTER = '''"""Texts of all kinds."""
from __future__ import annotations

import json
import re
from functools import cached_property

LIMIT = 4
_TABLE = {"a": 1}
_MARK: str = "#"
_plain = re.compile("[a-z]+")


def count(text, *, more=_MARK):
    """The number of vowels and more."""
    return sum(each in "aeiou" for each in text)


def words(text, most=LIMIT):
    """All words."""
    return text.split()[:most]


async def fetch():
    return 1


def numbers():
    yield from range(9)


class Reader:
    size = 80

    def __init__(self, text, width=7):
        self.text = text
        self.width = max(width, 3)

    @cached_property
    def lines(self):
        return [line for line in self.text.split("\\n") if line]

    def widest(self):
        return max(map(len, self.lines))


class Failed(ValueError):
    code = 7

    def __init__(self, name):
        super().__init__(name)
        self.name = name
        self.label = name.upper()
        self.parts = []

    def describe(self):
        return f"failed: {self.name}"


if LIMIT > 3:
    words("a b")
'''


def module(source: str) -> Any:
    names: dict[str, Any] = {"__name__": "outlined"}
    exec(compile(source, "outlined", "exec"), names)
    return names


def test_an_outline_has_the_new_names_and_the_old_behaviour():
    outlined = outline(BEFORE, AFTER)
    names = module(outlined.source)
    assert names["LIMIT"] == 3 and names["_TABLE"] == {} and names["_MARK"] == ""
    assert names["count"]("aeiou", more="x") == 0
    assert names["words"]("a b") is None and list(names["numbers"]()) == []
    assert names["json"] and names["_plain"].match("word")
    reader = names["Reader"]("a\n\nb", width=2)
    assert reader.lines() == ["a", "", "b"] and reader.gone() == 5 and reader.widest() is None
    assert reader.size == 80 and not hasattr(reader, "width")
    failed = names["Failed"]("x")
    assert (failed.args, failed.name, failed.parts, failed.code) == (("x",), "x", [], 7)
    assert failed.describe() is None and not hasattr(failed, "label")
    assert set(outlined.docstrings) == {"Texts.", "The number of vowels.", "Reads."}


def test_the_outline_of_a_change_without_new_names_is_the_file_as_it_was():
    after = BEFORE.replace("return 0", "return sum(each in 'aeiou' for each in text)").replace(
        "LIMIT = 3", "LIMIT = 4"
    )
    assert outline(BEFORE, after).source == BEFORE


def test_a_new_file_is_outlined_and_invalid_python_is_refused():
    assert module(outline("", "def f(x):\n    return x + 1\n").source)["f"](1) is None
    assert module(outline("", "def f(x):\n    return x\n").source)["f"](1) == 1
    for before, after in (("x =", "x = 1"), ("x = 1", "def"), ("", "\0")):
        with pytest.raises(ValueError, match="invalid Python"):
            outline(before, after)


def test_context_managers_stay_usable_and_properties_keep_their_kind():
    source = "import contextlib\n@contextlib.contextmanager\ndef opened():\n    yield 5\n"
    names = module(outline("import contextlib\n", source).source)
    with names["opened"]() as value:
        assert value is None


def test_new_functions_may_return_an_argument_and_new_classes_what_they_inherit():
    after = (
        "class Base:\n    def size(self):\n        return 7\n\n\nclass Small(Base):\n"
        "    def size(self):\n        return 3\n\n    def __init__(self):\n        self.x = 1\n\n\n"
        "def chained(self, text):\n    return text.upper()\n\n\ndef cached(make):\n    return make() + 1\n"
    )
    before = after.partition("\n\n\n")[0] + "\n"
    nothing, first, last = (module(outline(before, after, returns).source) for returns in RETURNS)
    assert nothing["Small"]().size() is None and nothing["Small"]().x == 1
    assert first["Small"]().size() == last["Small"]().size() == 7
    assert [each["chained"]("a", "b") for each in (nothing, first, last)] == [None, "a", "b"]
    assert [each["cached"](int) for each in (nothing, first, last)] == [None, int, 0]


def test_old_defaults_and_decorators_stay():
    before = "class Loan:\n    def rate(self, a, b=2, *, c=3, d):\n        return a, b, c, d\n"
    after = (
        "class Loan:\n    @property\n    def rate(self, a, b=20, e=5, *, c=30, d, f=6):\n        return 0\n"
        "    def other(self):\n        return 1\n"
    )
    loan = module(outline(before, after).source)["Loan"]()
    assert loan.rate(1, d=4, e=0, f=0) == (1, 2, 3, 4)
    assert loan.other() is None


def test_new_decorators_change_nothing_and_new_iterators_pass_their_items_on():
    after = (
        "def limited(most):\n    def decorate(function):\n        def inner(*args):\n"
        "            return function(*args)\n        return inner\n    return decorate\n\n\n"
        "def logged(function):\n    def inner(*args):\n        return function(*args)\n    return inner\n\n\n"
        "def track(items, label=''):\n    for each in items:\n        yield each\n"
    )
    assert module(outline("", after, "last").source)["logged"](len)("abc") == 3
    names = module(outline("", after, "first").source)
    assert names["limited"](3)(len)("abc") == names["logged"](len)("abc") == 3
    assert sum(names["track"]([1, 2])) == 3
