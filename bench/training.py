"""What merging calls into sequences saves in training: tokens, time, and nothing of the gradient.

    python bench/training.py [--json FILE] [--sessions N] [--turns N] [--hidden N] [--layers N]

Sessions of a number of turns (30) as the gateway would keep them: calls with their messages and exact tokens,
those of the shipped tokenizer; text of code and of what tools say, made by a seed. One session goes straight on,
one is summed up after two thirds, so that it falls into more sequences. A model of 3.6 M parameters with random
weights takes one GRPO step over two rollouts, one with advantage 1 and one with -1:

- one sample a call: each call's prompt and answer by itself, batches of like length;
- one sample a call, beginnings shared: the same samples through our forward pass, which computes once what a batch
  begins with;
- merged: the sequences of `trajectory.samples`, through our forward pass.

All on one thread; seconds are CPU-seconds of a forward and backward pass. Gradients are compared by |a - b| / |a|
over all parameters. The figures go to bench/results/training.json unless `--json` says where.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.train.algorithms.forward import behaviour_logprobs, masks, micro_batches, token_logprobs
from understudy.train.algorithms.losses import policy_loss, tokens_of_rollouts
from understudy.train.groups import TokenSequence
from understudy.train.options import GRPOOptions
from understudy.trajectory.samples import samples
from understudy.trajectory.tree import build

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

FEWER, SAME = 4.0, 1e-5
RESULTS = Path(__file__).parent / "results" / "training.json"
WORDS = (
    *("def", "return", "self", "value", "for", "in", "range", "if", "not", "None", "import", "path", "list"),
    *("index", "token", "result", "test", "name", "count", "open"),
)


class Sampled(Struct):
    """A rollout's calls one by one, and merged."""

    calls: list[TokenSequence]
    merged: list[TokenSequence]


def prose(dice: random.Random, count: int) -> str:
    return " ".join(
        dice.choice(WORDS) + dice.choice(["", "", "(", ")", ":", " =", f"_{dice.randrange(100)}"])
        for _ in range(count)
    )


def rollout(number: int, turns: int, compaction: bool) -> Sampled:
    """A session of as many calls as turns, read back the way the trainer reads a store."""
    tokenizer, dice = scripted_tokenizer(), random.Random(number)
    session = Session(f"rollout-{number}")

    def turn(role: str, content: str) -> tuple[int, ...]:
        return tuple(tokenizer.encode(f"<|im_start|>{role}\n{content}<|im_end|>\n"))

    opening = tuple(tokenizer.encode("<|im_start|>assistant\n"))
    start = turn("system", prose(random.Random(-1), 120))
    task = prose(dice, 30)
    messages = [user(text(task))]
    prompt = start + turn("user", task) + opening
    for at in range(turns):
        if compaction and at == turns * 2 // 3:
            summary = prose(dice, 40)
            messages, prompt = [user(text(summary))], start + turn("user", summary) + opening
        answer_text, output = prose(dice, dice.randint(4, 20)), prose(dice, dice.randint(5, 40))
        id = f"t{number}-{at}"
        answer = tuple(tokenizer.encode(f"{answer_text}<|im_end|>"))
        message = assistant(text(answer_text), tool_use(id, command=answer_text))
        logprobs = [dice.uniform(-8, -6) for _ in answer]
        session.ask(
            messages, message["content"], prompt=prompt, completion=answer, logprobs=logprobs, policy="step-0000"
        )
        messages = [*messages, message, user(tool_result(id, output))]
        prompt = prompt + answer + tuple(tokenizer.encode("\n")) + turn("user", output) + opening
    calls = [
        TokenSequence(
            token_ids=(*(call.prompt_token_ids or ()), *(call.completion_token_ids or ())),
            loss_mask=(0,) * len(call.prompt_token_ids or ()) + (1,) * len(call.completion_token_ids or ()),
            logprobs=(0.0,) * len(call.prompt_token_ids or ()) + (call.logprobs or ()),
        )
        for call in session.calls
    ]
    merged = [
        TokenSequence(
            token_ids=tuple(one.segment.token_ids),
            loss_mask=tuple(one.segment.loss_mask),
            logprobs=tuple(logprob or 0.0 for logprob in one.segment.logprobs),
        )
        for one in samples(build(session.calls), rollout_id=session.attempt_id, reward=1.0)
    ]
    return Sampled(calls, merged)


def alone(model: Any, rows: list[TokenSequence]) -> torch.Tensor:
    """The logprobs of sampled tokens by a plain padded batch."""
    width = max(len(row.token_ids) for row in rows)
    tokens = torch.tensor([[*row.token_ids, *[0] * (width - len(row.token_ids))] for row in rows])
    mask = masks(rows)
    targets = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    logits = model(input_ids=tokens, use_cache=False, logits_to_keep=targets).logits.float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(-1, tokens[mask].unsqueeze(-1)).squeeze(-1)
    return torch.zeros(mask.shape).masked_scatter(mask, logprobs)


def by_length(sequences: list[TokenSequence], tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    for index in sorted(range(len(sequences)), key=lambda one: -len(sequences[one].token_ids)):
        if not batches or (len(batches[-1]) + 1) * len(sequences[batches[-1][0]].token_ids) > tokens:
            batches.append([])
        batches[-1].append(index)
    return batches


def step(
    model: Any,
    rollouts: list[list[TokenSequence]],
    batches: Callable[[list[TokenSequence], int], list[list[int]]],
    logprobs: Callable[[Any, list[TokenSequence]], torch.Tensor],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """The gradient of a GRPO step, and what it took."""
    options = GRPOOptions()
    sequences = [sequence for one in rollouts for sequence in one]
    owner = torch.tensor([number for number, one in enumerate(rollouts) for _ in one])
    gains = torch.tensor([1.0 if number % 2 == 0 else -1.0 for number in range(len(rollouts))])
    whole = tokens_of_rollouts(masks(sequences), owner, len(gains))
    model.zero_grad()
    began = time.process_time()
    loss = 0.0
    for batch in batches(sequences, options.micro_batch_tokens):
        rows = [sequences[index] for index in batch]
        predicted = logprobs(model, rows)
        part, _ = policy_loss(
            predicted,
            predicted.detach(),
            behaviour_logprobs(rows),
            gains,
            masks(rows),
            owner[batch],
            options,
            rollout_tokens=whole,
        )
        part.backward()
        loss += float(part.detach())
    seconds = time.process_time() - began
    gradient = torch.cat([value.grad.flatten() for value in model.parameters()])
    tokens = sum(len(sequence.token_ids) for sequence in sequences)
    return gradient, {"sequences": len(sequences), "tokens": tokens, "cpu_s": seconds, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="write the figures here")
    parser.add_argument("--sessions", type=int, default=2, metavar="N", help="rollouts of the step")
    parser.add_argument("--turns", type=int, default=30, metavar="N")
    parser.add_argument("--hidden", type=int, default=192, metavar="N")
    parser.add_argument("--layers", type=int, default=6, metavar="N")
    options = parser.parse_args()
    torch.set_num_threads(1)
    from transformers import Qwen3Config, Qwen3ForCausalLM

    rollouts = [rollout(number, options.turns, number % 2 == 1) for number in range(options.sessions)]
    vocabulary = 1 + max(id for one in rollouts for sequence in one.merged for id in sequence.token_ids)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 8 // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=options.hidden // 6,
            tie_word_embeddings=True,
        )
    )
    parameters = sum(value.numel() for value in model.parameters())
    calls, merged = [one.calls for one in rollouts], [one.merged for one in rollouts]
    step(
        model, [merged[0][:1]], micro_batches, token_logprobs
    )  # The first pass of a process is slower than others.
    ways = {
        "one sample a call": step(model, calls, by_length, alone),
        "one sample a call, beginnings shared": step(model, calls, micro_batches, token_logprobs),
        "merged": step(model, merged, micro_batches, token_logprobs),
    }
    truth, plain = ways["one sample a call"]

    print(
        f"{platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}; "
        f"{options.sessions} sessions × {options.turns} turns, {parameters / 1e6:.1f} M parameters"
    )
    print(f"{'':<38}{'sequences':>10}{'tokens':>10}{'fewer':>8}{'CPU-s':>8}{'faster':>8}{'gradient off by':>17}")
    figures: dict[str, dict[str, Any]] = {}
    for name, (gradient, one) in ways.items():
        one["tokens_ratio"] = plain["tokens"] / one["tokens"]
        one["time_ratio"] = plain["cpu_s"] / one["cpu_s"]
        one["gradient_off"] = float((gradient - truth).norm() / truth.norm())
        figures[name] = one
        print(
            f"{name:<38}{one['sequences']:>10}{one['tokens']:>10}{one['tokens_ratio']:>7.1f}×{one['cpu_s']:>8.2f}"
            f"{one['time_ratio']:>7.1f}×{one['gradient_off']:>17.1e}"
        )
    ours = figures["merged"]
    verdicts = {
        f"{FEWER:.0f} times fewer tokens": ours["tokens_ratio"] >= FEWER,
        f"the same gradient to {SAME:.0e}": ours["gradient_off"] <= SAME and float(truth.norm()) > 0,
    }
    for target, met in verdicts.items():
        print(f"target {target}: {'met' if met else 'MISSED'}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        json.dumps(
            {
                "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
                "torch": torch.__version__,
                "sessions": options.sessions,
                "turns": options.turns,
                "parameters": parameters,
                "figures": figures,
                "targets": verdicts,
            },
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
