"""What a trainer can be told."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from understudy.errors import ConfigError
from understudy.train.options import DPOOptions, GRPOOptions, LoraOptions, SFTOptions, TrainOptions


def test_options_are_read_from_toml() -> None:
    text = 'loss = "gspo"\nlearning_rate = 1e-4\nclip_high = 0.001\n[lora]\nrank = 4\nmodules = ["q_proj"]\n'
    options = msgspec.toml.decode(text, type=GRPOOptions)
    assert options.lora == LoraOptions(rank=4, modules=("q_proj",))
    assert (options.loss, options.learning_rate, options.clip) == ("gspo", 1e-4, (3e-4, 0.001))
    assert options.temperature == GRPOOptions().temperature


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (GRPOOptions, {"temperature": 0.0}, "grpo.temperature is 0.0, expected above 0"),
        (GRPOOptions, {"clip_low": -0.1}, "grpo.clip_low is -0.1, expected at least 0"),
        (
            GRPOOptions,
            {"band_low": 2.0, "band_high": 1.0},
            "grpo.band_high is 1.0, expected more than band_low, 2.0",
        ),
        (GRPOOptions, {"overlong_tokens": 100}, "grpo.overlong_buffer is 512"),
        (GRPOOptions, {"learning_rate": 0.0}, "grpo.learning_rate is 0.0, expected above 0"),
        (GRPOOptions, {"kl_coefficient": float("nan")}, "grpo.kl_coefficient is nan"),
        (GRPOOptions, {"learning_rate": float("inf")}, "grpo.learning_rate is inf"),
        (DPOOptions, {"label_smoothing": 0.5}, "dpo.label_smoothing is 0.5"),
        (DPOOptions, {"beta": 0.0}, "dpo.beta is 0.0"),
        (SFTOptions, {"epochs": 0}, "sft.epochs is 0, expected at least 1"),
        (SFTOptions, {"beta2": 1.0}, "sft.beta2 is 1.0, expected at least 0 and below 1"),
        (LoraOptions, {"rank": 0}, "lora.rank is 0, expected at least 1"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name(
    kind: type[Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        kind(**arguments)


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="los_rate"):
        msgspec.toml.decode("los_rate = 1.0", type=GRPOOptions)
    assert issubclass(GRPOOptions, TrainOptions)


def test_options_and_groups_import_without_torch() -> None:
    code = (
        "import sys, understudy.train.options, understudy.train.groups\n"
        "import understudy.train.algorithms.batch\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
