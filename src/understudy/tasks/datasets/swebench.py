"""Rows of SWE-bench: the classic thirteen fields, and the fifth version's, which say how they are tested."""

from __future__ import annotations

import posixpath
import re
import shlex
from typing import Any

import msgspec

from understudy.errors import TaskError
from understudy.tasks.datasets import eval_script
from understudy.tasks.datasets.images import ImageChoice, instance_image, named_image
from understudy.tasks.datasets.repos import find_recipe
from understudy.tasks.datasets.row import DatasetRow
from understudy.types import ImageTree, Sdist, Source, SuiteChecks, Task

WORKDIR = "/testbed"
ACTIVATE = f"{eval_script.PIPEFAIL}\nsource /opt/miniconda3/bin/activate\nconda activate testbed"
"""How the images of SWE-bench and those made like them get their Python."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PARSER = re.compile(r"parse_log_[a-z0-9_]+")
_TESTED = re.compile(r"^diff --git a/.* b/(.*)", re.MULTILINE)
_DELETED = re.compile(r"^diff --git a/.* b/(.*)\n(?:.*\n)?deleted file mode", re.MULTILINE)
_NO_TESTS = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_EVAL_TYPES = {"pass_and_fail": False, "fail_only": True}
_ABOUT = ("version", "difficulty", "created_at")
_KEPT = ("environment_setup_commit", "image_assets", "language")


def task(row: DatasetRow, choice: ImageChoice) -> Task:
    """The task of a row of SWE-bench. Raises TaskError."""
    instance_id, test_patch = row.text("instance_id"), row.text("test_patch")
    if row.object("image_assets").has("test_patch"):
        raise TaskError("image_assets: its tests need files from the network, which a patch cannot carry")
    extra: dict[str, Any] = row.metadata(*_KEPT)
    if row.has("eval_script"):
        checks, script = _checks_by_script(row, test_patch)
        extra["eval_script"] = script
        image = named_image(row.text("image"), choice)
    else:
        checks = _checks_by_table(row, test_patch)
        image = instance_image(instance_id, choice)
    return make_task(row, checks, image=image, dataset="swebench", source=_source(row), extra=extra)


def make_task(
    row: DatasetRow,
    checks: SuiteChecks,
    *,
    image: str,
    dataset: str,
    source: Source | None = None,
    workdir: str = WORKDIR,
    extra: dict[str, Any] | None = None,
) -> Task:
    """A task of a row that has SWE-bench's common fields. Raises TaskError."""
    if not checks.fail_to_pass:
        raise TaskError("FAIL_TO_PASS: is empty, expected at least one test that the solution fixes")
    repo = row.text("repo")
    meta: dict[str, Any] = {"dataset": dataset, **row.metadata(*_ABOUT)}
    if isinstance(source, Sdist):  # a row of ours
        meta |= row.object("meta").metadata("license")
    if row.has("base_commit"):
        meta["base_commit"] = base_commit(row)
    if extra:
        meta["row"] = extra
    return Task(
        instance_id=row.text("instance_id"),
        repo=repo,
        instruction=instruction(repo, workdir, row.text("problem_statement")),
        source=source or ImageTree(base_commit(row)),
        checks=checks,
        gold_patch=row.text("patch"),
        workdir=workdir,
        image=image,
        meta=meta,
    )


def instruction(repo: str, workdir: str, statement: str) -> str:
    """What the agent is told."""
    return (
        f"The source of {repo} is in {workdir}. Resolve the issue below by changing it there. The tests are not "
        "yours to change: hidden ones will decide, and all that works now has to go on working.\n\n"
        f"<issue>\n{statement.strip()}\n</issue>\n"
    )


def base_commit(row: DatasetRow) -> str:
    """The commit that the images' repository is at. Raises TaskError when it is not one."""
    commit = row.text("base_commit")
    if not _COMMIT.fullmatch(commit):
        raise TaskError("base_commit: expected 40 lower-case hex digits")
    return commit


def parser_name(name: str, key: str = "log_parser") -> str:
    """A parser's name as swebench spells it. Raises TaskError when it can be none."""
    if not _PARSER.fullmatch(name):
        raise TaskError(f"{key}: expected the name of a parser, as parse_log_pytest, found {name[:40]!r}")
    return name


def directives(repo: str, test_patch: str) -> list[str]:
    """What is given to the test command: the files of the test patch, as this repository's command wants them."""
    files = [file for file in _TESTED.findall(test_patch) if not file.endswith(_NO_TESTS)]
    if repo == "django/django":
        return [file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in files]
    return files


def test_files(test_patch: str) -> tuple[str, ...]:
    """The test files that exist after the patch is applied."""
    gone = set(_DELETED.findall(test_patch))
    files = (file for file in _TESTED.findall(test_patch) if not file.endswith(_NO_TESTS) and file not in gone)
    return tuple(dict.fromkeys(file for file in files if posixpath.normpath(file) == file))


def _checks_by_script(row: DatasetRow, test_patch: str) -> tuple[SuiteChecks, str | list[str]]:
    """The checks, and the script to store: in two parts where the row's own test patch separates them."""
    script = row.text("eval_script")
    phases = eval_script.split_script(script, WORKDIR)
    if phases.test_patch is None:
        raise TaskError("eval_script: does not apply the test patch, in a here-document for git apply")
    if phases.test_patch.strip() != test_patch.strip():
        raise TaskError("eval_script: applies another test patch than the row's test_patch")
    eval_type = row.text("eval_type", "pass_and_fail")
    if eval_type not in _EVAL_TYPES:
        raise TaskError(f"eval_type: expected {' or '.join(_EVAL_TYPES)}, found {eval_type[:40]!r}")
    checks = SuiteChecks(
        parser=parser_name(row.text("log_parser")),
        command=phases.command,
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=test_files(test_patch),
        test_patch=test_patch,
        activate=phases.activate,
        before=phases.before,
        install=phases.install,
        only_failures_count=_EVAL_TYPES[eval_type],
    )
    head, separator, tail = script.partition(test_patch)
    return checks, [head, tail] if separator else script


def _checks_by_table(row: DatasetRow, test_patch: str) -> SuiteChecks:
    repo = row.text("repo")
    parser, suite = find_recipe(repo, row.text("version"))
    command = " ".join([suite.command, *map(shlex.quote, directives(repo, test_patch))])
    return SuiteChecks(
        parser=parser,
        command=command,
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=test_files(test_patch),
        test_patch=test_patch,
        activate="\n".join((ACTIVATE, *suite.env)),
        before="\n".join(suite.before),
        install=suite.install,
    )


def _source(row: DatasetRow) -> Sdist | None:
    """The source of the tree for our own rows, which have no image."""
    if not row.has("source"):
        return None
    try:
        return msgspec.convert(row.object("source").data, Sdist)
    except msgspec.ValidationError as error:
        raise TaskError(f"source: expected a pinned sdist (kind, name, version, sha256): {error}") from error
