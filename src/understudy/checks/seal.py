"""Protects hidden test files: writes them again after the install, makes them read-only where possible, and
compares them at the end.

Code of the patch runs during the install. Files that it put in place of a hidden file, or beside one so that they
would be imported first, are removed before the tests start.
"""

from __future__ import annotations

import contextlib
import posixpath
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from understudy.checks.base import CheckResult
from understudy.errors import GraderError
from understudy.sandbox.base import Sandbox
from understudy.types import Evidence, Integrity, PytestChecks, SuiteChecks, Task, is_solved
from understudy.util.diffs import parse_diff
from understudy.util.files import tar_of

HiddenFiles = Mapping[str, bytes | None]
"""The content of each hidden file by its path in the tree; None for one that the task's test patch deletes."""

_TIMEOUT_S = 120.0
_FILE_BYTES = 64 << 20

# A shell script; its arguments are hidden paths. It removes what is in the way of their directories, and compiled
# versions of the tests, because Python may use those without looking at the source.
_CLEAR = r"""
set -eu
for path; do
  above=. rest=$path
  while [ "$rest" != "${rest#*/}" ]; do
    above=$above/${rest%%/*} rest=${rest#*/}
    [ ! -L "$above" ] && [ -d "$above" ] || { rm -rf "$above"; mkdir "$above"; }
    [ -r "$above" ] && [ -w "$above" ] && [ -x "$above" ] || chmod u+rwx "$above"
  done
  [ ! -L "$path" ] && [ ! -d "$path" ] || rm -rf "$path"
  [ ! -e "$above/__pycache__" ] || { chmod -R u+rwx "$above/__pycache__"; rm -rf "$above/__pycache__"; }
done
"""


async def read_hidden(sandbox: Sandbox, task: Task) -> HiddenFiles:
    """Read the hidden files in a sandbox where they were applied, before code of the patch has run there.

    Raises SandboxError, or GraderError when one is missing.
    """
    if isinstance(task.checks, PytestChecks):
        return {posixpath.normpath(name): text.encode() for name, text in task.checks.files.items()}
    if not isinstance(task.checks, SuiteChecks):
        return {}
    files: dict[str, bytes | None] = {}
    for file in parse_diff(task.checks.test_patch.encode(errors="surrogateescape")):
        if file.old_path is not None:
            files.setdefault(file.old_path.decode(errors="surrogateescape"), None)
        if file.new_path is not None:
            path = file.new_path.decode(errors="surrogateescape")
            try:
                files[path] = await sandbox.read(posixpath.join(sandbox.workdir, path), limit=_FILE_BYTES)
            except FileNotFoundError as error:
                raise GraderError(
                    f"task {task.instance_id}: checks.test_patch was applied, but {path}, which it writes, "
                    "cannot be found; expected a regular file, or a link to a file of the tree: add the link's "
                    "target to checks.test_patch, or remove the link"
                ) from error
    return files


async def list_tree(sandbox: Sandbox) -> frozenset[str]:
    """Return the paths in the tree, without those in `.git`. Raises SandboxError, GraderError."""
    listing = await sandbox.run(
        ["find", ".", "-name", ".git", "-prune", "-o", "-print0"], timeout_s=_TIMEOUT_S, cwd=sandbox.workdir
    )
    if listing.exit_code != 0 or listing.truncated:
        problem = (
            "the list is longer than the sandbox's output limit"
            if listing.truncated
            else (listing.stderr[-300:].decode(errors="replace").strip() or f"it did not end in {_TIMEOUT_S:g} s")
        )
        raise GraderError(
            f"the files of the tree could not be listed: {problem}; check that the task's image has "
            "`find` and a shell"
        )
    names = listing.stdout.split(b"\0")
    return frozenset(name.removeprefix(b"./").decode(errors="surrogateescape") for name in names if name)


async def rewrite_hidden(
    sandbox: Sandbox, files: HiddenFiles, before: frozenset[str], is_intruder: Callable[[str], bool]
) -> None:
    """Write the hidden files again after an install, and remove new files that would influence the tests.

    `before` are the paths in the tree before the install; `is_intruder` returns whether a new path must be
    removed. Raises SandboxError, GraderError.
    """
    if files:
        await _run(sandbox, ["/bin/sh", "-c", _CLEAR, "sh", *files], b"")
    new = sorted(await list_tree(sandbox) - before - files.keys())
    intruders = [path for path in new if is_intruder(path)]
    if intruders:
        await _run(sandbox, ["rm", "-rf", "--", *intruders], b"")
    changed = await changed_files(sandbox, files)
    if deleted_paths := [path for path in changed if files[path] is None]:
        await _run(sandbox, ["rm", "-rf", "--", *deleted_paths], b"")
    if hidden_files := {path: content for path in changed if (content := files[path]) is not None}:
        await _run(sandbox, ["tar", "--unlink-first", "-x", "-f", "-"], tar_of(hidden_files))


async def changed_files(sandbox: Sandbox, files: HiddenFiles) -> list[str]:
    """Return the hidden files that have changed. Raises SandboxError."""
    changed: list[str] = []
    for path, content in files.items():
        current: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            current = await sandbox.read(posixpath.join(sandbox.workdir, path), limit=_FILE_BYTES)
        if current != content:
            changed.append(path)
    return changed


async def with_unchanged(sandbox: Sandbox, files: HiddenFiles, result: CheckResult) -> CheckResult:
    """Return `result`, but as forged if a hidden file has changed. Raises SandboxError."""
    if not is_solved(result.verdict.reward) or not (changed := await changed_files(sandbox, files)):
        return result
    reason = f"{len(changed)} hidden files were changed while the tests ran: {changed[0]}"
    integrity = Integrity("forged", reason, tuple(Evidence(rule="sealed", path=path) for path in changed[:20]))
    return replace(result, verdict=replace(result.verdict, reward=0.0, reason=reason, integrity=integrity))


async def _run(sandbox: Sandbox, argv: list[str], stdin: bytes) -> None:
    completed = await sandbox.run(argv, timeout_s=_TIMEOUT_S, cwd=sandbox.workdir, stdin=stdin)
    if completed.exit_code != 0:
        ending = f"did not end in {_TIMEOUT_S:g} s" if completed.timed_out else f"exit code {completed.exit_code}"
        message = completed.stderr[-500:].decode(errors="replace").strip()
        raise GraderError(
            f"the hidden files could not be written ({argv[0]}: {ending}): {message}; check in the task's image "
            "that the sandbox's user may write in the tree, and that it has tar and rm"
        )
