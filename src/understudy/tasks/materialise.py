"""Gets a task's source: a pinned sdist, a directory of this machine, or files in its record."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

from understudy.errors import ConfigError, TaskError
from understudy.tasks.environment import python_environment
from understudy.types import Directory, Files, ImageTree, Sdist, Source
from understudy.util.files import locked, write_remedy

_MAX_BYTES = 2 << 30
_MAX_MEMBERS = 200_000
_PIP_TIMEOUT_S = 600

# pip asks a package for its metadata even when it only downloads it, which runs the package's code. Loaded as
# sitecustomize by the interpreters that pip starts, this code returns fake metadata instead, and ends any other
# program.
_NO_BUILD = """\
import json, os, sys
if sys.orig_argv[1:3] != ["-m", "pip"]:
    hook, control = (["", ""] + sys.orig_argv)[-2:]
    result = None
    if hook == "prepare_metadata_for_build_wheel":
        name, version = os.environ["UNDERSTUDY_SDIST"].split("==")
        result = "%s-%s.dist-info" % (name.replace("-", "_"), version)
        with open(os.path.join(control, "input.json")) as file:
            place = os.path.join(json.load(file)["kwargs"]["metadata_directory"], result)
        os.makedirs(place)
        with open(os.path.join(place, "METADATA"), "w") as file:
            file.write("Metadata-Version: 2.1\\nName: %s\\nVersion: %s\\n" % (name, version))
    elif hook.startswith("get_requires_for_"):
        result = []
    if result is not None:
        with open(os.path.join(control, "output.json"), "w") as file:
            json.dump({"return_val": result}, file)
    os._exit(result is None)
"""


def read_text(path: Path, what: str) -> str:
    """Return the text of a task's file. Raises TaskError, which says that `what` was expected, when it
    has none.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        remedy = "create it" if isinstance(error, FileNotFoundError) else "make it a file that you can read"
        raise TaskError(f"{path}: {error.strerror}; expected {what}: {remedy}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8: {error}; expected {what}: convert it to UTF-8") from error
    if not text.strip():
        raise TaskError(f"{path}: is empty; expected {what}: write it there")
    return text


def relative_path(name: str, where: str) -> PurePosixPath:
    """Return `name` as a path inside a tree. Raises TaskError, naming `where`, when it leads out of it or into
    `.git`.
    """
    path = PurePosixPath(name)
    leaves_tree = path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name
    if leaves_tree or any(part.lower() == ".git" for part in path.parts):
        raise TaskError(
            f"{where}: invalid path {name[:200]!r}; give a relative path inside the tree, without '..', '.git' or "
            "NUL"
        )
    return path


def materialise(source: Source, into: Path, cache: Path) -> None:
    """Create the directory `into` with the source's files, without `.git` at any depth.

    Raises TaskError when the source is not usable, ConfigError when it cannot be fetched.
    """
    match source:
        case Sdist():
            _unpack(fetch(source, cache), into)
        case Directory():
            _copy(Path(source.path), into)
        case Files():
            _write(source.files, into)
        case ImageTree():
            raise TaskError(
                "checks.source: a container image (kind image) is unsupported for hidden checks; set it to a "
                "source of kind files, directory or sdist"
            )


def fetch(sdist: Sdist, cache: Path) -> Path:
    """Return the archive of a pinned sdist, from the cache or through pip; its hash is verified, its code never
    run.

    Raises ConfigError when pip cannot get it, TaskError when the pin is malformed or the hash differs.
    """
    for value, pattern, expected in (
        (sdist.name, r"[A-Za-z0-9][A-Za-z0-9._-]*", "a name of letters, digits, '.', '_' and '-'"),
        (sdist.version, r"[A-Za-z0-9][A-Za-z0-9.+!_-]*", "a version of letters, digits and '.+!_-'"),
        (sdist.sha256, r"[0-9a-f]{64}", "a sha256 of 64 lower-case hex digits"),
    ):
        if not re.fullmatch(pattern, value):
            raise TaskError(
                f"sdist {sdist.name[:80]!r} {sdist.version[:80]!r}: got {value[:80]!r}, expected {expected}; "
                "correct the source in the task"
            )
    archive = archive_path(sdist, cache)
    home = archive.parent
    if not archive.exists():
        with locked(home.with_suffix(".lock")):
            if not archive.exists():
                home.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=home) as temporary:
                    _download(sdist, Path(temporary), cache).rename(archive)
    return archive


def archive_path(sdist: Sdist, cache: Path) -> Path:
    """Return the path of the archive of a pinned sdist in the cache."""
    return cache.absolute() / "sdists" / sdist.sha256 / "file"


def _download(sdist: Sdist, directory: Path, cache: Path) -> Path:
    pin = f"{sdist.name}=={sdist.version}"
    (directory / "sitecustomize.py").write_text(_NO_BUILD, encoding="utf-8")
    (directory / "requirements.txt").write_text(f"{pin} --hash=sha256:{sdist.sha256}\n", encoding="utf-8")
    python = Path(python_environment(cache).path_prefixes[0], "python")
    argv = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--no-binary=:all:", "--no-build-isolation", "--require-hashes", "--dest", directory / "got"]
    try:
        pip = subprocess.run(
            [*argv, "-r", directory / "requirements.txt"],
            env={**os.environ, "PYTHONPATH": str(directory), "UNDERSTUDY_SDIST": pin},
            capture_output=True,
            text=True,
            timeout=_PIP_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            f"sdist {pin}: pip could not be started, or did not end within {_PIP_TIMEOUT_S} s: {error}; check the "
            "network and pip's settings (index, proxy), then run the same command again"
        ) from error
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise TaskError(
            f"sdist {pin}: the file of the package index does not have the expected sha256 {sdist.sha256}; if you "
            "trust that file, set source.sha256 in the task to its digest"
        )
    archives = sorted((directory / "got").glob("*"))
    if pip.returncode or len(archives) != 1:
        raise ConfigError(
            f"sdist {pin}: pip could not fetch it; check name and version in the task, the network and pip's "
            f"settings (index, proxy), then run the same command again. pip said:\n{pip.stderr.strip()[-2000:]}"
        )
    if (actual := hashlib.sha256(archives[0].read_bytes()).hexdigest()) != sdist.sha256:
        raise TaskError(
            f"sdist {pin}: got sha256 {actual}, expected {sdist.sha256}; if you trust that file, set "
            "source.sha256 in the task to its digest"
        )
    return archives[0]


def _unpack(archive: Path, into: Path) -> None:
    """Unpack an archive without its top directory."""
    into.mkdir(parents=True)
    total = 0
    try:
        with tarfile.open(archive) as tar:
            for count, member in enumerate(tar, 1):
                total += member.size
                if total > _MAX_BYTES or count > _MAX_MEMBERS:
                    raise TaskError(
                        f"{archive}: has at least {count:,} files and {total >> 20} MiB; expected at most "
                        f"{_MAX_MEMBERS:,} files and {_MAX_BYTES >> 20} MiB: pin a smaller package or release in "
                        "the task"
                    )
                parts = PurePosixPath(member.name).parts[1:]
                if parts and all(part.lower() != ".git" for part in parts):
                    extract(tar, member, "/".join(parts), into)
    except _UnsafeMember as error:
        raise TaskError(
            f"{archive}: {error}. Pin a release in the task whose archive has no such entry"
        ) from error
    except (tarfile.TarError, OSError, EOFError, KeyError) as error:
        raise TaskError(
            f"{archive}: cannot be unpacked: {error}; expected a tar archive: delete this file if it is damaged "
            "(it is fetched again), otherwise check the disk space, or pin another release in the task"
        ) from error


def check_directory(root: Path) -> None:
    """Check whether a directory may be copied into sandboxes, by its entries' metadata only.

    Raises TaskError when it is missing or too large, and for a file that only its owner may read in a tree that
    others may read: probably a key that must not be given away. (In a tree that is private as a whole, as with
    umask 077, the modes of files mean nothing.)
    """
    if not root.is_dir():
        raise TaskError(
            f"{root}: no such directory, expected the task's source; create it, or correct its path in the task"
        )
    shared = bool(root.stat().st_mode & 0o077)
    size = count = 0
    for parent, names, files in os.walk(root, onerror=_unreadable):
        names[:] = [name for name in names if name.lower() != ".git"]
        count += len(names) + len(files)
        for name in files:
            path = Path(parent, name)
            status = path.lstat()
            if stat.S_ISREG(status.st_mode):
                size += status.st_size
                if shared and not status.st_mode & 0o044 and name.lower() != ".git":
                    raise TaskError(
                        f"{path}: only its owner may read this file, and an agent would; remove it from the tree, "
                        "or let others read it (chmod go+r)"
                    )
        if size > _MAX_BYTES or count > _MAX_MEMBERS:
            raise TaskError(
                f"{root}: a task's source is too large: {size >> 20} MiB in {count} files so far, expected "
                f"at most {_MAX_BYTES >> 20} MiB and {_MAX_MEMBERS:,} files; remove what the task does not "
                "need"
            )


def _copy(source: Path, into: Path) -> None:
    check_directory(source)
    into.mkdir(parents=True)
    for parent, names, files in os.walk(source, onerror=_unreadable):
        names[:] = [name for name in names if name.lower() != ".git"]
        destination_directory = into / Path(parent).relative_to(source)
        for name in [*names, *(name for name in files if name.lower() != ".git")]:
            origin = Path(parent, name)
            mode = origin.lstat().st_mode
            if stat.S_ISLNK(mode):
                (destination_directory / name).symlink_to(origin.readlink())
            elif stat.S_ISDIR(mode):
                (destination_directory / name).mkdir()
            elif not stat.S_ISREG(mode):
                raise TaskError(
                    f"{origin}: is a special file; expected a file, directory or link: remove it from the source"
                )
            elif not os.access(origin, os.R_OK):
                raise TaskError(
                    f"{origin}: permission denied; make it readable (chmod u+r), or remove it from the source"
                )
            else:
                shutil.copy2(origin, destination_directory / name)


def _unreadable(error: OSError) -> None:
    raise TaskError(
        f"{error.filename}: cannot be read: {error.strerror}; make it readable (chmod), or remove it from the "
        "source"
    ) from error


def _write(files: dict[str, str], into: Path) -> None:
    into.mkdir(parents=True)
    for name, content in files.items():
        path = into / relative_path(name, "files")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode())
        except UnicodeEncodeError as error:
            raise TaskError(
                f"files: {name[:200]!r}: its name or content cannot be encoded as UTF-8 ({error}); remove the "
                "character from the task"
            ) from error
        except OSError as error:
            remedy = write_remedy(error, "expected short names, none of which is also a directory: rename it")
            raise TaskError(f"files: {name[:200]!r} cannot be written: {error.strerror}; {remedy}") from error


class _UnsafeMember(tarfile.TarError):
    """A member of an archive is not extracted, because of its path or kind."""


def extract(tar: tarfile.TarFile, member: tarfile.TarInfo, name: str, root: Path) -> None:
    """Extract a member to the path `name` below the directory `root`: a file, a directory or a link.

    Equals tarfile's data filter, which Python has since 3.11.4, but Debian 12 has 3.11.2. Raises a TarError for a
    member that leads out of `root` or is anything else.
    """
    root = root.resolve()
    path = PurePosixPath(name)
    target = root / path
    if target == root and member.isdir():
        return
    if path.is_absolute() or ".." in path.parts or not target.parent.resolve().is_relative_to(root):
        raise _UnsafeMember(f"{member.name!r} leads out of the tree; expected a relative path without ..")
    if member.isdir():
        if target.is_symlink():
            raise _UnsafeMember(f"{member.name!r} is a link and a directory; expected one of them")
        target.mkdir(parents=True, exist_ok=True)
        return
    if member.issym():
        destination = target.parent / member.linkname
        if PurePosixPath(member.linkname).is_absolute() or not destination.resolve().is_relative_to(root):
            raise _UnsafeMember(f"{member.name!r} is a link that leads out of the tree; expected a target in it")
    elif not (member.isreg() or member.islnk()):
        raise _UnsafeMember(f"{member.name!r} is a device, pipe or socket; expected a file, directory or link")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    if member.issym():
        target.symlink_to(member.linkname)
        return
    content = tar.extractfile(member)  # for a hard link this is the content of its target in the archive
    if content is None:
        raise _UnsafeMember(
            f"{member.name!r} is a hard link without a file as its target; expected one in the archive"
        )
    with content, target.open("xb") as file:
        shutil.copyfileobj(content, file)
    target.chmod(0o755 if member.mode & 0o100 else 0o644)
    os.utime(target, (member.mtime, member.mtime))
