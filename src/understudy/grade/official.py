"""Grading by SWE-bench's own harness, the package `swebench`, in a process of its own.

It takes rows and images of SWE-bench's fifth version, so tasks are converted into such rows. How its containers
are isolated, and how far its verdicts can be trusted, is not under our control.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from understudy.errors import ConfigError, GraderError, TaskError
from understudy.grade.predictions import Prediction, Predictions
from understudy.grade.reports import LOGS, REPORT, VERDICT, instance_dir, name_part
from understudy.tasks import eval_script
from understudy.tasks.patch import NO_PATCH
from understudy.tasks.row_formats import WORKDIR
from understudy.types import ImageTree, SuiteChecks, Task
from understudy.util.diffs import DiffError, parse_diff
from understudy.util.files import write_remedy

MODULE = "swebench.harness.run_evaluation"
DATASET, PREDICTIONS = "understudy-dataset.jsonl", "understudy-predictions.jsonl"
_MAJOR = 5
_GRACE_S = 30.0


class HarnessResult(Struct, frozen=True):
    """The harness's output: path and content of its summary, and predictions that were not passed to it, with the
    reason.
    """

    path: Path
    summary: dict[str, Any]
    skipped: dict[str, str]


def interpreter() -> str:
    """Return the Python that has the harness: `UNDERSTUDY_SWEBENCH_PYTHON`, otherwise our own."""
    return os.environ.get("UNDERSTUDY_SWEBENCH_PYTHON") or sys.executable


def problems(python: str) -> list[str]:
    """Return why SWE-bench's harness cannot run here, each reason with a remedy; empty if it can."""
    problems: list[str] = []
    version = _version(python)
    if not version:
        problems.append(
            f"--official needs the package swebench, which {python} does not have; install it there (pip install "
            "'understudy[swebench]'), or name the Python of another environment in UNDERSTUDY_SWEBENCH_PYTHON"
        )
    elif int(version.split(".")[0]) < _MAJOR:
        problems.append(
            f"--official needs swebench {_MAJOR} or later, but {python} has {version}; upgrade it there: pip "
            "install -U 'understudy[swebench]'"
        )
    if shutil.which("docker") is None:
        problems.append(
            "SWE-bench's harness stops its containers with the docker command, which is not installed; get it "
            "(Debian: apt-get install docker.io docker-cli)"
        )
    return problems


def run_official(
    predictions: Predictions,
    tasks: Sequence[Task],
    *,
    output: Path,
    run_id: str,
    jobs: int,
    timeout_s: float | None = None,
) -> HarnessResult:
    """Let SWE-bench's harness grade predictions, with its reports where `grade.reports` writes ours. Blocks; its
    output goes to stderr.

    It is started again if it fails, because it fails if other programs' containers end while it lists them; what
    has a report is not repeated. Raises ConfigError if the harness or a container engine is missing, GraderError
    if it fails twice.
    """
    from understudy.sandbox.docker.engine import find_engine

    python = interpreter()
    if missing := problems(python):
        raise ConfigError("\n".join(missing))
    with contextlib.closing(find_engine()) as engine:
        env = {**os.environ, "DOCKER_HOST": engine.url}
    directory = output / LOGS / name_part(run_id)
    if any(directory.glob(f"*/*/{VERDICT}")):
        raise ConfigError(
            f"run {run_id!r} in {output} has reports of Understudy's own grader, which SWE-bench's harness "
            "would mistake for its own; give another --run-id"
        )
    skipped: dict[str, str] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        gradable = _write_dataset(directory / DATASET, tasks, skipped)
        first = _write_predictions(directory / PREDICTIONS, predictions, gradable, output, run_id, skipped)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot be written: {error.strerror}; "
            f"{write_remedy(error, 'choose another --output-dir')}"
        ) from error
    if first is None:
        reasons = "; ".join(list(skipped.values())[:3]) or "there are none"
        raise ConfigError(
            f"no prediction can be graded by SWE-bench's harness: {reasons}; leave out --official to grade "
            "with Understudy"
        )
    timeout_s = timeout_s or max((task.checks.timeout_s for task in tasks), default=1800.0)
    command = [python, "-m", MODULE, "--run_id", run_id, "--report_dir", str(output)]
    command += ["--dataset_name", str(directory / DATASET), "--predictions_path", str(directory / PREDICTIONS)]
    command += ["--max_workers", str(jobs), "--timeout", str(round(timeout_s))]
    if _run(command, output, env) and (code := _run(command, output, env)):
        raise GraderError(
            f"SWE-bench's harness failed twice, the second time with exit code {code}, expected 0; correct what "
            "its output above says, then run the same command again, which keeps the reports there are"
        )
    path = output / f"{name_part(first.model)}.{name_part(run_id)}.json"
    try:
        summary = cast("dict[str, Any]", json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise GraderError(
            f"SWE-bench's harness left no readable summary at {path}: {error}; correct what its output above "
            "says, then run the same command again, which keeps the reports there are"
        ) from error
    return HarnessResult(path, summary, skipped)


def _version(python: str) -> str:
    version_command = "import importlib.metadata as m; print(m.version('swebench'))"
    try:
        completed = subprocess.run([python, "-c", version_command], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return completed.stdout.strip()


def _write_dataset(path: Path, tasks: Sequence[Task], skipped: dict[str, str]) -> dict[str, Task]:
    """Write the tasks' rows; return the tasks that could be converted."""
    gradable: dict[str, Task] = {}
    # ASCII, because the harness splits lines at every Unicode line separator
    with path.open("w", encoding="ascii") as file:
        for task in tasks:
            try:
                row = as_harness_row(task)
            except TaskError as error:
                skipped[task.instance_id] = str(error)
                continue
            file.write(json.dumps(row) + "\n")
            gradable[task.instance_id] = task
    return gradable


def _write_predictions(
    path: Path,
    predictions: Predictions,
    gradable: Mapping[str, Task],
    output: Path,
    run_id: str,
    skipped: dict[str, str],
) -> Prediction | None:
    """Write the predictions that the harness can grade; return the first of them."""
    first: Prediction | None = None
    for id in skipped.keys() - predictions.rows.keys():
        del skipped[id]
    with path.open("w", encoding="ascii") as file:
        for row in predictions.rows.values():
            if row.instance_id not in gradable:
                skipped.setdefault(row.instance_id, f"{row.where}: no task has the id {row.instance_id!r}")
                continue
            patch = predictions.patch(row).data
            if patch.startswith(NO_PATCH):
                skipped[row.instance_id] = patch.removeprefix(NO_PATCH).decode(errors="replace").strip()
                continue
            first = first or row
            text = patch.decode(errors="replace")
            reports = instance_dir(output, run_id, row.model, row.instance_id)
            earlier_patch = reports / "patch.diff"
            if earlier_patch.is_file() and earlier_patch.read_text(encoding="utf-8", errors="replace") != text:
                # The harness would reuse a report on another patch of the same instance.
                (reports / REPORT).unlink(missing_ok=True)
            prediction = {
                "instance_id": row.instance_id,
                "model_name_or_path": row.model,
                "model_patch": None if row.empty else text,
            }
            file.write(json.dumps(prediction) + "\n")
    return first


def _run(command: Sequence[str], directory: Path, env: Mapping[str, str]) -> int:
    """Run to the end, the output to stderr; the exit code. An interrupt ends it, and is raised again."""
    process = subprocess.Popen(
        command, cwd=directory, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), process_group=0
    )
    try:
        return process.wait()
    except BaseException:
        for signal_number in (signal.SIGINT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, signal_number)
                process.wait(_GRACE_S)
                break
        raise


# --- rows for the harness ------------------------------------------------------------------------------

_DELIMITER = "EOF_UNDERSTUDY_TEST_PATCH"


def as_harness_row(task: Task) -> dict[str, Any]:
    """Return the row of a task with a suite: image, eval_script, log_parser, eval_type and all classic fields.

    Raises TaskError for tasks that the harness cannot grade: other checks, or a bug that its images do not have.
    """
    checks = task.checks
    where = f"task {task.instance_id}"
    if not isinstance(checks, SuiteChecks):
        raise TaskError(
            f"{where}: its checks are of kind {checks.__struct_config__.tag}, but SWE-bench's harness grades only "
            "those of kind suite; grade it without --official"
        )
    if task.setup_patch.strip():
        raise TaskError(
            f"{where}: its bug is added by setup_patch, but SWE-bench's harness expects it in the image; "
            "grade it without --official"
        )
    if task.workdir != WORKDIR:
        raise TaskError(
            f"{where}: its tree is at {task.workdir}; SWE-bench's harness expects {WORKDIR}; grade it "
            "without --official"
        )
    row = cast("dict[str, Any]", task.meta.get("row", {}))
    commit = task.source.base_commit if isinstance(task.source, ImageTree) else task.meta.get("base_commit", "")
    if not commit:
        raise TaskError(
            f"{where}: has no base commit, which SWE-bench's harness needs; grade it without --official"
        )
    return {
        "instance_id": task.instance_id,
        "repo": task.repo,
        "version": task.meta.get("version", ""),
        "base_commit": commit,
        "environment_setup_commit": row.get("environment_setup_commit", commit),
        "created_at": task.meta.get("created_at", ""),
        "difficulty": task.meta.get("difficulty", ""),
        "problem_statement": task.instruction,
        "hints_text": "",
        "patch": task.gold_patch,
        "test_patch": checks.test_patch,
        "FAIL_TO_PASS": list(checks.fail_to_pass),
        "PASS_TO_PASS": list(checks.pass_to_pass),
        "image": task.image,
        "log_parser": checks.parser,
        "eval_type": "fail_only" if checks.only_failures_count else "pass_and_fail",
        "eval_script": _script(row.get("eval_script"), task, checks, commit),
        "image_assets": row.get("image_assets", {}),
    }


def _script(stored: str | list[str] | None, task: Task, checks: SuiteChecks, commit: str) -> str:
    if isinstance(stored, str):
        return stored
    if stored is not None:
        return checks.test_patch.join(stored)
    try:
        files = parse_diff(checks.test_patch.encode(errors="surrogateescape"))
    except DiffError as error:
        raise TaskError(
            f"task {task.instance_id}: checks.test_patch is not a valid unified diff: {error}; correct it in the "
            "task"
        ) from error
    changed = [shlex.quote(os.fsdecode(file.old_path)) for file in files if file.old_path is not None]
    reset = f"git checkout {commit} {' '.join(changed)}" if changed else "echo 'No test files to reset'"
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        *(line for line in checks.activate.split("\n") if line != eval_script.PIPEFAIL),
        f"cd {task.workdir}",
        *checks.before.split("\n"),
        f"git config --global --add safe.directory {task.workdir}",
        *checks.install.split("\n"),
        reset,
        f"git apply -v - <<'{_DELIMITER}'",
        checks.test_patch,
        _DELIMITER,
        f": '{eval_script.START}'",
        checks.command,
        f": '{eval_script.END}'",
        reset,
    ]
    return "\n".join(line for line in lines if line) + "\n"
