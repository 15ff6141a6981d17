"""Logprobs of sampled tokens under a model, with as little computed as will do.

`micro_batches` lays sequences together that begin alike or are of like length. What all rows of a batch begin with
(system prompt and tools, and what the rollouts of a group did before they parted) goes through the model once, and
every row attends to it; logits are computed where a sampled token needs one. All of it only saves work: logprobs
and gradients are those of each sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from msgspec import Struct
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer

from understudy.train.groups import TokenSequence

_SHARED = 16
"""Tokens that rows must have in common before it pays to compute them apart."""
_ROWS = 256
"""The most sequences of a batch."""
_CHUNK = 1024
"""How many distributions the entropy is computed of at once."""


class Scores(Struct, frozen=True):
    """Of sampled tokens, [sequences, length of the longest]; 0 elsewhere."""

    logprobs: Tensor
    entropy: Tensor
    """Of the distribution that each was sampled from, in nats; with a gradient only where that was asked for."""


def micro_batches(sequences: Sequence[TokenSequence], tokens: int) -> list[list[int]]:
    """Indices of `sequences` in batches of at most `tokens` tokens, padding included; the largest first.

    Every sequence with sampled tokens is in one batch; one longer than `tokens` is alone in its own. Of the ways
    to cut two orders, by tokens and by length, it is the one after which the model computes the fewest tokens,
    where a batch more counts as tokens / 32.
    """
    rows = [sequence.token_ids for sequence in sequences]
    used = [index for index, sequence in enumerate(sequences) if sequence.sampled]
    orders = sorted(used, key=rows.__getitem__), sorted(used, key=lambda index: len(rows[index]))
    _, batches = min(_cut([rows[index] for index in order], order, tokens) for order in orders)
    return sorted(batches, key=lambda batch: -len(batch) * max(len(rows[index]) for index in batch))


def masks(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor:
    """Where tokens were sampled: bool [sequences, length of the longest].

    Never at a sequence's first token, which has nothing before it that could predict it.
    """
    rows = _rectangle([sequence.loss_mask for sequence in sequences], 0, torch.bool, device)
    rows[:, :1] = False
    return rows


def behaviours(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor | None:
    """The logprobs of the policy that sampled, [sequences, length of the longest]; None if a sequence has none."""
    rows = [sequence.logprobs for sequence in sequences]
    if any(row is None for row in rows):
        return None
    return _rectangle(cast("list[tuple[float, ...]]", rows), 0.0, torch.float32, device)


def teacher_logprobs(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor | None:
    """The teacher's logprobs, [sequences, length of the longest]; None if a sequence has none."""
    rows = [sequence.teacher_logprobs for sequence in sequences]
    if any(row is None for row in rows):
        return None
    return _rectangle(cast("list[tuple[float, ...]]", rows), 0.0, torch.float32, device)


def token_logprobs(model: nn.Module, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> Tensor:
    """The logprob of each sampled token given all before it, at `temperature`: [sequences, length of the longest].

    0 where no token was sampled. One micro-batch: `micro_batches` says which sequences to give.
    """
    return scores(model, sequences, temperature).logprobs


def scores(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> Scores:
    """The logprobs of `token_logprobs`, and the entropies beside them.

    `model` is a causal language model of transformers, or a peft model of one. fp32, whatever it computes in.
    """
    device = next(model.parameters()).device
    mask = masks(sequences, device)
    tokens = _rectangle([sequence.token_ids for sequence in sequences], 0, torch.long, device)
    rows = [sequence.token_ids for sequence in sequences]
    shared = _shared(rows)
    blank = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    positions = torch.arange(mask.shape[1], device=device)
    result, inputs, own = Scores(blank, blank), dict[str, Any](use_cache=False), 0
    if shared and _keeps(model):
        # Position t - 1 predicts token t, so this predicts the first token of each row's own part too.
        columns = mask[:, 1 : shared + 1].any(dim=0)
        output = model(input_ids=tokens[:1, :shared], use_cache=True, logits_to_keep=columns.unsqueeze(0))
        if _repeatable(output.past_key_values):
            at, column = mask[:, 1 : shared + 1].nonzero(as_tuple=True)
            row_index = (columns.cumsum(0) - 1)[column]
            part = _of_logits(output.logits / temperature, row_index, tokens[at, column + 1], entropy_gradient)
            result, own = _with_part(result, part, mask & (positions <= shared)), shared
            output.past_key_values.batch_repeat_interleave(len(rows))
            inputs = {"use_cache": True, "past_key_values": output.past_key_values}
    targets = mask[:, own + 1 :]
    if own and not targets.any():
        return result
    selected = torch.cat([targets, mask.new_zeros(len(rows), 1)], dim=1)
    logits: Tensor = model(input_ids=tokens[:, own:], logits_to_keep=selected, **inputs).logits / temperature
    each = torch.arange(len(logits), device=device)
    part = _of_logits(logits, each, tokens[:, own + 1 :][targets], entropy_gradient)
    return _with_part(result, part, mask & (positions > own))


def _of_logits(logits: Tensor, row_index: Tensor, tokens: Tensor, entropy_gradient: bool) -> Scores:
    """Of each token: the scores under the distribution that `logits` has at its place."""
    logits = logits.float()
    chosen = logits[row_index, tokens] - logits.logsumexp(dim=-1)[row_index]
    if entropy_gradient:
        return Scores(chosen, _entropy(logits)[row_index])
    with torch.no_grad():
        # In chunks: with a vocabulary of 150,000 the probabilities would take as much memory as the logits.
        chunks = [_entropy(logits[at : at + _CHUNK]) for at in range(0, len(logits), _CHUNK)]
    return Scores(chosen, torch.cat([*chunks, logits.new_zeros(0)])[row_index])


def _entropy(logits: Tensor) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=-1)
    # Bounded, for what cannot be sampled has a logprob of -inf, and 0 times that is NaN.
    return -(logprobs.exp() * logprobs.clamp(min=-1000.0)).sum(dim=-1)


def _with_part(onto: Scores, part: Scores, mask: Tensor) -> Scores:
    return Scores(
        onto.logprobs.masked_scatter(mask, part.logprobs), onto.entropy.masked_scatter(mask, part.entropy)
    )


def _keeps(model: nn.Module) -> bool:
    """Whether the model gives out keys and values in this mode: checkpointed layers compute theirs anew."""
    return not (model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()))


def _repeatable(cache: Any) -> bool:
    """Whether each row can have a copy of this: only plain attention leaves nothing but keys and values."""
    return isinstance(cache, Cache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def _cut(rows: list[tuple[int, ...]], names: list[int], tokens: int) -> tuple[float, list[list[int]]]:
    """The cheapest way to cut this order into batches, and what it costs, in tokens computed."""
    common = [0, *(_common(left, right) for left, right in pairwise(rows))]
    # best[n]: what the first n rows cost, and where the last of their batches begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(rows) + 1):
        longest, same, least = 0, len(rows[end - 1]), (float("inf"), 0)
        shortest = same
        for start in range(end - 1, max(-1, end - 1 - _ROWS), -1):
            length, count = len(rows[start]), end - start
            longest, shortest = max(longest, length), min(shortest, length)
            if count > 1 and count * longest > tokens:
                break
            shared = _worth(min(same, shortest - 1)) if count > 1 else 0
            cost = best[start][0] + shared + count * (longest - shared) + tokens / 32
            least = min(least, (cost, start))
            same = min(same, common[start])
        best.append(least)
    batches: list[list[int]] = []
    end = len(rows)
    while end:
        start = best[end][1]
        batches.append(names[start:end])
        end = start
    return best[-1][0], batches


def _shared(rows: list[tuple[int, ...]]) -> int:
    """How many tokens are computed once for these rows; each keeps one at least of its own."""
    if len(rows) < 2:
        return 0
    return _worth(min(_common(min(rows), max(rows)), min(map(len, rows)) - 1))


def _worth(shared: int) -> int:
    return shared if shared >= _SHARED else 0


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _rectangle(
    rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype, device=device)
