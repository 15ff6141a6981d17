"""What tests of serving and training share, and none may change: a small model, the tiny one's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.tiny import make_tokenizer
from support.tiny_model import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory."""
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def module(model: Path) -> Any:
    """What the engine computes with."""
    from understudy.model.causal.checkpoint import load_model

    return load_model(model)


@pytest.fixture(scope="session")
def token_bytes(model: Path) -> list[bytes]:
    """The bytes of each of its tokens."""
    from understudy.model.causal.checkpoint import read_checkpoint

    return read_checkpoint(model).tokenizer.token_bytes


@pytest.fixture(scope="session")
def tiny_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the tiny model's tokenizer, made of few conversations."""
    made = tmp_path_factory.mktemp("tiny")
    make_tokenizer(made)
    return made
