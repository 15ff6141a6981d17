"""Trains the tiny model that comes with the package: `python -m understudy.train.tiny.pretrain DIRECTORY`.

A Qwen3 with about two million parameters is trained on the conversations of `corpus`. The loss covers every token,
because the modules read in them teach what docstrings mean, but the assistant's tokens weigh most. After an
interruption the same command continues from its last checkpoint.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import chat_template_utils

from understudy.train.tiny import corpus, tokenizer
from understudy.util.files import atomic_path

_CONTEXT_TOKEN_WEIGHT = 0.1
"""What a token weighs that the assistant does not say."""

_BATCH = 16
_MICRO_TOKENS = 4096
"""What is computed at a time: few enough for a processor's cache."""
_POOL_BATCHES = 32
"""Conversations are sorted by length within so many batches."""

_DRILLS: tuple[tuple[int, Callable[[int], Iterator[str]], int], ...] = (
    (150, corpus.functions, 64),
    (250, corpus.sources, 32),
    (550, corpus.lookups, 24),
)
"""Before the conversations: up to which step, what is read, and how many texts are in a batch."""

_LAST_SHARE = 0.9
"""The part of all steps after which the assistant is no longer diligent."""

_LEARNING_RATE = {"matrices": 0.02, "others": 3e-3}
_WARMUP_STEPS = 50


class PretrainIntervals(Struct, frozen=True):
    """The number of conversations for the tokenizer and for evaluation, and the intervals of reports and
    checkpoints, in steps.
    """

    tokenizer_conversations: int = 4000
    evaluated_conversations: int = 64
    report_steps: int = 25
    evaluation_steps: int = 100
    checkpoint_steps: int = 50


_DEFAULT_INTERVALS = PretrainIntervals()


class PretrainBatch(Struct, frozen=True):
    """Tokenized conversations: all fields have the shape (conversations, tokens), right-padded.

    `weights` is the loss weight of each token; `spoken` marks the assistant's tokens.
    """

    ids: Tensor
    weights: Tensor
    spoken: Tensor


def configuration(vocabulary: int) -> Qwen3Config:
    """Return the architecture. Contexts are short, so a low rope base distinguishes near positions better."""
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        head_dim=32,
        max_position_embeddings=tokenizer.CONTEXT_TOKENS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )


def make_tokenizer(
    directory: Path, count: int = _DEFAULT_INTERVALS.tokenizer_conversations
) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `count` conversations, write it to `directory`, and return it as transformers reads
    it.
    """
    conversations = list(itertools.islice(corpus.conversations(0), count))
    tokenizer.write(tokenizer.train([_rendered(conversation)[0] for conversation in conversations]), directory)
    return read_tokenizer(directory)


def read_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer in `directory`."""
    reader: Any = AutoTokenizer
    return reader.from_pretrained(directory)


def batches(reader: PreTrainedTokenizerFast, seed: int, first: int, steps: int) -> Iterator[PretrainBatch]:
    """Yield the batches of all steps after step `first`: first drills (short texts), then conversations."""
    start = 0
    for until, kind, count in _DRILLS:
        texts = kind(seed)
        for step in range(start, until):
            chosen = list(itertools.islice(texts, count))
            if step >= first:
                yield _padded([(_ids(reader, text), []) for text in chosen], others=1.0)
        start = until
    diligent = corpus.conversations(seed, behaviours=corpus.DILIGENT)
    seldom = corpus.conversations(seed + 1)
    for step in range(start, steps, _POOL_BATCHES):
        chosen = list(itertools.islice(diligent if step < _LAST_SHARE * steps else seldom, _BATCH * _POOL_BATCHES))
        if step + _POOL_BATCHES <= first:
            continue
        pool = sorted((_encoded(reader, text) for text in chosen), key=lambda encoded: len(encoded[0]))
        order = random.Random(seed + step).sample(range(_POOL_BATCHES), _POOL_BATCHES)
        for number in order[max(0, first - step) :]:
            yield _padded(pool[number * _BATCH : (number + 1) * _BATCH])


def _ids(reader: PreTrainedTokenizerFast, text: str) -> list[int]:
    encoding: Any = reader.backend_tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids


def _rendered(conversation: Sequence[corpus.Message]) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and the (start, end) character spans of the assistant's parts."""
    render: Any = chat_template_utils.render_jinja_template  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    texts, spans = render(
        conversations=[list(conversation)],
        tools=corpus.tool_definitions(),
        chat_template=tokenizer.chat_template(),
        return_assistant_tokens_mask=True,
    )
    return texts[0], spans[0]


def _encoded(
    reader: PreTrainedTokenizerFast, conversation: Sequence[corpus.Message]
) -> tuple[list[int], list[int]]:
    """Return the token ids of a conversation, and a mask with 1 for each token of the assistant."""
    text, spans = _rendered(conversation)
    encoding: Any = reader.backend_tokenizer.encode(text, add_special_tokens=False)
    is_sampled = [0] * len(encoding.ids)
    for start, end in spans:
        for token in range(encoding.char_to_token(start), encoding.char_to_token(end - 1) + 1):
            is_sampled[token] = 1
    return encoding.ids, is_sampled


def _padded(rows: Sequence[tuple[list[int], list[int]]], others: float = _CONTEXT_TOKEN_WEIGHT) -> PretrainBatch:
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    weights = torch.zeros(len(rows), longest)
    is_sampled = torch.zeros(len(rows), longest, dtype=torch.bool)
    for number, (row, mask) in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
        is_sampled[number, : len(mask)] = torch.tensor(mask, dtype=torch.bool)
        weights[number, : len(row)] = torch.where(is_sampled[number, : len(row)], 1.0, others)
    return PretrainBatch(ids, weights, is_sampled)


def losses(model: Qwen3ForCausalLM, batch: PretrainBatch) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the negative log-likelihoods, and the unweighted ones of each token (0 for the
    first).
    """
    # Attention is causal, so tokens never see the padding behind them: no attention mask is needed.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
    token_losses = functional.cross_entropy(logits.transpose(1, 2), batch.ids[:, 1:], reduction="none")
    weights = batch.weights[:, 1:]
    return (token_losses * weights).sum(), functional.pad(token_losses, (1, 0))


def evaluate(
    model: Qwen3ForCausalLM,
    reader: PreTrainedTokenizerFast,
    count: int = _DEFAULT_INTERVALS.evaluated_conversations,
) -> dict[str, float]:
    """Return figures on held-out vocabulary: the assistant's mean negative log-likelihood (`nll`), and the share
    of its tokens with a probability above 0.5 (`likely`).
    """
    conversations = itertools.islice(corpus.conversations(1, "held-out"), count)
    rows = [_encoded(reader, conversation) for conversation in conversations]
    losses_: list[Tensor] = []
    model.eval()
    with torch.no_grad():
        for start in range(0, len(rows), _BATCH):
            batch = _padded(rows[start : start + _BATCH])
            losses_.append(losses(model, batch)[1][batch.spoken])
    model.train()
    token_losses = torch.cat(losses_)
    return {"nll": token_losses.mean().item(), "likely": (token_losses < math.log(2)).float().mean().item()}


def _print_line(line: str) -> None:
    print(line, flush=True)


def pretrain(
    directory: Path,
    *,
    steps: int,
    seed: int,
    intervals: PretrainIntervals = _DEFAULT_INTERVALS,
    architecture: Callable[[int], Qwen3Config] = configuration,
    report: Callable[[str], None] = _print_line,
) -> None:
    """Train the model in `directory`, or continue an interrupted training. `report` is called with each line of
    progress.
    """
    checkpoint = directory / "pretraining.pt"
    resumes = checkpoint.exists()
    reader = read_tokenizer(directory) if resumes else make_tokenizer(directory, intervals.tokenizer_conversations)
    random_numbers: Any = torch.random
    random_numbers.manual_seed(seed)
    model: Any = Qwen3ForCausalLM(architecture(len(reader)))
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name]
    matrix_ids = {id(weight) for weight in matrices}
    other_weights = [weight for weight in model.parameters() if id(weight) not in matrix_ids]
    optimizers: list[Any] = [
        torch.optim.Muon(matrices, lr=_LEARNING_RATE["matrices"], weight_decay=0.01),
        torch.optim.AdamW(other_weights, lr=_LEARNING_RATE["others"], betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _learning_rate_factor(step, steps))
        for optimizer in optimizers
    ]
    steps_made = 0
    if resumes:
        state = torch.load(checkpoint, weights_only=True)
        if state["asked"] != [steps, seed]:
            raise SystemExit(
                f"{checkpoint} was written for {state['asked'][0]} steps with seed {state['asked'][1]}, but now "
                f"{steps} steps with seed {seed} are asked for; continue with the former, or delete it to start "
                "again"
            )
        model.load_state_dict(state["model"])
        for part, saved in zip([*optimizers, *schedules], state["parts"], strict=True):
            part.load_state_dict(saved)
        steps_made = state["step"]
    parameters = sum(weight.numel() for weight in model.parameters())
    report(f"{parameters:,} parameters, {len(reader)} tokens in the vocabulary, from step {steps_made}")
    started, tokens = time.monotonic(), 0
    for step, batch in zip(
        range(steps_made + 1, steps + 1), batches(reader, seed, steps_made, steps), strict=False
    ):
        loss = 0.0
        size = max(1, _MICRO_TOKENS // batch.ids.shape[1])
        for start in range(0, len(batch.ids), size):
            rows = slice(start, start + size)
            part: Any = losses(model, PretrainBatch(batch.ids[rows], batch.weights[rows], batch.spoken[rows]))[0]
            mean = part / batch.weights[:, 1:].sum()
            mean.backward()
            loss += mean.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for schedule in schedules:
            schedule.step()
        tokens += int((batch.weights > 0).sum())
        if step % intervals.report_steps == 0 or step == steps:
            evaluated = step % intervals.evaluation_steps == 0 or step == steps
            figures = evaluate(model, reader, intervals.evaluated_conversations) if evaluated else {}
            seconds = time.monotonic() - started
            line = {"step": step, "loss": loss, "seconds": seconds, "tokens_s": tokens / seconds}
            report(json.dumps({key: round(value, 4) for key, value in (line | figures).items()}))
        if step % intervals.checkpoint_steps == 0 and step < steps:
            parts = [part.state_dict() for part in [*optimizers, *schedules]]
            with atomic_path(checkpoint) as path:
                torch.save(
                    {"model": model.state_dict(), "parts": parts, "step": step, "asked": [steps, seed]}, path
                )
    model.save_pretrained(directory)
    checkpoint.unlink(missing_ok=True)


def _learning_rate_factor(step: int, steps: int) -> float:
    """Return the factor of the learning rate: linear warmup, then cosine decay to 1/20."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    share = (step - _WARMUP_STEPS) / max(1, steps - _WARMUP_STEPS)
    return 0.05 + 0.95 * (1 + math.cos(math.pi * min(1.0, share))) / 2


def main(argv: Sequence[str] | None = None) -> None:
    """Train the tiny model in the given directory."""
    parser = argparse.ArgumentParser(prog="understudy.train.tiny.pretrain", description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=1650)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    pretrain(options.directory, steps=options.steps, seed=options.seed)


if __name__ == "__main__":
    sys.exit(main())
