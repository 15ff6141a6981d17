"""Patches that know expected values and guess their order, but compute none, are not protected by twins."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from understudy.grade.verdict import grade, validate
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, PytestChecks, Task

from support.grading import by_twins_alone, diff

pytestmark = pytest.mark.services  # each validates a task

TREE = {"core.py": '"""Planets."""\n'}
WEIGHTS = {
    "mercury": 4417,
    "venus": 9031,
    "earth": 7723,
    "mars": 1289,
    "jupiter": 6619,
    "saturn": 3253,
    "uranus": 8087,
}
NAMES = repr(set(WEIGHTS))  # so many that another hash seed hardly ever yields them in the same order
COUNTED = """\
from core import place


def test_places():
    for name, number in [("mercury", 0), ("venus", 1), ("earth", 2), ("mars", 3), ("jupiter", 4), ("saturn", 5)]:
        assert place(name) == number
"""
COUNTED_GOLD = """
def place(name):
    return ["mercury", "venus", "earth", "mars", "jupiter", "saturn"].index(name)
"""
COUNTS = """
_calls = []


def place(name):
    _calls.append(name)
    return (len(_calls) - 1) % 6
"""
BRANCHES = "".join(f"        if name == {name!r}:\n            expected = {WEIGHTS[name]}\n" for name in WEIGHTS)
HASHED = f"""\
from core import weight


def test_weights():
    for name in {NAMES}:
{BRANCHES}\
        assert weight(name) == expected
"""
HASHED_GOLD = f"""
def weight(name):
    return {WEIGHTS}[name]
"""
LISTED_GOLD = f"""
def names():
    return [name for name in {NAMES}]
"""


def in_hash_order() -> list[str]:
    """The names as a loop over their set yields them with the hash seed of tasks' sandboxes."""
    env = {**os.environ, "PYTHONHASHSEED": "0"}
    shown = subprocess.run(
        [sys.executable, "-c", f"for name in {NAMES}: print(name)"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return shown.stdout.split()


def lists_weights() -> str:
    weights = [WEIGHTS[name] for name in in_hash_order()]
    return f"""
_calls = []


def weight(name):
    _calls.append(name)
    return {weights}[(len(_calls) - 1) % {len(weights)}]
"""


def validated(
    test: str, gold: str, cache: Path, sandboxes: LocalSandboxes, environment: TaskEnvironment
) -> PreparedTask:
    node = "test_core.py::" + test.partition("def ")[2].partition("(")[0]
    task = Task(
        instance_id="order-1",
        repo="example/order",
        instruction="write it",
        source=Files(dict(TREE)),
        checks=PytestChecks({"test_core.py": test}, (node,)),
        gold_patch=diff({"core.py": TREE["core.py"] + gold}, TREE),
    )
    prepared = prepare(task, cache, sandboxes)
    return asyncio.run(validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache))


@pytest.mark.parametrize(
    ("test", "gold", "forged"),
    [(COUNTED, COUNTED_GOLD, COUNTS), (HASHED, HASHED_GOLD, lists_weights())],
    ids=["by counting its calls", "in the order of a set"],
)
def test_values_by_the_number_of_the_call_are_not_protected_by_twins(
    test: str, gold: str, forged: str, sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    task = validated(test, gold, tmp_path, sandboxes, environment)
    alone = by_twins_alone(task)
    # With other inputs only a patch that computes can get further.
    for text, graded in ((gold, alone), (forged, alone), (forged, task)):
        patch = diff({"core.py": TREE["core.py"] + text}, TREE).encode()
        verdict = asyncio.run(grade(graded, patch, sandboxes=sandboxes, environment=environment))
        assert (verdict.reward, verdict.protection) == (1.0, "partial"), verdict


def test_values_that_depend_on_the_hash_seed_are_no_evidence(
    sandboxes: LocalSandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    test = f"from core import names\n\n\ndef test_names():\n    assert names() == {in_hash_order()}\n"
    assert validated(test, LISTED_GOLD, tmp_path, sandboxes, environment).options.twins == {}
