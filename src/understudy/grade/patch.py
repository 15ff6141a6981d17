"""The patch an agent leaves behind: taken byte for byte by a pristine git, then let through the gate or not.

Nothing the agent wrote is run or believed while its work is read: not its `.git`, its configuration, its
attributes or its ignore rules. What cannot be read (a file that is too large, too many files) becomes a patch that
says so in its first line and that the gate refuses.
"""

from __future__ import annotations

import asyncio
import posixpath
import re
import secrets
from pathlib import Path

from msgspec import Struct

from understudy.checks.pytest_checks import deciding_files
from understudy.errors import GraderError, TaskError
from understudy.grade.delta import GitTimeout, PristineRepository
from understudy.sandbox.base import Sandbox
from understudy.tasks.prepare import GIT_MOUNT, git_program
from understudy.types import PytestChecks, SuiteChecks, Task
from understudy.util.diffs import DiffError, FileDiff, parse_diff

MAX_PATCH_BYTES = 16 << 20
"""The largest patch, and the largest changed file, that is taken."""

NO_PATCH = b"understudy: no patch: "
"""How bytes begin that say why there is no patch."""

_EXTRACT_TIMEOUT_S = 60.0
_LARGE = 65  # what the script exits with when there are large files; it then lists them, and all that changed

# One run does it all. Names and modes that git cannot hold are dealt with first: special files count as absent,
# unreadable ones as what they contain, and a nested `.git` goes, so that the files around it are files like all
# others. New files are added before changed ones: git has no other word for a file that became a directory.
_EXTRACT = r"""
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

# What decides how tests are found, run and imported is not the agent's to change, unless the right answer does.
_PROTECTED = frozenset(
    {
        "conftest.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "setup.cfg",
        "setup.py",
        "pyproject.toml",
        ".gitattributes",
        "__pycache__",
    }
)
_PROTECTED_LIKE = re.compile(
    r"(?:site|user)customize(?:\..*)?|.*\.(?:pth|pyc|pyo|egg-link|egg-info|dist-info|so|pyd|dylib|dll)"
)
# New modules that would be found before the installed ones, from the root or a directory of tests.
_SHADOWS = re.compile(r"(?:.*tests?/)?(?:pytest|_pytest|pluggy|iniconfig|unittest|nose|xdist)(?:\.py$|/.*)")
_TEST_DIRECTORY = re.compile(r"((?:.*/)?(?:tests?|testing)/)[^/]*(?:/.*)?")
_NAMED_AS_TEST = re.compile(r"(?:.*/)?(?:test_[^/]*|[^/]*_test)\.\w+")
_FILE_MODES = frozenset({b"100644", b"100755"})
_FORBIDDEN_MODES = {b"120000": "a symbolic link", b"160000": "a submodule"}


class GatedPatch(Struct, frozen=True):
    """A patch that has been through the gate.

    `patch` is what may be applied; `dropped` are the paths whose changes were taken out of it. When `refused`
    is not empty it says why nothing may be applied, and the reward is 0. `steering` are those of the dropped paths
    that decide how tests run, as they are in the patch.
    """

    patch: bytes
    dropped: tuple[str, ...] = ()
    refused: str = ""
    steering: tuple[str, ...] = ()


async def extract_patch(sandbox: Sandbox, pristine: Path) -> bytes:
    """The difference between the task's tree and what the sandbox's working directory now holds, as a git patch.

    `pristine` is the task's pristine git directory (`PreparedTask.git`). Files ignored by the task's own
    `.gitignore` files stay out, and so do Python's caches. Empty when nothing changed. Raises ConfigError when git
    is not installed, GraderError when it fails, SandboxError when the sandbox broke.
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
        return _no_patch("the changes could not be read in time")
    if len(patch) > MAX_PATCH_BYTES:
        return _no_patch(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
    return patch


async def _extract_inside(sandbox: Sandbox) -> bytes:
    """The patch, taken by this machine's git where the sandbox shows it."""
    git = git_program()
    pristine = sandbox.locate(GIT_MOUNT)
    for limit in (MAX_PATCH_BYTES, 1 << 62):
        done = await sandbox.run(
            ["/bin/sh", "-c", _EXTRACT, "sh", sandbox.workdir, git, pristine, str(limit), scratch_name()],
            timeout_s=_EXTRACT_TIMEOUT_S,
            cwd="/",
            reveal=True,
        )
        if done.exit_code != _LARGE:
            break
        large, _, changed = done.stdout.partition(b"\0\0")
        found = {path.removeprefix(b"./") for path in large.split(b"\0")} & set(changed.split(b"\0"))
        if found:
            return _no_patch(f"{_show(min(found))} is larger than {MAX_PATCH_BYTES} bytes")
    if done.timed_out:
        return _no_patch(f"the changes could not be read in {_EXTRACT_TIMEOUT_S:.0f} s")
    if b"No space left on device" in done.stderr:
        return _no_patch("the changes fill the sandbox's disk")
    if done.exit_code:
        said = done.stderr.decode(errors="replace").strip()
        raise GraderError(f"the patch could not be taken (exit code {done.exit_code}): {said[-2000:]}")
    if done.truncated or len(done.stdout) > MAX_PATCH_BYTES:
        return _no_patch(f"the patch is larger than {MAX_PATCH_BYTES} bytes")
    return done.stdout


def scratch_name() -> str:
    """A new name for a directory in a sandbox, which nothing in there can have taken before."""
    return f"understudy-{secrets.token_hex(16)}"


def gate(patch: bytes, task: Task) -> GatedPatch:
    """What of a patch may be applied when it is graded.

    Links, submodules, other modes and paths out of the tree refuse the whole patch. Changes of files that decide
    how tests run are dropped unless the gold patch changes the same file; so are changes of the checks' own files,
    of all that lies in their directory of tests, which they may import, and new files that are named as tests.
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
    checks = _check_files(task)
    programs = _programs(task) - allowed
    tests = _test_directories(task)
    kept: list[bytes] = []
    dropped: list[str] = []
    steering: list[str] = []
    for file in files:
        if refused := _refusal(file):
            return GatedPatch(b"", refused=refused)
        paths = [path.decode(errors="surrogateescape") for path in sorted(file.paths)]
        of_checks = any(path in programs or _is_of_checks(path, checks) for path in paths)
        of_tests = any(path not in allowed and path.startswith(tests) for path in paths) or (
            file.is_new and any(path not in allowed and _NAMED_AS_TEST.fullmatch(path) for path in paths)
        )
        protected = [
            path for path in paths if path not in allowed and (is_protected(path) or _shadows(path, file, allowed))
        ]
        if of_checks or of_tests or protected:
            dropped += [_show(path) for path in sorted(file.paths)]
            steering += protected
        else:
            kept.append(file.text)
    return GatedPatch(b"".join(kept), tuple(dropped), steering=tuple(steering))


def _refusal(file: FileDiff) -> str:
    """Why a change refuses the whole patch, or an empty string."""
    name = _show(min(file.paths))
    for mode in sorted(file.modes - _FILE_MODES):
        return f"{name} is {_FORBIDDEN_MODES.get(mode, f'of mode {mode.decode()}')}"
    for path in file.paths:
        parts = path.split(b"/")
        if path.startswith(b"/") or b"\0" in path or any(part in (b"", b".", b"..") for part in parts):
            return f"{_show(path)} is not a path inside the tree"
        if any(part.lower() == b".git" for part in parts):
            return f"{_show(path)} is inside a git directory"
    return ""


def is_protected(path: str) -> bool:
    """Whether a path names what decides how tests are found, run and imported."""
    return any(part in _PROTECTED or _PROTECTED_LIKE.fullmatch(part) for part in path.split("/"))


def _shadows(path: str, file: FileDiff, allowed: frozenset[str]) -> bool:
    """Whether a new file would be imported in place of what runs the tests, which the gold patch leaves alone."""
    package = path.partition("/")[0] + "/"
    own = any(other.startswith(package) for other in allowed)
    return file.is_new and not own and _SHADOWS.fullmatch(path) is not None


def _check_files(task: Task) -> frozenset[str]:
    """The files that hidden tests are in, laid over the tree or already there."""
    match task.checks:
        case PytestChecks():
            return frozenset(map(posixpath.normpath, (*task.checks.files, *deciding_files(task.checks))))
        case SuiteChecks():
            patched = paths_of(task.checks.test_patch, f"task {task.instance_id}: checks.test_patch")
            return frozenset(map(posixpath.normpath, {*task.checks.files, *patched}))
        case _:
            return frozenset()


def _test_directories(task: Task) -> tuple[str, ...]:
    """The directories of tests that the deciding tests are in, each with a slash at its end: the innermost."""
    checks = task.checks
    match checks:
        case PytestChecks():
            files = {*checks.files, *deciding_files(checks)}
        case SuiteChecks():
            ids = (*checks.fail_to_pass, *checks.pass_to_pass)
            files = {*checks.files, *(file for id in ids if (file := id.partition("::")[0]).endswith(".py"))}
        case _:
            return ()
    found = (_TEST_DIRECTORY.fullmatch(posixpath.normpath(file)) for file in files)
    return tuple(sorted({match[1] for match in found if match}))


def _programs(task: Task) -> frozenset[str]:
    """What of the tree a suite's commands name, as a runner of its own."""
    if not isinstance(task.checks, SuiteChecks):
        return frozenset()
    words = f"{task.checks.before} {task.checks.install} {task.checks.command}".split()
    named = (word.strip("'\"").removeprefix(task.workdir + "/").partition("::")[0] for word in words)
    return frozenset(posixpath.normpath(name) for name in named if name)


def _is_of_checks(path: str, checks: frozenset[str]) -> bool:
    """Whether `path` is a file of the checks, lies below its name, or stands where its directory must be."""
    return any(path == check or path.startswith(check + "/") or check.startswith(path + "/") for check in checks)


def gold_paths(task: Task) -> frozenset[str]:
    """The paths that the gold patch names. Raises TaskError when it cannot be read."""
    return paths_of(task.gold_patch, f"task {task.instance_id}: gold_patch")


def paths_of(patch: str, what: str, *, new: bool = False) -> frozenset[str]:
    """The paths that a patch of the task's own names, or only those of new files.

    Raises TaskError, saying `what` it is, when it cannot be read.
    """
    try:
        files = parse_diff(patch.encode(errors="surrogateescape"))
    except DiffError as error:
        raise TaskError(f"{what} cannot be read: {error}") from error
    kept = (file for file in files if file.is_new or not new)
    return frozenset(path.decode(errors="surrogateescape") for file in kept for path in file.paths)


def _no_patch(reason: str) -> bytes:
    return NO_PATCH + reason.encode(errors="replace") + b"\n"


def _show(path: bytes) -> str:
    return repr(path.decode(errors="replace"))
