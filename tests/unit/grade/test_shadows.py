"""New files that would be imported in place of what hidden tests import: they never count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.grade.gate import gate
from understudy.types import Files, PytestChecks, Task

from support.grading import CALC, CALC_TASK, diff, gate_of

FLAT = {
    "inflection.py": "def plural(word):\n    return word\n",
    "helpers.py": "VALUE = 1\n",
    "tests/support.py": "CASES = []\n",
    "src/kept/__init__.py": "",
}
HIDDEN = """\
import json, os.path as path
import numpy
from support import CASES
from inflection import plural
import fresh

pytest = __import__("importlib").import_module("soon")


def test_plural():
    assert plural("cat") == "cats"
"""


def flat_task(gold: Mapping[str, str | None]) -> Task:
    return Task(
        instance_id="flat",
        repo="example/flat",
        instruction="mend it",
        source=Files(FLAT),
        checks=PytestChecks(
            files={"test_inflection.py": HIDDEN, "tests/unit/test_more.py": "from helpers import VALUE\n"},
            fail_to_pass=("test_inflection.py::test_plural",),
        ),
        gold_patch=diff(gold, FLAT),
    )


GOLD = {"inflection.py": FLAT["inflection.py"].replace("word\n", 'word + "s"\n'), "fresh.py": "A = 1\n"}
TASK = flat_task(GOLD)

REPLACE = {
    "a package in place of a hidden module": "test_inflection/__init__.py",
    "the same, in another case": "Test_Inflection/__init__.py",
    "the same, in letters that look alike": "test_inﬂection.py",
    "an extension in place of it": "test_inflection.abi3.so",
    "its compiled form": "__pycache__/test_inflection.cpython-311.pyc",
    "a package at the root of the tree": "__init__.py",
    "a package of the tests' directory": "tests/unit/__init__.py",
    "a module in place of the tests' directory": "tests.py",
    "a module of the standard library": "json.py",
    "a package of the standard library": "unittest/__init__.py",
    "one in a directory that may be on the path": "src/random.py",
    "one that only other versions of Python have": "distutils/__init__.py",
    "a library that the tests import": "numpy/__init__.py",
    "a library that a function of the tests imports": "soon.py",
    "a plugin of pytest": "pytest_cov.py",
    "a part of pytest": "pluggy/__init__.py",
    "a helper of the tests": "support.py",
    "a package in place of conftest.py": "conftest/__init__.py",
    "settings in another case": "sub/Pytest.INI",
    "an installed distribution": "evil-1.dist-info/entry_points.txt",
    "settings of coverage, which loads plugins": ".coveragerc",
}


@pytest.mark.parametrize("name", REPLACE)
def test_a_file_that_shadows_an_import_of_the_tests_is_dropped(name: str):
    patch = diff({REPLACE[name]: "import os\n", "inflection.py": "x = 1\n"}, FLAT)
    gated = gate_of(patch.encode(), TASK)
    assert gated.dropped == (repr(REPLACE[name]),)
    assert gated.patch == diff({"inflection.py": "x = 1\n"}, FLAT).encode()


def test_a_rename_to_a_shadowing_name_is_dropped():
    rename = (
        "diff --git a/helpers.py b/test_inflection/__init__.py\nsimilarity index 100%\n"
        "rename from helpers.py\nrename to test_inflection/__init__.py\n"
    )
    assert gate_of(rename.encode(), TASK).patch == b""


def test_a_shadowing_file_is_dropped_without_a_new_file_header():
    plain = "--- a/json.py\n+++ b/json.py\n@@ -0,0 +1 @@\n+import os\n"
    assert gate_of(plain.encode(), TASK).dropped == ("'json.py'",)


HONEST = [
    "inflection/__init__.py",  # the code under test becomes a package
    "fresh.py",  # gold makes it
    "src/kept/json.py",  # in a package
    "src/kept/test/data.txt",
    "src/kept/__init__.py",
    "src/other/__init__.py",
    "helpers/__init__.py",
    "notes.md",
]


@pytest.mark.parametrize("path", HONEST)
def test_a_new_file_beside_the_tests_is_kept(path: str):
    patch = diff({path: "x = 1\n"}, FLAT)
    assert gate_of(patch.encode(), TASK).patch == patch.encode()


def test_a_shadowing_name_that_the_gold_patch_creates_is_kept():
    task = flat_task({**GOLD, "tomllib/__init__.py": "x = 1\n"})
    patch = diff({"tomllib.py": "x = 2\n"}, FLAT)
    assert gate_of(patch.encode(), task).patch == patch.encode()


def test_a_file_below_a_symlink_to_the_tests_is_dropped(tmp_path: Path):
    (tmp_path / "tests").mkdir()
    (tmp_path / "other").symlink_to("tests")
    patch = diff({"other/helper.py": "x = 1\n"}, {})
    assert gate(patch.encode(), TASK, tmp_path).dropped == ("'other/helper.py'",)


def test_shadowing_files_are_dropped_for_suite_checks_too():
    patch = diff({"pytest/__init__.py": "x\n", "tests.py": "x\n", "calc/json.py": "x\n"}, CALC)
    gated = gate_of(patch.encode(), CALC_TASK)
    assert gated.patch == diff({"calc/json.py": "x\n"}, CALC).encode()


def test_a_directory_on_pythonpath_is_an_import_root():
    activate = "export PYTHONPATH='/testbed/calc/vendor':$PYTHONPATH"
    task = replace(CALC_TASK, checks=replace(CALC_TASK.checks, activate=activate))
    patch = diff({"calc/vendor/json.py": "x\n"}, CALC).encode()
    assert gate_of(patch, CALC_TASK).patch == patch
    assert gate_of(patch, task).patch == b""
