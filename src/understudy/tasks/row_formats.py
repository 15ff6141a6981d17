"""Turns rows of SWE-bench and related datasets into tasks; a row's format is recognised by its keys.

To add a format, write the function that makes a task of its rows and add a `TaskRowFormat` to FORMATS.
"""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import TaskError
from understudy.tasks import eval_script, records
from understudy.tasks.recipes import ImageChoice, find_recipe, instance_image, named_image
from understudy.tasks.records import LoadedTasks, RefusedRow, summarise_refusals
from understudy.tasks.rows import ROW_REMEDY, DatasetRow, LocatedRow, json_type
from understudy.types import ImageTree, Sdist, Source, SuiteChecks, Task
from understudy.util import diffs

WORKDIR = "/testbed"
_ACTIVATE = f"{eval_script.PIPEFAIL}\nsource /opt/miniconda3/bin/activate\nconda activate testbed"
"""How the images of SWE-bench and those made like them get their Python."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_PARSER = re.compile(r"parse_log_[a-z0-9_]+")
_REPOSITORY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CHANGED_FILE = re.compile(r"^diff --git a/.* b/(.*)", re.MULTILINE)
_DELETED_FILE = re.compile(r"^diff --git a/.* b/(.*)\n(?:.*\n)?deleted file mode", re.MULTILINE)
_NOT_TEST_SUFFIXES = (".json", ".png", "csv", ".txt", ".md", ".jpg", ".jpeg", ".pkl", ".yml", ".yaml", ".toml")
_ONLY_FAILURES_COUNT = {"pass_and_fail": False, "fail_only": True}
_NO_TEST_TO_FIX = f"is empty, expected at least one test that the solution fixes; {ROW_REMEDY}"


# --- what the formats have in common -------------------------------------------------------------------


def _make_task(
    row: DatasetRow,
    checks: SuiteChecks,
    *,
    image: str,
    dataset: str,
    source: Source | None = None,
    workdir: str = WORKDIR,
    extra: dict[str, Any] | None = None,
) -> Task:
    """Return the task of a row that has SWE-bench's common keys. Raises TaskError."""
    if not checks.fail_to_pass:
        raise TaskError(f"FAIL_TO_PASS: {_NO_TEST_TO_FIX}")
    repo = row.text("repo")
    meta = {"dataset": dataset, **row.metadata("version", "difficulty", "created_at")}
    if isinstance(source, Sdist):  # a row made by Understudy
        meta |= row.object("meta").metadata("license")
    if row.has("base_commit"):
        meta["base_commit"] = _base_commit(row)
    if extra:
        meta["row"] = extra
    return Task(
        instance_id=row.text("instance_id"),
        repo=repo,
        instruction=_instruction(repo, workdir, row.text("problem_statement")),
        source=source or ImageTree(_base_commit(row)),
        checks=checks,
        gold_patch=row.text("patch"),
        workdir=workdir,
        image=image,
        meta=meta,
    )


def _instruction(repo: str, workdir: str, statement: str) -> str:
    """Return the instruction for the agent."""
    return (
        f"The source of {repo} is in {workdir}. Resolve the issue below by changing it there. The tests are not "
        "yours to change: hidden ones will decide, and all that works now has to go on working. The environment "
        "is set up: `python` and the other commands found are those that the tests run with. There is no network "
        f"to install more.\n\n<issue>\n{statement.strip()}\n</issue>\n"
    )


def _base_commit(row: DatasetRow) -> str:
    """Return the commit that the repository in the image is at."""
    commit = row.text("base_commit")
    if not _COMMIT.fullmatch(commit):
        raise TaskError(
            f"base_commit: invalid commit {commit[:80]!r}, expected 40 lower-case hex digits; {ROW_REMEDY}"
        )
    return commit


def _parser_name(name: str, key: str = "log_parser") -> str:
    """Return a parser's name as swebench spells it."""
    if not _PARSER.fullmatch(name):
        raise TaskError(
            f"{key}: expected the name of a parser, such as parse_log_pytest, got {name[:40]!r}; {ROW_REMEDY}"
        )
    return name


def _changed_tests(test_patch: str) -> list[str]:
    return [file for file in _CHANGED_FILE.findall(test_patch) if not file.endswith(_NOT_TEST_SUFFIXES)]


def _test_command(command: str, repo: str, test_patch: str) -> str:
    """Return the command followed by the files of the test patch, in the form that this repository's command
    expects.
    """
    files = _changed_tests(test_patch)
    if repo == "django/django":
        files = [file.removesuffix(".py").removeprefix("tests/").replace("/", ".") for file in files]
    return " ".join([command, *map(shlex.quote, files)])


def _test_files(test_patch: str) -> tuple[str, ...]:
    """Return the test files that exist after the patch is applied."""
    deleted = set(_DELETED_FILE.findall(test_patch))
    files = dict.fromkeys(_changed_tests(test_patch))
    return tuple(file for file in files if file not in deleted and posixpath.normpath(file) == file)


# --- SWE-bench: the classic thirteen keys; the fifth version's keys also say how the tests are run -------


def _swebench(row: DatasetRow, choice: ImageChoice) -> Task:
    instance_id, test_patch = row.text("instance_id"), row.text("test_patch")
    if row.object("image_assets").has("test_patch"):
        raise TaskError(
            "image_assets.test_patch: the tests need files from the network, which a patch cannot contain; such "
            "rows are unsupported and left out"
        )
    extra = row.metadata("environment_setup_commit", "image_assets", "language")
    if row.has("eval_script"):
        checks, extra["eval_script"] = _checks_by_script(row, test_patch)
        image = named_image(row.text("image"), choice, "image")
    else:
        checks = _checks_by_table(row, test_patch)
        image = instance_image(instance_id, choice)
    source = None
    if row.has("source"):  # rows made by Understudy have no image
        try:
            source = msgspec.convert(row.object("source").data, Sdist)
        except msgspec.ValidationError as error:
            raise TaskError(
                f"source: expected a pinned sdist (kind, name, version, sha256): {error}; {ROW_REMEDY}"
            ) from error
    return _make_task(row, checks, image=image, dataset="swebench", source=source, extra=extra)


def _checks_by_script(row: DatasetRow, test_patch: str) -> tuple[SuiteChecks, str | list[str]]:
    """Return the checks, and the script to store: in two parts if the row's own test patch separates them."""
    script = row.text("eval_script")
    phases = eval_script.split_script(script, WORKDIR)
    if phases.test_patch is None:
        raise TaskError(
            "eval_script: does not apply the test patch; expected it in a here-document for `git apply`: "
            f"{ROW_REMEDY}"
        )
    if phases.test_patch.strip() != test_patch.strip():
        raise TaskError(
            "eval_script: applies another test patch than the row's test_patch, expected the same; copy one to "
            "the other; until then the row is left out"
        )
    eval_type = row.text("eval_type", "pass_and_fail")
    if eval_type not in _ONLY_FAILURES_COUNT:
        raise TaskError(
            f"eval_type: expected {' or '.join(_ONLY_FAILURES_COUNT)}, got {eval_type[:40]!r}; {ROW_REMEDY}"
        )
    checks = SuiteChecks(
        parser=_parser_name(row.text("log_parser")),
        command=phases.command,
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=_test_files(test_patch),
        test_patch=test_patch,
        activate=phases.activate,
        before=phases.before,
        install=phases.install,
        only_failures_count=_ONLY_FAILURES_COUNT[eval_type],
    )
    head, separator, tail = script.partition(test_patch)
    return checks, [head, tail] if separator else script


def _checks_by_table(row: DatasetRow, test_patch: str) -> SuiteChecks:
    """Return the checks of a row without test commands, from the table in `recipes`."""
    repo = row.text("repo")
    parser, recipe = find_recipe(repo, row.text("version"))
    return SuiteChecks(
        parser=parser,
        command=_test_command(recipe.command, repo, test_patch),
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=_test_files(test_patch),
        test_patch=test_patch,
        activate="\n".join((_ACTIVATE, *recipe.env)),
        before="\n".join(recipe.before),
        install=recipe.install,
    )


# --- related datasets -------------------------------------------------------------------------------


def _swe_rebench(row: DatasetRow, choice: ImageChoice) -> Task:
    """Return the task of a SWE-rebench row: like SWE-bench's classic rows in version 1, with images of its own in
    version 2.
    """
    config = row.object("install_config")
    key = next((key for key in ("image_name", "docker_image") if row.has(key)), "")
    if not key:
        raise TaskError(
            "image_name: is missing, and docker_image too; expected the image to run the instance in: add one of "
            "the keys; until then the row is left out"
        )
    image = row.text(key)
    parser_key = "log_parser" if config.has("log_parser") else "parser"
    parser = config.text(parser_key)
    commands = config.lines("test_cmd")
    if not commands:
        raise TaskError(f"install_config.test_cmd: is empty; expected at least one command: {ROW_REMEDY}")
    repo, test_patch = row.text("repo"), row.text("test_patch")
    is_version_1 = "sweb.eval." in image  # images made in the same way as SWE-bench's
    directory = posixpath.basename(repo)
    if not is_version_1 and directory in ("", ".", ".."):
        raise TaskError(f"repo: expected OWNER/NAME, got {repo[:80]!r}; {ROW_REMEDY}")
    command = "\n".join(commands)
    checks = SuiteChecks(
        parser=_parser_name(parser, f"install_config.{parser_key}"),
        command=_test_command(command, repo, test_patch) if is_version_1 else command,
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=_test_files(test_patch),
        test_patch=test_patch,
        activate=_ACTIVATE if is_version_1 else eval_script.PIPEFAIL,
        install="\n".join(config.lines("install")) if is_version_1 else "",
    )
    workdir = WORKDIR if is_version_1 else f"/{directory}"
    return _make_task(row, checks, image=named_image(image, choice, key), dataset="swe-rebench", workdir=workdir)


def _swe_bench_live(row: DatasetRow, choice: ImageChoice) -> Task:
    """Return the task of a SWE-bench-Live row, which names an image and the commands that rebuild, test
    and print.
    """
    parser = row.text("log_parser").strip()
    if "\n" in parser:
        raise TaskError(
            f"log_parser: is a program ({parser.count(chr(10)) + 1} lines), which is not run, for security; "
            f"expected the name of a parser, such as pytest: {ROW_REMEDY}"
        )
    tests, prints = row.lines("test_cmds"), row.lines("print_cmds")
    if not tests:
        raise TaskError(f"test_cmds: is empty; expected at least one command: {ROW_REMEDY}")
    if prints:  # the log is printed by a later command; the exit code that counts is that of the tests
        tests = (*tests, "tests_ended=$?", *prints, "(exit $tests_ended)")
    test_patch = row.text("test_patch")
    checks = SuiteChecks(
        parser="parse_log_pytest" if parser.lower() == "pytest" else _parser_name(parser),
        command="\n".join(tests),
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=_test_files(test_patch),
        test_patch=test_patch,
        activate=eval_script.PIPEFAIL,
        install="\n".join(row.lines("rebuild_cmds")),
    )
    image = row.text("docker_image") if row.has("docker_image") else ""
    if "/sweb.eval.win." in image:
        raise TaskError(f"docker_image: {image[:80]!r} is for Windows; expected one for Linux: {ROW_REMEDY}")
    image = (
        named_image(image, choice, "docker_image")
        if image
        else instance_image(row.text("instance_id"), choice, "starryzhang")
    )
    return _make_task(row, checks, image=image, dataset="swe-bench-live")


def _multi_swe_bench(row: DatasetRow, choice: ImageChoice) -> Task:
    """Return the task of a Multi-SWE-bench row: a pull request, tested by /home/run.sh inside its image.

    The rows do not say how the tests' output is read, which is code of the dataset's harness. Only rows that name
    a parser in an added key, `log_parser`, are accepted.
    """
    org, name, number = row.text("org"), row.text("repo"), row.data.get("number")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise TaskError(
            f"number: expected a positive integer, the number of a pull request, got {str(number)[:80]!r}; "
            f"{ROW_REMEDY}"
        )
    for key, value in (("org", org), ("repo", name)):
        if not _REPOSITORY.fullmatch(value):
            raise TaskError(f"{key}: expected letters, digits and ._-, got {value[:80]!r}; {ROW_REMEDY}")
    if not row.has("log_parser"):
        raise TaskError(
            "log_parser: missing; rows of Multi-SWE-bench do not say how the output of tests is read. Add this "
            "key with the name of a parser of swebench that fits, such as parse_log_pytest; until then the row is "
            "left out"
        )
    # Tests that failed, were skipped or did not exist before the solution.
    fail_to_pass = [id for key in ("f2p_tests", "s2p_tests", "n2p_tests") for id in _test_ids(row, key)]
    if not fail_to_pass:
        raise TaskError(f"f2p_tests: {_NO_TEST_TO_FIX}")
    test_patch, workdir = row.text("test_patch"), f"/home/{name}"
    statement = "\n\n".join(_issues(row)) or row.text("title", "")
    if not statement.strip():
        raise TaskError(
            "resolved_issues: have no title or body, and title is empty; expected a problem statement for the "
            f"agent: {ROW_REMEDY}"
        )
    repo, base = f"{org}/{name}", row.object("base")
    return Task(
        instance_id=f"{org}__{name}-{number}",
        repo=repo,
        instruction=_instruction(repo, workdir, statement),
        source=ImageTree(base.text("sha") if base.has("sha") else ""),
        checks=SuiteChecks(
            parser=_parser_name(row.text("log_parser")),
            command="bash /home/run.sh",
            fail_to_pass=tuple(fail_to_pass),
            pass_to_pass=_test_ids(row, "p2p_tests"),
            files=_test_files(test_patch),
            test_patch=test_patch,
            activate=eval_script.PIPEFAIL,
        ),
        gold_patch=row.text("fix_patch"),
        workdir=workdir,
        image=named_image(f"mswebench/{org}_m_{name}:pr-{number}".lower(), choice, "org, repo"),
        meta={"dataset": "multi-swe-bench", **row.metadata("difficulty", "lang", "created_at")},
    )


def _test_ids(row: DatasetRow, key: str) -> tuple[str, ...]:
    """Return the ids of a map from ids to results, which is what the dataset has, or of a list."""
    return row.texts(key) if isinstance(row.data.get(key), list) else tuple(row.object(key).data)


def _issues(row: DatasetRow) -> list[str]:
    """Return the text of each issue that the pull request resolves, if it has one."""
    value: object = row.data.get("resolved_issues") or ()
    try:
        issues = msgspec.convert(value, list[dict[str, Any]])
    except msgspec.ValidationError as error:
        raise TaskError(
            f"resolved_issues: expected a list of objects, got {json_type(value)} ({error}); {ROW_REMEDY}"
        ) from error
    texts = ([issue.text(key, "") for key in ("title", "body")] for issue in map(DatasetRow, issues))
    return [text for parts in texts if (text := "\n\n".join(part for part in parts if part.strip()))]


def _swe_smith(row: DatasetRow, choice: ImageChoice) -> Task:
    """Return the task of a SWE-smith row: a bug was inserted into a repository, and its reverse is the
    solution.
    """
    bug = row.text("patch")
    try:
        gold = diffs.reverse(bug)
    except ValueError as error:
        raise TaskError(
            f"patch: cannot be reversed to get the solution: {error}; expected a unified diff of text files: "
            f"{ROW_REMEDY}"
        ) from error
    statement = row.text("problem_statement", "")
    if not statement.strip():
        raise TaskError(f"problem_statement: is empty; expected a text for the agent: {ROW_REMEDY}")
    fail_to_pass, pass_to_pass = row.texts("FAIL_TO_PASS"), row.texts("PASS_TO_PASS")
    if not fail_to_pass:
        raise TaskError(f"FAIL_TO_PASS: {_NO_TEST_TO_FIX}")
    files = dict.fromkeys(id.partition("::")[0] for id in (*fail_to_pass, *pass_to_pass))
    if not all(file.endswith(".py") for file in files):
        raise TaskError(
            "FAIL_TO_PASS, PASS_TO_PASS: expected ids of pytest, such as tests/test_a.py::test_b, got "
            f"{next(file for file in files if not file.endswith('.py'))[:80]!r}; how to run other tests is not in "
            "the row, but in SWE-smith, so it is left out"
        )
    repo = row.text("repo")
    return Task(
        instance_id=row.text("instance_id"),
        repo=repo,
        instruction=_instruction(repo, WORKDIR, statement),
        source=ImageTree(),
        setup_patch=bug,
        checks=SuiteChecks(
            parser="parse_log_pytest",
            command=f"pytest -rA --disable-warnings --color=no --tb=no -p no:cacheprovider {shlex.join(files)}",
            fail_to_pass=fail_to_pass,
            pass_to_pass=pass_to_pass,
            files=tuple(files),
            activate=_ACTIVATE,
        ),
        gold_patch=gold,
        workdir=WORKDIR,
        image=named_image(row.text("image_name"), choice, "image_name"),
        meta={"dataset": "swe-smith", **row.metadata("strategy", "created_at")},
    )


# --- the table -----------------------------------------------------------------------------------------


class TaskRowFormat(Struct, frozen=True):
    """The keys that identify a format, and the function that makes a task of its rows, or the reason why it is
    unsupported.

    `task` raises TaskError, which names the key but not the row's location.
    """

    name: str
    keys: tuple[str, ...]
    task: Callable[[DatasetRow, ImageChoice], Task] | str


FORMATS: tuple[TaskRowFormat, ...] = (
    TaskRowFormat("R2E-Gym", ("expected_output_json",), "their tests and how they are read are inside its images"),
    TaskRowFormat(
        "SWE-bench Pro",
        ("before_repo_set_cmd", "selected_test_files_to_run"),
        "the scripts that run and read its tests are not in them",
    ),
    TaskRowFormat("Multi-SWE-bench", ("org", "number", "fix_patch"), _multi_swe_bench),
    TaskRowFormat("SWE-rebench", ("install_config", "test_patch"), _swe_rebench),
    TaskRowFormat("SWE-bench-Live", ("test_cmds", "log_parser"), _swe_bench_live),
    TaskRowFormat("SWE-bench", ("base_commit", "test_patch"), _swebench),
    TaskRowFormat("SWE-smith", ("image_name", "patch", "FAIL_TO_PASS"), _swe_smith),
)
"""The first whose keys a row has is its format."""


def task_of(data: dict[str, Any], choice: ImageChoice = ImageChoice()) -> Task:  # noqa: B008
    """Return the task of a row in any of the formats. Raises TaskError without the row's location."""
    for format in FORMATS:
        if all(key in data for key in format.keys):
            if isinstance(format.task, str):
                supported = ", ".join(
                    row_format.name for row_format in FORMATS if not isinstance(row_format.task, str)
                )
                raise TaskError(
                    f"{format.name} rows are unsupported: {format.task}; give task records, or rows of {supported}"
                )
            task = format.task(DatasetRow(data), choice)
            records.check(task, format.name)
            return task
    expected = "; ".join(f"{format.name}: {', '.join(format.keys)}" for format in FORMATS)
    raise TaskError(f"unsupported row format; give rows with the keys of a task record, or of one of: {expected}")


def load_rows(
    rows: Iterable[LocatedRow],
    *,
    source: str,
    base: Path,
    choice: ImageChoice,
    wanted: Collection[str] | None = None,
) -> LoadedTasks:
    """Return the tasks of rows, which come with their locations; only the `wanted` ids if given.

    For our own records, every mistake raises TaskError; their directories are relative to `base`. Rows of other
    formats are refused one by one; TaskError is raised when none is left, or a row is not an object.
    """
    tasks: dict[str, Task] = {}
    refused: list[RefusedRow] = []
    empty = True
    for where, data in rows:
        empty = False
        if not isinstance(data, dict):
            raise TaskError(
                f"{where}: invalid task record: expected an object, got {json_type(data)}; write each task as one "
                "JSON object"
            )
        row: dict[str, Any] = data  # pyright: ignore[reportUnknownVariableType]
        instance_id = row.get("instance_id")
        name = instance_id if isinstance(instance_id, str) else ""
        if wanted is not None and name and name not in wanted:
            continue
        if any(key in row for key in ("instruction", "checks", "gold_patch")):
            task = records.record(row, where, base)
            if task.instance_id in tasks:
                raise TaskError(
                    f"{where}: instance_id: {task.instance_id!r} occurs twice, a row before this one has it too; "
                    "give each task an instance_id of its own"
                )
        else:
            try:
                task = task_of(row, choice)
                if task.instance_id in tasks:
                    raise TaskError(
                        "instance_id: occurs twice, so this row was left out; give each row one of its own"
                    )
            except TaskError as error:
                refused.append(RefusedRow(name[:150], where, str(error)))
                continue
        if wanted is None or task.instance_id in wanted:
            tasks[task.instance_id] = task
    if empty:
        raise TaskError(f"{source}: has no row, expected at least one; give a file with one JSON object a line")
    if not tasks and refused:
        raise TaskError(
            "\n".join(
                [
                    f"{source}: none of its rows can become a task; correct what each row's reason says",
                    *summarise_refusals(refused),
                ]
            )
        )
    return LoadedTasks(list(tasks.values()), tuple(refused))
