"""Directories of models: the one of the tiny model that comes with the package, and a version name for any other.

The tiny model is made by `python -m understudy.train.tiny.pretrain`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from understudy.errors import ConfigError

TINY = "tiny"
"""Its name where a model's directory is asked for."""


def directory_of(model: str | Path) -> Path:
    """The directory that a model's name means, absolute: the shipped one's, or the path itself."""
    path = Path(model).expanduser()
    if str(model) == TINY and not path.is_dir():
        return Path(__file__).with_name("assets") / TINY
    return path.absolute()


_BLOCK = 1 << 20
_FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "*.safetensors", "*.bin")


def fingerprint(directory: Path) -> str:
    """Twelve hex digits that follow from the content of a model's files. Raises ConfigError where it is none."""
    if not (directory / "config.json").is_file():
        what = "has no config.json" if directory.is_dir() else "is no directory"
        raise ConfigError(f"{directory} {what}; expected a model's directory as save_pretrained writes it")
    content = hashlib.sha256()
    for pattern in _FILES:
        for path in sorted(directory.glob(pattern)):
            content.update(f"\0{path.name}\0".encode())
            try:
                with path.open("rb") as file:
                    while block := file.read(_BLOCK):
                        content.update(block)
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    return content.hexdigest()[:12]
