"""Rows as the official harness wants them, for grading by it: those of the fifth version, made of tasks."""

from __future__ import annotations

import os
import shlex
from typing import Any, cast

from understudy.errors import TaskError
from understudy.tasks.datasets import eval_script
from understudy.tasks.datasets.swebench import WORKDIR
from understudy.types import ImageTree, SuiteChecks, Task
from understudy.util.diffs import DiffError, parse_diff

_DELIMITER = "EOF_UNDERSTUDY_TEST_PATCH"


def as_harness_row(task: Task) -> dict[str, Any]:
    """The row of a task that has a suite, with image, eval_script, log_parser, eval_type and all classic fields.

    Raises TaskError for tasks that the harness cannot grade: other checks, or a bug that its images do not have.
    """
    checks = task.checks
    where = f"task {task.instance_id}"
    if not isinstance(checks, SuiteChecks):
        raise TaskError(f"{where}: is not graded by a suite, so SWE-bench's harness cannot grade it")
    if task.setup_patch.strip():
        raise TaskError(
            f"{where}: begins with a bug that is not in its image, so SWE-bench's harness cannot grade it"
        )
    if task.workdir != WORKDIR:
        raise TaskError(f"{where}: its tree is at {task.workdir}; SWE-bench's harness expects {WORKDIR}")
    row = cast("dict[str, Any]", task.meta.get("row", {}))
    commit = task.source.base_commit if isinstance(task.source, ImageTree) else task.meta.get("base_commit", "")
    if not commit:
        raise TaskError(f"{where}: has no base commit, which SWE-bench's harness needs")
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
        raise TaskError(f"task {task.instance_id}: test_patch is not a unified diff: {error}") from error
    changed = [shlex.quote(os.fsdecode(file.old_path)) for file in files if file.old_path is not None]
    reset = f"git checkout {commit} {' '.join(changed)}" if changed else "echo 'No test files to reset'"
    activate = [line for line in checks.activate.split("\n") if line != eval_script.PIPEFAIL]
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        *activate,
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
