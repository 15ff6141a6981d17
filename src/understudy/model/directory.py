"""The model that comes with the package: a tiny one, made by `python -m understudy.train.tiny.pretrain`."""

from __future__ import annotations

from pathlib import Path

TINY = "tiny"
"""Its name where a model's directory is asked for."""


def directory_of(model: str | Path) -> Path:
    """The directory that a model's name means, absolute: the shipped one's, or the path itself."""
    path = Path(model).expanduser()
    if str(model) == TINY and not path.is_dir():
        return Path(__file__).with_name("assets") / TINY
    return path.absolute()
