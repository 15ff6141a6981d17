"""The gate: decides which parts of a patch may be applied for grading. It only reads the patch and runs
nothing.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from msgspec import Struct

from understudy.checks.pytest_checks import deciding_files
from understudy.errors import TaskError
from understudy.grade.scratch import scratch_files
from understudy.grade.shadows import TestImports, normalised_path
from understudy.tasks.patch import MAX_PATCH_BYTES, NO_PATCH, show_path
from understudy.types import PytestChecks, SuiteChecks, Task
from understudy.util.diffs import DiffError, FileDiff, parse_diff

# Files that decide how tests are found, run and imported; an agent may change them only if the gold patch does.
# The audit reports each one that was dropped: a new name here needs a rule in `_steering` of grade/audit.py, or
# every patch that touches such a file is suspicious.
_PYTEST_FILES = ("conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg")
_PROTECTED = frozenset(
    (*_PYTEST_FILES, "setup.py", "pyproject.toml", ".coveragerc", ".gitattributes", "__pycache__", "pyvenv.cfg")
)
_INSTALL_STEERS = re.compile(r"(?:(?:site|user)customize|conftest)(?:\..*)?|.*\.pth")
_PROTECTED_LIKE = re.compile(
    r"(?:(?:site|user)customize|conftest)(?:\..*)?|"
    r".*\.(?:pth|pyc|pyo|egg|egg-link|egg-info|dist-info|so|pyd|dylib|dll)"
)
_TEST_DIRECTORY = re.compile(r"((?:.*/)?(?:tests?|testing)/)[^/]*(?:/.*)?")
_NAMED_AS_TEST = re.compile(r"(?:.*/)?(?:test_[^/]*|[^/]*_test)\.\w+")
_FILE_MODES = frozenset({b"100644", b"100755"})
_FORBIDDEN_MODES = {b"120000": "a symbolic link", b"160000": "a submodule"}


class GatedPatch(Struct, frozen=True):
    """The result of the gate for a patch.

    `patch` is what may be applied; `dropped` are the paths whose changes were removed from it. If `refused` is not
    empty, it is the reason why nothing may be applied, and the reward is 0. `steering` are those of the dropped
    paths that decide how tests run, with their changes in the patch.
    """

    patch: bytes
    dropped: tuple[str, ...] = ()
    refused: str = ""
    steering: tuple[str, ...] = ()


def gate(patch: bytes, task: Task, tree: Path) -> GatedPatch:
    """Return the part of a patch that may be applied when it is graded. `tree` is the task's prepared tree,
    without any patch.

    Links, submodules, other file modes and paths outside of the tree refuse the whole patch. Changes of files that
    decide how tests run are dropped unless the gold patch changes the same file. Also dropped are changes of the
    checks' own files and of everything in their directory of tests, which they may import; new files that are
    named like tests; new files that would be imported in place of what the tests import (see `shadows`); and
    scratch files that nothing names (see `scratch`).
    """
    if patch.startswith(NO_PATCH):
        return GatedPatch(b"", refused=patch.removeprefix(NO_PATCH).decode(errors="replace").strip())
    if len(patch) > MAX_PATCH_BYTES:
        return GatedPatch(b"", refused=f"the patch is larger than {MAX_PATCH_BYTES} bytes")
    try:
        files = parse_diff(patch)
    except DiffError as error:
        return GatedPatch(b"", refused=f"the patch cannot be read: {error}")
    if patch.strip() and not files:
        return GatedPatch(b"", refused="the patch cannot be read: no file is changed in it")
    allowed = gold_paths(task)
    checks, tests = _hidden_files_and_directories(task)
    imports = TestImports(task, tree, checks, tests, allowed)
    programs = _programs(task) - allowed
    scratch = scratch_files(files, task, tree, allowed)
    parts: list[bytes] = []
    dropped: list[str] = []
    steering: list[str] = []
    for file in files:
        if refused := _refusal(file):
            return GatedPatch(b"", refused=refused)
        paths = [path.decode(errors="surrogateescape") for path in sorted(file.paths)]
        touches_checks = any(path in programs or _overlaps_checks(path, checks) for path in paths)
        disallowed = [path for path in paths if path not in allowed]
        new = [path for path in disallowed if file.is_new or not _exists(tree, path)]
        touches_tests = any(
            normalised_path(path).startswith(tuple(map(normalised_path, tests))) for path in disallowed
        ) or any(_NAMED_AS_TEST.fullmatch(path) for path in new)
        protected = [path for path in disallowed if is_protected(path) or _leads_through_link(tree, path)]
        protected += [path for path in new if imports.is_replaced_by(path)]
        if touches_checks or touches_tests or protected or not scratch.isdisjoint(paths):
            dropped += [show_path(path) for path in sorted(file.paths)]
            steering += protected
        else:
            parts.append(file.text)
    return GatedPatch(b"".join(parts), tuple(dropped), steering=tuple(steering))


def intruder_predicate(task: Task, tree: Path) -> Callable[[str], bool]:
    """Return a function that decides whether a path created by an install would influence the tests or what they
    import.

    `tree` is the task's prepared tree, without any patch. What the tests import is read when it is first needed,
    since most tasks install nothing. The function raises TaskError when a patch of the task cannot be parsed.
    """

    @cache
    def imports() -> tuple[frozenset[str], TestImports]:
        allowed = gold_paths(task)
        return allowed, TestImports(task, tree, *_hidden_files_and_directories(task), allowed)

    def is_intruder(path: str) -> bool:
        parts = normalised_path(path).split("/")
        steers = any(part in _PYTEST_FILES or _INSTALL_STEERS.fullmatch(part) for part in parts)
        allowed, imported = imports()
        return path not in allowed and (steers or imported.is_replaced_by(path))

    return is_intruder


def _refusal(file: FileDiff) -> str:
    """Return why a change refuses the whole patch, or ""."""
    name = show_path(min(file.paths))
    for mode in sorted(file.modes - _FILE_MODES):
        return f"{name} is {_FORBIDDEN_MODES.get(mode, f'of mode {mode.decode()}')}"
    for path in file.paths:
        parts = path.split(b"/")
        if path.startswith(b"/") or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
            return f"{show_path(path)} is not a path inside the tree"
        if any(part.lower() == b".git" for part in parts):
            return f"{show_path(path)} is inside a git directory"
    return ""


def is_protected(path: str) -> bool:
    """Return whether a part of a path names a file that decides how tests are found, run and imported."""
    return any(part in _PROTECTED or _PROTECTED_LIKE.fullmatch(part) for part in normalised_path(path).split("/"))


def _exists(tree: Path, path: str) -> bool:
    """Return whether the tree has something at `path`. A renamed file's header does not say that it is new."""
    try:
        (tree / path).lstat()
    except (OSError, ValueError):
        return False
    return True


def _leads_through_link(tree: Path, path: str) -> bool:
    """Return whether a directory above `path` is a link in the tree, so that the file would be written
    elsewhere.
    """
    try:
        return any((tree / parent).is_symlink() for parent in Path(path).parents if parent != Path())
    except (OSError, ValueError):
        return True


def _hidden_files_and_directories(task: Task) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the files of the hidden tests, and the directories of tests that contain the deciding ones.

    The files replace files of the tree; the directories are the innermost ones, with a slash at the end.
    """
    match task.checks:
        case PytestChecks() as checks:
            files = tests = {*checks.files, *deciding_files(checks)}
        case SuiteChecks() as checks:
            ids = (*checks.fail_to_pass, *checks.pass_to_pass)
            files = {*checks.files, *paths_of(checks.test_patch, f"task {task.instance_id}: checks.test_patch")}
            tests = {*checks.files, *(file for id in ids if (file := id.partition("::")[0]).endswith(".py"))}
        case _:
            return frozenset(), ()
    matches = (_TEST_DIRECTORY.fullmatch(posixpath.normpath(file)) for file in tests)
    return frozenset(map(posixpath.normpath, files)), tuple({match[1] for match in matches if match})


def _programs(task: Task) -> frozenset[str]:
    """Return the paths that a suite's commands name, such as a test runner in the tree."""
    if not isinstance(task.checks, SuiteChecks):
        return frozenset()
    tokens = f"{task.checks.before} {task.checks.install} {task.checks.command}".split()
    names = (word.strip("'\"").removeprefix(task.workdir + "/").partition("::")[0] for word in tokens)
    return frozenset(posixpath.normpath(name) for name in names if name)


def _overlaps_checks(path: str, checks: frozenset[str]) -> bool:
    """Return whether `path` is a file of the checks, is below one, or replaces one of their parent directories."""
    return any(path == check or path.startswith(check + "/") or check.startswith(path + "/") for check in checks)


def gold_paths(task: Task) -> frozenset[str]:
    """Return the paths that the gold patch names. Raises TaskError when it cannot be parsed."""
    return paths_of(task.gold_patch, f"task {task.instance_id}: gold_patch")


def paths_of(patch: str, label: str, *, new: bool = False) -> frozenset[str]:
    """Return the paths that a patch of the task itself names, or only those of new files.

    Raises TaskError, with `label` as the patch's name, if it cannot be parsed.
    """
    try:
        files = parse_diff(patch.encode(errors="surrogateescape"))
    except DiffError as error:
        raise TaskError(f"{label} is not a valid unified diff: {error}; correct it in the task") from error
    selected = (file for file in files if file.is_new or not new)
    return frozenset(path.decode(errors="surrogateescape") for file in selected for path in file.paths)
