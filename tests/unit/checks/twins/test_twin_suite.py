"""Versions of suites' hidden files: which functions the ids name, and what the files say of themselves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, TwinTest
from understudy.checks.protection import protection_of
from understudy.checks.twins import twin_driver
from understudy.checks.twins.run import load_stopped
from understudy.checks.twins.suite import outcomes_of, self_reporting
from understudy.checks.twins.test_ids import deciding_tests, version_texts
from understudy.checks.twins.versions import write_version
from understudy.types import SuiteChecks

from support.grading import CALC_TASK, CALC_TESTS

assert isinstance(CALC_TASK.checks, SuiteChecks)
CHECKS: SuiteChecks = CALC_TASK.checks
FILES = {
    "tests/test_calc.py": "def test_shift(): ...\n\n\nclass TestA:\n    def test_b(self): ...\n",
    "tests/app/tests.py": 'class Slugs:\n    def test_slug(self):\n        """\n        Is short.\n        """\n',
    "lib/tests/__init__.py": "def test_two(): ...\n",
    "lib/test_more.py": "def test_two(): ...\n",
}


def nodes_of(*ids: str) -> dict[str, str]:
    task = replace(CALC_TASK, checks=replace(CHECKS, fail_to_pass=ids, pass_to_pass=()))
    return deciding_tests(task, GradingOptions(twin_files=FILES)).nodes


@pytest.mark.parametrize(
    ("id", "node"),
    [
        ("tests/test_calc.py::test_shift", "tests/test_calc.py::test_shift"),
        ("tests/test_calc.py::test_shift[a::b-[1]", "tests/test_calc.py::test_shift"),
        ("test_calc.py::TestA::()::test_b", "tests/test_calc.py::TestA::test_b"),
        ("other_test_calc.py::test_shift", None),
        ("test_b (tests.test_calc.TestA)", "tests/test_calc.py::TestA::test_b"),
        ("test_b (tests.test_calc.TestA.test_b)", "tests/test_calc.py::TestA::test_b"),
        ("test_slug (app.tests.Slugs)", "tests/app/tests.py::Slugs::test_slug"),
        ("test_two (lib.tests.Slugs)", "lib/tests/__init__.py::Slugs::test_two"),
        ("test_slug (other.Slugs)", None),
        ("test_shift", "tests/test_calc.py::test_shift"),
        ("test_two", None),  # two files have it
        ("Is short.", "tests/app/tests.py::Slugs::test_slug"),
        ("app/main_test.go:TestSlug", None),
    ],
)
def test_test_ids_of_each_runner_map_to_node_ids(id: str, node: str | None):
    assert nodes_of(id).get(id) == node


def test_a_parametrised_function_is_called_once_for_each_of_its_ids():
    ids = ("tests/test_calc.py::test_shift[1]", "tests/test_calc.py::test_shift[2]")
    task = replace(CALC_TASK, checks=replace(CHECKS, fail_to_pass=ids[:1], pass_to_pass=ids[1:]))
    tests = deciding_tests(task, GradingOptions(twin_files=FILES))
    assert (tests.fail_to_pass, tests.pass_to_pass) == (("tests/test_calc.py::test_shift",), ())
    lines = [json.dumps({"test": "tests/test_calc.py::test_shift", "passed": True})] * 2
    assert outcomes_of("\n".join(lines).encode(), tests.calls) == {"tests/test_calc.py::test_shift": "passed"}
    assert set(outcomes_of(lines[0].encode(), tests.calls).values()) == {"failed"}


def test_a_test_that_fails_once_or_writes_something_else_does_not_pass():
    lines = [b'{"test": "a", "passed": true}', b'{"test": "a", "passed": false}', b"{", b'{"test": 3}']
    assert outcomes_of(b"\n".join(lines), {}) == {"a": "failed"}


def test_only_hidden_files_that_are_text_have_versions():
    checks = replace(CHECKS, files=("a.py", "./b.py", "c.js", "gone.py", "d.py"))
    hidden = {"a.py": b"x = 1\n", "b.py": b"\xff", "c.js": b"x", "gone.py": None, "helper.py": b""}
    assert version_texts(checks, hidden) == {"a.py": "x = 1\n"}


SOURCE = '''\
"""Tests."""
from __future__ import annotations


class Base:
    def test_same(self):
        assert [self.value] == [3]

    @staticmethod
    def test_static():
        assert int("4") == 4


class TestHeir(Base):
    value = 3


def helper():
    assert 1 + 1 == 2


def test_fails():
    helper()
    raise KeyError
'''


def test_a_version_reports_which_test_runs_and_its_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "understudy_sites", raising=False)
    report = tmp_path / "report"
    version = write_version(SOURCE)
    text = self_reporting(version.source, "t.py", str(twin_driver.__file__), str(report))
    scope: dict[str, object] = {"__name__": "t"}
    exec(compile(text, "t.py", "exec"), scope)  # our own text
    monkeypatch.delitem(sys.modules, "understudy_sites")
    exec(
        "TestHeir().test_same()\nTestHeir.test_static()\ntry: test_fails()\nexcept KeyError: pass\nhelper()", scope
    )
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert [line.get("node", line.get("test")) for line in lines] == [
        "t.py::",  # the file itself
        *["t.py::TestHeir::test_same"] * 2,
        *["t.py::Base::test_static"] * 2,
        *["t.py::test_fails"] * 3,
        "t.py::",  # a helper that no test calls
    ]
    assert [line["passed"] for line in lines if "passed" in line] == [True, True, True, False]
    kinds = tuple(each.__name__ for each in KeyError.__mro__)
    assert load_stopped(report.read_bytes()) == {"t.py::test_fails": kinds}, "how it ended"


def test_source_that_does_not_parse_is_left_unchanged():
    assert self_reporting("print 'two'\n", "t.py", "driver", "report") == "print 'two'\n"


def test_protection_of_a_suite_reports_what_is_missing():
    files = {"tests/test_calc.py": CALC_TESTS["tests/test_calc.py"]}
    names = [f"tests/test_calc.py::{name}" for name in ("test_shift", "test_refuses", "test_same")]
    twins = {name: TwinTest(name, {0: "[]"}) for name in names}
    options = GradingOptions(twin_files=files, twins=twins, twin_bits=20, twin_all_bits=20)
    unwatched = "what the code does in the process of the tests is not watched"
    assert protection_of(CALC_TASK, options) == ("twins", unwatched)
    assert protection_of(CALC_TASK, replace(options, twins={names[0]: twins[names[0]]}))[0] == "partial"
    assert protection_of(CALC_TASK, GradingOptions())[0] == "none"
