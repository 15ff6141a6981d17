"""Generates tasks from a repository's history: changes with tests that fail before the change and pass after it.

The agent gets the tree before a change, and is told the commit's message and which checks fail. The tests that
came with the change are hidden and decide the task; the rest of the change is the gold patch.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import posixpath
import re
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path, PurePosixPath
from typing import Any, cast

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.pytest_checks import PytestReport, run_pytest
from understudy.errors import SandboxError, TaskError
from understudy.sandbox.base import Sandbox, Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.generate.git_history import Change, Commit, History
from understudy.tasks.generate.ordered import ordered
from understudy.tasks.generate.package_instruction import (
    FailedCheck,
    failing_example,
    normalise_message,
    one_per_function,
)
from understudy.tasks.generate.requirements import pytest_options
from understudy.tasks.materialise import relative_path
from understudy.tasks.prepare import prepare, sandbox_spec
from understudy.types import Directory, PytestChecks, Task
from understudy.util.diffs import unified
from understudy.util.files import write_remedy

Progress = Callable[[int, int], None]
"""Called with how many tasks are made and how many commits were looked at."""

_WORKDIR = "/workspace"
_TIMEOUT_S = 300.0
_CHECK_TIMEOUT_S = 180.0
_MAX_FILES = 20
_MAX_LINES = 600
_SHOWN_CHECKS = 3
_MAX_BODY_CHARACTERS = 4000
_TEST_FILE = re.compile(r"(test_.*|.*_test)\.py")
_TEST_PARTS = frozenset(("test", "tests", "testing"))
_NO_CODE_PARTS = frozenset(("doc", "docs", "examples", "benchmarks"))
_ROOT_SCRIPTS = frozenset(("setup.py", "noxfile.py", "fabfile.py", "tasks.py", "conftest.py"))
# Settings that tell build backends where to write the version of a checkout.
_VERSION_FILES = (
    ("tool", "hatch", "build", "hooks", "vcs", "version-file"),
    ("tool", "setuptools_scm", "version_file"),
    ("tool", "setuptools_scm", "write_to"),
    ("tool", "pdm", "version", "write_to"),
)
# Lines of commit messages that are for maintainers and their tools, not for the agent.
_TRAILER = re.compile(
    r"(?mi)^(signed-off-by|co-authored-by|reviewed-by|change-id|cherry.picked.*|\(cherry picked).*$"
)


class HistoryTasks(Struct, frozen=True):
    """The generated tasks, newest change first, and the number of refused commits by reason."""

    tasks: list[Task]
    refused: dict[str, int]


class _Candidate(Struct, frozen=True):
    """A commit that may become a task: its test files, and its code before and after (text by path)."""

    commit: Commit
    tests: dict[str, str]
    before: dict[str, str]
    after: dict[str, str]

    @property
    def test_files(self) -> list[str]:
        """The files that pytest runs."""
        return sorted(path for path in self.tests if _TEST_FILE.fullmatch(posixpath.basename(path)))


async def make_from_history(
    history: History,
    name: str,
    count: int,
    *,
    trees: Path,
    packages: tuple[str, ...],
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    cache: Path,
    jobs: int,
    progress: Progress,
) -> HistoryTasks:
    """Return at most `count` tasks from the newest changes of the repository `name`; the result does not depend on
    `jobs`.

    Each task's tree is kept in its own directory below `trees`. `environment` contains the `packages`. Code of the
    repository runs only in sandboxes. Raises TaskError when no change can become a task.
    """
    commits = await asyncio.to_thread(history.commits)
    tasks: list[Task] = []
    refused: Counter[str] = Counter()

    async def attempt(commit: Commit) -> Task | str:
        try:
            candidate = await asyncio.to_thread(_candidate, history, commit)
            tree = trees / commit.parent[:16]
            try:
                await asyncio.to_thread(_write_tree, history, candidate, tree)
                task = await _task_of_commit(candidate, name, tree, packages, sandboxes, environment, cache)
            except BaseException:
                await asyncio.to_thread(shutil.rmtree, tree, ignore_errors=True)
                raise
        except (TaskError, SandboxError) as error:
            return str(error)
        return task

    looked_at = 0
    async with aclosing(ordered(iter(commits), attempt, max(1, jobs))) as results:
        async for result in results:
            looked_at += 1
            if isinstance(result, Task):
                tasks.append(result)
            else:
                refused[result] += 1
            progress(len(tasks), looked_at)
            if len(tasks) == count:
                break
    if not tasks:
        await asyncio.to_thread(_remove_if_empty, trees)
        reasons = "; ".join(f"{number} commits: {reason}" for reason, number in refused.most_common(5))
        raise TaskError(
            f"{name}: none of {looked_at} commits can become a task "
            f"({reasons or 'there are no commits with a parent'}); give its tests' requirements with "
            "--requirements if tests could not run, else another repository"
        )
    await asyncio.to_thread(_remove_others, trees, tasks)
    return HistoryTasks(tasks, dict(refused.most_common()))


def _remove_others(trees: Path, tasks: list[Task]) -> None:
    """Remove the trees of commits that were tried in advance but are not needed."""
    source_paths = {task.source.path for task in tasks if isinstance(task.source, Directory)}
    for tree in trees.iterdir():
        if str(tree) not in source_paths:
            shutil.rmtree(tree)


def _remove_if_empty(directory: Path) -> None:
    with suppress(OSError):  # missing, or with trees of an earlier file
        directory.rmdir()


def _candidate(history: History, commit: Commit) -> _Candidate:
    """Return a commit's changes as a candidate. Raises TaskError with the reason why it cannot become a task."""
    changes = history.changes(commit)
    tests = [change for change in changes if change.after and _is_test(change.path)]
    code = [change for change in changes if _is_code(change.path)]
    if not any(_TEST_FILE.fullmatch(posixpath.basename(change.path)) for change in tests):
        raise TaskError("changes no test file; expected at least one named test_*.py or *_test.py")
    if not any(change.path.endswith(".py") for change in code):
        raise TaskError("changes no code besides tests; expected at least one other .py file")
    if len(changes) > _MAX_FILES:
        raise TaskError(f"changes more than {_MAX_FILES} files; expected a smaller change")
    if any(change.mode in (b"120000", b"160000") for change in (*tests, *code)):
        raise TaskError(
            "changes a symbolic link or a submodule, which is unsupported; expected changes of regular files only"
        )
    if any(not change.path.isprintable() or set(change.path) & set('"\\') for change in (*tests, *code)):
        raise TaskError(
            'changes a file whose name a patch must quote; expected names of printable characters other than " '
            "and \\"
        )
    blobs = history.texts(blob for change in (*tests, *code) for blob in (change.before, change.after) if blob)

    def side(changed: list[Change], blob: Callable[[Change], str]) -> dict[str, str]:
        return {change.path: blobs[blob(change)] for change in changed if blob(change)}

    before, after = side(code, lambda change: change.before), side(code, lambda change: change.after)
    changed_lines = sum(line[:1] in "+-" for line in unified(before, after).splitlines() if line)
    if changed_lines > _MAX_LINES:
        raise TaskError(f"changes more than {_MAX_LINES} lines of code; expected a smaller change")
    return _Candidate(commit, side(tests, lambda change: change.after), before, after)


def _is_test(path: str) -> bool:
    parts = PurePosixPath(path).parts
    return (
        bool(_TEST_PARTS & set(parts[:-1])) or parts[-1] == "conftest.py" or bool(_TEST_FILE.fullmatch(parts[-1]))
    )


def _is_code(path: str) -> bool:
    """Return whether a file is code under test: not a test, documentation, or the repository's configuration."""
    parts = PurePosixPath(path).parts
    if _is_test(path) or parts[0].startswith(".") or parts[0] in _NO_CODE_PARTS:
        return False
    return len(parts) > 1 or (path.endswith(".py") and path not in _ROOT_SCRIPTS)


async def _task_of_commit(
    candidate: _Candidate,
    name: str,
    tree: Path,
    packages: tuple[str, ...],
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    cache: Path,
) -> Task:
    """Return the task of a commit. Raises TaskError unless its tests reliably fail before and pass after the
    change.
    """
    env = {"PYTHONPATH": f"{_WORKDIR}/src"} if (tree / "src").is_dir() else {}
    if options := pytest_options(environment):
        env["PYTEST_ADDOPTS"] = options
    gold = unified(candidate.before, candidate.after)
    digest = hashlib.sha256(f"{candidate.commit.id}\n{gold}".encode()).hexdigest()
    task = Task(
        instance_id=f"{name}__{candidate.commit.id[:10]}-{digest[:8]}",
        repo=name,
        instruction="",
        source=Directory(str(tree)),
        checks=PytestChecks(files={}, fail_to_pass=()),
        gold_patch=gold,
        workdir=_WORKDIR,
        env=env,
        packages=packages,
        meta={"commit": candidate.commit.id, "parent": candidate.commit.parent, "time": candidate.commit.time},
    )
    prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment))
    try:
        before = [await _run_tests(candidate, sandbox, gold=False) for _ in range(2)]
        after = [await _run_tests(candidate, sandbox, gold=True) for _ in range(2)]
        workdir = sandbox.workdir
    finally:
        await sandbox.close()
    if not any(outcome == "passed" for outcome in after[0].outcomes.values()):
        raise TaskError(
            "the commit's tests do not pass with it in this environment; give what they need with --requirements"
        )
    if before[0].outcomes != before[1].outcomes or after[0].outcomes != after[1].outcomes:
        raise TaskError("its tests are flaky: two runs ended differently; expected the same outcome each time")
    passed = sorted(id for id, outcome in after[0].outcomes.items() if outcome == "passed")
    broken = [id for id in passed if before[0].outcomes.get(id) != "passed"]
    if not broken:
        raise TaskError("no test fails without the commit and passes with it; expected at least one")
    failures = [FailedCheck(id, normalise_message(before[0].messages.get(id, ""), workdir)) for id in broken]
    still_passing = tuple(id for id in passed if id not in set(broken))
    checks = PytestChecks(
        files=candidate.tests, fail_to_pass=tuple(broken), pass_to_pass=still_passing, timeout_s=_CHECK_TIMEOUT_S
    )
    return replace(task, checks=checks, instruction=_instruction(name, candidate.commit, failures))


async def _run_tests(candidate: _Candidate, sandbox: Sandbox, *, gold: bool) -> PytestReport:
    """Return the report of the commit's tests on the tree before it, or with `gold` on the tree after it."""
    files = {**candidate.tests, **(candidate.after if gold else {})}
    removed = [path for path in candidate.before if gold and path not in candidate.after]
    try:
        for path, text in files.items():
            await sandbox.write(posixpath.join(sandbox.workdir, path), text.encode())
        if removed:
            await sandbox.run(["rm", "-f", "--", *removed], timeout_s=60, cwd=sandbox.workdir)
        report = await run_pytest(sandbox, candidate.test_files, timeout_s=_TIMEOUT_S)
    finally:
        await sandbox.reset()
    if report.timed_out:
        raise TaskError(f"its tests did not end within {_TIMEOUT_S:.0f} s, the maximum; expected faster ones")
    return report


def _write_tree(history: History, candidate: _Candidate, tree: Path) -> None:
    """Write the files before a commit, and those that an editable install of the package would add."""
    commit = candidate.commit
    shutil.rmtree(tree, ignore_errors=True)
    history.write_tree(commit.parent, tree)
    project = tree / "pyproject.toml"
    try:
        data = {} if project.is_symlink() else tomllib.loads(project.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    name = _value(data, "project", "name")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        return
    version = re.sub(r"^\D*", "", history.latest_tag(commit.parent)) or "0.0.0"
    root = tree / "src" if (tree / "src").is_dir() else tree
    about = root / f"{re.sub(r'[-_.]+', '_', name)}.egg-info" / "PKG-INFO"
    _add_file(tree, about, f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for keys in _VERSION_FILES:
        path = _value(data, *keys)
        if isinstance(path, str):
            file = tree / relative_path(path, "pyproject.toml")
            _add_file(tree, file, f"version = __version__ = {version!r}\nversion_tuple = ()\n")


def _add_file(tree: Path, file: Path, text: str) -> None:
    """Write a file that does not exist in the tree, without following links, which the repository controls."""
    if os.path.lexists(file) or file.parent.resolve() != tree.resolve() / file.parent.relative_to(tree):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TaskError(
            f"its {file.relative_to(tree)} cannot be written: {error.strerror}; "
            f"{write_remedy(error, 'check the permissions of the directory of --output')}"
        ) from error


def _value(data: dict[str, Any], *keys: str) -> object:
    """Return the value under nested keys of a TOML document; None if there is none."""
    value: Any = data
    for key in keys:
        value = cast("dict[str, Any]", value).get(key) if isinstance(value, dict) else None
    return value


def _instruction(name: str, commit: Commit, failures: list[FailedCheck]) -> str:
    functions = one_per_function(failures)
    number = len(functions)
    body = re.sub(r"\n{3,}", "\n\n", _TRAILER.sub("", commit.body)).strip()[:_MAX_BODY_CHARACTERS]
    checks = "One check of it fails" if number == 1 else f"{number} checks of it fail"
    parts = [
        f"# {name}: {commit.subject}",
        *([body] if body else []),
        f"The above is a change to {name} that this tree does not have yet. {checks} now:",
        *(failing_example(at, function) for at, function in enumerate(functions[:_SHOWN_CHECKS], start=1)),
    ]
    if number > _SHOWN_CHECKS:
        parts.append(f"and {number - _SHOWN_CHECKS} more.")
    parts.append(
        "Make the change in the source, so that these checks pass and all that works now goes on working. The "
        "checks themselves are not in this tree."
    )
    return "\n\n".join(parts) + "\n"
