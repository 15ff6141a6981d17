"""Extracts the agent's changes as a patch, byte for byte, with the task's pristine git directory.

Nothing that the agent wrote is executed or trusted: not its `.git`, its configuration, its attributes or its
ignore rules. In a sandbox that shows this machine's programs, this machine's git runs inside. In a container the
agent may have replaced every program, so the changes are read from outside, and this machine's git makes a patch
of them, from blobs in an index with nothing checked out.

If the changes cannot be read (a file is too large, or there are too many), the result is a patch that says so in
its first line, and that the gate refuses.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import subprocess
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from understudy.errors import GraderError
from understudy.sandbox.base import Sandbox, TreeChanges
from understudy.tasks.prepare import GIT_MOUNT, git_environment, git_program

MAX_PATCH_BYTES = 16 << 20
"""The size limit of a patch, and of each changed file."""

NO_PATCH = b"understudy: no patch: "
"""The start of bytes that stand in place of a patch and say why there is none."""

_EXTRACT_TIMEOUT_S = 60.0
_LARGE_FILES_EXIT_CODE = (
    65  # the script's exit code for files that are too large; it then lists them, and all changed files
)

# A single run does everything. First come names and modes that git cannot store: special files count as absent,
# unreadable ones as their content, and a nested `.git` is removed, so that the files around it are ordinary files.
# New files are added before changed ones, because otherwise git fails on a file that became a directory.
_EXTRACT_SCRIPT = r"""
set -eu
work=$1 git=$2 pristine=$3 limit=$4
chmod u+rwx /dev/shm "${TMPDIR:-/tmp}" 2>/dev/null || true  # both are the agent's to close
base=/dev/shm; [ -w "$base" ] || base=${TMPDIR:-/tmp}
scratch=$base/$5
trap 'rm -rf "$scratch"' EXIT
cp -R "$pristine/scratch" "$scratch"
cd "$work" 2>/dev/null && [ -r . ] && [ -w . ] || { mkdir -p "$work"; chmod u+rwx "$work"; cd "$work"; }
find . -mindepth 1 \( -path ./.git -prune \) -o \
  \( -iname .git -type d -exec chmod -R u+rwX {} \; -exec rm -rf {} \; -prune \) -o \
  \( \( -iname .git -o ! -type f ! -type d ! -type l \) -exec rm -f {} + \) -o \
  \( -type d ! -perm -u=rwx -exec chmod u+rwx {} \; \) -o \
  \( -type f ! -perm -u=r -exec chmod u+r {} \; -false \) -o \
  \( -type f -size +"$limit"c -print0 \) >"$scratch/large"
export GIT_DIR="$pristine" GIT_WORK_TREE="$work" GIT_INDEX_FILE="$scratch/index"
export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$pristine/objects"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1 HOME=/nonexistent LC_ALL=C
"$git" ls-files -z --others --exclude-from="$pristine/info/ignored" >"$scratch/new"
if [ -s "$scratch/large" ]; then
  cat "$scratch/large"; printf '\0'; cat "$scratch/new"
  "$git" update-index -q --refresh >/dev/null || true
  "$git" diff-files -z --name-only --diff-filter=d
  exit 65
fi
"$git" update-index -q --really-refresh --add --replace -z --stdin <"$scratch/new" >/dev/null
"$git" add --update
"$git" diff --cached --binary --full-index --no-renames --no-ext-diff --no-textconv --no-color \
  --src-prefix=a/ --dst-prefix=b/ HEAD --
"""

_DELETED_ENTRY = b"0 " + b"0" * 40


async def extract_patch(sandbox: Sandbox, pristine: Path) -> bytes:
    """Return the difference between the task's tree and the sandbox's working directory as a git patch; empty if
    equal.

    `pristine` is the task's pristine git directory (`PreparedTask.git`). Files that the task's own `.gitignore`
    files ignore are left out, and so are Python's caches. Raises ConfigError when git is not installed,
    GraderError when it fails, SandboxError when the sandbox broke.
    """
    base = PristineRepository(pristine)
    try:
        delta = await sandbox.read_changes(file_limit=MAX_PATCH_BYTES, ignored=base.ignored)
        if delta is None:
            return await _extract_inside(sandbox)
        if delta.refused:
            return _no_patch(delta.refused)
        patch = await asyncio.to_thread(base.patch, delta, limit=MAX_PATCH_BYTES)
    except GitTimeout:
        return _no_patch(f"the changes could not be read in {_EXTRACT_TIMEOUT_S:.0f} s")
    if len(patch) > MAX_PATCH_BYTES:
        return _no_patch(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
    return patch


async def _extract_inside(sandbox: Sandbox) -> bytes:
    """Return the patch, made by this machine's git inside a sandbox that shows it."""
    git = git_program()
    pristine = sandbox.locate(GIT_MOUNT)
    for limit in (MAX_PATCH_BYTES, 1 << 62):
        completed = await sandbox.run(
            ["/bin/sh", "-c", _EXTRACT_SCRIPT, "sh", sandbox.workdir, git, pristine, str(limit), scratch_name()],
            timeout_s=_EXTRACT_TIMEOUT_S,
            cwd="/",
            reveal=True,
        )
        if completed.exit_code != _LARGE_FILES_EXIT_CODE:
            break
        large, _, changed = completed.stdout.partition(b"\0\0")
        oversized = {path.removeprefix(b"./") for path in large.split(b"\0")} & set(changed.split(b"\0"))
        if oversized:
            return _no_patch(f"{show_path(min(oversized))} is larger than {MAX_PATCH_BYTES} bytes")
    if completed.timed_out:
        return _no_patch(f"the changes could not be read in {_EXTRACT_TIMEOUT_S:.0f} s")
    if b"No space left on device" in completed.stderr:
        return _no_patch("the changes fill the sandbox's disk")
    if completed.exit_code:
        message = completed.stderr.decode(errors="replace").strip()
        raise GraderError(
            "the agent's patch could not be extracted from the sandbox: expected git to end with exit code 0, got "
            f"{completed.exit_code}: {message[-2000:]}; check the sandbox with `understudy doctor`, then run the "
            "same command again"
        )
    if completed.truncated or len(completed.stdout) > MAX_PATCH_BYTES:
        return _no_patch(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
    return completed.stdout


def scratch_name() -> str:
    """Return an unguessable name for a directory in a sandbox, so that nothing can exist under it beforehand."""
    return f"understudy-{secrets.token_hex(16)}"


def _no_patch(reason: str) -> bytes:
    return NO_PATCH + reason.encode(errors="replace") + b"\n"


def show_path(path: bytes) -> str:
    """Return a path for a message, quoted."""
    return repr(path.decode(errors="replace"))


# --- a container's changes, made into a patch by this machine's git -------------------------------------


class GitTimeout(Exception):
    """Git did not end in time."""


class PristineRepository:
    """A task's pristine git directory, and the content of its only commit."""

    def __init__(self, git: Path) -> None:
        self._git = git

    @cached_property
    def base(self) -> dict[bytes, tuple[bytes, bytes]]:
        """The (mode, blob id) of every file, by path."""
        files: dict[bytes, tuple[bytes, bytes]] = {}
        for line in self._run("ls-tree", "-r", "-z", "HEAD").split(b"\0"):
            if line:
                about, _, path = line.partition(b"\t")
                mode, _, blob = about.split(b" ")
                files[path] = (mode, blob)
        return files

    def ignored(self, paths: Sequence[bytes]) -> frozenset[bytes]:
        """Return the new paths that the task's ignore rules, or the rules for caches, keep out of a patch."""
        new = [path for path in paths if path not in self.base]
        if not new:
            return frozenset()
        rules = f"core.excludesFile={self._git}/info/ignored"
        command = ("-c", rules, "check-ignore", "--no-index", "-z", "--stdin")
        stdin = b"".join(b"./" + path + b"\0" for path in new)
        with tempfile.TemporaryDirectory() as empty:  # git exits with 1 if it ignores none of the paths
            output = self._run(*command, stdin=stdin, tree=Path(empty), exit_codes=(0, 1))
        return frozenset(path.removeprefix(b"./") for path in output.split(b"\0") if path)

    def patch(self, delta: TreeChanges, *, limit: int) -> bytes:
        """Return the patch from the base to the changed tree, truncated after `limit` + 1 bytes.

        Raises GitTimeout, GraderError when git fails.
        """
        current_files = {path: blob for path, blob in self.base.items() if not _is_deleted(path, delta)}
        for path, entry in delta.files.items():
            current_files[path] = (entry.mode.encode(), _blob_id(entry.data))
        parents = _parents(delta.files)
        current_files = {
            path: blob
            for path, blob in current_files.items()
            if path in delta.files or (path not in parents and not _below(path, delta.files))
        }
        deleted = [path for path in self.base if path not in current_files]
        changed = [path for path, blob in current_files.items() if self.base.get(path) != blob]
        if not deleted and not changed:
            return b""
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            (scratch / "objects").mkdir()
            (scratch / "tree").mkdir()
            (scratch / "index").write_bytes((self._git / "scratch" / "index").read_bytes())
            for name, data in {current_files[path][1]: delta.files[path].data for path in changed}.items():
                _write_blob(scratch / "objects", name.decode(), data)
            lines = [_DELETED_ENTRY + b"\t" + path for path in deleted]
            lines += [current_files[path][0] + b" " + current_files[path][1] + b"\t" + path for path in changed]
            env = {
                "GIT_INDEX_FILE": str(scratch / "index"),
                "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._git / "objects"),
            }
            tree = scratch / "tree"
            self._run("update-index", "-z", "--index-info", stdin=b"\0".join((*lines, b"")), tree=tree, env=env)
            # a file, because the patch may be much larger than the part that is needed
            with (scratch / "patch").open("w+b") as file:
                self._run(*_DIFF_COMMAND, stdout=file, tree=tree, env=env)
                file.seek(0)
                return file.read(limit + 1)

    def _run(
        self,
        *args: str,
        stdin: bytes = b"",
        stdout: BinaryIO | int = subprocess.PIPE,
        tree: Path = Path("/nonexistent"),
        env: Mapping[str, str] | None = None,
        exit_codes: tuple[int, ...] = (0,),
    ) -> bytes:
        """Return what git prints, unless it goes to `stdout`. Raises GitTimeout, GraderError for other
        exit codes.
        """
        try:
            completed = subprocess.run(
                [git_program(), *args],
                cwd=tree if tree.is_dir() else "/",
                env={**git_environment(self._git, tree), **(env or {})},
                input=stdin,
                stdout=stdout,
                stderr=subprocess.PIPE,
                timeout=_EXTRACT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise GitTimeout(f"git did not end within {_EXTRACT_TIMEOUT_S:.0f} s, the time limit") from error
        except OSError as error:
            raise GraderError(
                f"the agent's patch could not be extracted: git does not start: {error}; check git with "
                "`understudy doctor`, and the free memory and disk space of this machine"
            ) from error
        if completed.returncode not in exit_codes:
            message = completed.stderr.decode(errors="replace").strip()[-2000:]
            raise GraderError(
                f"the agent's patch could not be extracted: git ended with exit code {completed.returncode}: "
                f"{message}; check git with `understudy doctor`, and the disk space of the temporary directory"
            )
        return completed.stdout


_DIFF_COMMAND = (
    *("diff", "--cached", "--binary", "--full-index", "--no-renames"),
    *("--no-ext-diff", "--no-textconv", "--no-color"),
    *("--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"),
)


def _is_deleted(path: bytes, delta: TreeChanges) -> bool:
    deleted = delta.deleted
    return path in delta.directories or path in deleted or b"" in deleted or _below(path, deleted)


def _below(path: bytes, directories: frozenset[bytes] | Mapping[bytes, object]) -> bool:
    """Return whether any directory above `path` is in `directories`."""
    while path := path.rpartition(b"/")[0]:
        if path in directories:
            return True
    return False


def _parents(paths: Mapping[bytes, object]) -> set[bytes]:
    """Return all directories above the paths."""
    parents: set[bytes] = set()
    for path in paths:
        directory = path
        while (directory := directory.rpartition(b"/")[0]) and directory not in parents:
            parents.add(directory)
    return parents


def _blob(data: bytes) -> bytes:
    return b"blob %d\0%b" % (len(data), data)


def _blob_id(data: bytes) -> bytes:
    return hashlib.sha1(_blob(data), usedforsecurity=False).hexdigest().encode()


def _write_blob(objects: Path, name: str, data: bytes) -> None:
    """Write a loose object as git does."""
    (objects / name[:2]).mkdir(exist_ok=True)
    (objects / name[:2] / name[2:]).write_bytes(zlib.compress(_blob(data), 1))
