"""Reads the history of a git repository from its objects: commits, their changes, and files byte for byte.

Nothing is checked out, and no filter, hook or program that the repository names is run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.tasks.materialise import relative_path
from understudy.tasks.prepare import git_program

_FILE_MODES = (b"100644", b"100755")
_LINK_MODE = b"120000"
_TREE_BYTES = 512 << 20
_TIMEOUT_S = 300
_ADVICE = "; check the repository with git fsck"


class Commit(Struct, frozen=True):
    """A commit on the main line, with its first parent, message and time (Unix seconds)."""

    id: str
    parent: str
    subject: str
    body: str
    time: int


class Change(Struct, frozen=True):
    """A commit's change to one path: the blobs before and after ("" if there is none), and the mode after."""

    path: str
    before: str
    after: str
    mode: bytes


class History:
    """The main line of a repository, which may be bare or have a work tree."""

    def __init__(self, repository: Path) -> None:
        """Open a repository. Raises ConfigError when git or the repository is missing."""
        self._repository = repository
        self._git = git_program()
        if not repository.is_dir():
            raise ConfigError(f"{repository}: no such directory; give a git repository")
        try:
            self._run("rev-parse", "--verify", "HEAD^{commit}")
        except TaskError as error:
            problem = str(error).removeprefix(f"{repository}: ").removesuffix(_ADVICE)
            raise ConfigError(
                f"{repository}: is not a git repository, or has no commit; give the path of a repository with "
                f"commits ({problem})"
            ) from error

    def commits(self) -> list[Commit]:
        """Return the commits that have a parent, newest first; of a merge only the first parent is followed."""
        out = self._run(
            "log", "-z", "--first-parent", "--no-show-signature", "--format=%H%n%P%n%ct%n%s%n%b", "HEAD"
        )
        commits: list[Commit] = []
        for record in out.decode(errors="replace").split("\0"):
            if record.strip():
                id, parents, seconds, subject, body = record.lstrip("\n").split("\n", 4)
                if parents:
                    commits.append(Commit(id, parents.split()[0], subject, body.strip(), int(seconds)))
        return commits

    def changes(self, commit: Commit) -> list[Change]:
        """Return a commit's changes against its first parent; a rename is a deletion and an addition."""
        out = self._run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", commit.parent, commit.id)
        fields = out.split(b"\0")
        changes: list[Change] = []
        for head, path in zip(fields[::2], fields[1::2], strict=False):
            _, mode, before, after, _ = head.split(b" ")
            changes.append(Change(os.fsdecode(path), _blob(before), _blob(after), mode))
        return changes

    def texts(self, blobs: Iterable[str]) -> dict[str, str]:
        """Return the texts of blobs by their ids. Raises TaskError for one that is not UTF-8 text."""
        texts: dict[str, str] = {}
        for blob, content in self._read(list(blobs)).items():
            try:
                text = content.decode()
            except UnicodeDecodeError:
                text = "\0"
            if "\0" in text:
                raise TaskError("changes a file that is not text; expected UTF-8 without NUL in all changed files")
            texts[blob] = text
        return texts

    def latest_tag(self, commit: str) -> str:
        """Return the name of the nearest tag before a commit; "" if there is none."""
        try:
            return self._run("describe", "--tags", "--abbrev=0", commit).decode(errors="replace").strip()
        except TaskError:
            return ""

    def write_tree(self, commit: str, into: Path) -> None:
        """Write the files of a commit to a new directory, without submodules and links that lead out of the tree.

        Raises TaskError for a tree that is too large or has invalid paths.
        """
        entries: list[tuple[bytes, str, str]] = []
        size = 0
        for line in self._run("ls-tree", "-r", "-z", "-l", "--full-tree", commit).split(b"\0"):
            if line:
                head, _, path = line.partition(b"\t")
                mode, _, blob, length = head.split()
                if mode in (*_FILE_MODES, _LINK_MODE):
                    if not length.isdigit():
                        raise self._missing(blob.decode())
                    size += int(length)
                    name = os.fsdecode(path)
                    relative_path(name, commit)
                    entries.append((mode, blob.decode(), name))
        if size > _TREE_BYTES:
            raise TaskError(f"its tree has {size >> 20} MiB; expected at most {_TREE_BYTES >> 20} MiB")
        _check_names([name for _, _, name in entries])
        contents = self._read([blob for _, blob, _ in entries])
        into.mkdir(parents=True)
        for mode, blob, name in entries:
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if mode != _LINK_MODE:
                path.write_bytes(contents[blob])
                path.chmod(0o755 if mode == b"100755" else 0o644)
        # Links are created last, so that no file is written through one.
        links = {into / name: os.fsdecode(contents[blob]) for mode, blob, name in entries if mode == _LINK_MODE}
        for path, target in links.items():
            path.symlink_to(target)
        _remove_links_out(into.resolve(), list(links))

    def file(self, commit: str, path: str) -> str | None:
        """Return the text of a file in a commit; None if it does not exist or is not text."""
        try:
            return self._run("cat-file", "blob", f"{commit}:{path}").decode()
        except (TaskError, UnicodeDecodeError):
            return None

    def _read(self, blobs: list[str]) -> dict[str, bytes]:
        unique = list(dict.fromkeys(blobs))
        out = self._run("cat-file", "--batch", stdin="".join(f"{blob}\n" for blob in unique).encode())
        contents: dict[str, bytes] = {}
        offset = 0
        for blob in unique:
            end = out.index(b"\n", offset)
            header = out[offset:end].split()
            if len(header) != 3 or header[1] != b"blob":
                raise self._missing(blob)
            length = int(header[2])
            contents[blob] = out[end + 1 : end + 1 + length]
            offset = end + 2 + length
        return contents

    def _missing(self, blob: str) -> TaskError:
        return TaskError(
            f"{self._repository} lacks the object {blob}; expected a complete clone, neither partial nor shallow: "
            "fetch all objects (git fetch --unshallow, or git fetch --refetch --no-filter)"
        )

    def _run(self, *arguments: str, stdin: bytes = b"") -> bytes:
        settings = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "protocol.allow=never")
        options = [word for setting in settings for word in ("-c", setting)]
        environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": "/nonexistent",
            "LC_ALL": "C",
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_CONFIG_GLOBAL": "/dev/null",
            "GIT_NO_LAZY_FETCH": "1",
            # so that nothing is fetched, whatever the repository's configuration says
            "GIT_ALLOW_PROTOCOL": "none",
            "GIT_NO_REPLACE_OBJECTS": "1",
            "GIT_OPTIONAL_LOCKS": "0",
            "GIT_TERMINAL_PROMPT": "0",
        }
        command = [self._git, "--no-pager", *options, "-C", str(self._repository), *arguments]
        try:
            completed = subprocess.run(
                command, input=stdin, capture_output=True, env=environment, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise TaskError(
                f"{self._repository}: git {arguments[0]} could not be run, or did not end within {_TIMEOUT_S} s: "
                f"{error}; check git with `understudy doctor`, or give a smaller repository"
            ) from error
        if completed.returncode:
            message = completed.stderr.decode(errors="replace").strip()[:500]
            raise TaskError(f"{self._repository}: git {arguments[0]} failed: {message}{_ADVICE}")
        return completed.stdout


def _blob(id: bytes) -> str:
    return "" if set(id) == {ord("0")} else id.decode()


def _check_names(names: list[str]) -> None:
    """Raise TaskError when a path occurs twice, or is below a path that is a file."""
    unique = set(names)
    if len(unique) != len(names) or any(str(up) in unique for name in names for up in PurePosixPath(name).parents):
        raise TaskError(
            "its tree has a path twice, or a path below a file; expected a tree that git can check out"
        )


def _remove_links_out(root: Path, links: list[Path]) -> None:
    """Remove links that lead out of the tree, directly or through other links."""
    removed = True
    while removed:
        removed = False
        for link in links:
            if link.is_symlink() and not _leads_inside(root, link):
                link.unlink()
                removed = True


def _leads_inside(root: Path, link: Path) -> bool:
    try:
        return not link.readlink().is_absolute() and link.resolve().is_relative_to(root)
    except (OSError, RuntimeError):  # links that form a circle
        return False
