"""Making the tiny model: what it reads, that it goes on where it was interrupted, and what it is measured by."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from understudy.train.tiny import corpus

from support import optional
from support.tiny import encode

torch: Any = optional("torch", "transformers")


@pytest.fixture(scope="module")
def reader(tiny_tokenizer: Path) -> Any:
    from understudy.train.tiny.pretrain import read_tokenizer

    return read_tokenizer(tiny_tokenizer)


def small(vocabulary: int) -> Any:
    """The architecture with as little in it as there may be."""
    from transformers import Qwen3Config

    from understudy.train.tiny.pretrain import configuration

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "layer_types": None}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    return Qwen3Config.from_dict(configuration(vocabulary).to_dict() | sizes)


@pytest.mark.services
def test_batches_started_at_a_later_step_equal_those_of_an_unbroken_run(reader: Any) -> None:
    from understudy.train.tiny.pretrain import batches

    for start in (149, 548):
        whole = list(itertools.islice(batches(reader, 3, start, 600), 4))
        later = list(itertools.islice(batches(reader, 3, start + 2, 600), 2))
        assert len(whole) == 4
        for one, other in zip(whole[2:], later, strict=True):
            assert torch.equal(one.ids, other.ids)
            assert torch.equal(one.weights, other.weights) and torch.equal(one.spoken, other.spoken)


def test_batches_equal_the_conversations_encoded_by_transformers(reader: Any) -> None:
    from understudy.train.tiny.pretrain import batches

    (batch,) = itertools.islice(batches(reader, 0, 550, 1000), 1)
    rows = {
        tuple(ids): assistant_mask
        for ids, assistant_mask in (
            encode(reader, one)
            for one in itertools.islice(corpus.conversations(0, behaviours=corpus.DILIGENT), 16 * 32)
        )
    }
    for ids, weights, assistant_mask in zip(
        batch.ids.tolist(), batch.weights.tolist(), batch.spoken.tolist(), strict=True
    ):
        length = sum(weight > 0 for weight in weights)
        assert assistant_mask[:length] == [bool(one) for one in rows[tuple(ids[:length])]]
        assert not any(assistant_mask[length:]) and not any(weights[length:])
        assert {weight for weight, one in zip(weights, assistant_mask, strict=True) if one} == {1.0}


class Cut(Exception):
    """Where the power goes."""


def test_interrupted_pretraining_resumes_to_the_same_model(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from understudy.train.tiny.pretrain import PretrainIntervals, pretrain, read_tokenizer

    pace = PretrainIntervals(
        tokenizer_conversations=200,
        evaluated_conversations=2,
        report_steps=1,
        evaluation_steps=2,
        checkpoint_steps=2,
    )
    reports: dict[str, list[str]] = {"whole": [], "cut": []}

    def make(name: str, cut: int | None = None) -> None:
        def report(line: str) -> None:
            reports[name].append(line)
            if cut is not None and f'"step": {cut},' in line:
                raise Cut

        pretrain(tmp_path / name, steps=4, seed=1, intervals=pace, architecture=small, report=report)

    make("whole")
    with pytest.raises(Cut):
        make("cut", 3)
    assert (tmp_path / "cut/pretraining.pt").exists() and not (tmp_path / "cut/model.safetensors").exists()
    make("cut")
    assert "from step 2" in reports["cut"][4]
    ends = [json.loads(reports[name][-1]) for name in ("whole", "cut")]
    for one in ends:
        assert one["step"] == 4 and one["nll"] > 0 and 0 <= one["likely"] <= 1
        del one["seconds"], one["tokens_s"]
    assert ends[0] == ends[1]
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in reports]
    assert files[0] == files[1]
    assert not (tmp_path / "cut/pretraining.pt").exists()
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert model.config.vocab_size == len(read_tokenizer(tmp_path / "cut"))


def test_evaluation_measures_assistant_tokens_of_held_out_conversations(reader: Any) -> None:
    from transformers import Qwen3ForCausalLM

    from understudy.train.tiny.pretrain import evaluate

    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(small(len(reader)))
    metrics = evaluate(model, reader, 3)
    each: list[float] = []
    for conversation in itertools.islice(corpus.conversations(1, "held-out"), 3):
        ids, assistant_mask = encode(reader, conversation)
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        each += [
            -logprobs[position - 1, ids[position]].item() for position, one in enumerate(assistant_mask) if one
        ]
    assert metrics["nll"] == pytest.approx(sum(each) / len(each), abs=0.02)
    assert metrics["likely"] == 0
