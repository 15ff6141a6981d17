"""Updates over rollouts that are there: gone on with after a kill, and refused where nothing can be learned."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.train import groups
from understudy.train.algorithms.updater import UpdateReport, train_grpo
from understudy.train.metrics import read_metrics
from understudy.train.options import DistillOptions, GRPOOptions, LoraOptions
from understudy.train.weights import check_model

from support import optional
from support.train import make_groups

optional("torch")

OPTIONS = GRPOOptions(learning_rate=1e-2)


class Killed(Exception):
    pass


def killed(report: UpdateReport, of: int) -> None:
    if report.step == 3:
        raise Killed


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4, dropout=0.1)], ids=["full", "lora"])
def test_resuming_from_a_checkpoint_gives_the_same_weights(model: Path, tmp_path: Path, lora: LoraOptions | None):
    options, groups, output = structs.replace(OPTIONS, lora=lora), make_groups(groups=4), tmp_path / "out"
    train_grpo(model, groups, tmp_path / "whole", options, groups_per_update=1)
    with pytest.raises(Killed):
        train_grpo(model, groups, output, options, groups_per_update=1, save_steps=2, on_update=killed)
    assert not (output / "config.json").exists()
    checkpoint = output / "training" / "checkpoints" / "checkpoint-2"
    copied_checkpoint = Path(shutil.copytree(checkpoint, tmp_path / "kept"))
    for resume, target in ((True, output), (copied_checkpoint, tmp_path / "other")):
        resumed = train_grpo(model, groups, target, options, groups_per_update=1, resume=resume)
        assert resumed.updates == 2
        for part in ("model.safetensors", *(["adapter/adapter_model.safetensors"] if lora else [])):
            assert (target / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()
    steps = [line["step"] for line in read_metrics(output / "training" / "metrics.jsonl")]
    assert steps == [1, 2, 3, 4] and not checkpoint.exists()
    check_model(output)


def test_without_usable_rollouts_training_fails_and_no_model_is_written(model: Path, tmp_path: Path):
    groups, output = make_groups(groups=2), tmp_path / "out"
    with pytest.raises(ConfigError, match=r"nothing could be learned.*16 sequences that are too long"):
        train_grpo(model, groups, output, structs.replace(OPTIONS, max_tokens=5))
    assert not (output / "config.json").exists()
    distilling = DistillOptions(teacher="http://teacher", max_tokens=5)
    with pytest.raises(ConfigError, match=r"nothing could be learned.*; raise --max-tokens, or take a teacher"):
        train_grpo(model, groups, output, distilling)
    equal = [
        structs.replace(group, rollouts=tuple(structs.replace(each, reward=1.0) for each in group.rollouts))
        for group in groups
    ]
    with pytest.raises(ConfigError, match=r"in none of the 2 groups \(8 rollouts\) do rewards differ"):
        train_grpo(model, equal, output, OPTIONS)


@pytest.mark.parametrize(
    ("left_out", "remedy"),
    [
        ({}, "collect some with `understudy run`"),
        ({groups.SUSPICIOUS: 8, groups.NO_TOKENS: 1}, "give --include-suspicious"),
        ({groups.NO_VERDICT: 2}, "wait until they are graded"),
        ({groups.NO_TOKENS: 3, groups.NO_VERDICT: 1}, "expected token ids and logprobs"),
    ],
)
def test_without_groups_the_remedy_follows_the_commonest_reason(
    model: Path, tmp_path: Path, left_out: dict[str, int], remedy: str
):
    with pytest.raises(ConfigError, match=f"no groups to learn from.*{remedy}"):
        train_grpo(model, [], tmp_path / "out", OPTIONS, left_out=Counter(left_out))
    assert not (tmp_path / "out").exists()
