"""What the server says it sampled with, against what the trainer computes of the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from understudy.train.groups import TokenSequence

from support import lazily, optional
from support.causal import ask, done, prompts

torch: Any = optional("torch")
transformers: Any = optional("transformers")
CausalEngine, EngineLimits, ModelWeights = lazily(
    "understudy.model.causal.engine", "CausalEngine", "EngineLimits", "ModelWeights"
)
[SamplingSettings] = lazily("understudy.model.causal.sampling", "SamplingSettings")
behaviours, masks, micro_batches, token_logprobs = lazily(
    "understudy.train.algorithms.forward", "behaviour_logprobs", "masks", "micro_batches", "token_logprobs"
)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_trainer_s_logprobs_equal_the_server_s(
    model: Path, module: Any, token_bytes: list[bytes], temperature: float
) -> None:
    """Of 64 rollouts of two turns that begin alike, decoded eight at a time, gone on from the cache."""
    engine = CausalEngine({"m": ModelWeights(module, "v0")}, token_bytes, limits=EngineLimits(chunk=16))
    drawing = SamplingSettings(temperature=temperature)
    begin, *tasks = prompts(9, 40)
    firsts = [
        ask(begin + task, 5 + number, sampling=drawing, seed=number) for task in tasks for number in range(8)
    ]
    try:
        first_outcomes = done(engine, *firsts)
        seconds = [
            ask([*first.prompt, *outcome.ids, *task], 7, sampling=drawing)
            for first, outcome, task in zip(firsts, first_outcomes, prompts(64, 12), strict=True)
        ]
        second_outcomes = done(engine, *seconds)
    finally:
        engine.close()
    assert all(outcome.cached for outcome in second_outcomes)
    sequences: list[TokenSequence] = []
    for first, second, first_outcome, second_outcome in zip(
        firsts, seconds, first_outcomes, second_outcomes, strict=True
    ):
        between = len(second.prompt) - len(first.prompt) - len(first_outcome.ids)
        sequences.append(
            TokenSequence(
                token_ids=(*second.prompt, *second_outcome.ids),
                loss_mask=(
                    *[0] * len(first.prompt),
                    *[1] * len(first_outcome.ids),
                    *[0] * between,
                    *[1] * len(second_outcome.ids),
                ),
                logprobs=(
                    *[0.0] * len(first.prompt),
                    *first_outcome.logprobs,
                    *[0.0] * between,
                    *second_outcome.logprobs,
                ),
            )
        )
    trained = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    compared = 0
    for batch in micro_batches(sequences, 2000):
        rows = [sequences[index] for index in batch]
        with torch.no_grad():
            logprobs, mask = token_logprobs(trained, rows, temperature), masks(rows)
        expected = behaviours(rows)
        assert expected is not None
        torch.testing.assert_close(logprobs[mask], expected[mask], atol=1e-4, rtol=0)
        compared += int(mask.sum())
    assert compared == sum(sequence.sampled for sequence in sequences)
