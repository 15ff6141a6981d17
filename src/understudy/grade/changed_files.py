"""Reads the files that a patch changes, in full, before and after the patch, for the audit."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from msgspec import Struct

from understudy.tasks.patch import MAX_PATCH_BYTES
from understudy.tasks.prepare import git_environment, git_program
from understudy.util.diffs import FileDiff, parse_diff

_GIT_TIMEOUT_S = 60.0
_MAX_LINES = 100_000
_MAX_CACHED_PATCH_BYTES = 256 << 10


class PatchedFile(Struct, frozen=True):
    """One file of a patch under its new path; `before` is None for a new file, `after` for a deleted one."""

    path: str
    before: bytes | None
    after: bytes | None


class PatchedFiles(Struct, frozen=True):
    """The files of a patch. `exact` if git applied it as it is, and to these files only."""

    files: tuple[PatchedFile, ...]
    exact: bool


def changed_files(patch: bytes, tree: Path | None) -> PatchedFiles:
    """Return the files that a patch changes, with their contents before and after. Raises DiffError.

    Without the task's tree, or if git cannot apply the patch to it as it is (the grader has less strict ways), the
    contents are only what the patch's hunks show. A grading asks several times; small patches are remembered.
    """
    return _cached_files(patch, tree) if len(patch) <= _MAX_CACHED_PATCH_BYTES else _read_files(patch, tree)


def _read_files(patch: bytes, tree: Path | None) -> PatchedFiles:
    files = parse_diff(patch)
    if not files:
        return PatchedFiles((), exact=True)
    with tempfile.TemporaryDirectory(prefix="understudy-audit-") as directory:
        root = Path(directory, "tree")
        root.mkdir()
        before = {path: _read(tree, path) for file in files for path in file.paths} if tree else {}
        for path, content in before.items():
            if content is not None:
                target = Path(root, os.fsdecode(path))
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
        applied = (tree is not None or all(file.is_new for file in files)) and _apply(patch, root)
        patched_paths = {bytes(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
        exact = applied and patched_paths == {file.new_path for file in files if file.new_path}
        patched = tuple(
            PatchedFile(
                os.fsdecode(file.new_path or min(file.paths)),
                before.get(file.old_path or b""),
                _read(root, file.new_path) if file.new_path else None,
            )
            if applied
            else _file_of_hunks(file)
            for file in files
        )
    return PatchedFiles(patched, exact)


@lru_cache(maxsize=16)
def _cached_files(patch: bytes, tree: Path | None) -> PatchedFiles:
    return _read_files(patch, tree)


def _apply(patch: bytes, root: Path) -> bool:
    """Return whether git could apply a patch to the files below `root`. It follows no link and runs nothing of
    theirs.
    """
    env = git_environment(root / ".git", root)
    del env["GIT_DIR"], env["GIT_WORK_TREE"]
    env["GIT_CEILING_DIRECTORIES"] = str(root.parent)
    completed = subprocess.run(
        [git_program(), "apply", "-p1", "--whitespace=nowarn"],
        cwd=root,
        env=env,
        input=patch,
        capture_output=True,
        check=False,
        timeout=_GIT_TIMEOUT_S,
    )
    return completed.returncode == 0


def _read(root: Path, path: bytes) -> bytes | None:
    """Return a regular file below `root`, None if there is none; links are not followed anywhere on the way."""
    parts = [part for part in os.fsdecode(path).split("/") if part]
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for number, part in enumerate(parts, 1):
            flags = os.O_DIRECTORY if number < len(parts) else os.O_NONBLOCK
            child = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = child
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        with os.fdopen(os.dup(descriptor), "rb") as file:
            return file.read(MAX_PATCH_BYTES)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _file_of_hunks(file: FileDiff) -> PatchedFile:
    path = os.fsdecode(file.new_path or min(file.paths))
    before = None if file.is_new else _hunk_side(file, b" -\t")
    return PatchedFile(path, before, _hunk_side(file, b" +\t") if file.new_path else None)


def _hunk_side(file: FileDiff, signs: bytes) -> bytes:
    """Return one side of all hunks, padded with empty lines so that each has its line number in the new file."""
    lines: list[bytes] = []
    for hunk in file.hunks:
        lines += [b""] * (min(hunk.new_start, _MAX_LINES) - 1 - len(lines))
        lines += [line[1:] for line in hunk.lines if not line or line[:1] in signs]
    return b"".join(line + b"\n" for line in lines)
