"""Apply a patch to the tree of a fresh sandbox: by git, and by the fallbacks that SWE-bench uses.

Where a sandbox has this machine's programs, a patch that only changes or adds ordinary files is applied once, by
git in a directory of its own, and the files are written into each sandbox. All else is done inside the sandbox: by
this machine's git, or by the image's own. Byte for byte first; then as the tree's own attributes have it, for
patches made elsewhere; then as a merge; then by `patch`, which is less strict about what stands around a change.
"""

from __future__ import annotations

import asyncio
import posixpath
import stat
from pathlib import Path

from understudy.errors import GraderError, TaskError
from understudy.grade.changed_files import changed_files
from understudy.grade.gate import paths_of
from understudy.sandbox.base import Sandbox
from understudy.tasks.patch import scratch_name
from understudy.tasks.prepare import GIT_MOUNT, git_program
from understudy.types import PytestChecks, SuiteChecks, Task
from understudy.util.diffs import FileDiff, parse_diff
from understudy.util.files import tar_of

_TIMEOUT_S = 120.0
_DOES_NOT_APPLY, _TEST_PATCH, _NO_GIT = 65, 66, 69

# Input is a tar of a directory with `patch` and what else `_tar_members` puts there. Git works with a directory of
# its own beside the patch, where nothing of a repository's configuration is; only the index and the objects are
# the repository's. What was changed is printed, to be compared with what the gate has read in the patch.
_APPLY = r"""
set -eu
work=$1 git=$2 repository=$3
base=/dev/shm; [ -d "$base" ] && [ -w "$base" ] || base=${TMPDIR:-/tmp}
scratch=$base/$4
trap 'rm -rf "$scratch"' EXIT
cd "$work"
command -v "$git" >/dev/null || exit 69
tar -x -f - -C "$base"
mkdir -p "$scratch/git/objects" "$scratch/git/refs" "$scratch/git/info"
echo ref: refs/heads/main >"$scratch/git/HEAD"
exact='* -text !eol !crlf -ident !filter !working-tree-encoding !diff !merge !whitespace'
echo "$exact" >"$scratch/git/info/attributes"
printf '[safe]\n\tdirectory = *\n[core]\n\tautocrlf = false\n' >"$scratch/.gitconfig"
export GIT_DIR="$scratch/git" GIT_WORK_TREE="$work" GIT_INDEX_FILE="$scratch/git/index"
export GIT_OBJECT_DIRECTORY="$scratch/git/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$repository/objects"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL="$scratch/.gitconfig" GIT_ATTR_NOSYSTEM=1 HOME="$scratch" LC_ALL=C
git_apply() { "$git" apply -p1 --whitespace=nowarn --numstat -z --apply "$@"; }
state() {  # which files are not as in the repository, by name, and by what any writing to them changes
  { "$git" diff-files -z --name-only; "$git" ls-files -z --others; } >"$scratch/names"
  { sed -z 's/^/is\t/' "$scratch/names"; xargs -0 -r stat --printf '%i %z\t%n\0' -- <"$scratch/names" 2>/dev/null
  } | sort -z -u
}
apply_any_way() {
  git_apply "$1" 2>"$scratch/error" && return
  rm "$scratch/git/info/attributes"
  git_apply "$1" 2>/dev/null && return
  [ -f "$repository/index" ] || return 1
  cp "$repository/index" "$GIT_INDEX_FILE"
  chmod u+w "$GIT_INDEX_FILE"
  "$git" update-index -q --refresh >/dev/null || true
  git_apply --3way "$1" 2>/dev/null && return
  cp -f "$repository/index" "$GIT_INDEX_FILE"
  xargs -0 rm -rf -- <"$scratch/paths"
  "$git" checkout-index -q -f -z --stdin <"$scratch/paths" 2>/dev/null || true
  state >"$scratch/before"
  command -v patch >/dev/null && patch --batch --forward --fuzz=5 -p1 -i "$1" >/dev/null 2>&1 ||
    "$git" apply --check --reverse "$1" 2>/dev/null || return 1
  state | comm -z -3 "$scratch/before" - | sed -z -E 's/^\t?[^\t]*\t/0\t0\t/'
}
if [ -s "$scratch/test_patch" ]; then
  xargs -0 rm -f -- <"$scratch/new"
  git_apply "$scratch/test_patch" >/dev/null || { rm "$scratch/git/info/attributes"
    git_apply "$scratch/test_patch" >/dev/null || exit 66; echo "$exact" >"$scratch/git/info/attributes"; }
fi
if [ -s "$scratch/patch" ]; then
  apply_any_way "$scratch/patch" || { cat "$scratch/error" >&2; exit 65; }
fi
[ ! -d "$scratch/files" ] || cp -R --remove-destination "$scratch/files/." .
"""


async def apply_patch(sandbox: Sandbox, task: Task, patch: bytes, *, host_programs: bool, tree: Path) -> str:
    """Apply a gated patch, and the hidden checks' files that belong in the tree, to the sandbox's tree.

    Returns why the patch cannot be applied, or "". `host_programs` is that of the sandbox's kind, `tree` the
    task's prepared tree, which the sandbox must still have unless the checks are a suite. Raises TaskError when
    the task's own test patch does not apply, GraderError when there is no git or something else failed,
    SandboxError when the sandbox broke.
    """
    if host_programs and not isinstance(task.checks, SuiteChecks):
        written = await asyncio.to_thread(_written_files, task, patch, tree)
        if written is not None:
            for path, (data, mode) in written.items():
                await sandbox.write(posixpath.join(sandbox.workdir, path), data, mode=mode)
            return ""
    scratch = scratch_name()
    changed = parse_diff(patch)
    files = task.checks.files if isinstance(task.checks, PytestChecks) else {}
    test_patch = task.checks.test_patch if isinstance(task.checks, SuiteChecks) else ""
    git, repository = "git", f"{sandbox.workdir}/.git"
    if host_programs:
        git, repository = git_program(), sandbox.locate(GIT_MOUNT)
    completed = await sandbox.run(
        ["/bin/sh", "-c", _APPLY, "sh", sandbox.workdir, git, repository, scratch],
        timeout_s=_TIMEOUT_S,
        stdin=tar_of(_tar_members(scratch, patch, changed, test_patch, files)),
        cwd="/",
        reveal=host_programs,
    )
    message = "; ".join(completed.stderr.decode(errors="replace").splitlines())[-1000:]
    if completed.exit_code == _DOES_NOT_APPLY:
        return f"the patch does not apply: {message}"
    if completed.exit_code == _TEST_PATCH:
        raise TaskError(
            f"task {task.instance_id}: checks.test_patch does not apply to the task's tree; expected a unified "
            f"diff against it: correct checks.test_patch, or the source or image. git said: {message}"
        )
    if completed.exit_code == _NO_GIT:
        raise GraderError(
            f"task {task.instance_id}: its image {task.image} has no git, which applies patches; install git in "
            "the image"
        )
    if completed.exit_code != 0:
        raise GraderError(
            f"task {task.instance_id}: the patch could not be applied: expected exit code 0, got "
            f"{completed.exit_code}: {message}; check the sandbox with `understudy doctor`, then grade again"
        )
    expected = {path for file in changed for path in file.paths}
    leftovers = {path + suffix for path in expected for suffix in (b".orig", b".rej")}  # which `patch` leaves
    # `git apply --numstat -z` prints records `added TAB deleted TAB path`; a rename has two paths more.
    applied = {path for record in completed.stdout.split(b"\0") if (path := record.split(b"\t", 2)[-1])}
    if not applied <= expected | leftovers:
        return "patch refused: git and the gate read different files in it"
    return ""


def _written_files(task: Task, patch: bytes, tree: Path) -> dict[str, tuple[bytes, int]] | None:
    """Return the files that applying a patch writes, with their modes; None unless they are ordinary files, whose
    content git could make of the tree's as it is, and nothing else is done.

    Then the sandbox needs no git. A grading applies its patch in several sandboxes, and git would take longer in
    each than all else that is done to open one.
    """
    changed = parse_diff(patch)
    if any(file.new_path is None or file.old_path not in (None, file.new_path) for file in changed):
        return None
    patched = changed_files(patch, tree)
    if not patched.exact:
        return None
    written: dict[str, tuple[bytes, int]] = {}
    for file, patched_file in zip(changed, patched.files, strict=True):
        mode = _file_mode(tree, patched_file.path)
        if patched_file.after is None or mode is None or (file.old_path is None) is not (mode == _ABSENT):
            return None
        new_modes = [line[-6:] for line in file.header if line.startswith((b"new file mode ", b"new mode "))]
        executable = new_modes[-1] == b"100755" if new_modes else mode & 0o100
        written[patched_file.path] = patched_file.after, 0o755 if executable else 0o644
    for name, text in (task.checks.files if isinstance(task.checks, PytestChecks) else {}).items():
        path = posixpath.normpath(name)
        if _file_mode(tree, path) is None:
            return None
        written[path] = text.encode(), 0o644
    return written


_ABSENT = 0


def _file_mode(tree: Path, path: str) -> int | None:
    """Return the mode of a file of a tree that can be overwritten, `_ABSENT` if there is nothing; None for what
    is no ordinary file, or is not in an ordinary directory.
    """
    directory = tree
    *parents, name = path.split("/")
    try:
        for parent in parents:
            directory /= parent
            mode = directory.lstat().st_mode
            if not stat.S_ISDIR(mode) or not mode & 0o200:
                return None
        mode = (directory / name).lstat().st_mode
    except FileNotFoundError:
        return _ABSENT
    return mode if stat.S_ISREG(mode) and mode & 0o200 else None


def _tar_members(
    top: str, patch: bytes, changed: list[FileDiff], test_patch: str, files: dict[str, str]
) -> dict[str, bytes]:
    paths = b"".join(path + b"\0" for path in sorted({path for file in changed for path in file.paths}))
    members = {"patch": patch, "paths": paths}
    if test_patch:
        new = "".join(path + "\0" for path in sorted(paths_of(test_patch, "checks.test_patch", new=True)))
        for name, text in (("test_patch", test_patch), ("new", new)):
            members[name] = text.encode(errors="surrogateescape")
    members |= {f"files/{name}": text.encode() for name, text in files.items()}
    return {f"{top}/{name}": data for name, data in members.items()}
