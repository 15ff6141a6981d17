"""The key under which pseudonyms are made: a file of the user's own, made at its first use."""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from understudy.errors import ConfigError

SIZE = 32
"""Bytes of a key; the file holds them as hex digits."""


def key_path() -> Path:
    """Where the key lies: `redaction.key` in Understudy's directory of the user's data (`XDG_DATA_HOME`)."""
    home = os.environ.get("XDG_DATA_HOME", "")
    # The specification has a path that is not absolute ignored.
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "share"
    return base / "understudy" / "redaction.key"


def load_key(path: Path | None = None) -> bytes:
    """The user's key; made, readable by the user alone, where there is none yet.

    Raises ConfigError when the file cannot be made or read, can be read by others, or holds no key.
    """
    path = path or key_path()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise _trouble(path, "read", error) from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise ConfigError(f"{path}: the key of redaction is no file; move away what is there")
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        if mode & 0o077:
            raise ConfigError(
                f"{path}: the key of redaction can be read by others (mode {stat.S_IMODE(mode):o}); "
                f"make it yours alone: chmod 600 {path}"
            )
        try:
            text = file.read(4 * SIZE).strip()
        except OSError as error:
            raise _trouble(path, "read", error) from error
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != SIZE:
        raise ConfigError(
            f"{path}: holds no key of redaction, which is {2 * SIZE} hex digits; restore it, or remove it to have "
            "a new one made (pseudonyms will be others then)"
        )
    return key


def _create(path: Path) -> bytes:
    """A new key, in place whole or not at all; that of another process where it was quicker."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(SIZE) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise _trouble(path, "made", error) from error
    return load_key(path)


def _trouble(path: Path, done: str, error: OSError) -> ConfigError:
    return ConfigError(
        f"{path}: the key of redaction cannot be {done}: {error.strerror}; "
        "set XDG_DATA_HOME to a directory of yours"
    )
