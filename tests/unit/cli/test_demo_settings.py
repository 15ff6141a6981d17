"""The settings of `understudy demo` for each model, which are options of other commands."""

from __future__ import annotations

import pytest

from understudy.cli.demo.training import MODELS, demo_settings
from understudy.errors import ConfigError
from understudy.model.directory import TINY
from understudy.model.pretrained import PINNED
from understudy.train.options import GRPOOptions, SFTOptions

from support import understudy


def options(arguments: tuple[str, ...]) -> set[str]:
    return {word.removeprefix("--").replace("-", "_") for word in arguments[::2]}


@pytest.mark.parametrize("model", MODELS)
def test_the_settings_are_options_of_the_commands_that_get_them(model: str):
    settings = demo_settings(model)
    assert model == TINY or model in PINNED
    assert options(settings.sft) <= set(SFTOptions.__struct_fields__)
    assert options(settings.weak_sft or ()) <= set(SFTOptions.__struct_fields__)
    assert options(settings.grpo) <= set(GRPOOptions.__struct_fields__)


def test_another_model_is_refused_with_the_names_of_those_there_are():
    with pytest.raises(ConfigError, match=r"--model gpt: .* give tiny or smollm2-135m"):
        demo_settings("gpt")
    refused = understudy("demo", "--quick", "--model", "smollm2-135m")
    assert refused.returncode == 2
    assert "--model and --quick exclude each other" in refused.stderr
