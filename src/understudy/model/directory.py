"""Model directories: that of the tiny model which comes with the package, and fingerprints as versions of others.

The tiny model is made by `python -m understudy.train.tiny.pretrain`.
"""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path

from understudy.config import CACHE_LOCK, cache_dir
from understudy.errors import ConfigError
from understudy.model.pretrained import RECORD, cached_directory
from understudy.util.files import mark_used, share_lock

TINY = "tiny"
"""Its name where a model's directory is asked for."""

SCRIPTED = Path(__file__).with_name("assets")
"""The tokenizer and the chat template of the scripted models, which have no weights."""


def directory_of(model: str | Path) -> Path:
    """Return the absolute directory of a model: of the shipped one or a fetched one by name, otherwise the path
    itself.

    A fetched model stays in the cache until this process ends.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path.absolute()
    if str(model) == TINY:
        return SCRIPTED / TINY
    fetched = cached_directory(str(model))
    if not (fetched / RECORD).is_file():
        return path.absolute()
    share_lock(cache_dir() / CACHE_LOCK)
    mark_used(cache_dir(), (fetched,))
    return fetched


_FILES = ("config.json", "tokenizer.json", "chat_template.jinja", "*.safetensors", "*.bin")
_ADVICE = {
    "config.json": "give a model's directory as save_pretrained writes it, or download the model again",
    "tokenizer.json": "copy it there from the model that this one was made of",
}


def require_packages(*modules: str, extra: str = "train") -> None:
    """Raise ConfigError when one of these modules (default: those that weights need) is not installed.

    `extra` is the extra of this package that installs them.
    """
    missing = [module for module in modules or ("torch", "transformers") if find_spec(module) is None]
    if missing:
        names = " and ".join(filter(None, [", ".join(missing[:-1]), missing[-1]]))
        raise ConfigError(
            f"{names} {'is' if len(missing) == 1 else 'are'} required here, and not installed; install "
            f"{'it' if len(missing) == 1 else 'them'}: pip install 'understudy[{extra}]'"
        )


def require_files(directory: Path, *names: str) -> None:
    """Raise ConfigError when a model's directory lacks one of these files."""
    for name in names:
        if not (directory / name).is_file():
            fault = f"has no {name}" if directory.is_dir() else f"is no directory, expected one with {name}"
            raise ConfigError(f"{directory} {fault}; {_ADVICE[name]}")


def missing_template(directory: Path) -> ConfigError:
    """Return the error for a model's directory without a chat template."""
    path = directory / "chat_template.jinja"
    return ConfigError(
        f"{directory} has no chat template, in {path.name} or in tokenizer_config.json; copy the model's template "
        f"to {path}"
    )


def fingerprint(directory: Path) -> str:
    """Return twelve hex digits that identify the content of a model's files. Raises ConfigError if it is not a
    model.
    """
    require_files(directory, "config.json")
    content = hashlib.sha256()
    for path in (path for pattern in _FILES for path in sorted(directory.glob(pattern))):
        content.update(f"\0{path.name}\0".encode())
        try:
            with path.open("rb") as file:
                while block := file.read(1 << 20):
                    content.update(block)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}; check its permissions") from error
    return content.hexdigest()[:12]
