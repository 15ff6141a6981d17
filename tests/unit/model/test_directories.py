"""Directories that are no model that can be served or trained: said in words, and nothing in them is executed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError
from understudy.model.pretrained import RECORD
from understudy.train.options import SFTOptions
from understudy.train.weights import WeightsRecord, load_chat_tokenizer, save_model
from understudy.train.weights import load_model as load_to_train

from support import files_of_at_most, lazily, optional

torch: Any = optional("torch")
load_to_serve, read_checkpoint = lazily("understudy.model.causal.checkpoint", "load_model", "read_checkpoint")

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast as OwnWords, Qwen3Config, Qwen3ForCausalLM as Own
Path(__file__).with_name("executed").touch()
class OwnConfig(Qwen3Config):
    model_type = "own"
"""


class Bomb:
    """A pickle that leaves a file where it is loaded."""

    def __init__(self, path: Path) -> None:
        self._place = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._place / "executed"),)


def configured(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def shortened(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-2000])


def pickled(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    torch.save({"bomb": Bomb(directory)}, directory / "pytorch_model.bin")


def with_code(kind: str) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / "own.py").write_text(CODE)
        own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
        configured(model_type=kind, auto_map=own)(directory)
        tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
        tokenizer_config["auto_map"] = {"AutoTokenizer": [None, "own.OwnWords"]}
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))

    return change


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (shortened, "cannot be loaded"),
    "pickled": (pickled, "contains more than tensors"),
    "of another kind": (configured(model_type="bert"), "the weights lack tensors: bert"),
    "of a relative": (
        configured(model_type="llama"),
        "the model has no tensors named: model.layers.0.self_attn.k_norm",
    ),
    "of fewer layers": (configured(num_hidden_layers=1, layer_types=["full_attention"]), "layers.1."),
    "of another width": (configured(hidden_size=64), "tensors have another shape: model.embed_tokens.weight"),
    "of words for numbers": (configured(hidden_size="many"), "hidden_size"),
    "with code of its own": (with_code("own"), "which Understudy never executes"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("load", [load_to_serve, lambda path: load_to_train(path, SFTOptions())])
def test_a_broken_model_directory_is_a_config_error_and_runs_no_code(
    name: str, load: Callable[[Path], Any], model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    directory = tmp_path / "bröken model"
    shutil.copytree(model, directory)
    damage, message = BROKEN[name]
    damage(directory)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")) as caught:
        load(directory)
    assert directory.name in str(caught.value)
    assert not (directory / "executed").exists()
    assert "y/N" not in capfd.readouterr().out  # nobody is asked whether it should be


def test_custom_code_beside_a_supported_model_is_not_executed(model: Path, tmp_path: Path):
    directory = tmp_path / "model"
    shutil.copytree(model, directory)
    with_code("qwen3")(directory)
    load_to_serve(directory)
    read_checkpoint(directory)
    load_to_train(directory, SFTOptions())
    load_chat_tokenizer(directory)
    assert not (directory / "executed").exists()


def test_a_trained_model_does_not_have_the_hashes_of_the_fetched_one(model: Path, tmp_path: Path):
    source, trained = tmp_path / "model", tmp_path / "trained"
    shutil.copytree(model, source)
    (source / RECORD).write_text("{}")
    written = WeightsRecord(version="v1", step=1, base="model")
    save_model(load_to_train(source, SFTOptions()), source, trained, written=written)
    assert {path.name for path in source.iterdir()} - {path.name for path in trained.iterdir()} == {RECORD}


def test_a_failed_save_reports_the_error_and_keeps_existing_files(model: Path, tmp_path: Path):
    source, written = tmp_path / "model", WeightsRecord(version="v1", step=1, base="model")
    shutil.copytree(model, source)
    configured(odd=float("nan"))(source)  # which JSON does not have, and transformers reads
    loaded = load_to_train(source, SFTOptions())
    save_model(loaded, source, tmp_path / "new", written=written)
    assert (tmp_path / "new" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    before = sorted(tmp_path.rglob("*"))
    with files_of_at_most(1 << 14), pytest.raises(ConfigError, match="new: the model cannot be written"):
        save_model(loaded, source, tmp_path / "new", written=written)
    assert sorted(tmp_path.rglob("*")) == before
