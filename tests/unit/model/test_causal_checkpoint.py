"""Directories that hold no model that can be served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError

from support import optional

optional("torch", "transformers")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda path: (path / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda path: (path / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda path: (path / "model.safetensors").write_bytes(b"no weights"), "cannot be loaded"),
        (lambda path: _configure(path, vocab_size=100), "belong to different models"),
        (lambda path: _configure(path, num_hidden_layers=3, layer_types=["full_attention"] * 3), "weights lack"),
        (lambda path: _configure(path, model_type="t5"), "expected a causal language model"),
        (lambda path: _configure(path, model_type="nobody"), "invalid or unsupported model"),
        (lambda path: _configure(path, layer_types=["sliding_attention"] * 2), "full attention only"),
        (lambda path: (path / "config.json").write_text("{"), "invalid JSON: .*; expected a JSON object"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_a_config_error_with_the_reason(
    model: Path, tmp_path: Path, damage: Any, message: str
):
    from understudy.model.causal.checkpoint import load_model, read_checkpoint

    path = tmp_path / "model"
    shutil.copytree(model, path)
    damage(path)
    with pytest.raises(ConfigError, match=message):
        read_checkpoint(path)
        load_model(path)


def _configure(path: Path, **settings: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | settings))
