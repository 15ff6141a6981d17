"""Finds logs: files, directory trees, zip archives, gzip.

Archives are hostile input. Nothing is unpacked to disk: a log in an archive is read as a stream, so names in the
archive cannot lead to other places. A stream raises an error if it grows far beyond what its compressed size makes
plausible.
"""

from __future__ import annotations

import gzip
import os
import stat
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import BinaryIO

from msgspec import Struct

from understudy.errors import ConfigError

HEAD_BYTES = 64 * 1024
"""Bytes at the beginning of a file from which its format is detected."""

INSIDE = "!/"
"""Separates the path of a zip archive from the name of a log in it."""

_BUFFER = 1 << 16
_DISK_BUFFER = 1 << 18  # large enough for many log lines
_MIN_BOMB_BYTES = 64 * 1024 * 1024
_MAX_BYTES = 8 * 1024 * 1024 * 1024
_HONEST_RATIO = 250
_MAX_MEMBERS = 200_000
_MAX_DIRECTORY_BYTES = 64 * 1024 * 1024
_END_RECORD = b"PK\x05\x06"
_END_SEARCHED = 65_557
_LEFT_OUT = frozenset((".git", "node_modules", "__pycache__", ".venv"))


class LogFile(Struct, frozen=True):
    """A log on disk or in an archive. `path` may be `archive.zip!/inner/path`; `size` is in bytes.

    `open` returns a new binary stream of the decompressed contents.
    """

    path: str
    size: int
    open: Callable[[], BinaryIO]

    @classmethod
    def on_disk(cls, path: Path) -> LogFile:
        """Return the file at `path`. Raises OSError if there is none."""
        return cls(str(path), path.stat().st_size, lambda: path.open("rb", buffering=_DISK_BUFFER))


MAX_ERRORS = 20
"""The most texts of errors that are collected: a directory may have very many damaged files."""


class OversizedLog(OSError):
    """A compressed log unpacks to implausibly many bytes, or an archive has too many members."""


def add_error(errors: list[str] | None, error: str | OSError, path: str = "") -> None:
    """Add the text of an error to `errors`, unless there are `MAX_ERRORS` already, or nobody collects them.

    `path` is put before a text that does not name it.
    """
    if errors is None or len(errors) >= MAX_ERRORS:
        return
    if isinstance(error, OSError) and error.filename is not None:
        error = f"{os.fsdecode(error.filename)} cannot be read: {error.strerror}; {_read_remedy(error)}"
    text = str(error)
    errors.append(text if path in text else f"{path} cannot be read: {text}; it may be damaged, so copy it again")


def _read_remedy(error: OSError) -> str:
    if isinstance(error, PermissionError):
        return "check its permissions"
    if isinstance(error, FileNotFoundError):
        return "it was removed while logs were read, and is left out"
    return "check the disk that it is on, or copy it to another one"


def walk_logs(paths: Iterable[Path], skipped: Counter[str], errors: list[str] | None = None) -> Iterator[LogFile]:
    """Yield the files at and below the paths in the order of their names, including those in zip archives.

    Symbolic links are followed only if they are among `paths`. Skipped files are counted in `skipped` by reason,
    and `errors` collects the texts of errors (see `add_error`). Raises ConfigError if a path does not exist or
    cannot be read.
    """
    yielded_paths: set[str] = set()
    working_directory = Path.cwd()
    for file in _walk(paths, skipped, errors):
        # Paths may overlap, so each file is yielded once.
        absolute_path = os.path.join(working_directory, file.path)  # noqa: PTH118 (of very many paths)
        if absolute_path in yielded_paths:
            continue
        yielded_paths.add(absolute_path)
        yield file


def _walk(paths: Iterable[Path], skipped: Counter[str], errors: list[str] | None) -> Iterator[LogFile]:
    for path in paths:
        try:
            mode = path.stat().st_mode
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}; give a log, a directory of logs or a zip archive"
            ) from error
        if stat.S_ISDIR(mode):
            yield from _tree(path, skipped, errors)
        elif stat.S_ISREG(mode):
            yield from _file(str(path), skipped, errors)
        else:
            raise ConfigError(
                f"cannot read {path}: it is a special file; give a log, a directory of logs or a zip archive"
            )


def log_file_at(path: str) -> LogFile:
    """Return the log at `path`, which has the form of `LogFile.path`. Raises OSError if there is none."""
    archive, separator, member = path.partition(INSIDE)
    if separator and archive.lower().endswith(".zip"):
        info = _member(archive, member)
        return LogFile(path, info.file_size, partial(_open_member, archive, member))
    size = os.stat(path).st_size  # noqa: PTH116 (of very many paths)
    return LogFile(path, size, partial(_open_gzip if path.endswith(".gz") else _open_plain, path))


def read_head(file: LogFile) -> bytes:
    """Return the first 64 KB of a log. Raises OSError if not even its first bytes can be read."""
    head = b""
    with file.open() as stream:
        try:
            while len(head) < HEAD_BYTES and (data := read_some(stream, HEAD_BYTES - len(head))):
                head += data
        except OSError:
            if not head:
                raise
    return head


def read_some(stream: BinaryIO, size: int) -> bytes:
    """Read at most `size` bytes with a single read, so that an error loses only what follows.

    Returns b"" at the end.
    """
    return getattr(stream, "read1", stream.read)(size)


def _tree(top: Path, skipped: Counter[str], errors: list[str] | None) -> Iterator[LogFile]:
    def count_unreadable(error: OSError) -> None:
        skipped["unreadable_directory"] += 1
        add_error(errors, error)

    for directory, directories, names in os.walk(top, onerror=count_unreadable):
        directories[:] = sorted(name for name in directories if name not in _LEFT_OUT)
        if links := sum(map(os.path.islink, (f"{directory}{os.sep}{name}" for name in directories))):
            skipped["link"] += links
        for name in sorted(names):
            path = f"{directory}{os.sep}{name}"
            try:
                mode = os.lstat(path).st_mode
            except OSError as error:
                skipped["unreadable_file"] += 1
                add_error(errors, error)
                continue
            if stat.S_ISREG(mode):
                yield from _file(path, skipped, errors)
            else:
                skipped["link" if stat.S_ISLNK(mode) else "special_file"] += 1


def _file(path: str, skipped: Counter[str], errors: list[str] | None) -> Iterator[LogFile]:
    if not path.lower().endswith(".zip"):
        try:
            yield log_file_at(path)
        except OSError as error:
            skipped["unreadable_file"] += 1
            add_error(errors, error)
        return
    try:
        members = sorted(_archive(path).infolist(), key=lambda info: info.filename)
    except OversizedLog as error:
        skipped["oversized_archive"] += 1
        add_error(errors, error)
        return
    except _BROKEN as error:
        skipped["bad_archive"] += 1
        add_error(errors, _damaged(path, error))
        return
    names: set[str] = set()
    for info in members:
        reason = _refused(info, names)
        if reason:
            skipped[reason] += 1
            if reason == "oversized_member":
                add_error(errors, _oversized(f"{path}{INSIDE}{info.filename}"))
        elif not info.is_dir():
            names.add(info.filename)
            yield log_file_at(f"{path}{INSIDE}{info.filename}")


def _refused(info: zipfile.ZipInfo, names: set[str]) -> str | None:
    """Return the reason why a member of a zip archive is skipped, or None if it should be read."""
    if info.flag_bits & 0x1:
        return "encrypted_member"
    if stat.S_ISLNK(info.external_attr >> 16):
        return "link"
    if info.filename in names:
        return "repeated_member"
    if info.filename.lower().endswith(".zip"):
        return "nested_archive"
    if info.file_size > _allowed(info.compress_size):
        return "oversized_member"
    return None


_BROKEN = (
    zipfile.BadZipFile, OSError, zlib.error, EOFError, ValueError, NotImplementedError, RuntimeError, KeyError
)  # fmt: skip


def _archive(archive: str) -> zipfile.ZipFile:
    """Return the open zip archive. It is cached until the file changes."""
    status = Path(archive).stat()
    return _open_archive(archive, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _open_archive(archive: str, size: int, modified_ns: int) -> zipfile.ZipFile:
    """Open a zip archive.

    Its central directory's size is checked first, because opening reads all of it into memory.
    """
    with Path(archive).open("rb") as stream:
        stream.seek(max(0, size - _END_SEARCHED))
        tail = stream.read()
    position = tail.rfind(_END_RECORD)
    if (
        position >= 0
        and (directory_bytes := int.from_bytes(tail[position + 12 : position + 16], "little")) != 0xFFFFFFFF
    ):
        if directory_bytes > _MAX_DIRECTORY_BYTES:
            raise OversizedLog(
                f"{archive}: the zip's central directory has {directory_bytes} bytes, expected at most "
                f"{_MAX_DIRECTORY_BYTES}; unpack it yourself, or split it"
            )
    elif size > _MAX_DIRECTORY_BYTES:
        # A zip64 archive stores the size of its directory in another record.
        position64 = tail.rfind(b"PK\x06\x06")
        if (
            position64 < 0
            or int.from_bytes(tail[position64 + 40 : position64 + 48], "little") > _MAX_DIRECTORY_BYTES
        ):
            raise OversizedLog(
                f"{archive}: the zip's central directory has more than {_MAX_DIRECTORY_BYTES} bytes; unpack it "
                "yourself, or split it"
            )
    archive_file = zipfile.ZipFile(archive)
    if len(archive_file.filelist) > _MAX_MEMBERS:
        raise OversizedLog(
            f"{archive}: expected at most {_MAX_MEMBERS} members, got {len(archive_file.filelist)}; unpack it "
            "yourself, or split it"
        )
    return archive_file


def _member(archive: str, member: str) -> zipfile.ZipInfo:
    try:
        return _archive(archive).getinfo(member)
    except KeyError as error:
        raise FileNotFoundError(
            f"{archive} has no member {member!r}; the archive was replaced while logs were read; run the "
            "same command again"
        ) from error
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise OSError(_damaged(archive, error)) from error


def _damaged(archive: str, error: Exception) -> str:
    return f"{archive} cannot be read as a zip archive: {error}; it may be damaged or incomplete, so copy it again"


def _open_plain(path: str) -> BinaryIO:
    # The file may have been replaced by a pipe or device since it was listed. O_NONBLOCK keeps open() from
    # waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(
            f"{path} is no longer a regular file; it was replaced while logs were read; run the same command again"
        )
    return open(descriptor, "rb", buffering=_BUFFER)  # noqa: PTH123


def _open_gzip(path: str) -> BinaryIO:
    packed = _open_plain(path)
    allowed = _allowed(os.fstat(packed.fileno()).st_size)
    return _bounded(_Unpacked(packed), allowed, path)  # pyright: ignore[reportArgumentType]


class _Unpacked(gzip.GzipFile):
    """A gzip stream that also closes the file it reads from."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__(fileobj=packed)
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


def _open_member(archive: str, member: str) -> BinaryIO:
    info = _member(archive, member)
    path = f"{archive}{INSIDE}{member}"
    try:
        stream: BinaryIO = _archive(archive).open(info)  # pyright: ignore[reportAssignmentType]
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        raise OSError(
            f"{path} cannot be unpacked: {error}; it may be damaged, encrypted or incomplete, so copy it "
            "again, or unpack it yourself"
        ) from error
    allowed = _allowed(info.compress_size)
    if member.endswith(".gz"):
        return _bounded(gzip.GzipFile(fileobj=_bounded(stream, allowed, path)), allowed * 4, path)  # pyright: ignore[reportArgumentType]
    return _bounded(stream, allowed, path)


def _allowed(compressed: int) -> int:
    return min(max(_MIN_BOMB_BYTES, compressed * _HONEST_RATIO), _MAX_BYTES)


def _oversized(path: str) -> str:
    return (
        f"{path} unpacks to far more bytes than expected for its compressed size (a decompression bomb?); unpack "
        "it yourself if you trust it"
    )


class _Bounded(RawIOBase):
    """A stream that fails after `allowed` bytes, or ends there if `cut` is set.

    Decompression errors become OSError.
    """

    def __init__(self, stream: BinaryIO, allowed: int, path: str, *, cut: bool = False) -> None:
        self._stream = stream
        self._remaining_bytes = allowed
        self._path = path
        self._cut = cut

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            data = read_some(self._stream, min(len(buffer), self._remaining_bytes) if self._cut else len(buffer))
        except (EOFError, zlib.error, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise OSError(
                f"{self._path} cannot be unpacked: {error}; it may be damaged or incomplete, so copy it again"
            ) from error
        self._remaining_bytes -= len(data)
        if self._remaining_bytes < 0:
            raise OversizedLog(_oversized(self._path))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _bounded(stream: BinaryIO, allowed: int, path: str) -> BinaryIO:
    return BufferedReader(_Bounded(stream, allowed, path), 256 * 1024)


_READ_BYTES = 1 << 20


def readable_files(
    files: Sequence[LogFile], skipped: Counter[str], broken: Counter[str], errors: list[str] | None = None
) -> list[LogFile]:
    """Return the files that can be read. A file that breaks off is cut off there.

    Files of which nothing can be read are counted in `skipped`, files that break off in `broken`. `errors`
    collects the texts of errors.
    """
    readable: list[LogFile] = []
    for file in files:
        size = 0
        try:
            with file.open() as stream:
                while data := read_some(stream, _READ_BYTES):
                    size += len(data)
        except OSError as error:
            add_error(errors, error, file.path)
            if not size:
                skipped["unreadable_file"] += 1
                continue
            broken["unreadable_rest"] += 1
            file = _cut(file, size)
        readable.append(file)
    return readable


def _cut(file: LogFile, size: int) -> LogFile:
    return LogFile(file.path, size, lambda: BufferedReader(_Bounded(file.open(), size, file.path, cut=True)))
