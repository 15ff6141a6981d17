"""Policy losses over sampled tokens.

Tensors are right-padded rectangles, [sequences, width]. Position t of row s stands for token t of sequence s,
given all tokens before it. `mask` is true exactly where a token was sampled; no other position influences the
result. Notation: π is the logprob under the weights being trained, `old` under the weights at the start of the
update, μ under the weights that sampled the token (the behaviour policy), r = exp(π − old), and A is the advantage
of the rollout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec import Struct, structs
from torch import Tensor

from understudy.train.options import DistillOptions, GRPOOptions, Loss

_MAX_LOGPROB_GAP = 20.0
"""Logprobs further apart count as this far apart: exp() of more is no number that a weight or a mean can hold."""


class LossSums(Struct, frozen=True):
    """The terms of a loss, summed over tokens. Sums of micro-batches add up to the sums of the whole batch."""

    loss: float = 0.0
    tokens: int = 0
    clipped_low: int = 0
    clipped_high: int = 0
    """Tokens without gradient because their ratio is outside the clip range (CISPO: whose weight was clipped)."""
    corrected: int = 0
    """Tokens whose importance weight was truncated ("truncate") or set to 0 ("band"); see `correction`."""
    ratio: float = 0.0
    kl: float = 0.0
    """KL to the reference model, by the k3 estimator; 0 without a reference."""
    entropy: float = 0.0
    mismatch: float = 0.0
    """|old − μ|."""
    mismatch_kl: float = 0.0
    """KL from the behaviour policy to `old`, by the k3 estimator."""
    mismatch_max: float = 0.0
    teacher_kl: float = 0.0
    """Sum of old − log p over sampled tokens: estimates the reverse KL to the teacher. 0 without a teacher."""

    def __add__(self, other: LossSums) -> LossSums:
        both: Any = {name: value + getattr(other, name) for name, value in structs.asdict(self).items()}
        return structs.replace(LossSums(**both), mismatch_max=max(self.mismatch_max, other.mismatch_max))

    def means(self) -> dict[str, float]:
        """Return the loss and per-token means of the other sums; fractions are between 0 and 1."""
        count = max(self.tokens, 1)
        return {
            "loss": self.loss,
            "tokens": self.tokens,
            "clip_fraction": (self.clipped_low + self.clipped_high) / count,
            "clip_fraction_low": self.clipped_low / count,
            "clip_fraction_high": self.clipped_high / count,
            "corrected_fraction": self.corrected / count,
            "ratio": self.ratio / count,
            "kl": self.kl / count,
            "entropy": self.entropy / count,
            "mismatch_mean": self.mismatch / count,
            "mismatch_kl": self.mismatch_kl / count,
            "mismatch_max": self.mismatch_max,
            "teacher_kl": self.teacher_kl / count,
        }


def tokens_of_rollouts(mask: Tensor, rollout_index: Tensor, rollouts: int) -> Tensor:
    """Return how many sampled tokens each rollout has over all its sequences, shape [rollouts]."""
    counts = torch.zeros(rollouts, dtype=torch.float32, device=mask.device)
    return counts.index_add(0, rollout_index, mask.sum(dim=1).to(torch.float32))


def token_weights(rollout_tokens: Tensor, rollout_index: Tensor, options: GRPOOptions) -> Tensor:
    """Return the weight of one token of each sequence in the loss, shape [sequences, 1].

    Let R be the number of rollouts that have sampled tokens, n_i the number of sampled tokens of rollout i over
    all its sequences, and N the number over all rollouts.

    - "rollout-mean": 1 / (R · n_i). Every rollout has the same total weight, whatever its length and number of
      sequences. With one sequence per rollout this is GRPO's weighting, arXiv 2402.03300.
    - "token-mean": 1 / N. DAPO, arXiv 2503.14476.
    - "constant": 1 / (R · `constant_tokens`). Dr. GRPO, arXiv 2503.20783.

    None of them changes when a rollout is split into more sequences.
    """
    rollouts = (rollout_tokens > 0).sum().clamp(min=1)
    if options.normalisation == "rollout-mean":
        weights = 1 / (rollouts * rollout_tokens.clamp(min=1))
    elif options.normalisation == "token-mean":
        weights = (1 / rollout_tokens.sum().clamp(min=1)).expand_as(rollout_tokens)
    else:
        weights = (1 / (rollouts * options.constant_tokens)).expand_as(rollout_tokens)
    return weights[rollout_index].unsqueeze(1)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    behaviour: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    rollout_index: Tensor,
    options: GRPOOptions,
    *,
    rollout_tokens: Tensor | None = None,
    reference: Tensor | None = None,
    entropy: Tensor | None = None,
    teacher: Tensor | None = None,
) -> tuple[Tensor, LossSums]:
    """Return the loss to minimize, and the sums that it is made of.

    L = Σ_s Σ_t w_s · (c_t · l_t + kl_coefficient · k3_t − entropy_coefficient · H_t) over the sampled tokens. w
    comes from `token_weights`, l from the function of `options.loss` (`ppo`, `gspo`, `cispo`) and c from
    `correction`. k3 = exp(ref − π) − (ref − π) − 1 estimates the KL to the reference, as in arXiv 2402.03300. With
    DistillOptions the advantage of each token comes from `distillation_gain`.

    `logprobs`, `old_logprobs`, `behaviour`, `reference`, `entropy` and `teacher` are [sequences, width]; only
    `logprobs` and `entropy` have gradients. `advantages` is [rollouts]; `rollout_index`, [sequences], is the
    rollout of each sequence. For a micro-batch, pass the `advantages` and `rollout_tokens` (`tokens_of_rollouts`)
    of the whole batch: then losses and gradients of the micro-batches add up to those of the batch, however a
    rollout's sequences are distributed over them.

    Raises ValueError when an option needs a tensor that is None.
    """
    for name, required, tensor, option in (
        ("behaviour", options.correction != "none", behaviour, f"correction={options.correction!r}"),
        ("reference", options.kl_coefficient > 0, reference, f"kl_coefficient={options.kl_coefficient:g}"),
        (
            "entropy",
            options.entropy_coefficient > 0,
            entropy,
            f"entropy_coefficient={options.entropy_coefficient:g}",
        ),
        ("teacher", isinstance(options, DistillOptions), teacher, "a teacher (DistillOptions)"),
    ):
        if required and tensor is None:
            raise ValueError(
                f"{name}: expected a tensor [sequences, width], got None; give it, because {option} needs it"
            )
    if rollout_tokens is None:
        rollout_tokens = tokens_of_rollouts(mask, rollout_index, len(advantages))
    # Masked before any arithmetic: values outside the mask may be inf or NaN, and 0 · NaN is NaN.
    logprobs, old = _sampled(logprobs, mask), _sampled(old_logprobs, mask)
    gain = advantages[rollout_index].unsqueeze(1)
    teacher_gap: Tensor | None = None
    if teacher is not None and isinstance(options, DistillOptions):
        theirs = _sampled(teacher, mask)
        teacher_gap = old - theirs
        gain = distillation_gain(gain, logprobs.detach() - theirs, options)
    loss, ratio, low, high = _LOSSES[options.loss](logprobs, old, gain, mask, options.clip)
    cut = torch.zeros_like(mask)
    gap: Tensor | None = None
    if behaviour is not None:
        gap = old - _sampled(behaviour, mask)
        weight, cut = correction(gap, options)
        loss = loss * weight
    kl: Tensor | None = None
    if reference is not None:
        kl = _k3(_sampled(reference, mask) - logprobs)
        loss = loss + options.kl_coefficient * kl
    if entropy is not None:
        entropy = _sampled(entropy, mask)
        loss = loss - options.entropy_coefficient * entropy
    loss = (loss * token_weights(rollout_tokens, rollout_index, options) * mask).sum()
    with torch.no_grad():
        sums = LossSums(
            loss=float(loss.detach()),
            tokens=int(mask.sum()),
            clipped_low=int((low & mask).sum()),
            clipped_high=int((high & mask).sum()),
            corrected=int((cut & mask).sum()),
            ratio=_masked_sum(ratio, mask),
            kl=0.0 if kl is None else _masked_sum(kl, mask),
            entropy=0.0 if entropy is None else _masked_sum(entropy, mask),
            mismatch=0.0 if gap is None else _masked_sum(gap.abs(), mask),
            mismatch_kl=0.0 if gap is None else _masked_sum(_k3(gap), mask),
            mismatch_max=0.0 if gap is None or not gap.numel() else float(gap.abs().max()),
            teacher_kl=0.0 if teacher_gap is None else _masked_sum(teacher_gap, mask),
        )
    return loss, sums


def distillation_gain(gain: Tensor, gap: Tensor, options: DistillOptions) -> Tensor:
    """Return the advantage of each sampled token: reward_coefficient · A − teacher_coefficient · (π − log p).

    `gap` is π − log p, where p is the teacher's probability of the token that the student sampled. Its mean over
    the student's samples is the reverse KL, KL(π ‖ p), at the states that the student visits. The penalty counts
    only for the token itself and not for earlier ones (discount 0), so the gradient, r · (π − log p) · ∇π, is an
    unbiased estimate of the gradient of the KL at these states. π is that of the present pass: with the gap of the
    first one (r = 1), later passes over the same rollouts would push on after the student has reached the teacher.
    On-policy distillation: MiniLLM, arXiv 2306.08543 (reverse KL by policy gradient), GKD, arXiv 2306.13649 (on
    the student's own outputs). Gaps are clamped to 20 nats.
    """
    return options.reward_coefficient * gain - options.teacher_coefficient * gap.clamp(
        -_MAX_LOGPROB_GAP, _MAX_LOGPROB_GAP
    )


def ppo(logprobs: Tensor, old: Tensor, gain: Tensor, mask: Tensor, clip: tuple[float, float]) -> _TokenLosses:
    """Return l = −min(r A, clip(r, 1 − low, 1 + high) A), by token.

    PPO, arXiv 1707.06347; clip-higher (high above low) is DAPO's, arXiv 2503.14476.
    """
    return _clipped(_ratio(logprobs - old), gain, clip)


def gspo(logprobs: Tensor, old: Tensor, gain: Tensor, mask: Tensor, clip: tuple[float, float]) -> _TokenLosses:
    """Return the loss of `ppo`, but with one ratio for all tokens of a sequence: s = exp(mean_t(π − old)).

    GSPO, arXiv 2507.18071. The ratio is that of one sequence (a segment of a branch), not of all sequences of a
    rollout, because those may be in different micro-batches. The token weights are still those of the rollout.
    """
    count = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (logprobs - old).sum(dim=1, keepdim=True) / count
    return _clipped(_ratio(mean).expand_as(logprobs), gain, clip)


def cispo(logprobs: Tensor, old: Tensor, gain: Tensor, mask: Tensor, clip: tuple[float, float]) -> _TokenLosses:
    """Return l = −sg(clip(r, 1 − low, 1 + high)) · A · π, by token, with sg for stop-gradient.

    CISPO, arXiv 2506.13585. Every token keeps a gradient; clipping only bounds its weight.
    """
    ratio = _ratio(logprobs - old).detach()
    weight = ratio.clamp(1 - clip[0], 1 + clip[1])
    return -weight * gain * logprobs, ratio, ratio < 1 - clip[0], ratio > 1 + clip[1]


def correction(gap: Tensor, options: GRPOOptions) -> tuple[Tensor, Tensor]:
    """Return the importance weight of each token, and where it was cut; `gap` is old − μ.

    exp(old − μ) corrects for tokens sampled by another policy than `old`: the sampling engine computes slightly
    different logprobs than the trainer, and in asynchronous collection its weights may be some versions older. The
    clipped ratio stays relative to `old` (decoupled PPO, as in AReaL, arXiv 2505.24298).

    - "truncate": min(exp(old − μ), C) with C = `truncate_at`, as in V-trace, arXiv 1802.01561.
    - "band": exp(old − μ) inside [`band_low`, `band_high`], 0 outside: IcePop, arXiv 2510.18855.
    - "none": 1.
    """
    weight = _ratio(gap).detach()
    if options.correction == "truncate":
        return weight.clamp(max=options.truncate_at), weight > options.truncate_at
    if options.correction == "band":
        out = (weight < options.band_low) | (weight > options.band_high)
        return weight.masked_fill(out, 0.0), out
    return torch.ones_like(weight), torch.zeros_like(weight, dtype=torch.bool)


_TokenLosses = tuple[Tensor, Tensor, Tensor, Tensor]
"""A loss by token, the ratio, and where it was clipped below and above."""


def _clipped(ratio: Tensor, gain: Tensor, clip: tuple[float, float]) -> _TokenLosses:
    free, bound = ratio * gain, ratio.clamp(1 - clip[0], 1 + clip[1]) * gain
    # Clipping removes the gradient only where the clipped term is the smaller one.
    low = (ratio < 1 - clip[0]) & (gain < 0)
    high = (ratio > 1 + clip[1]) & (gain > 0)
    return -torch.minimum(free, bound), ratio, low, high


def _sampled(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0)


def _ratio(gap: Tensor) -> Tensor:
    return gap.clamp(-_MAX_LOGPROB_GAP, _MAX_LOGPROB_GAP).exp()


def _k3(gap: Tensor) -> Tensor:
    # The whole k3 term is clamped. Clamping only exp() would leave a gradient that pushes the policy further away.
    gap = gap.clamp(max=_MAX_LOGPROB_GAP)
    return gap.exp() - gap - 1


def _masked_sum(values: Tensor, mask: Tensor) -> float:
    return float((values * mask).sum())


_LOSSES: dict[Loss, Callable[[Tensor, Tensor, Tensor, Tensor, tuple[float, float]], _TokenLosses]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
}
