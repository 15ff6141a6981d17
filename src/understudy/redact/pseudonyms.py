"""Pseudonyms, and the key from which they are derived.

A secret has the same pseudonym everywhere, which reveals nothing about the secret without the key. The key is a
file of the user, created when it is first needed.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Literal

from understudy.errors import ConfigError
from understudy.redact.tokens import pseudonym_label
from understudy.util.files import atomic_write

SIZE = 32
"""The size of a key in bytes; the file contains it as hex digits."""


def key_path() -> Path:
    """The path of the key: `understudy/redaction.key` in the user's data directory (`XDG_DATA_HOME`)."""
    home = os.environ.get("XDG_DATA_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(home) if home.startswith("/") else Path.home() / ".local" / "share"
    return base / "understudy" / "redaction.key"


def load_key(path: Path | None = None) -> bytes:
    """Return the user's key. It is created if there is none, readable by the user only.

    Raises ConfigError if the file cannot be created or read, can be read by others, or is malformed.
    """
    path = path or key_path()
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(
                f"{path}: expected a regular file with the redaction key, got a "
                f"{'directory' if stat.S_ISDIR(mode) else 'special file'}; move it away, and a new key is made "
                "there"
            )
        if mode & 0o077:
            raise ConfigError(
                f"{path}: the redaction key can be read by others (mode {stat.S_IMODE(mode):o}); "
                f"run: chmod 600 {path}"
            )
        key = bytes.fromhex(path.read_text("ascii"))
    except FileNotFoundError:
        return _create(path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the redaction key cannot be read: {error.strerror}; expected a file that you own, with mode "
            "600, in directories that you may enter: correct owner and mode (a new key elsewhere would change all "
            "pseudonyms)"
        ) from error
    except ValueError:
        key = b""
    if len(key) != SIZE:
        raise ConfigError(
            f"{path}: invalid redaction key, expected {2 * SIZE} hex digits; restore the file from a copy, or "
            "remove it to get a new key (pseudonyms will differ then)"
        )
    return key


def _create(path: Path) -> bytes:
    """Create the key file atomically; if another process creates one first, return that one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            atomic_write(draft, f"{secrets.token_hex(SIZE)}\n".encode(), fsync=True, mode=0o600)
            # Unlike a rename, a link leaves a key alone that is there by now.
            with suppress(FileExistsError):
                os.link(draft, path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{path}: the redaction key cannot be created: {error.strerror}; set XDG_DATA_HOME to a "
            "directory that you may write in"
        ) from error
    return load_key(path)


SecretKind = Literal["secret", "private-key", "user", "email"]


class Pseudonyms:
    """Derives pseudonyms from a key."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._cached: dict[tuple[SecretKind, str], str] = {}

    def name(self, kind: SecretKind, value: str) -> str:
        """Return the pseudonym of a value, such as `[GITHUB_TOKEN_3f2a91]`, `user_1c2d3e` or
        `user_1c2d3e@example.com`.
        """
        pseudonym = self._cached.get((kind, value)) or self._make(kind, value)
        if len(self._cached) < 100_000:
            self._cached[kind, value] = pseudonym
        return pseudonym

    def _make(self, kind: SecretKind, value: str) -> str:
        hashed_kind = "secret" if kind == "private-key" else kind
        hashed_value = value.lower() if kind == "email" else value
        message = f"understudy redaction 1\0{hashed_kind}\0{hashed_value}".encode(errors="surrogatepass")
        digits = hmac.digest(self._key, message, "sha256").hex()[:6]
        if kind in ("user", "email"):
            return f"user_{digits}" + ("@example.com" if kind == "email" else "")
        return f"[{'PRIVATE_KEY' if kind == 'private-key' else pseudonym_label(value)}_{digits}]"
