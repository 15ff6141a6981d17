"""Files and directories that other machines need: identified by a digest of their content, sent once, and cached
there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from understudy.errors import SandboxError
from understudy.util.files import atomic_path, locked, mark_used

_NAME = "content"
PIECE_BYTES = 1 << 20


def digest_of(path: Path) -> str:
    """Return a digest of a file or directory: of names, kinds, permissions and bytes of everything in it.

    Raises SandboxError when it cannot be read, or contains something other than files, directories and links.
    """
    digest = hashlib.sha256()
    try:
        for name, entry, mode in _entries(path):
            digest.update(f"{len(name)}:{stat.S_IFMT(mode):o}:{mode & 0o777:o}:".encode() + name)
            if stat.S_ISLNK(mode):
                digest.update(hashlib.sha256(os.fsencode(entry.readlink())).digest())
            elif stat.S_ISREG(mode):
                with entry.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise SandboxError(f"cannot send {path} to another machine: {error}; check its permissions") from error
    return digest.hexdigest()


def pack(path: Path, into: IO[bytes]) -> None:
    """Write a tar of a file or directory. Raises SandboxError."""
    try:
        with tarfile.open(fileobj=into, mode="w", format=tarfile.PAX_FORMAT) as tar:
            tar.dereference = path.is_file()
            tar.add(path.resolve() if path.is_file() else path, _NAME)
    except OSError as error:
        raise SandboxError(
            f"cannot send {path} to another machine: {error}; check its permissions, and that $TMPDIR of "
            "this machine has space for a copy"
        ) from error


class ContentCache:
    """A directory of received contents, by digest. `prepare` is called once with each new content."""

    def __init__(self, directory: Path, prepare: Callable[[Path], None] = lambda _: None) -> None:
        self._directory = directory
        self._prepare = prepare

    def path_of(self, digest: str) -> Path | None:
        """Return the path of a content, None if it is not here."""
        path = self._directory / digest / _NAME
        mark_used(self._directory.parent, (path,))
        return path if os.path.lexists(path) else None

    def add(self, digest: str, archive: Path) -> None:
        """Unpack the tar of a received content. Raises SandboxError when its digest is not `digest`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        target = self._directory / digest
        with locked(target.with_suffix(".lock")):
            if target.exists():
                return
            with atomic_path(target) as new:
                new.mkdir()
                try:
                    with tarfile.open(archive) as tar:
                        # Safe although unfiltered: the sender is the one whose commands run here anyway, and the
                        # digest is checked.
                        tar.extractall(new, filter="fully_trusted")
                except (OSError, tarfile.TarError) as error:
                    raise SandboxError(
                        f"cannot unpack the content for {target}: {error}; free some disk space on that "
                        "machine, then run the same command again"
                    ) from error
                if (actual := digest_of(new / _NAME)) != digest:
                    raise SandboxError(
                        f"the content was damaged or changed on the way: expected the digest {digest}, got "
                        f"{actual}; run the same command again"
                    )
                self._prepare(new / _NAME)


def _entries(path: Path) -> Iterator[tuple[bytes, Path, int]]:
    """Yield name below `path`, path and mode of everything there, in a fixed order; `path` itself may be
    a link.
    """
    yield b"", path, path.stat().st_mode
    if not path.is_dir():
        return
    for folder, directories, names in os.walk(path):
        directories.sort()
        for name in sorted((*directories, *names)):
            entry = Path(folder, name)
            mode = entry.lstat().st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
                raise SandboxError(
                    f"cannot send {entry} to another machine: it is a special file; expected a file, "
                    "directory or link: remove it"
                )
            yield os.fsencode(entry.relative_to(path)), entry, mode
