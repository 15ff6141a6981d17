"""Serving and training on a GPU give what they give on a CPU. Skipped where torch finds no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.train.groups import TokenSequence
from understudy.train.options import GRPOOptions, LoraOptions

from support import lazily, optional
from support.causal import ask, done, prompts
from support.tiny_model import make_model
from support.train import make_groups

torch: Any = optional("torch")
CausalEngine, ModelWeights = lazily("understudy.model.causal.engine", "CausalEngine", "ModelWeights")
[load_served] = lazily("understudy.model.causal.checkpoint", "load_model")
[Updater] = lazily("understudy.train.algorithms.updater", "Updater")
token_logprobs, masks = lazily("understudy.train.algorithms.forward", "token_logprobs", "masks")
[trained_weights] = lazily("understudy.train.weights", "trained_weights")

pytestmark = pytest.mark.services

_HAS_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
OPTIONS = GRPOOptions(learning_rate=1e-3)


@pytest.fixture(scope="module", autouse=True)
def gpu() -> None:
    # Asked in a process of its own, because importing torch takes seconds and memory where there is no GPU.
    if (
        not Path("/dev/nvidiactl").exists()
        or subprocess.run([sys.executable, "-c", _HAS_GPU], check=False).returncode
    ):
        pytest.skip("torch finds no GPU on this machine")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("gpu") / "model", hidden=64, layers=3)


def sampled(directory: Path, device: str) -> list[TokenSequence]:
    """Two turns of 24 completions, of which the second goes on from the prefix cache."""
    engine = CausalEngine({"m": ModelWeights(load_served(directory, device=device), "v0")}, [b"x"] * 300)
    try:
        firsts = [ask(prompt, 12, seed=number) for number, prompt in enumerate(prompts(24))]
        first_results = done(engine, *firsts)
        seconds = [
            ask([*first.prompt, *one.ids, *prompt], 12)
            for first, one, prompt in zip(firsts, first_results, prompts(24, 20), strict=True)
        ]
        second_results = done(engine, *seconds)
        assert all(one.cached for one in second_results)
    finally:
        engine.close()
    return [
        TokenSequence(
            token_ids=(*request.prompt, *one.ids),
            loss_mask=(0,) * len(request.prompt) + (1,) * len(one.ids),
            logprobs=(0.0,) * len(request.prompt) + tuple(one.logprobs),
        )
        for request, one in zip([*firsts, *seconds], [*first_results, *second_results], strict=True)
    ]


def differences(module: Any, sequences: list[TokenSequence]) -> Any:
    """How much a module's logprobs of the sampled tokens differ from those that the engine gave."""
    with torch.no_grad():
        logprobs = token_logprobs(module, sequences, 1.0).float().cpu()
    expected = torch.nn.utils.rnn.pad_sequence([torch.tensor(one.logprobs) for one in sequences], batch_first=True)
    return (logprobs - expected)[masks(sequences)].abs()


def test_logprobs_of_a_gpu_are_those_of_its_weights(model: Path):
    sequences = sampled(model, "cuda")
    exact = differences(load_served(model, device="cpu"), sequences)
    # bf16 has 8 bits of precision; a wrong position, mask or cache row changes logprobs of this model by over 1.
    assert exact.mean() < 0.1
    assert exact.max() < 1.0


def test_an_update_in_fp32_equals_that_of_the_cpu(model: Path, tmp_path: Path):
    script = (
        "import sys; from pathlib import Path; from support.train import make_groups;"
        "from understudy.train.algorithms.updater import Updater;"
        "from understudy.train.options import GRPOOptions;"
        "updater = Updater(Path(sys.argv[1]), GRPOOptions(learning_rate=1e-3, precision='fp32'));"
        "updater.update(make_groups(), 1); updater.save(Path(sys.argv[2]))"
    )
    argv = [sys.executable, "-c", script, str(model), str(tmp_path / "cpu")]
    tests = str(Path(__file__).parents[1])
    environment = {"PYTHONPATH": ":".join([tests, *sys.path]), "CUDA_VISIBLE_DEVICES": "", "PATH": "/usr/bin:/bin"}
    subprocess.run(argv, env=environment, check=True, capture_output=True)
    updater = Updater(model, structs.replace(OPTIONS, precision="fp32"))
    assert updater.device.type == "cuda"
    updater.update(make_groups(), 1)
    updater.save(tmp_path / "gpu")
    start, cpu, gpu = (load_served(each, device="cpu") for each in (model, tmp_path / "cpu", tmp_path / "gpu"))
    for before, one, other in zip(start.parameters(), cpu.parameters(), gpu.parameters(), strict=True):
        moved = one - before
        # AdamW's first step is the gradient's sign, which rounding decides where the gradient is nearly 0.
        assert ((one - other).abs() > 1e-4).float().mean() < 0.02
        assert moved.abs().max() > 0


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_updates_in_bf16_learn_and_resume(
    model: Path, tmp_path: Path, lora: LoraOptions | None, checkpointing: bool
):
    options = structs.replace(OPTIONS, lora=lora, gradient_checkpointing=checkpointing, precision="bf16")
    updater = Updater(model, options)
    first = updater.update(make_groups(), 1)
    assert first.updated
    assert first.mismatch_mean < 10
    updater.save(tmp_path / "one")
    again = Updater(model, options, resume=tmp_path / "one")
    second, resumed = updater.update(make_groups(), 2), again.update(make_groups(), 2)
    assert resumed.loss == pytest.approx(second.loss, abs=1e-3)
    for name, value in trained_weights(updater.model).items():
        torch.testing.assert_close(trained_weights(again.model)[name], value, atol=2e-3, rtol=0)
    load_served(tmp_path / "one", device="cuda")


def test_a_full_gpu_is_reported_with_what_to_lower(model: Path):
    big = [
        structs.replace(
            group,
            rollouts=tuple(
                structs.replace(
                    rollout,
                    sequences=tuple(
                        TokenSequence(
                            token_ids=(9,) * 30_000, loss_mask=(0, *(1,) * 29_999), logprobs=(-3.0,) * 30_000
                        )
                        for _ in rollout.sequences
                    ),
                )
                for rollout in group.rollouts
            ),
        )
        for group in make_groups()
    ]
    updater = Updater(model, structs.replace(OPTIONS, max_tokens=32_000, micro_batch_tokens=64_000))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(2**28 / total)
    try:
        with pytest.raises(ConfigError, match=r"the GPU is out of memory .*--micro-batch-tokens \(now 64000\)"):
            updater.update(big, 1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()
