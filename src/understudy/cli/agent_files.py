"""The files that options of agents name, as text that is stored with a run."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from understudy.errors import ConfigError

_SKILLS_LIMIT = 1 << 20


def option_text(name: str, value: object) -> str:
    """Return an option's value as text: of a path, the content of its files. Raises ConfigError."""
    return _READERS[name](value) if isinstance(value, Path) else str(value)


def _json_of(flag: str, path: Path) -> str:
    """Return the JSON object in a file that an option names. Raises ConfigError."""
    try:
        value = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(
            f"{flag} {path}: cannot be read as a file with one JSON object: {error}; check the path, or correct "
            "the JSON"
        ) from error
    return msgspec.json.encode(value).decode()


def _skills_of(path: Path) -> str:
    """Return the files of a directory of skills as a tar archive in base64, always the same for the same files.

    Raises ConfigError.
    """
    if not path.is_dir() or not any(path.glob("*/SKILL.md")):
        raise ConfigError(
            f"--skills {path}: has no skills, expected a directory with a file NAME/SKILL.md for each; check the "
            "path"
        )
    import tarfile

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for file in sorted(entry for entry in path.rglob("*") if entry.is_file()):
            member = tarfile.TarInfo(file.relative_to(path).as_posix())
            member.mode = 0o755 if file.stat().st_mode & 0o100 else 0o644
            try:
                content = file.read_bytes()
            except OSError as error:
                raise ConfigError(f"--skills {path}: {error}; make the file readable, or remove it") from error
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
            if archive.tell() > _SKILLS_LIMIT:
                raise ConfigError(
                    f"--skills {path}: its files, up to {member.name}, have more than {_SKILLS_LIMIT >> 20} MiB, "
                    "too much to store with a run; remove large ones"
                )
    return b64encode(archive.getvalue()).decode()


_READERS: Mapping[str, Callable[[Any], str]] = {
    "mcp_config": partial(_json_of, "--mcp-config"),
    "settings": partial(_json_of, "--settings"),
    "skills": _skills_of,
}
"""How the text of an option whose value is a path is read, by the name of its field."""
