"""Rows of Multi-SWE-bench: pull requests in several languages, tested by a script inside their images."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from understudy.errors import TaskError
from understudy.tasks.datasets import eval_script, swebench
from understudy.tasks.datasets.images import ImageChoice, named_image
from understudy.tasks.datasets.row import DatasetRow, json_type
from understudy.types import ImageTree, SuiteChecks, Task

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_NOT_PASSED_BEFORE = ("f2p_tests", "s2p_tests", "n2p_tests")


def task(row: DatasetRow, choice: ImageChoice) -> Task:
    """The task of a row of Multi-SWE-bench. Raises TaskError.

    Its images run the tests by /home/run.sh; what the row does not have is how the output is read, for that is a
    program of its harness. Rows that name a parser in a key of their own, `log_parser`, are taken.
    """
    org, name, number = row.text("org"), row.text("repo"), row.data.get("number")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise TaskError(f"number: expected the number of a pull request, got {json_type(number)}")
    for key, value in (("org", org), ("repo", name)):
        if not _NAME.fullmatch(value):
            raise TaskError(f"{key}: expected letters, digits and ._-, found {value[:80]!r}")
    if not row.has("log_parser"):
        raise TaskError(
            "log_parser: is missing: how the output of its tests is read is a program of Multi-SWE-bench's own "
            "harness, not part of the row; where swebench has a parser that fits, name it in this key"
        )
    fail_to_pass = [id for key in _NOT_PASSED_BEFORE for id in _ids(row, key)]
    if not fail_to_pass:
        raise TaskError("f2p_tests: is empty, expected at least one test that the solution fixes")
    test_patch, workdir = row.text("test_patch"), f"/home/{name}"
    statement = "\n\n".join(_issues(row)) or row.text("title", "")
    if not statement.strip():
        raise TaskError("resolved_issues: have no text, expected a problem statement for the agent")
    repo, base = f"{org}/{name}", row.object("base")
    return Task(
        instance_id=f"{org}__{name}-{number}",
        repo=repo,
        instruction=swebench.instruction(repo, workdir, statement),
        source=ImageTree(base.text("sha") if base.has("sha") else ""),
        checks=SuiteChecks(
            parser=swebench.parser_name(row.text("log_parser")),
            command="bash /home/run.sh",
            fail_to_pass=tuple(fail_to_pass),
            pass_to_pass=_ids(row, "p2p_tests"),
            files=swebench.test_files(test_patch),
            test_patch=test_patch,
            activate=eval_script.PIPEFAIL,
        ),
        gold_patch=row.text("fix_patch"),
        workdir=workdir,
        image=named_image(f"mswebench/{org}_m_{name}:pr-{number}".lower(), choice),
        meta={"dataset": "multi-swe-bench", **row.metadata("difficulty", "lang", "created_at")},
    )


def _ids(row: DatasetRow, key: str) -> tuple[str, ...]:
    """The ids of a map from ids to what happened, which is what its rows have, or of a list."""
    return tuple(row.object(key).data) if not isinstance(row.data.get(key), list) else row.texts(key)


def _issues(row: DatasetRow) -> list[str]:
    value: object = row.data.get("resolved_issues") or ()
    try:
        issues = msgspec.convert(value, list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise TaskError(f"resolved_issues: expected a list of objects, got {json_type(value)}: {error}") from error
    texts: list[str] = []
    for issue in map(DatasetRow, issues):
        parts = [issue.text(key, "") for key in ("title", "body")]
        texts.append("\n\n".join(part for part in parts if part.strip()))
    return [text for text in texts if text]
