"""`understudy grade --official`: the swebench package judges, on rows that are made of tasks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from understudy.grade.official import interpreter, problems
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.row_formats import task_of

from support import docker_engine, understudy
from support.grading import diff
from support.suite import FILES, ID, classic

pytestmark = pytest.mark.services


@pytest.fixture
def harness() -> None:
    """The package swebench can be run here; the test is skipped where it cannot."""
    if missing := problems(interpreter()):
        pytest.skip("; ".join(missing))


@pytest.fixture
def dataset(engine: docker_engine.Engine, tmp_path: Path) -> Path:
    """A file with one classic row, whose image is there."""
    image = docker_engine.instance_image(engine, ID, FILES)
    row = classic(image.base_commit)
    assert task_of(row, ImageChoice()).image == image.name
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    return path


@pytest.mark.usefixtures("harness")
def test_the_harness_and_our_grader_agree_and_leave_the_same_files(dataset: Path, tmp_path: Path):
    predictions_file, out = tmp_path / "p.jsonl", tmp_path / "out"
    row = json.loads(dataset.read_text())

    def graded(output: Path, *flags: str, code: int) -> tuple[dict[str, Any], dict[str, Any], set[str]]:
        """The summary, the instance's report, and the names of the files beside it."""
        done = understudy("grade", predictions_file, "-t", dataset, "-o", output, "--json", *flags)
        assert done.returncode == code, done.stderr
        (report,) = output.rglob("report.json")
        summary = json.loads(Path(json.loads(done.stdout)["summary"]).read_text())
        return summary, json.loads(report.read_text()), {path.name for path in report.parent.iterdir()}

    # In one directory: what the harness wrote of the first patch is not taken for the second's.
    wrong = diff({"calc/new.py": "x = 1\n"}, {})
    for patch, ids, code, resolved in ((wrong, [ID, "nobody"], 1, []), (row["patch"], [ID], 0, [ID])):
        rows = [{"instance_id": each, "model_name_or_path": "org/m", "model_patch": patch} for each in ids]
        predictions_file.write_text("\n".join(map(json.dumps, rows)))
        theirs, their_report, their_files = graded(out, "--official", code=code)
        ours, our_report, our_files = graded(tmp_path / f"ours {code}", "--sandbox", "docker", code=code)
        assert list(ours) == list(theirs)
        assert ours["resolved_ids"] == theirs["resolved_ids"] == resolved
        assert ours["unresolved_ids"] == theirs["unresolved_ids"]
        assert our_report == their_report
        assert our_files - their_files == {"verdict.json"}
        assert their_files <= our_files


@pytest.mark.usefixtures("harness")
def test_reports_of_ours_are_not_taken_for_the_harnesss(dataset: Path, tmp_path: Path):
    ours = understudy("grade", "gold", "-t", dataset, "-o", tmp_path, "--sandbox", "docker")
    assert ours.returncode == 0, ours.stderr
    mixed = understudy("grade", "gold", "-t", dataset, "-o", tmp_path, "--official", "--run-id", "understudy")
    assert (mixed.returncode, "reports of Understudy's own grader" in mixed.stderr) == (2, True)


@pytest.mark.usefixtures("harness")
def test_an_engine_that_is_down_is_said(dataset: Path, tmp_path: Path):
    env = {"DOCKER_HOST": f"unix://{tmp_path}/nothing.sock"}
    done = understudy("grade", "gold", "-t", dataset, "-o", tmp_path, "--official", env=env)
    assert done.returncode == 2
    assert "container engine" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("engine")
def test_tasks_that_the_harness_cannot_grade(calc_tasks: Path, tmp_path: Path):
    """Said before the harness is started."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\necho 5.0.2\n")
    fake.chmod(0o755)
    docker = tmp_path / "bin" / "docker"
    docker.parent.mkdir()
    docker.write_text("#!/bin/sh\n")
    docker.chmod(0o755)
    env = {
        "UNDERSTUDY_SWEBENCH_PYTHON": str(fake),
        "PATH": f"{docker.parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = understudy("grade", "gold", "-t", calc_tasks, "-o", tmp_path / "out", "--official", env=env)
    assert done.returncode == 2
    assert (
        "calc-0: its checks are of kind pytest, but SWE-bench's harness grades only those of kind suite"
        in done.stderr
    )
    old = fake.read_text().replace("5.0.2", "4.1.0")
    fake.write_text(old)
    done = understudy("grade", "gold", "-t", calc_tasks, "-o", tmp_path / "out", "--official", env=env)
    assert "needs swebench 5 or later" in done.stderr
