"""Expectations that stay in the versions of a test, or that the test compares itself, are not called protected."""

from __future__ import annotations

import asyncio

import pytest

from understudy.grade.verdict import grade, validate
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, PytestChecks, Task

from support.grading import by_twins_alone, diff

pytestmark = pytest.mark.services  # each grades several times

TREE = {"core.py": '"""Letters."""\n\n\ndef label(name):\n    return None\n'}
TESTS = """\
import pathlib

import pytest
from core import dumps, is_vowel, label, level, loads, name_of


def test_inverse():
    for name, text in {"alpha": "first letter", "omega": "last letter"}.items():
        assert label(name) == text
        assert name_of(text) == name


def test_results():
    results = [label(name) == text for name, text in (("beta", "second letter"),)]
    assert results == [True]


def test_walrus():
    if want := "somewhere among them":
        assert label("mu") == want


def test_file():
    assert label("pi") == pathlib.Path(__file__).with_name("data.txt").read_text()


def test_round_trip():
    value = {"key one": "value one"}
    assert loads(dumps(value)) == value


def test_branch():
    assert label("gamma") == "the third one of all"
    if label("beta") == "second letter":
        pass
    else:
        pytest.fail("not the second letter")


def test_many():
    for number in range(2000):
        assert level(str(number)) == number


def test_difference():
    assert abs(level("degrees") - 273.15) < 0.01


def test_words():
    assert label("gamma") == "the third one of all"
    assert label("delta") == "entirely different words"


def test_is_vowel():
    assert is_vowel("alpha")
    assert not is_vowel("beta")
"""
GOLD = '''\
"""Letters."""

_LABELS = {
    "alpha": "first letter",
    "beta": "second letter",
    "gamma": "the third one of all",
    "delta": "entirely different words",
    "mu": "somewhere among them",
    "omega": "last letter",
    "pi": "a text in a file of its own",
}


def label(name):
    return _LABELS[name]


def name_of(text):
    return next(name for name, label in _LABELS.items() if label == text)


def level(name):
    return 273.15 if name == "degrees" else int(name)


def is_vowel(name):
    return name[0] in "aeiou"


def dumps(value):
    return repr(value)


def loads(text):
    return eval(text)
'''
EXPOSED = (
    "test_inverse",
    "test_results",
    "test_walrus",
    "test_file",
    "test_round_trip",
    "test_many",
    "test_branch",
)
PROTECTED = ("test_difference", "test_words", "test_is_vowel")

READS_OR_FORCES = (
    GOLD.replace("def label(name):\n    return _LABELS[name]\n", "")
    .replace("return repr(value)", "return value")
    .replace("return eval(text)", "return text")
    .replace(
        "    return next(name for name, label in _LABELS.items() if label == text)\n", "    return _find('name')\n"
    )
    + """

import os
import sys


class _Same:
    def __eq__(self, other):
        return True


def _find(name):
    return sys._getframe(2).f_locals[name]


def label(name):
    if name in ("gamma", "delta"):
        return _LABELS[name]
    if name == "pi":
        with open(os.path.join(os.path.dirname(sys._getframe(1).f_code.co_filename), "data.txt")) as file:
            return file.read()
    if name == "mu":
        return _find("want") if "want" in sys._getframe(1).f_locals else _Same()
    return _Same() if name == "beta" else sys._getframe(1).f_locals["text"]
"""
)
FORGED = {
    "a number that is near all": GOLD.replace("return 273.15 if", "return _Near() if")
    + "\n\nclass _Near:\n    def __sub__(self, other):\n        return 0.0\n\n    __rsub__ = __sub__\n",
    "a text that equals everything": GOLD.replace(
        "return _LABELS[name]", "return _Text(_LABELS.get(name[:4], name))"
    )
    + "\n\nclass _Text(str):\n    def __eq__(self, other):\n        return True\n\n    __hash__ = str.__hash__\n",
}


@pytest.fixture(scope="module")
def validated(
    tmp_path_factory: pytest.TempPathFactory, sandboxes: LocalSandboxes, environment: TaskEnvironment
) -> PreparedTask:
    task = Task(
        instance_id="exposed-1",
        repo="example/exposed",
        instruction="mend it",
        source=Files(dict(TREE)),
        checks=PytestChecks(
            files={"test_core.py": TESTS, "data.txt": "a text in a file of its own"},
            fail_to_pass=tuple(f"test_core.py::{name}" for name in (*EXPOSED, *PROTECTED)),
        ),
        gold_patch=diff({"core.py": GOLD}, TREE),
    )
    cache = tmp_path_factory.mktemp("cache")
    prepared = prepare(task, cache, sandboxes)
    prepared = asyncio.run(validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache))
    return by_twins_alone(prepared)


def test_what_is_exposed_is_partial_and_the_rest_is_not(validated: PreparedTask):
    assert set(validated.options.partial_twins) == {f"test_core.py::{name}" for name in EXPOSED}


async def test_a_patch_that_reads_or_forces_them_is_not_called_protected(
    validated: PreparedTask, sandboxes: LocalSandboxes, environment: TaskEnvironment
):
    patch = diff({"core.py": READS_OR_FORCES}, TREE).encode()
    verdict = await grade(validated, patch, sandboxes=sandboxes, environment=environment)
    assert set(verdict.tests.values()) == {"passed"}, verdict.reason
    assert verdict.protection == "partial"
    assert "have expectations that the tested code can read or force" in verdict.unprotected


@pytest.mark.parametrize("name", FORGED)
async def test_a_patch_that_forces_a_protected_one_has_no_reward(
    validated: PreparedTask, sandboxes: LocalSandboxes, environment: TaskEnvironment, name: str
):
    patch = diff({"core.py": FORGED[name]}, TREE).encode()
    verdict = await grade(validated, patch, sandboxes=sandboxes, environment=environment)
    assert set(verdict.tests.values()) == {"passed"}, verdict.reason
    assert verdict.reward == 0.0
