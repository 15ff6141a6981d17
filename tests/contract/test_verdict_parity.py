"""Verdicts beside those of the `swebench` package, which judges a run of its own evaluation script."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import SuiteChecks, Task

from support.grading import CALC, CALC_MENDED, CALC_TASK, diff, suite_task
from support.swebench import Harness, harness_log

CORE = "calc/core.py"
FILES = {CORE: CALC[CORE], "calc/__init__.py": CALC["calc/__init__.py"]}

# What each patch makes of calc/core.py. The tests want shift(1) == 2, same(3) == 3, a TypeError of shift(None).
PATCHES: dict[str, str] = {
    "gold": CALC_MENDED[CORE],
    "empty": CALC[CORE],
    "wrong": CALC[CORE].replace("x - 1", "x - 2"),
    "partial": CALC[CORE].replace("x - 1", "x + 1"),
    "breaks another": CALC_MENDED[CORE].replace("return x\n", "return -x\n"),
    "flaky": CALC_MENDED[CORE].replace(
        "def shift(x):\n",
        "_calls = []\n\n\ndef shift(x):\n    _calls.append(x)\n    x = x and x + len(_calls) - 2\n",
    ),
    "broken syntax": CALC_MENDED[CORE] + "\ndef broken(:\n",
    "fails at import": CALC_MENDED[CORE] + "\nimport nothing_of_this_name\n",
}

OPTIONS_TESTS = {
    "tests/test_options.py": """\
import pytest

from calc import same, shift


@pytest.mark.parametrize("text", ["/some/path", "//two", "/glob/*", "plain"])
def test_same(text):
    assert same(text) == text


@pytest.mark.parametrize("number", [1, 2])
def test_shift(number):
    assert shift(number) == number + 1


def test_refuses():
    with pytest.raises(TypeError):
        shift(None)


@pytest.mark.xfail(strict=True)
def test_known():
    assert shift(1) == 2 and False
"""
}
VERBOSE_TESTS = {
    "calc/tests/test_verbose.py": """\
import pytest

from calc import same, shift


@pytest.mark.parametrize("text", ["two words", "a - b", "[x]"])
def test_same(text):
    assert same(text) == text


@pytest.mark.parametrize("text", ["one more", "x - y"])
def test_shift(text):
    assert shift(len(text)) == len(text) + 1


def test_refuses():
    with pytest.raises(TypeError):
        shift(None)
""",
}
RUNNER = """\
import os
import sys
import unittest

root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [root, os.path.join(root, "tests")]
labels = [word for word in sys.argv[1:] if not word.startswith("-") and not word.isdigit()]
suite = unittest.defaultTestLoader.loadTestsFromNames(labels)
result = unittest.TextTestRunner(verbosity=2).run(suite)
sys.exit(bool(result.failures or result.errors))
"""
UNITTEST_TESTS = {
    "tests/arithmetic/tests.py": '''\
import unittest

from calc import same, shift


class ShiftTests(unittest.TestCase):
    def test_shift(self):
        self.assertEqual(shift(1), 2)

    def test_refuses(self):
        """Nothing cannot be shifted."""
        with self.assertRaises(TypeError):
            shift(None)

    def test_same(self):
        self.assertEqual(same(3), 3)

    @unittest.skip("later")
    def test_skipped(self):
        pass
'''
}
SYMPY_RUNNER = """\
import sys
import traceback

sys.path.insert(0, ".")
failed = []
for path in (word for word in sys.argv[1:] if not word.startswith("-")):
    space = {"__name__": path}
    print(f"{path}[?]")
    try:
        with open(path) as file:
            exec(compile(file.read(), path, "exec"), space)
    except BaseException:
        failed.append((path, "", traceback.format_exc()))
        print("Failed to import [FAIL]")
        continue
    for name, test in list(space.items()):
        if name.startswith("test_") and callable(test):
            try:
                test()
            except AssertionError:
                print(f"{name} F")
                failed.append((path, name, traceback.format_exc()))
            except Exception:
                print(f"{name} E")
                failed.append((path, name, traceback.format_exc()))
            else:
                print(f"{name} ok")
    print("[FAIL]" if failed else "[OK]")
for path, name, text in failed:
    print(f"{'_' * 20} {path}:{name} {'_' * 20}")
    print(text)
print(f"tests finished: {len(failed)} failed")
sys.exit(bool(failed))
"""
SYMPY_RAISES = """\
def raises(expected, code):
    try:
        code()
    except expected:
        return
    raise Exception("DID NOT RAISE")
"""
SYMPY_TESTS = {
    "calc/tests/test_calc.py": """\
from calc import same, shift
from sympy.testing.pytest import raises


def test_same():
    assert same(3) == 3


def test_shift():
    assert shift(1) == 2


def test_refuses():
    raises(TypeError, lambda: shift(None))
"""
}


def _suite(name: str, tests: dict[str, str], tree: dict[str, str] | None = None, **checks: object) -> Task:
    return suite_task(
        name, {**FILES, **(tree or {})}, CALC_MENDED, tests, activate="export PYTHONPATH=/testbed", **checks
    )


TASKS: dict[str, Task] = {
    "pytest": CALC_TASK,
    "pytest with options": _suite(
        "psf__requests-1",
        OPTIONS_TESTS,
        parser="parse_log_requests",
        command="pytest -rA --tb=no -p no:cacheprovider tests/test_options.py",
        fail_to_pass=(
            *(f"tests/test_options.py::test_shift[{n}]" for n in (1, 2)),
            "tests/test_options.py::test_refuses",
        ),
        pass_to_pass=(
            *(f"tests/test_options.py::test_same[{text}]" for text in ("/path", "//two", "/glob/*", "plain")),
            "tests/test_options.py::test_known",
        ),
    ),
    "pytest in full": _suite(
        "astropy__astropy-1",
        VERBOSE_TESTS,
        {"calc/tests/__init__.py": ""},
        parser="parse_log_astropy",
        command="pytest -rA -vv -o console_output_style=classic --tb=no calc/tests/test_verbose.py",
        fail_to_pass=(
            "calc/tests/test_verbose.py::test_shift[one more]",
            "calc/tests/test_verbose.py::test_shift[x",  # cut, as some of SWE-bench's are
            "calc/tests/test_verbose.py::test_refuses",
        ),
        pass_to_pass=("calc/tests/test_verbose.py::test_same[two words]",),
    ),
    "seaborn": _suite(
        "mwaskom__seaborn-1",
        OPTIONS_TESTS,
        parser="parse_log_seaborn",
        command="pytest --no-header -rA tests/test_options.py",
        fail_to_pass=("tests/test_options.py::test_shift[1]", "tests/test_options.py::test_refuses"),
        pass_to_pass=("tests/test_options.py::test_same[plain]",),
    ),
    "django": _suite(
        "django__django-1",
        UNITTEST_TESTS,
        {"tests/runtests.py": RUNNER, "tests/arithmetic/__init__.py": ""},
        parser="parse_log_django",
        command="python tests/runtests.py --verbosity 2 --parallel 1 arithmetic.tests",
        fail_to_pass=(
            "test_shift (arithmetic.tests.ShiftTests.test_shift)",
            "Nothing cannot be shifted.",
        ),
        pass_to_pass=(
            "test_same (arithmetic.tests.ShiftTests.test_same)",
            "test_skipped (arithmetic.tests.ShiftTests.test_skipped)",
        ),
    ),
    "sympy": _suite(
        "sympy__sympy-1",
        SYMPY_TESTS,
        {"bin/test": SYMPY_RUNNER, "sympy/testing/pytest.py": SYMPY_RAISES},
        parser="parse_log_sympy",
        command="python bin/test -C --verbose calc/tests/test_calc.py",
        fail_to_pass=("test_shift", "test_refuses"),
        pass_to_pass=("test_same",),
    ),
    "only failures count": replace(
        CALC_TASK,
        instance_id="example__calc-3",
        checks=replace(CALC_TASK.checks, only_failures_count=True, pass_to_pass=("not in the output",)),
    ),
}


IN_BOTH_TIERS = ("pytest", "django")
"""One whose log is pytest's and one whose log is not; each of the others takes seconds more."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in IN_BOTH_TIERS else pytest.mark.services) for name in TASKS],
)
def prepared(
    request: pytest.FixtureRequest, sandboxes: Sandboxes, tmp_path_factory: pytest.TempPathFactory
) -> PreparedTask:
    return prepare(TASKS[request.param], tmp_path_factory.mktemp("parity"), sandboxes)


async def test_every_task_is_taken_in_with_its_canaries(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, tmp_path: Path
) -> None:
    way = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=tmp_path)
    assert way.options.canaries and not way.options.conflicts


@pytest.mark.parametrize("name", PATCHES)
async def test_the_verdict_is_the_package_s(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, harness: Harness, name: str
) -> None:
    patch = diff({CORE: PATCHES[name]}, FILES).encode()
    log = await harness_log(prepared, patch, sandboxes=sandboxes, environment=environment)
    assert log is not None
    report = harness.report(prepared, patch, log)
    verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
    checks = prepared.task.checks
    assert isinstance(checks, SuiteChecks)
    assert verdict.integrity.status == "clean", verdict.integrity
    if checks.only_failures_count and name in ("broken syntax", "fails at import"):
        # The package takes a suite that could not begin for one without failures; our canaries did not run.
        assert (verdict.reward, report["resolved"]) == (0.0, True)
        return
    assert verdict.reward == float(report["resolved"]), (verdict, log)
    assert (verdict.reward == 1.0) == (name == "gold") or name == "flaky" or checks.only_failures_count
    if "tests_status" in report and verdict.tests and not checks.only_failures_count:
        passing = {"passed", "xfailed"}
        for key, ids in (("FAIL_TO_PASS", checks.fail_to_pass), ("PASS_TO_PASS", checks.pass_to_pass)):
            assert report["tests_status"][key]["success"] == [id for id in ids if verdict.tests[id] in passing], (
                log
            )
            passing.add("skipped")
