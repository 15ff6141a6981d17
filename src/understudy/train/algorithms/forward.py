"""Logprobs and entropies of sampled tokens under a model, computed without redundant work.

`micro_batches` puts sequences together that share a prefix or have similar lengths. The prefix that all rows of a
batch share (system prompt, tools, and the common beginning of a group's rollouts) goes through the model once, and
every row attends to its keys and values. Logits are computed only at positions that predict a sampled token. These
are pure optimizations: logprobs and gradients equal those of each sequence computed alone.
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

_MIN_SHARED_TOKENS = 16
"""Tokens that rows must have in common before it pays to compute them apart."""
_MAX_ROWS = 256
"""The most sequences of a batch."""
_ENTROPY_CHUNK = 1024
"""How many distributions the entropy is computed of at once."""


class Scores(Struct, frozen=True):
    """Values for sampled tokens, shape [sequences, length of the longest sequence]; 0 at all other positions."""

    logprobs: Tensor
    entropy: Tensor
    """Entropy of the distribution that each token was sampled from, in nats; has a gradient only on request."""


def micro_batches(sequences: Sequence[TokenSequence], tokens: int) -> list[list[int]]:
    """Return batches of indices into `sequences`, each of at most `tokens` tokens with padding; the largest come
    first.

    Every sequence with sampled tokens is in exactly one batch; a sequence longer than `tokens` gets a batch of its
    own. Two orders are tried, by content and by length; each is cut optimally, and the cheaper one is returned.
    The cost is the number of tokens that the model computes, plus tokens / 32 for every batch.
    """
    rows = [sequence.token_ids for sequence in sequences]
    used = [index for index, sequence in enumerate(sequences) if sequence.sampled]
    orders = sorted(used, key=rows.__getitem__), sorted(used, key=lambda index: len(rows[index]))
    _, batches = min(_cheapest_batches([rows[index] for index in order], order, tokens) for order in orders)
    return sorted(batches, key=lambda batch: -len(batch) * max(len(rows[index]) for index in batch))


def masks(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor:
    """Return which tokens were sampled: bool, shape [sequences, length of the longest sequence].

    The first token of a sequence is never marked, because no preceding token could predict it.
    """
    rows = _padded([sequence.loss_mask for sequence in sequences], 0, torch.bool, device)
    rows[:, :1] = False
    return rows


def behaviour_logprobs(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor | None:
    """Return the sampling policy's logprobs, shape [sequences, longest length]; None if any sequence has none."""
    rows = [sequence.logprobs for sequence in sequences]
    if any(row is None for row in rows):
        return None
    return _padded(cast("list[tuple[float, ...]]", rows), 0.0, torch.float32, device)


def teacher_logprobs(sequences: Sequence[TokenSequence], device: torch.device | str = "cpu") -> Tensor | None:
    """Return the teacher's logprobs, shape [sequences, length of the longest sequence]; None if any sequence has
    none.
    """
    rows = [sequence.teacher_logprobs for sequence in sequences]
    if any(row is None for row in rows):
        return None
    return _padded(cast("list[tuple[float, ...]]", rows), 0.0, torch.float32, device)


def token_logprobs(model: nn.Module, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> Tensor:
    """Return the logprob of each sampled token given all tokens before it: [sequences, length of the longest
    sequence].

    Logits are divided by `temperature`. Positions without a sampled token are 0. All sequences are computed as one
    micro-batch; see `micro_batches`.
    """
    return scores(model, sequences, temperature).logprobs


def scores(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    temperature: float = 1.0,
    *,
    entropy_gradient: bool = False,
) -> Scores:
    """Return the logprobs (as `token_logprobs`) and entropies of sampled tokens, in fp32 whatever the model
    computes in.

    `model` is a causal language model of transformers, or a peft model of one. With `entropy_gradient` the
    entropies have a gradient.
    """
    device = next(model.parameters()).device
    mask = masks(sequences, device)
    tokens = _padded([sequence.token_ids for sequence in sequences], 0, torch.long, device)
    rows = [sequence.token_ids for sequence in sequences]
    shared = _shared_prefix_length(rows)
    blank = torch.zeros(mask.shape, dtype=torch.float32, device=device)
    positions = torch.arange(mask.shape[1], device=device)
    result, inputs, prefix = Scores(blank, blank), dict[str, Any](use_cache=False), 0
    if shared and _returns_cache(model):
        # Position t - 1 predicts token t, so the last position of the shared prefix predicts the first token of
        # each row's own suffix.
        columns = mask[:, 1 : shared + 1].any(dim=0)
        output = model(input_ids=tokens[:1, :shared], use_cache=True, logits_to_keep=columns.unsqueeze(0))
        if _is_repeatable(output.past_key_values):
            at, column = mask[:, 1 : shared + 1].nonzero(as_tuple=True)
            row_index = (columns.cumsum(0) - 1)[column]
            part = _scores_of_logits(
                output.logits / temperature, row_index, tokens[at, column + 1], entropy_gradient
            )
            result, prefix = _with_part(result, part, mask & (positions <= shared)), shared
            output.past_key_values.batch_repeat_interleave(len(rows))
            inputs = {"use_cache": True, "past_key_values": output.past_key_values}
    targets = mask[:, prefix + 1 :]
    if prefix and not targets.any():
        return result
    selected = torch.cat([targets, mask.new_zeros(len(rows), 1)], dim=1)
    logits: Tensor = model(input_ids=tokens[:, prefix:], logits_to_keep=selected, **inputs).logits / temperature
    row_numbers = torch.arange(len(logits), device=device)
    part = _scores_of_logits(logits, row_numbers, tokens[:, prefix + 1 :][targets], entropy_gradient)
    return _with_part(result, part, mask & (positions > prefix))


def _scores_of_logits(logits: Tensor, row_index: Tensor, tokens: Tensor, entropy_gradient: bool) -> Scores:
    """Return logprob and entropy of each of `tokens` under the row of `logits` that `row_index` assigns to it."""
    logits = logits.float()
    chosen = logits[row_index, tokens] - logits.logsumexp(dim=-1)[row_index]
    if entropy_gradient:
        return Scores(chosen, _entropy(logits)[row_index])
    with torch.no_grad():
        # In chunks, because with a vocabulary of 150,000 the probabilities would take as much memory as the
        # logits.
        chunks = [_entropy(logits[at : at + _ENTROPY_CHUNK]) for at in range(0, len(logits), _ENTROPY_CHUNK)]
    return Scores(chosen, torch.cat([*chunks, logits.new_zeros(0)])[row_index])


def _entropy(logits: Tensor) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=-1)
    # Clamped, because a token of probability 0 has the logprob -inf, and 0 * -inf is NaN.
    return -(logprobs.exp() * logprobs.clamp(min=-1000.0)).sum(dim=-1)


def _with_part(onto: Scores, part: Scores, mask: Tensor) -> Scores:
    return Scores(
        onto.logprobs.masked_scatter(mask, part.logprobs), onto.entropy.masked_scatter(mask, part.entropy)
    )


def _returns_cache(model: nn.Module) -> bool:
    """Return whether the model returns its keys and values in this mode.

    With gradient checkpointing in training mode it does not, because layers are recomputed in the backward pass.
    """
    return not (model.training and any(getattr(part, "gradient_checkpointing", False) for part in model.modules()))


def _is_repeatable(cache: Any) -> bool:
    """Return whether the cache can be copied for each row: only plain attention caches nothing but keys and
    values.
    """
    return isinstance(cache, Cache) and all(type(layer) is DynamicLayer for layer in cache.layers)


def _cheapest_batches(rows: list[tuple[int, ...]], names: list[int], tokens: int) -> tuple[float, list[list[int]]]:
    """Return the cheapest way to cut `rows`, in this order, into batches, with its cost in computed tokens.

    `names` are the rows' indices, which the batches consist of. Solved by dynamic programming over the last
    batch's start.
    """
    common = [0, *(_common(left, right) for left, right in pairwise(rows))]
    # best[n]: the cost of batching the first n rows, and the index where the last of those batches begins.
    best: list[tuple[float, int]] = [(0.0, 0)]
    for end in range(1, len(rows) + 1):
        longest, same, least = 0, len(rows[end - 1]), (float("inf"), 0)
        shortest = same
        for start in range(end - 1, max(-1, end - 1 - _MAX_ROWS), -1):
            length, count = len(rows[start]), end - start
            longest, shortest = max(longest, length), min(shortest, length)
            if count > 1 and count * longest > tokens:
                break
            shared = _worth_sharing(min(same, shortest - 1)) if count > 1 else 0
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


def _shared_prefix_length(rows: list[tuple[int, ...]]) -> int:
    """Return the length of the prefix that is computed once for these rows; each keeps at least one token of its
    own.
    """
    if len(rows) < 2:
        return 0
    return _worth_sharing(min(_common(min(rows), max(rows)), min(map(len, rows)) - 1))


def _worth_sharing(shared: int) -> int:
    return shared if shared >= _MIN_SHARED_TOKENS else 0


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Return the length of the common prefix of two token sequences, by binary search."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _padded(
    rows: Sequence[Sequence[float]], fill: float, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype, device=device)
