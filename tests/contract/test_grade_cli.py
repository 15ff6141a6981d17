"""`understudy grade`: predictions in, reports out, as a person runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.tasks.records import dump
from understudy.types import PytestChecks, Task

from support import UNDERSTUDY, calc_task, understudy, wait_for

pytestmark = pytest.mark.usefixtures("isolation")

WRONG = '--- a/calc.py\n+++ b/calc.py\n@@ -1,3 +1,3 @@\n-"""Arithmetic."""\n+"""Sums."""\n \n \n'
LOGS = Path("logs", "run_evaluation", "understudy", "org__m")


def row(name: str, patch: Any, **more: Any) -> dict[str, Any]:
    return {"instance_id": name, "model_name_or_path": "org/m", "model_patch": patch, **more}


def predictions(path: Path, *rows: Any) -> Path:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows))
    return path


def graded(directory: Path, *arguments: str | Path, code: int = 0) -> dict[str, Any]:
    done = understudy("grade", *arguments, "-t", directory / "tasks.jsonl", "-o", directory / "out", "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def slow(number: int, seconds: float) -> Task:
    """A task whose hidden test takes a while, and says that it began."""
    task = calc_task(number)
    assert isinstance(task.checks, PytestChecks)
    (name, content), *_ = task.checks.files.items()
    wait = f"import time\n\n\ndef test_wait():\n    time.sleep({seconds})\n\n\n"
    return msgspec.structs.replace(task, checks=msgspec.structs.replace(task.checks, files={name: wait + content}))


def test_every_kind_of_prediction(calc_tasks: Path, tmp_path: Path):
    predictions_file = predictions(
        tmp_path / "p.jsonl",
        row("calc-0", calc_task(0).gold_patch),
        row("calc-1", WRONG),
        "nonsense",
        row("calc-2", ""),
        row("calc-3", "--- a/no.py\n+++ b/no.py\n@@ -1 +1 @@\n-x\n+y\n"),
        row("nobody", WRONG),
    )
    output = graded(tmp_path, predictions_file, code=1)
    counts = {
        key: output[key] for key in ("resolved", "unresolved", "empty", "error", "refused_rows", "not_graded")
    }
    assert counts == {
        "resolved": 1,
        "unresolved": 2,
        "empty": 1,
        "error": 1,
        "refused_rows": 1,
        "not_graded": 0,
    }
    assert output["errors"] == {
        "nobody": f"task: {predictions_file}:6: no task has the id 'nobody'; correct the id, or give its task "
        "with --tasks"
    }
    assert output["rows"][0].startswith(f"{predictions_file}:3: not a prediction: ")
    summary = json.loads(Path(output["summary"]).read_text())
    assert Path(output["summary"]).name == "org__m.understudy.json"
    assert (summary["resolved_ids"], summary["unresolved_ids"]) == (["calc-0"], ["calc-1", "calc-3"])
    assert (summary["empty_patch_ids"], summary["error_ids"]) == (["calc-2"], ["nobody"])
    assert (summary["total_instances"], summary["submitted_instances"]) == (4, 5)
    logs = tmp_path / "out" / LOGS
    assert sorted(path.name for path in logs.iterdir()) == ["calc-0", "calc-1", "calc-3"]
    report = json.loads((logs / "calc-3" / "report.json").read_text())["calc-3"]
    assert (report["patch_exists"], report["patch_successfully_applied"]) == (True, False)
    report = json.loads((logs / "calc-1" / "report.json").read_text())["calc-1"]
    assert report["tests_status"]["FAIL_TO_PASS"] == {"success": [], "failure": ["test_calc.py::test_shift"]}
    assert json.loads((logs.parent / "run.json").read_text())["dataset"] == str(calc_tasks)


def test_nothing_to_grade_is_an_error_of_its_own(calc_tasks: Path, tmp_path: Path):
    for rows in (("nonsense",), (row("nobody", WRONG),)):
        output = graded(tmp_path, predictions(tmp_path / "p.jsonl", *rows), code=2)
        assert output["refused_rows"] + output["error"] == 1


def test_report_files_of_predictions_without_a_model_say_so(calc_tasks: Path, tmp_path: Path):
    without_model = json.dumps({"instance_id": "calc-0", "model_patch": ""})
    output = graded(tmp_path, predictions(tmp_path / "p.jsonl", without_model), code=0)
    assert Path(output["summary"]).name == "unnamed-model.understudy.json"
    output = graded(tmp_path, predictions(tmp_path / "q.jsonl", "nonsense"), code=2)
    assert Path(output["summary"]).name == "unnamed-model.understudy.json"


def test_gold_patches_of_some_instances(calc_tasks: Path, tmp_path: Path):
    chosen = ("-t", calc_tasks, "--instance-ids", "calc-1,calc-3")
    done = understudy("grade", "gold", *chosen, "-o", tmp_path / "out", "--validate", "--json")
    assert (done.returncode, "2 of 2 tasks validated" in done.stderr) == (0, True)
    report = json.loads(done.stdout)
    assert (report["resolved"], report["predictions"]) == (2, 2)
    summary = json.loads((tmp_path / "out" / "gold.understudy.json").read_text())
    assert (summary["resolved_ids"], summary["total_instances"]) == (["calc-1", "calc-3"], 2)
    done = understudy("grade", "gold", "-t", calc_tasks, "--instance-ids", "calc-9", "-o", tmp_path)
    assert (done.returncode, "there is no task 'calc-9'" in done.stderr) == (2, True)


def test_what_has_a_report_is_graded_again_only_with_another_patch_or_task(calc_tasks: Path, tmp_path: Path):
    predictions_file = predictions(
        tmp_path / "p.jsonl", *(row(f"calc-{n}", calc_task(n).gold_patch) for n in range(3))
    )
    assert graded(tmp_path, predictions_file)["found"] == 0
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("report.json")}
    assert len(times) == 3
    assert graded(tmp_path, predictions_file)["found"] == 3
    assert {path: path.stat().st_mtime_ns for path in times} == times
    predictions(
        predictions_file, row("calc-0", WRONG), *(row(f"calc-{n}", calc_task(n).gold_patch) for n in (1, 2))
    )
    tasks = [calc_task(number) for number in range(4)]
    dump([*tasks[:2], msgspec.structs.replace(tasks[2], instruction="other"), tasks[3]], calc_tasks)
    report = graded(tmp_path, predictions_file)
    assert (report["found"], report["resolved"], report["unresolved"]) == (1, 2, 1)
    changed = {path.parent.name for path in times if path.stat().st_mtime_ns != times[path]}
    assert changed == {"calc-0", "calc-2"}


def test_a_patch_of_100_mb_is_refused_and_its_neighbours_graded(calc_tasks: Path, tmp_path: Path):
    predictions_file = tmp_path / "p.jsonl"
    with predictions_file.open("w") as file:
        file.write(json.dumps(row("calc-0", calc_task(0).gold_patch)) + "\n")
        file.write('{"instance_id": "calc-1", "model_name_or_path": "org/m", "model_patch": "')
        for _ in range(100):
            file.write("+x\\n" * (1 << 18))
        file.write('"}\n' + json.dumps(row("calc-2", calc_task(2).gold_patch)) + "\n")
    report = graded(tmp_path, predictions_file)
    assert (report["resolved"], report["unresolved"], report["error"]) == (2, 1, 0)
    log = (tmp_path / "out" / LOGS / "calc-1" / "run_instance.log").read_text()
    assert "the patch is larger than" in log
    assert sum(path.stat().st_size for path in (tmp_path / "out").rglob("*.*")) < 1 << 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.jsonl",), "--tasks or --dataset-path"),
        (("nothing.jsonl", "-t", "tasks.jsonl"), "nothing.jsonl: the predictions cannot be read"),
        (("p.jsonl", "-t", "none.jsonl"), "none.jsonl: does not exist"),
        (("p.jsonl", "-t", "tasks.jsonl", "--run-id", "../x"), "'../x' cannot be part of a file name"),
        (("p.jsonl", "-t", "tasks.jsonl", "--sandbox", "moon"), "'moon' is not one of the installed sandboxes"),
        (("twice.jsonl", "-t", "tasks.jsonl"), "twice.jsonl:2: 'calc-0' has another prediction"),
        (("p.jsonl", "-t", "tasks.jsonl", "-o", "p.jsonl/x"), "p.jsonl/x"),
    ],
)
@pytest.mark.usefixtures("calc_tasks")
def test_what_cannot_be_done_is_said(arguments: tuple[str, ...], message: str, tmp_path: Path):
    predictions(tmp_path / "p.jsonl", row("calc-0", WRONG))
    predictions(tmp_path / "twice.jsonl", row("calc-0", WRONG), row("calc-0", ""))
    done = understudy("grade", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()


def test_a_task_that_cannot_be_prepared_is_one_error(calc_tasks: Path, tmp_path: Path):
    tasks = [calc_task(0), msgspec.structs.replace(calc_task(1), setup_patch=WRONG.replace("Arith", "Nothing"))]
    dump(tasks, calc_tasks)
    report = graded(tmp_path, "gold", code=1)
    assert (report["resolved"], list(report["errors"])) == (1, ["calc-1"])
    assert "setup_patch does not apply" in report["errors"]["calc-1"]
    directory = tmp_path / "out" / LOGS.parent / "gold" / "calc-1"
    assert not (directory / "report.json").exists()
    assert "not judged" in (directory / "run_instance.log").read_text()


def test_ctrl_c_lets_what_runs_finish_and_the_same_command_goes_on(tmp_path: Path):
    dump([slow(number, 1.5) for number in range(4)], tmp_path / "tasks.jsonl")
    command = [UNDERSTUDY, "grade", "gold", "-t", tmp_path / "tasks.jsonl", "-o", tmp_path, "-j", "2", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    wait_for(lambda: (tmp_path / LOGS.parent / "run.json").exists(), process)
    time.sleep(0.7)  # so that some are at work, most likely; all must hold if none is
    os.killpg(process.pid, signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "finishing what runs" in stderr
    report = json.loads(stdout)
    assert report["not_graded"] > 0
    assert report["resolved"] + report["not_graded"] == 4
    summary = json.loads(Path(report["summary"]).read_text())
    assert len(summary["incomplete_ids"]) == report["not_graded"]
    again = understudy(*command[1:])
    assert again.returncode == 0
    assert json.loads(again.stdout)["found"] == report["resolved"]


def test_a_second_ctrl_c_stops_at_once(tmp_path: Path):
    dump([slow(0, 60)], tmp_path / "tasks.jsonl")
    command = [UNDERSTUDY, "grade", "gold", "-t", tmp_path / "tasks.jsonl", "-o", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0)
    wait_for(lambda: (tmp_path / LOGS.parent / "run.json").exists(), process)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "same command" in stderr
    assert "Traceback" not in stderr


def test_one_process_at_a_time_grades_a_run(tmp_path: Path):
    dump([slow(0, 2)], tmp_path / "tasks.jsonl")
    command = ["grade", "gold", "-t", tmp_path / "tasks.jsonl", "-o", tmp_path]
    process = subprocess.Popen(
        [UNDERSTUDY, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    wait_for(lambda: (tmp_path / LOGS.parent / "run.json").exists(), process)
    done = understudy(*command)
    assert (done.returncode, "another process grades run 'understudy'" in done.stderr) == (2, True)
    process.communicate(timeout=60)
    assert process.returncode == 0


def test_the_official_harness_where_it_is_not_there(calc_tasks: Path, tmp_path: Path):
    env = {"UNDERSTUDY_SWEBENCH_PYTHON": "/nonexistent/python"}
    done = understudy("grade", "gold", "-t", calc_tasks, "--official", "-o", tmp_path / "out", env=env)
    assert done.returncode == 2
    assert "--official needs the package swebench, which /nonexistent/python does not have" in done.stderr
    assert "pip install 'understudy[swebench]'" in done.stderr
    assert not (tmp_path / "out").exists()
