"""Reports with the keys, places and meanings of SWE-bench's harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.errors import ConfigError, TaskError
from understudy.grade.reports import (
    UNSURE,
    GradingOutcome,
    failed_outcome,
    instance_dir,
    instance_report,
    name_part,
    outcome_of,
    read_verdict,
    summary,
    write_failure,
    write_report,
    write_summary,
)
from understudy.types import Evidence, Integrity, SuiteChecks, Task, TestOutcome, Verdict

from support import calc_task

SHIFT, SAME = "test_calc.py::test_shift", "test_calc.py::test_same"
PATCH = b"--- a/calc.py\n"
KEYS = [  # those of swebench 5.0.2, in its order
    "total_instances",
    "submitted_instances",
    "completed_instances",
    "resolved_instances",
    "unresolved_instances",
    "infra_failure_instances",
    "ambiguous_failure_instances",
    "empty_patch_instances",
    "error_instances",
    "completed_ids",
    "incomplete_ids",
    "empty_patch_ids",
    "submitted_ids",
    "resolved_ids",
    "unresolved_ids",
    "infra_failure_ids",
    "ambiguous_failure_ids",
    "failure_reasons",
    "error_ids",
    "schema_version",
    "unstopped_instances",
    "unstopped_containers",
    "unremoved_images",
]


def verdict(reward: float = 0.0, **more: Any) -> Verdict:
    return Verdict(reward=reward, **{"reason": "because", **more})


def suite(**more: Any) -> Task:
    checks = SuiteChecks(
        parser="pytest",
        command="pytest -rA test_calc.py",
        fail_to_pass=(SHIFT,),
        pass_to_pass=(SAME,),
        activate="source activate",
        before="locale-gen",
        install="pip install -e .",
        **more,
    )
    return msgspec.structs.replace(calc_task(), checks=checks)


def test_the_report_of_a_resolved_instance():
    tests: dict[str, TestOutcome] = {SHIFT: "passed", SAME: "skipped"}
    assert instance_report(calc_task(), PATCH, verdict(1.0, tests=tests)) == {
        "calc-0": {
            "patch_is_None": False,
            "patch_exists": True,
            "patch_successfully_applied": True,
            "resolved": True,
            "infra_failure": False,
            "tests_status": {
                "FAIL_TO_PASS": {"success": [SHIFT], "failure": []},
                "PASS_TO_PASS": {"success": [SAME], "failure": []},
                "FAIL_TO_FAIL": {"success": [], "failure": []},
                "PASS_TO_FAIL": {"success": [], "failure": []},
            },
        }
    }


@pytest.mark.parametrize(
    ("outcome", "fixed", "maintained"),
    [
        ("passed", True, True),
        ("xfailed", True, True),
        ("skipped", False, True),
        ("failed", False, False),
        ("error", False, False),
        ("missing", False, False),
    ],
)
def test_what_counts_as_success(outcome: TestOutcome, fixed: bool, maintained: bool):
    report = instance_report(calc_task(), PATCH, verdict(tests={SHIFT: outcome, SAME: outcome}))["calc-0"]
    assert bool(report["tests_status"]["FAIL_TO_PASS"]["success"]) is fixed
    assert bool(report["tests_status"]["PASS_TO_PASS"]["success"]) is maintained


def test_where_only_failures_count_a_missing_test_passed():
    tests: dict[str, TestOutcome] = {SHIFT: "missing", SAME: "failed"}
    report = instance_report(suite(only_failures_count=True), PATCH, verdict(tests=tests))["calc-0"]
    assert report["tests_status"]["FAIL_TO_PASS"] == {"success": [SHIFT], "failure": []}
    assert report["tests_status"]["PASS_TO_PASS"] == {"success": [], "failure": [SAME]}


@pytest.mark.parametrize(
    ("patch", "applied", "expected"),
    [(None, True, (True, False, False)), (b"", True, (False, False, False)), (PATCH, False, (False, True, False))],
)
def test_patches_that_were_not_applied(patch: bytes | None, applied: bool, expected: tuple[bool, ...]):
    report = instance_report(calc_task(), patch, verdict(applied=applied))["calc-0"]
    assert (report["patch_is_None"], report["patch_exists"], report["patch_successfully_applied"]) == expected
    assert "tests_status" not in report


def test_the_files_of_an_instance(tmp_path: Path):
    directory = instance_dir(tmp_path, "run", "org/model", "calc-0")
    assert directory == tmp_path / "logs" / "run_evaluation" / "run" / "org__model" / "calc-0"
    integrity = Integrity("suspicious", "it exits", (Evidence("exit", "calc.py", 3, "os._exit(0)"),))
    graded = verdict(tests={SHIFT: "failed"}, log="1 failed\n", integrity=integrity)
    assert write_report(directory, suite(), PATCH, graded, elapsed_s=1.5, key="k") == directory / "report.json"
    assert sorted(path.name for path in directory.iterdir()) == [
        "eval.sh",
        "patch.diff",
        "report.json",
        "run_instance.log",
        "test_output.txt",
        "verdict.json",
    ]
    assert json.loads((directory / "report.json").read_text())["calc-0"]["resolved"] is False
    assert (directory / "patch.diff").read_bytes() == PATCH
    output = (directory / "test_output.txt").read_text()
    assert output == ">>>>> Start Test Output\n1 failed\n>>>>> End Test Output\n"
    assert "exit calc.py:3 os._exit(0)" in (directory / "run_instance.log").read_text()
    assert (directory / "eval.sh").read_text().splitlines()[1:] == [
        "cd /workspace",
        "source activate",
        "locale-gen",
        "git apply patch.diff",
        "pip install -e .",
        "pytest -rA test_calc.py",
    ]
    assert read_verdict(directory, "k") == graded
    assert read_verdict(directory, "other") is None
    commands = ("env -C /workspace bash -c 'pytest -rA test_calc.py'",)
    write_report(directory, suite(), PATCH, msgspec.structs.replace(graded, grader="1+7", commands=commands))
    assert (directory / "eval.sh").read_text().splitlines() == ["#!/bin/bash", *commands]


@pytest.mark.parametrize("damage", ["no report", "half a verdict", "another's"])
def test_a_report_that_is_not_whole_is_none(damage: str, tmp_path: Path):
    write_report(tmp_path, calc_task(), PATCH, verdict(1.0), key="k")
    if damage == "no report":
        (tmp_path / "report.json").unlink()
    else:
        (tmp_path / "verdict.json").write_text('{"key": "k", "verd' if damage == "half a verdict" else "{}")
    assert read_verdict(tmp_path, "k") is None


def test_a_failure_leaves_no_report(tmp_path: Path):
    write_report(tmp_path, calc_task(), PATCH, verdict(1.0), key="k")
    write_failure(tmp_path, calc_task(), PATCH, "the engine is down")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "eval.sh",
        "patch.diff",
        "run_instance.log",
        "test_output.txt",
    ]
    assert "not judged: the engine is down" in (tmp_path / "run_instance.log").read_text()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.*cannot be written.*--output-dir"):
        write_report(tmp_path / "file" / "x", calc_task(), PATCH, verdict())


@pytest.mark.parametrize("name", ["", ".", "..", ".x", "a\nb", "a\\b", "a" * 181, "\ud800"])
def test_names_that_are_no_file_names(name: str):
    with pytest.raises(TaskError, match="cannot be part of a file name"):
        name_part(name)


def test_the_summary_has_the_harness_keys_and_counts(tmp_path: Path):
    outcomes = {
        "b": GradingOutcome("resolved"),
        "a": outcome_of(verdict(1.0)),
        "c": outcome_of(verdict(reason="the tests did not end in 5 s")),
        "d": GradingOutcome("empty", "empty patch"),
        "e": failed_outcome("sandbox", "gone"),
        "x": failed_outcome("task", "no such task"),
    }
    path = write_summary(tmp_path, "r", "org/m", outcomes, ["a", "b", "c", "d", "e", "f"], images=["i:1"])
    assert path == tmp_path / "org__m.r.json"
    summary = json.loads(path.read_text())
    assert list(summary) == KEYS
    assert summary["total_instances"] == summary["submitted_instances"] == 6
    assert (summary["resolved_ids"], summary["unresolved_ids"], summary["completed_ids"]) == (
        ["a", "b"],
        ["c"],
        ["a", "b", "c"],
    )
    assert (summary["empty_patch_ids"], summary["error_ids"], summary["incomplete_ids"]) == (
        ["d"],
        ["e", "x"],
        ["f"],
    )
    assert summary["failure_reasons"] == {"c": "tests_timed_out", "e": "container_unavailable"}
    assert (summary["ambiguous_failure_ids"], summary["infra_failure_ids"]) == (["c"], ["e"])
    assert (summary["unremoved_images"], summary["schema_version"]) == (["i:1"], 2)
    for key in KEYS[2:9]:
        assert summary[key] == len(summary[key.replace("_instances", "_ids")]), key


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("E   ModuleNotFoundError: No module named 'x'", "missing_module"),
        ("collected 0 items", "no_tests_collected"),
        ("x\nKilled\n", "out_of_memory"),
        ("pip: Could not resolve host: pypi.org", "network_unreachable"),
        ("1 failed", ""),
    ],
)
def test_signs_of_another_cause_never_change_a_verdict(log: str, cause: str):
    outcome = outcome_of(verdict(log=log))
    assert (outcome.status, outcome.cause) == ("unresolved", cause)
    assert outcome_of(verdict(1.0, log=log)).cause == ""


def test_a_task_that_did_not_pass_validation_is_told():
    assert outcome_of(verdict(reason=f"x ({UNSURE}: y)")).cause == "gold_patch_fails"


def test_suspicious_patches_keep_their_verdict():
    outcome = outcome_of(verdict(1.0, integrity=Integrity("suspicious", "it exits")))
    assert (outcome.status, outcome.suspicious) == ("resolved", True)
    assert summary({"a": outcome}, ["a"])["resolved_ids"] == ["a"]
