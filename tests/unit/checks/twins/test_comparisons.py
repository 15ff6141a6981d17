"""Comparisons that a test evaluates without asserting them are observed, and honest ones agree."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from understudy.checks.twins import twin_driver
from understudy.checks.twins.judge import judge, load_observations
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.suite import self_reporting
from understudy.checks.twins.versions import write_version

SOURCE = """\
failed = []
def check(got, wanted):
    if got != wanted:
        failed.append(got)
def test_values():
    check(make(), 12)
    assert make() == 12 or make() == 13
"""


class Liar:
    """Equals every builtin value, and nothing else."""

    def __eq__(self, other: object) -> bool:
        return type(other).__module__ == "builtins"

    __hash__ = None  # pyright: ignore[reportAssignmentType]


class Number(int):
    """A number that says it is another one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int)

    __hash__ = int.__hash__


class Plain(int):
    """A number of its own class."""


VALUES = {"gold": 12, "float": 12.0, "subclass": Plain(12), "liar": Liar(), "lying number": Number(11)}


@pytest.mark.parametrize("name", VALUES)
def test_an_in_process_comparison_may_only_report_equality_of_equal_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(sys.modules, "understudy_sites", raising=False)
    report = tmp_path / "report"
    version = write_version(SOURCE)
    text = self_reporting(version.source, "t.py", str(twin_driver.__file__), str(report))
    scope: dict[str, object] = {"__name__": "t", "make": lambda: VALUES[name]}
    exec(compile(text, "t.py", "exec"), scope)  # our own text
    exec("test_values()", scope)
    monkeypatch.delitem(sys.modules, "understudy_sites")
    observed = load_observations(report.read_bytes())["t.py::test_values"]
    results = {number: site for number, site in version.sites.items() if site.operation == "result"}
    assert sorted(site.operator for site in results.values()) == ["!=", "==", "=="]
    judgements = {judge(site, [], observed[number]) for number, site in results.items() if number in observed}
    assert (judgements == {"agrees"}) == (name in ("gold", "float", "subclass")), judgements


def test_a_site_that_is_not_reached_agrees():
    assert judge(TwinSite("result", operator="=="), [], []) == "agrees"
    assert json.dumps(twin_driver.encode([0] * 501, 500)) == '["?"]'
