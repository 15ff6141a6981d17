"""Prepares a task for sandboxes: its tree, and a pristine git directory out of the agent's reach.

Both are made once for each content and kept in the cache. The tree has a `.git` of its own with one root commit.
The pristine git directory holds the same commit, and only with it are patches extracted or applied.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import secrets
import shutil
import stat
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.checks.base import GradingOptions
from understudy.checks.pytest_checks import PLUGIN_MOUNT
from understudy.checks.runtime_events import WATCH_MOUNT
from understudy.checks.script import REWARDS
from understudy.checks.twins.run import DRIVER_MOUNTS
from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.sandbox.base import Mount, Sandboxes, SandboxSpec
from understudy.tasks.environment import TaskEnvironment, python_environment
from understudy.tasks.materialise import check_directory, materialise, relative_path
from understudy.types import Directory, ImageTree, PytestChecks, ScriptChecks, Source, Task
from understudy.util.files import atomic_write, locked, make_readable, mark_used, write_remedy

GIT_MOUNT = "/opt/understudy/git"
"""Where the pristine git directory is in a sandbox, for runs with `reveal=True`."""

_HASH_SEED_VARIABLE, _MAX_HASH_SEED = "PYTHONHASHSEED", 4294967295

_FORMAT = "3"  # part of every digest: raise it when what is made here changes, so that it is made again

# Git attributes that disable filters and conversion of line ends, so that every file is stored byte for byte.
_ATTRIBUTES = "* -text !eol !crlf -ident !filter !working-tree-encoding !diff !merge !delta !whitespace\n"
_CONFIG = """\
[core]
\trepositoryformatversion = 0
\tbare = false
\tfilemode = true
\tsymlinks = true
\tignorecase = false
\tautocrlf = false
\tsafecrlf = false
\tprotectHFS = false
\tprotectNTFS = false
\tfsmonitor = false
\thooksPath = /dev/null
\tattributesFile = /dev/null
\texcludesFile = /dev/null
[gc]
\tauto = 0
[pack]
\tthreads = 1
"""
# Files are written directly into a pack: creating and removing thousands of loose objects takes half a minute on
# busy disks.
_PACK_OPTIONS = ("-c", "core.bigFileThreshold=1")
_CACHE_RULES = b"__pycache__/\n*.py[cod]\n.pytest_cache/\n"


class PreparedTask(Struct, frozen=True):
    """A task on disk, with the options for grading it.

    `hidden` is the directory of a script check's files, None for other checks. `environment` is the task's own, if
    it names packages.
    """

    task: Task
    tree: Path
    git: Path
    hidden: Path | None = None
    options: GradingOptions = GradingOptions()
    environment: TaskEnvironment | None = None


def prepare(task: Task, cache: Path, sandboxes: Sandboxes) -> PreparedTask:
    """Return the task's tree and pristine git directory for this kind of sandbox, made now or found in the cache.

    Raises TaskError when the source or `setup_patch` is not usable, ConfigError when the machine is not.
    """
    _check_paths(task)
    hidden = None
    if isinstance(checks := task.checks, ScriptChecks):
        hidden = _make_once(
            cache.absolute() / "checks" / _digest(checks.source, checks.reward_file, task.workdir),
            lambda staging: _make_hidden(task, checks, staging, cache),
        )
    kind = f"{sandboxes.name} {os.geteuid()}"  # the owner of the tree depends on both
    digest = _digest(task.source, *_image_identity(task, cache, sandboxes), task.setup_patch, kind)
    home = _make_once(
        cache.absolute() / "trees" / digest, lambda staging: _make_tree(task, staging, cache, sandboxes)
    )
    environment = None
    if task.packages:
        if not sandboxes.host_programs:
            raise TaskError(
                f"task {task.instance_id}: has packages for this machine's Python, which a sandbox of the kind "
                f"{sandboxes.name} does not have; use --sandbox local, or replace packages in the task by an image"
            )
        environment = python_environment(cache, task.packages)
    files = hidden / "files" if hidden else None
    return PreparedTask(task, home / "tree", home / "git", files, environment=environment)


def sandbox_spec(
    prepared: PreparedTask,
    environment: TaskEnvironment,
    *,
    mounts: tuple[Mount, ...] = (),
    env: Mapping[str, str] | None = None,
) -> SandboxSpec:
    """Return the sandbox spec for a prepared task, without its hidden checks; `mounts` and `env` are added.

    `environment` is for tasks that have none of their own.
    """
    environment = prepared.environment or environment
    common_mounts = (Mount(prepared.git, GIT_MOUNT, private=True), PLUGIN_MOUNT, *DRIVER_MOUNTS, WATCH_MOUNT)
    mark_used(cache_dir(), (prepared.tree, *(mount.source for mount in (*environment.mounts, *mounts))))
    return SandboxSpec(
        tree=prepared.tree,
        workdir=prepared.task.workdir,
        image=prepared.task.image,
        tree_in_image=isinstance(prepared.task.source, ImageTree) and not prepared.task.setup_patch.strip(),
        as_root=prepared.options.as_root,
        mounts=(*environment.mounts, *common_mounts, *mounts),
        env={**environment.env, **prepared.task.env, **(env or {})},
        path_prefixes=environment.path_prefixes,
    )


def other_hash_seed(prepared: PreparedTask, environment: TaskEnvironment) -> dict[str, str]:
    """Return the environment variables that give Pythons another hash seed than the task's sandboxes have; empty
    if theirs is random, or the task itself sets one.
    """
    env = (prepared.environment or environment).env
    if _HASH_SEED_VARIABLE not in env or _HASH_SEED_VARIABLE in prepared.task.env:
        return {}
    return {_HASH_SEED_VARIABLE: str(1 + secrets.randbelow(_MAX_HASH_SEED))}


def git_program() -> str:
    """Return the path of this machine's git, which also runs in sandboxes. Raises ConfigError if there is none."""
    git = shutil.which("git")
    if git is None:
        raise ConfigError("git is not installed; install it (Debian: apt-get install git)")
    return git


def git_environment(git_dir: Path, tree: Path) -> dict[str, str]:
    """Return the environment for git with this directory and tree, and without this machine's configuration."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": "/nonexistent",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "Understudy",
        "GIT_AUTHOR_EMAIL": "understudy@localhost",
        "GIT_AUTHOR_DATE": "2000-01-01T00:00:00Z",
        "GIT_COMMITTER_NAME": "Understudy",
        "GIT_COMMITTER_EMAIL": "understudy@localhost",
        "GIT_COMMITTER_DATE": "2000-01-01T00:00:00Z",
        "GIT_DIR": str(git_dir),
        "GIT_WORK_TREE": str(tree),
    }


def _check_paths(task: Task) -> None:
    where = f"task {task.instance_id}"
    if not task.workdir.startswith("/") or task.workdir == "/" or ".." in task.workdir.split("/"):
        raise TaskError(
            f"{where}: workdir is {task.workdir[:200]!r}; expected an absolute path below /, without ..: set it "
            "to one, such as /workspace"
        )
    if isinstance(task.checks, PytestChecks):
        for name in task.checks.files:
            relative_path(name, f"{where}: checks.files")


def hidden_mounts(prepared: PreparedTask) -> tuple[Mount, ...]:
    """Return the additional mounts for a script check: its files, and a place where it can write its reward."""
    checks = prepared.task.checks
    if prepared.hidden is None or not isinstance(checks, ScriptChecks):
        return ()
    mounts = [Mount(prepared.hidden, checks.target)]
    if _needs_link(prepared.task, checks):
        mounts.append(Mount(prepared.hidden.parent / "links", str(Path(checks.reward_file).parent.parent)))
    return tuple(mounts)


def _needs_link(task: Task, checks: ScriptChecks) -> bool:
    """Return whether the reward file needs a link, because it is not below the tree or /tmp, which are
    writable.
    """
    reward = Path(checks.reward_file)
    return not (reward.is_relative_to(task.workdir) or reward.is_relative_to("/tmp"))


def _make_once(home: Path, make: Callable[[Path], None]) -> Path:
    """Return `home`; if it does not exist, `make` creates it in a directory beside it that is then renamed, under
    a lock.
    """
    if not home.exists():
        with locked(home.with_suffix(".lock")):
            if not home.exists():
                # Ours while we hold the lock; what is there already was left by a killed process.
                staging = home.with_suffix(".new")
                shutil.rmtree(staging, ignore_errors=True)
                try:
                    staging.mkdir()
                    make(staging)
                    staging.rename(home)
                except OSError as error:
                    remedy = write_remedy(error, "set UNDERSTUDY_CACHE to a directory that you can write")
                    raise ConfigError(
                        f"{staging}: the task cannot be prepared there: {error}; {remedy}"
                    ) from error
                finally:
                    shutil.rmtree(staging, ignore_errors=True)
    return home


def _image_identity(task: Task, cache: Path, sandboxes: Sandboxes) -> tuple[str, ...]:
    """Return the identity of the image that a tree comes from, because its name may refer to another image later.

    If the image is not on this machine now, it is not fetched; it counts as the one that was seen last.
    """
    if not isinstance(task.source, ImageTree):
        return ()
    remembered = cache.absolute() / "images" / _digest(task.image, sandboxes.name)
    remembered_identity = remembered.read_text(encoding="utf-8") if remembered.exists() else ""
    now = sandboxes.image_id(task.image, fetch=not remembered_identity) or remembered_identity
    if now != remembered_identity:
        remembered.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(remembered, now.encode())
    return task.image, task.workdir, now


def _make_hidden(task: Task, checks: ScriptChecks, staging: Path, cache: Path) -> None:
    materialise(checks.source, staging / "files", cache)
    directory = Path(checks.reward_file).parent
    if _needs_link(task, checks):
        if directory.parent == Path("/") or not directory.is_absolute():
            raise TaskError(
                f"task {task.instance_id}: checks.reward_file {checks.reward_file!r} must be absolute and at "
                f"least two directories deep, or below {task.workdir} or /tmp; correct it in the task"
            )
        # Mounts are read-only, so the reward file's directory becomes a link to a directory that the script can
        # write.
        (staging / "links").mkdir()
        (staging / "links" / directory.name).symlink_to(REWARDS)
    make_readable(staging)


def _make_tree(task: Task, staging: Path, cache: Path, sandboxes: Sandboxes) -> None:
    tree, pristine = staging / "tree", staging / "git"
    if isinstance(task.source, ImageTree):
        sandboxes.export_tree(task.image, task.workdir, task.source.base_commit, tree)
    else:
        materialise(task.source, tree, cache)
    git = partial(_git, tree, pristine)
    git("init", "--quiet", "--template=", "--initial-branch=main")
    (pristine / "config").write_text(_CONFIG, encoding="utf-8")
    (pristine / "info").mkdir(exist_ok=True)
    (pristine / "info" / "attributes").write_text(_ATTRIBUTES, encoding="utf-8")
    git(*_PACK_OPTIONS, "add", "--all", "--force", ".")
    if task.setup_patch.strip():
        patch = task.setup_patch.encode(errors="surrogateescape")
        applied = git("apply", "--index", "--whitespace=nowarn", "-", stdin=patch, check=False)
        if applied.returncode:
            message = applied.stderr.decode(errors="replace").strip()
            raise TaskError(
                f"task {task.instance_id}: setup_patch does not apply to its source; expected a unified diff "
                f"against it: correct setup_patch, or the source. git said: {message[-999:]}"
            )
    git("commit", "--quiet", "--allow-empty", "--no-verify", "--message=Initial commit")
    git(*_PACK_OPTIONS, "repack", "-a", "-d", "-q")
    for name in ("COMMIT_EDITMSG", "logs"):
        shutil.rmtree(pristine / name, ignore_errors=True)
        (pristine / name).unlink(missing_ok=True)
    shutil.copytree(pristine, tree / ".git")
    (pristine / "info" / "ignored").write_bytes(ignore_rules(tree, git("ls-files", "-z").stdout))
    # Without remembered times and inodes git compares contents, which are the same in every sandbox.
    (pristine / "index").unlink()
    git("read-tree", "HEAD")
    # A template for taking a patch, which is copied first, because git must not write to the pristine directory.
    (pristine / "scratch" / "objects").mkdir(parents=True)
    shutil.copy2(pristine / "index", pristine / "scratch" / "index")
    make_readable(pristine)
    sandboxes.prepare_tree(tree)


def ignore_rules(tree: Path, listing: bytes) -> bytes:
    """Return all `.gitignore` files of a tree as one list for its root, with rules for caches that never belong to
    a patch.

    `listing` is the NUL-separated list of the tree's files.
    """
    paths = sorted(path for path in listing.split(b"\0") if posixpath.basename(path) == b".gitignore")
    rules: list[bytes] = []
    # sorted by depth, because the last matching rule counts
    for path in sorted(paths, key=lambda path: path.count(b"/")):
        file = tree / os.fsdecode(path)
        if not file.is_symlink() and b"\n" not in path:
            for line in file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"):
                rules.append(_rule(posixpath.dirname(path), line.removesuffix(b"\r")))
    return b"".join(rule + b"\n" for rule in rules if rule) + _CACHE_RULES


def _rule(directory: bytes, line: bytes) -> bytes:
    if not line.strip() or line.startswith(b"#"):
        return b""
    if not directory:
        return line
    negation, body = (b"!", line[1:]) if line.startswith(b"!") else (b"", line)
    if not body.strip(b" /"):
        return b""
    prefix = b"/" + re.sub(rb"([*?\[\\])", rb"\\\1", directory) + b"/"
    anchored = b"/" in body.rstrip(b" ").removesuffix(b"/")
    return negation + prefix + (body.removeprefix(b"/") if anchored else b"**/" + body)


def _digest(*parts: Source | str) -> str:
    sha = hashlib.sha256(_FORMAT.encode())
    for part in parts:
        content = _directory_digest(Path(part.path)) if isinstance(part, Directory) else msgspec.json.encode(part)
        sha.update(hashlib.sha256(content).digest())
    return sha.hexdigest()[:32]


def _directory_digest(root: Path) -> bytes:
    check_directory(root)
    sha = hashlib.sha256()
    try:
        for parent, names, files in os.walk(root):
            names[:] = sorted(name for name in names if name.lower() != ".git")
            for name in sorted([*names, *files]):
                path = Path(parent, name)
                mode = path.lstat().st_mode
                sha.update(os.fsencode(path.relative_to(root)) + b"\0%o\0" % mode)
                if stat.S_ISLNK(mode):
                    sha.update(os.fsencode(path.readlink()) + b"\0")
                elif stat.S_ISREG(mode):
                    with path.open("rb") as file:
                        sha.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise TaskError(
            f"{error.filename or root}: cannot be read: {error.strerror}; make it readable (chmod)"
        ) from error
    return sha.digest()


def _git(
    tree: Path, pristine: Path, *args: str, stdin: bytes = b"", check: bool = True
) -> subprocess.CompletedProcess[bytes]:
    """Run git with only the pristine directory's configuration."""
    env, command = git_environment(pristine, tree), [git_program(), *args]
    completed = subprocess.run(command, cwd=tree, env=env, input=stdin, capture_output=True, check=False)
    if check and completed.returncode:
        message = completed.stderr.decode(errors="replace").strip()
        raise TaskError(
            f"{tree}: git {args[0]} failed while the task was prepared (exit code {completed.returncode}); check "
            "the free disk space of the cache, and the names of the files in the task's source. git said: "
            f"{message[-2000:]}"
        )
    return completed
