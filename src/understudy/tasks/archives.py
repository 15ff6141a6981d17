"""Taking a member out of a tar archive that nobody vouches for."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, root: Path) -> None:
    """Write a member to the path `name` below the directory `root`: a file, a directory or a link.

    Does what tarfile's own data filter does, which Python has from 3.11.4 on only; Debian 12 has 3.11.2.
    Raises tarfile.TarError for a member that leads out of `root` or is anything else.
    """
    root = root.resolve()
    path = PurePosixPath(name)
    place = root / path
    if place == root and member.isdir():
        return
    if path.is_absolute() or ".." in path.parts or not place.parent.resolve().is_relative_to(root):
        raise tarfile.TarError(f"{member.name!r} leads out of the tree")
    if member.isdir():
        if place.is_symlink():
            raise tarfile.TarError(f"{member.name!r} is a link and a directory")
        place.mkdir(parents=True, exist_ok=True)
        return
    if member.issym():
        target = place.parent / member.linkname
        if PurePosixPath(member.linkname).is_absolute() or not target.resolve().is_relative_to(root):
            raise tarfile.TarError(f"{member.name!r} is a link that leads out of the tree")
    elif not (member.isreg() or member.islnk()):
        raise tarfile.TarError(f"{member.name!r} is neither a file, a directory nor a link")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    if member.issym():
        place.symlink_to(member.linkname)
        return
    content = tar.extractfile(member)  # a hard link's content is that of its target in the archive
    if content is None:
        raise tarfile.TarError(f"{member.name!r} is a link to what is no file")
    with content, place.open("xb") as file:
        shutil.copyfileobj(content, file)
    place.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(place, (member.mtime, member.mtime))
