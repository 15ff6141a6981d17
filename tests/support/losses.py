"""The losses once more, as their papers have them: plain Python over lists of floats, a loop for every sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec import Struct

from understudy.train.options import DistillOptions, DPOOptions, GRPOOptions

Rows = list[list[float]]


class Batch(Struct):
    """What a policy loss is computed of; the rows are ragged, without padding."""

    logprobs: Rows
    old: Rows
    behaviour: Rows
    reference: Rows
    entropy: Rows
    mask: list[list[int]]
    advantages: list[float]
    owner: list[int]
    teacher: Rows | None = None


def plain_policy_loss(batch: Batch, options: GRPOOptions, frozen: Rows | None = None) -> float:
    """The loss; `frozen` are the logprobs that no gradient flows through: those of CISPO's weight and of the gap
    to a teacher.
    """
    frozen = frozen or batch.logprobs
    low, high = options.clip
    lengths: dict[int, int] = {}
    for row, owner in zip(batch.mask, batch.owner, strict=True):
        lengths[owner] = lengths.get(owner, 0) + sum(row)
    rollouts = sum(1 for length in lengths.values() if length)
    total = 0.0
    for s, owner in enumerate(batch.owner):
        sampled = [t for t, one in enumerate(batch.mask[s]) if one]
        if not sampled:
            continue
        gaps = [batch.logprobs[s][t] - batch.old[s][t] for t in sampled]
        for t in sampled:
            now, old = batch.logprobs[s][t], batch.old[s][t]
            gain = batch.advantages[owner]
            if batch.teacher is not None and isinstance(options, DistillOptions):
                likelier = batch.teacher[s][t] - frozen[s][t]
                gain = options.reward_coefficient * gain + options.teacher_coefficient * likelier
            if options.loss == "cispo":
                weight = min(max(math.exp(frozen[s][t] - old), 1 - low), 1 + high)
                loss = -weight * gain * now
            else:
                ratio = math.exp(sum(gaps) / len(gaps)) if options.loss == "gspo" else math.exp(now - old)
                loss = -min(ratio * gain, min(max(ratio, 1 - low), 1 + high) * gain)
            importance = math.exp(old - batch.behaviour[s][t])
            if options.correction == "truncate":
                loss *= min(importance, options.truncate_at)
            elif options.correction == "band":
                loss *= importance if options.band_low <= importance <= options.band_high else 0.0
            apart = batch.reference[s][t] - now
            loss += options.kl_coefficient * (math.exp(apart) - apart - 1)
            loss -= options.entropy_coefficient * batch.entropy[s][t]
            if options.normalisation == "rollout-mean":
                total += loss / (rollouts * lengths[owner])
            elif options.normalisation == "token-mean":
                total += loss / sum(lengths.values())
            else:
                total += loss / (rollouts * options.constant_tokens)
    return total


def plain_dpo_loss(pairs: Sequence[Sequence[float]], options: DPOOptions) -> float:
    """Of (chosen, rejected, reference of chosen, reference of rejected)."""
    total = 0.0
    for chosen, rejected, reference_chosen, reference_rejected in pairs:
        margin = options.beta * ((chosen - reference_chosen) - (rejected - reference_rejected))
        right, wrong = 1 / (1 + math.exp(-margin)), 1 / (1 + math.exp(margin))
        noise = options.label_smoothing
        total -= ((1 - noise) * math.log(right) - noise * math.log(wrong)) / (1 - 2 * noise)
    return total / len(pairs)


def slopes(loss: Callable[[Rows], float], at: Rows, step: float = 1e-6) -> Rows:
    """The gradient by central differences."""
    gradients: Rows = []
    for s, row in enumerate(at):
        gradients.append([])
        for t, value in enumerate(row):
            sides: list[float] = []
            for sign in (1, -1):
                moved = [list(one) for one in at]
                moved[s][t] = value + sign * step
                sides.append(loss(moved))
            gradients[-1].append((sides[0] - sides[1]) / (2 * step))
    return gradients
