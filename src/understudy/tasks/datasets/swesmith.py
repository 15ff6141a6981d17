"""Rows of SWE-smith: a bug that was put into a repository, whose reverse is the solution."""

from __future__ import annotations

import shlex

from understudy.errors import TaskError
from understudy.tasks.datasets import swebench
from understudy.tasks.datasets.images import ImageChoice, named_image
from understudy.tasks.datasets.row import DatasetRow
from understudy.types import ImageTree, SuiteChecks, Task
from understudy.util import diffs

_PYTEST = "pytest -rA --disable-warnings --color=no --tb=no -p no:cacheprovider"


def task(row: DatasetRow, choice: ImageChoice) -> Task:
    """The task of a row of SWE-smith. Raises TaskError."""
    bug = row.text("patch")
    try:
        gold = diffs.reverse(bug)
    except ValueError as error:
        raise TaskError(f"patch: cannot be reversed: {error}") from error
    if not row.text("problem_statement", "").strip():
        raise TaskError("problem_statement: is empty, expected a problem statement for the agent")
    fail_to_pass, pass_to_pass = row.texts("FAIL_TO_PASS"), row.texts("PASS_TO_PASS")
    if not fail_to_pass:
        raise TaskError("FAIL_TO_PASS: is empty, expected at least one test that the solution fixes")
    files = dict.fromkeys(id.partition("::")[0] for id in (*fail_to_pass, *pass_to_pass))
    if not all(file.endswith(".py") for file in files):
        raise TaskError(
            "FAIL_TO_PASS: has ids that are not of pytest; how such a repository is tested is in a profile of "
            "SWE-smith's own, not in the row"
        )
    instance_id, repo = row.text("instance_id"), row.text("repo")
    return Task(
        instance_id=instance_id,
        repo=repo,
        instruction=swebench.instruction(repo, swebench.WORKDIR, row.text("problem_statement")),
        source=ImageTree(),
        setup_patch=bug,
        checks=SuiteChecks(
            parser="parse_log_pytest",
            command=" ".join([_PYTEST, *map(shlex.quote, files)]),
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            files=tuple(files),
            activate=swebench.ACTIVATE,
        ),
        gold_patch=gold,
        workdir=swebench.WORKDIR,
        image=named_image(row.text("image_name"), choice),
        meta={"dataset": "swe-smith", **row.metadata("strategy", "created_at")},
    )
