"""Draws tokens from a model's logits, and returns the probability with which each token was drawn."""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from msgspec import Struct

_MIN_TEMPERATURE = 1e-30
"""A temperature at which the likeliest token is certain already, and which float32 can divide by."""
_LOGIT_BOUND = 1e30
"""The bound of logits after all biases and penalties, so that differences stay finite."""


class SamplingSettings(Struct, frozen=True, kw_only=True):
    """The sampling parameters of one request, with vLLM's names and meanings; None for those that are not set.

    Biases and then penalties change the logits, `temperature` divides them (0: take the most likely token), then
    `min_p`, `top_k` and `top_p` exclude unlikely tokens.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None

    @property
    def truncates(self) -> bool:
        """Return whether some tokens are excluded."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def changes_logits(self) -> bool:
        """Return whether the request changes the logits, by penalties for earlier tokens or by biases."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1 or self.logit_bias
        )


def random_source(seed: int | None, prompt: Sequence[int]) -> random.Random:
    """Return the random generator of a request, seeded by its seed and prompt, or by the machine if it has no
    seed.

    The prompt is part of the seed, because all calls of a rollout have the same seed and must be sampled
    independently.
    """
    if seed is None:
        return random.Random(random.SystemRandom().getrandbits(64))
    content = array("q", prompt).tobytes()
    return random.Random(hashlib.sha256(b"%d:" % seed + content).digest())


def sample_tokens(
    logits: torch.Tensor,
    settings: Sequence[SamplingSettings],
    positions: Sequence[float],
    histories: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[tuple[int, float]]:
    """Return a token for each row of `logits` [rows, vocabulary], and the natural logarithm of its probability.

    `positions[i]` in [0, 1) is the point of the cumulative distribution at which the token of row i is taken;
    `histories[i]` are the tokens of its prompt and completion so far.

    The probability is that of the distribution that was sampled from, after temperature and truncation. If the
    most likely token was taken (temperature 0), it is the model's own probability at temperature 1. It is not
    finite if the row's logits are not.
    """
    logits = logits.float()
    for row, row_settings in enumerate(settings):
        if row_settings.changes_logits:
            logits[row] = _adjusted_logits(logits[row], row_settings, *histories[row])
    # The temperature 0 of vLLM: the likeliest, and the probability that the model itself gives it.
    temperatures = torch.tensor(
        [[max(setting.temperature or 1.0, _MIN_TEMPERATURE)] for setting in settings], device=logits.device
    )
    logprobs = torch.log_softmax((logits - logits.amax(dim=-1, keepdim=True)) / temperatures, dim=-1)
    for row, row_settings in enumerate(settings):
        if row_settings.truncates and row_settings.temperature:
            logprobs[row] = _truncated(logprobs[row], row_settings)
    sums = logprobs.double().exp().cumsum(dim=-1)
    thresholds = torch.tensor(positions, dtype=torch.float64, device=logits.device).unsqueeze(-1) * sums[:, -1:]
    # right=True skips tokens of probability 0, whose cumulative sum equals the one before.
    sampled = torch.searchsorted(sums, thresholds, right=True).squeeze(-1)
    likeliest = logits.argmax(dim=-1)
    greedy = torch.tensor([setting.temperature == 0 for setting in settings], device=logits.device)
    ids = torch.where(greedy, likeliest, sampled.clamp(max=logits.shape[-1] - 1))
    chosen = logprobs.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    tokens = cast("list[int]", ids.tolist())  # pyright: ignore[reportUnknownMemberType]
    token_logprobs = cast("list[float]", chosen.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [(id_, min(logprob, 0.0)) for id_, logprob in zip(tokens, token_logprobs, strict=True)]


def _adjusted_logits(
    logits: torch.Tensor, settings: SamplingSettings, prompt: Sequence[int], completion: Sequence[int]
) -> torch.Tensor:
    logits = logits.clone()
    for id_, bias in (settings.logit_bias or {}).items():
        logits[id_] += bias
    if settings.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *completion}), device=logits.device)
        values = logits[seen]
        rate = min(max(settings.repetition_penalty, 1 / _LOGIT_BOUND), _LOGIT_BOUND)
        logits[seen] = torch.where(values > 0, values / rate, values * rate).clamp(-_LOGIT_BOUND, _LOGIT_BOUND)
    counts = Counter(completion)
    if counts and (settings.presence_penalty or settings.frequency_penalty):
        ids = torch.tensor(list(counts), device=logits.device)
        times = torch.tensor([float(count) for count in counts.values()], device=logits.device)
        logits[ids] -= settings.presence_penalty + settings.frequency_penalty * times
    return logits


def _truncated(logprobs: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Return the distribution without the excluded tokens, normalised again; the likeliest token always stays."""
    if settings.min_p > 0:
        limit = logprobs.max() + math.log(settings.min_p)
        logprobs = logprobs.masked_fill(logprobs < limit, -math.inf).log_softmax(dim=-1)
    if 0 < settings.top_k < len(logprobs):
        limit = logprobs.topk(settings.top_k).values[-1]
        logprobs = logprobs.masked_fill(logprobs < limit, -math.inf).log_softmax(dim=-1)
    if settings.top_p < 1:
        ordered, order = logprobs.sort(descending=True, stable=True)
        before = ordered.double().exp().cumsum(dim=-1) - ordered.double().exp()
        removed = before >= settings.top_p
        removed[0] = False
        logprobs = logprobs.index_fill(0, order[removed], -math.inf).log_softmax(dim=-1)
    return logprobs
