"""Memory and speed of training and serving on a GPU, against the estimates of `doctor --gpu` and the limits of the
card.

    python bench/gpu.py [--json FILE] [--models DIR] [--shape NAME]...

Models of the shapes of Qwen2.5 with random weights in bf16 are written to `--models`, which may be /dev/shm.
Training: two GRPO updates of two rollouts by our trainer; the second is timed. Memory is the highest that torch
allocated, beside the estimate. Serving: the embedded server's engine samples at several numbers of sequences at
once; the bytes of the weights over the time of a step is the bandwidth that it used. The limits are measured
in the same run: a multiplication of two large matrices in bf16, and a copy within its memory. The logprobs of the
engine are compared with those of the trainer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from understudy.model.causal.checkpoint import load_model
from understudy.model.causal.engine import CausalEngine, EngineLimits, ModelWeights, SamplingRequest
from understudy.model.directory import directory_of
from understudy.model.memory import estimate_memory, read_shape
from understudy.train.algorithms.forward import token_logprobs
from understudy.train.algorithms.updater import Updater
from understudy.train.groups import RolloutGroup, TokenSequence, TrainingRollout
from understudy.train.options import GRPOOptions, LoraOptions

RESULTS = Path(__file__).parent / "results" / "gpu.json"
VOCABULARY = 151_936
SHAPES = {
    # layers, hidden, intermediate, heads, key-value heads, tied embeddings: those of Qwen2.5
    "0.5B": (24, 896, 4864, 14, 2, True),
    "1.5B": (28, 1536, 8960, 12, 2, True),
    "7B": (28, 3584, 18944, 28, 4, False),
}
# shape, LoRA rank (0: all weights), gradient checkpointing, tokens of a sequence, --micro-batch-tokens
TRAINING = (
    ("0.5B", 0, False, 4096, 8192),
    ("0.5B", 0, True, 4096, 8192),
    ("1.5B", 0, True, 8192, 16384),
    ("1.5B", 16, True, 8192, 16384),
    ("7B", 16, True, 16384, 16384),
    ("7B", 16, False, 2048, 2048),
)
SERVING = ("0.5B", "1.5B")
SEQUENCES = (1, 16, 64)


def write_model(name: str, directory: Path) -> Path:
    """Write a model of a shape with random weights; return its directory."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    layers, hidden, intermediate, heads, kv_heads, tied = SHAPES[name]
    target = directory / name
    if (target / "config.json").is_file():
        return target
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        eos_token_id=0,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model: Any = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(target)
    tiny = directory_of("tiny")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (target / file).write_bytes((tiny / file).read_bytes())
    return target


def rollouts(length: int) -> list[RolloutGroup]:
    """Two rollouts of random tokens, of which a third are learned."""
    dice = random.Random(length)

    def sequence() -> TokenSequence:
        mask = tuple(1 if at >= 2 * length // 3 else 0 for at in range(length))
        ids = tuple(dice.randrange(1000, VOCABULARY) for _ in range(length))
        return TokenSequence(token_ids=ids, loss_mask=mask, logprobs=tuple(-12.0 * each for each in mask))

    two = [
        TrainingRollout(rollout_id=str(n), task_id="t", reward=float(n), sequences=(sequence(),)) for n in (0, 1)
    ]
    return [RolloutGroup(task_id="t", rollouts=tuple(two))]


def timed(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def card_limits() -> dict[str, float]:
    """The card's own speed: of bf16 multiplications, and of copies counted as bytes read and written."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    for _ in range(3):
        left @ right
        target.copy_(source)
    multiplying = timed(lambda: [left @ right for _ in range(10)]) / 10
    copying = timed(lambda: [target.copy_(source) for _ in range(10)]) / 10
    return {"tflops_bf16": 2 * 8192**3 / multiplying / 1e12, "gb_per_s": 2 * 2**31 / copying / 1e9}


def gib(size: float) -> float:
    return round(size / 2**30, 2)


def train(case: tuple[str, int, bool, int, int], models: Path, tflops: float) -> dict[str, Any]:
    name, rank, checkpointing, length, micro = case
    directory = write_model(name, models)
    options = GRPOOptions(
        learning_rate=1e-6,
        max_tokens=32_768,
        micro_batch_tokens=micro,
        gradient_checkpointing=checkpointing,
        lora=LoraOptions(rank=rank) if rank else None,
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    updater = Updater(directory, options)
    groups = rollouts(length)
    first = updater.update(groups, 1)
    seconds = timed(lambda: updater.update(groups, 2))
    peak = torch.cuda.max_memory_allocated() - before
    shape = read_shape(directory)
    needed = estimate_memory(
        shape,
        context=length,
        sequences=1,
        micro_batch_tokens=micro,
        lora_rank=rank or None,
        checkpointing=checkpointing,
    )
    # Only a third of the tokens is learned, and only their logits are computed.
    a_third = needed.optimizer + needed.activations + needed.logits / 3
    # A forward and a backward pass: 6 operations a weight and token; with an adapter the base has no gradient (4),
    # with checkpointing the forward pass is made twice (2 more). Attention is not counted.
    operations = (4 if rank else 6) + (2 if checkpointing else 0)
    tokens = 2 * length
    return {
        "shape": name,
        "parameters_m": round(shape.parameters / 1e6),
        "lora_rank": rank,
        "gradient_checkpointing": checkpointing,
        "tokens_per_sequence": length,
        "micro_batch_tokens": micro,
        "updated": first.updated,
        "peak_gib": gib(peak),
        "estimated_gib": gib(needed.training),
        "estimated_gib_with_a_third_learned": gib(a_third),
        "that_over_peak": round(a_third / peak, 2),
        "tokens_per_s": round(tokens / seconds),
        "share_of_measured_tflops": round(operations * shape.parameters * tokens / seconds / 1e12 / tflops, 3),
    }


def serve(name: str, models: Path, gb_per_s: float) -> list[dict[str, Any]]:
    directory = write_model(name, models)
    shape = read_shape(directory)
    module = load_model(directory, device="cuda")
    limits = EngineLimits(slots=max(SEQUENCES))
    engine = CausalEngine({"m": ModelWeights(module, "v0")}, [b"x"] * VOCABULARY, limits=limits)
    dice = random.Random(7)
    rows: list[dict[str, Any]] = []
    try:
        for count in SEQUENCES:
            prompts = [[dice.randrange(1000, VOCABULARY) for _ in range(256)] for _ in range(count)]

            def sample(prompts: list[list[int]] = prompts, limit: int = 128) -> list[Any]:
                asked = [SamplingRequest(prompt=each, limit=limit, model="m", seed=1) for each in prompts]
                return [each.result(300) for each in [engine.submit(one) for one in asked]]

            sample(limit=4)  # the prompts are in the prefix cache afterwards
            results: list[Any] = []
            seconds = timed(lambda sample=sample, results=results: results.extend(sample()))
            sequences = [
                TokenSequence(
                    token_ids=(*prompt, *one.ids),
                    loss_mask=(0,) * len(prompt) + (1,) * len(one.ids),
                    logprobs=(0.0,) * len(prompt) + tuple(one.logprobs),
                )
                for prompt, one in zip(prompts[:8], results, strict=False)
            ]
            with torch.no_grad():
                logprobs = token_logprobs(module, sequences, 1.0).float().cpu()
            gaps = [
                abs(float(row[at]) - one.logprobs[at])
                for row, one in zip(logprobs, sequences, strict=True)
                for at, learned in enumerate(one.loss_mask)
                if learned and one.logprobs is not None
            ]
            steps = 128 / seconds
            rows.append(
                {
                    "shape": name,
                    "sequences": count,
                    "tokens_per_s": round(count * steps),
                    "ms_per_step": round(1000 / steps, 1),
                    "share_of_measured_bandwidth": round(shape.weight_bytes * steps / 1e9 / gb_per_s, 3),
                    "logprob_gap_mean": round(sum(gaps) / len(gaps), 5),
                    "logprob_gap_max": round(max(gaps), 4),
                }
            )
    finally:
        engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/understudy-gpu-bench"))
    parser.add_argument("--shape", action="append", choices=SHAPES, help="only this one; repeatable")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch finds no GPU on this machine, and this bench measures one")
    wanted = options.shape or list(SHAPES)
    about = torch.cuda.get_device_properties(0)
    measured = card_limits()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "gpu": about.name,
        "memory_gib": gib(about.total_memory),
        "torch": torch.__version__,
        "limits": {name: round(value) for name, value in measured.items()},
        "training": [],
        "serving": [],
    }

    def note(part: str, row: dict[str, Any]) -> None:
        result[part].append(row)
        print(part, json.dumps(row), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    print(json.dumps(result["limits"]), about.name, flush=True)
    for case in TRAINING:
        if case[0] in wanted:
            note("training", train(case, options.models, measured["tflops_bf16"]))
    for name in SERVING:
        if name in wanted:
            for row in serve(name, options.models, measured["gb_per_s"]):
                note("serving", row)


if __name__ == "__main__":
    main()
