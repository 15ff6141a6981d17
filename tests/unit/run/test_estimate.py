"""Estimates by measured rollouts, the clock of a loop's cost, and the memory that a model takes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.gateway.prices import Price
from understudy.model.memory import ModelShape, estimate_memory, read_shape
from understudy.run.estimate import estimate, measure
from understudy.store import Store

from support import optional
from support.tiny_model import make_model
from support.train import put_training_run

optional("torch")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("estimate")
    make_model(directory / "model")
    put_training_run(directory / "run", directory / "model")
    return directory


def test_an_estimate_is_the_measured_means_times_the_rollouts(place: Path):
    measured = measure([place / "run"])
    with Store.open(place / "run", create=False) as store:
        counts = store.outcomes.counts("run1")
    assert measured.count == 8 and measured.calls == counts.calls / 8
    result = estimate(measured, 80, 4, Price(input=2.0, output=10.0))
    assert result.prompt_tokens == pytest.approx(10 * counts.prompt_tokens, abs=1)
    assert result.completion_tokens == pytest.approx(10 * counts.completion_tokens, abs=1)
    expected = (result.prompt_tokens * 2.0 + result.completion_tokens * 10.0) / 1e6
    assert result.cost_usd == pytest.approx(expected, abs=1e-4)
    assert result.hours == pytest.approx(measured.seconds * 80 / 4 / 3600, abs=1e-3)
    assert estimate(measured, 8, 4, None).cost_usd is None


def test_nothing_to_measure_by_is_said(tmp_path: Path):
    with Store.open(tmp_path / "empty"):
        pass
    with pytest.raises(ConfigError, match=r"no graded rollout.*--limit 4"):
        measure([tmp_path / "empty"])


async def test_the_clock_of_a_loop_counts_over_starts_and_ends_it_before_the_ceiling(tmp_path: Path):
    import asyncio

    from understudy.train.loop.runtime import CostClock

    path = tmp_path / "hours.json"
    free = CostClock(path, None, None, every_s=0.01)
    watching = asyncio.ensure_future(free.watch())
    while not path.exists():  # noqa: ASYNC110 - what it waits for is a file
        await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert CostClock(path, None, None).seconds() >= 0.0
    path.write_text('{"seconds": 3500.0}')
    with pytest.raises(ConfigError, match=r"--max-cost: 0\.97 hours at 3 US dollars an hour have used up 2\.9"):
        await CostClock(path, 3.0, 2.9).watch()
    path.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        CostClock(path, 3.0, 2.9).seconds()


def test_memory_is_calculated_of_the_weights_that_are_there(place: Path):
    from understudy.model.causal.checkpoint import load_model

    shape = read_shape(place / "model")
    module = load_model(place / "model")
    assert shape.parameters == sum(each.numel() for each in module.parameters())
    small = estimate_memory(shape, context=100, sequences=2, micro_batch_tokens=64)
    config = json.loads((place / "model" / "config.json").read_text())
    per_token = 2 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert small.kv_cache == per_token * 200
    assert small.optimizer == 16 * shape.parameters and small.weights == shape.weight_bytes
    checkpointed = estimate_memory(shape, context=100, sequences=2, micro_batch_tokens=64, checkpointing=True)
    assert checkpointed.activations < small.activations and checkpointed.serving == small.serving


QWEN = {
    "0.5B": (494_032_768, 24, 896, 4_864, 128),
    "1.5B": (1_543_714_304, 28, 1_536, 8_960, 256),
    "7B": (7_615_616_512, 28, 3_584, 18_944, 512),
}


@pytest.mark.parametrize(
    ("name", "rank", "checkpointing", "micro_batch_tokens", "peak_gib"),
    [
        ("0.5B", None, False, 8192, 24.89),
        ("0.5B", None, True, 8192, 12.68),
        ("1.5B", None, True, 16384, 32.90),
        ("1.5B", 16, True, 16384, 16.86),
        ("7B", 16, True, 16384, 30.51),
        ("7B", 16, False, 2048, 29.91),
    ],
)
def test_the_estimate_is_near_the_peaks_that_a_gpu_measured(
    name: str, rank: int | None, checkpointing: bool, micro_batch_tokens: int, peak_gib: float
):
    """The peaks are those of `bench/gpu.py` on an H200; in it a third of the tokens is learned."""
    parameters, layers, hidden, intermediate, kv_width = QWEN[name]
    shape = ModelShape(
        parameters=parameters,
        weight_bytes=2 * parameters,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        kv_width=kv_width,
        vocabulary=151_936,
        context=32_768,
    )
    needed = estimate_memory(
        shape,
        context=100,
        sequences=1,
        micro_batch_tokens=micro_batch_tokens,
        lora_rank=rank,
        checkpointing=checkpointing,
    )
    expected = needed.optimizer + needed.activations + needed.logits / 3
    assert expected / 2**30 == pytest.approx(peak_gib, rel=0.1)
    assert needed.training > expected


def test_of_a_model_with_experts_those_that_a_token_passes_through_count(place: Path, tmp_path: Path):
    model = tmp_path / "experts"
    shutil.copytree(place / "model", model)
    config = json.loads((model / "config.json").read_text())
    experts = {"num_experts_per_tok": 8, "moe_intermediate_size": 768, "shared_expert_intermediate_size": 512}
    (model / "config.json").write_text(json.dumps(config | experts))
    assert read_shape(place / "model").intermediate == config["intermediate_size"]
    assert read_shape(model).intermediate == 8 * 768 + 512


def test_a_model_without_weights_or_with_damaged_ones_is_said(place: Path, tmp_path: Path):
    config = (place / "model" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"has no weights in \*\.safetensors, .*; give the directory"):
        read_shape(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ConfigError, match="damaged safetensors"):
        read_shape(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="the shape of the model cannot be read"):
        read_shape(tmp_path)
