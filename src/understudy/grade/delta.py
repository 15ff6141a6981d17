"""From what changed in a sandbox, as told from outside, to a git patch.

This machine's git works on blobs in an index, with the pristine git directory: nothing is checked out, and nothing
that an agent wrote is configuration, attribute or program to it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path

from understudy.errors import GraderError
from understudy.sandbox.base import TreeChanges
from understudy.tasks.prepare import git_program

TIMEOUT_S = 60.0
_NOTHING = b"0 " + b"0" * 40


class GitTimeout(Exception):
    """Git did not come to an end in time."""


class PristineRepository:
    """The pristine git directory of a task, and what its one commit holds."""

    def __init__(self, git: Path) -> None:
        self._git = git

    @cached_property
    def base(self) -> dict[bytes, tuple[bytes, bytes]]:
        """Path → (mode, blob id) of every file."""
        found: dict[bytes, tuple[bytes, bytes]] = {}
        for line in self._run("ls-tree", "-r", "-z", "HEAD").split(b"\0"):
            if line:
                about, _, path = line.partition(b"\t")
                mode, _, blob = about.split(b" ")
                found[path] = (mode, blob)
        return found

    def ignored(self, paths: Sequence[bytes]) -> frozenset[bytes]:
        """Those new paths that the task's own ignore rules, or the rules for caches, keep out of a patch."""
        new = [path for path in paths if path not in self.base]
        if not new:
            return frozenset()
        with tempfile.TemporaryDirectory() as nowhere:
            rules = ("-c", f"core.excludesFile={self._git}/info/ignored")
            said = self._run(
                *rules,
                *("check-ignore", "--no-index", "-z", "--stdin"),
                stdin=b"".join(b"./" + path + b"\0" for path in new),
                tree=nowhere,
                fine=(0, 1),
            )
        return frozenset(path.removeprefix(b"./") for path in said.split(b"\0") if path)

    def patch(self, delta: TreeChanges, *, limit: int) -> bytes:
        """The patch that makes the base what `delta` tells; at most one byte more than `limit` of it.

        Raises TooSlow, GraderError when git fails.
        """
        now = {path: known for path, known in self.base.items() if not _is_gone(path, delta)}
        for path, entry in delta.files.items():
            now[path] = (entry.mode.encode(), _blob_id(entry.data))
        taken = _parents(delta.files)
        now = {
            path: known
            for path, known in now.items()
            if path in delta.files or (path not in taken and not _below(path, delta.files))
        }
        gone = [path for path in self.base if path not in now]
        changed = [path for path, known in now.items() if self.base.get(path) != known]
        if not gone and not changed:
            return b""
        with tempfile.TemporaryDirectory() as room:
            scratch = Path(room)
            (scratch / "objects").mkdir()
            (scratch / "tree").mkdir()
            (scratch / "index").write_bytes((self._git / "scratch" / "index").read_bytes())
            for name, data in {now[path][1]: delta.files[path].data for path in changed}.items():
                _write_blob(scratch / "objects", name, data)
            lines = [_NOTHING + b"\t" + path for path in gone]
            lines += [now[path][0] + b" " + now[path][1] + b"\t" + path for path in changed]
            env = {
                "GIT_INDEX_FILE": str(scratch / "index"),
                "GIT_OBJECT_DIRECTORY": str(scratch / "objects"),
                "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(self._git / "objects"),
            }
            tree = str(scratch / "tree")
            self._run("update-index", "-z", "--index-info", stdin=b"\0".join((*lines, b"")), tree=tree, env=env)
            return self._run(*_DIFF, tree=tree, env=env, limit=limit + 1)

    def _run(
        self,
        *args: str,
        stdin: bytes = b"",
        tree: str = "/nonexistent",
        env: Mapping[str, str] | None = None,
        fine: tuple[int, ...] = (0,),
        limit: int | None = None,
    ) -> bytes:
        """What git says; with `limit` no more of it than so many bytes, after which git is ended."""
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_ATTR_NOSYSTEM": "1",
            "GIT_DIR": str(self._git),
            "GIT_WORK_TREE": tree,
            **(env or {}),
        }
        command = [git_program(), *args]
        try:
            with subprocess.Popen(
                command,
                cwd=tree if Path(tree).is_dir() else "/",
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ) as git:
                return _outcome(git, stdin, fine, limit)
        except OSError as error:
            raise GraderError(f"the patch could not be taken: git does not start: {error}") from error


def _outcome(git: subprocess.Popen[bytes], stdin: bytes, fine: tuple[int, ...], limit: int | None) -> bytes:
    """What a started git says. Raises TooSlow, GraderError."""
    late = threading.Event()

    def end() -> None:
        late.set()
        git.kill()

    timer = threading.Timer(TIMEOUT_S, end)
    timer.start()
    try:
        if limit is None:
            output, errors = git.communicate(stdin)
        else:
            assert git.stdin and git.stdout and git.stderr
            git.stdin.close()
            output = git.stdout.read(limit)
            if len(output) == limit:
                git.kill()
                return output
            errors = git.stderr.read()
            git.wait()
    finally:
        timer.cancel()
    if late.is_set():
        raise GitTimeout(f"git did not end in {TIMEOUT_S:.0f} s")
    if git.returncode not in fine:
        said = errors.decode(errors="replace").strip()
        raise GraderError(f"the patch could not be taken (git's exit code {git.returncode}): {said[-2000:]}")
    return output


_DIFF = (
    *(
        "diff",
        "--cached",
        "--binary",
        "--full-index",
        "--no-renames",
        "--no-ext-diff",
        "--no-textconv",
        "--no-color",
    ),
    *("--src-prefix=a/", "--dst-prefix=b/", "HEAD", "--"),
)


def _is_gone(path: bytes, delta: TreeChanges) -> bool:
    return (
        path in delta.directories or b"" in delta.deleted or path in delta.deleted or _below(path, delta.deleted)
    )


def _below(path: bytes, places: frozenset[bytes] | Mapping[bytes, object]) -> bool:
    """Whether one of the directories that `path` is in is among `places`."""
    while path := path.rpartition(b"/")[0]:
        if path in places:
            return True
    return False


def _parents(paths: Mapping[bytes, object]) -> set[bytes]:
    """All directories that the paths are in."""
    found: set[bytes] = set()
    for each in paths:
        path = each
        while (path := path.rpartition(b"/")[0]) and path not in found:
            found.add(path)
    return found


def _blob(data: bytes) -> bytes:
    return b"blob %d\0%b" % (len(data), data)


def _blob_id(data: bytes) -> bytes:
    return hashlib.sha1(_blob(data), usedforsecurity=False).hexdigest().encode()


def _write_blob(objects: Path, name: bytes, data: bytes) -> None:
    """Write a loose object as git does."""
    hexadecimal = name.decode()
    (objects / hexadecimal[:2]).mkdir(exist_ok=True)
    (objects / hexadecimal[:2] / hexadecimal[2:]).write_bytes(zlib.compress(_blob(data), 1))
