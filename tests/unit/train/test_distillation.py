"""Distillation's loss: against its formula in plain Python and a plain forward, and deaf to unsampled tokens."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.train.algorithms.batch import build_batch
from understudy.train.algorithms.updater import Updater
from understudy.train.groups import NO_TEACHER, RolloutGroup
from understudy.train.options import DistillOptions, GRPOOptions, read_options

from support import lazily, optional
from support.losses import Batch, Rows, plain_policy_loss, slopes
from support.train import make_groups

torch: Any = optional("torch")
behaviours, masks, scores, teacher_logprobs = lazily(
    "understudy.train.algorithms.forward", "behaviour_logprobs", "masks", "scores", "teacher_logprobs"
)
[policy_loss] = lazily("understudy.train.algorithms.losses", "policy_loss")

TEACHER = "http://127.0.0.1:1"


def some_batch(seed: int) -> Batch:
    random = Random(seed)
    lengths = [random.randint(2, 7) for _ in range(6)]
    old = [[random.uniform(-3, -0.1) for _ in range(length)] for length in lengths]

    def around(spread: float) -> Rows:
        return [[value + random.gauss(0, spread) for value in row] for row in old]

    return Batch(
        logprobs=around(0.1),
        old=old,
        behaviour=around(0.2),
        reference=old,
        entropy=[[0.0] * length for length in lengths],
        mask=[[0] + [random.randint(0, 1) for _ in row[1:]] for row in old],
        advantages=[random.uniform(-1.5, 1.5) for _ in range(3)],
        owner=[0, 1, 2, 0, 1, 2],
        teacher=around(1.0),
    )


def padded(rows: list[Any], fill: float, dtype: Any = None) -> Any:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype or torch.float64)


def of_batch(batch: Batch, options: DistillOptions, fill: float = 0.0) -> tuple[float, list[list[float]], float]:
    """Our loss, its gradient by logprob, and the estimate of the reverse KL by token."""
    logprobs = padded(batch.logprobs, fill).requires_grad_()
    loss, sums = policy_loss(
        logprobs,
        padded(batch.old, fill),
        padded(batch.behaviour, fill),
        torch.tensor(batch.advantages, dtype=torch.float64),
        padded(batch.mask, 0, torch.bool),
        torch.tensor(batch.owner),
        options,
        teacher=padded(batch.teacher or [], fill),
    )
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad.tolist(), sums.means()["teacher_kl"]


@pytest.mark.parametrize("reward", [0.0, 0.7])
@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("normalisation", ["rollout-mean", "token-mean", "constant"])
def test_loss_and_gradient_match_the_plain_implementation(loss: Any, normalisation: Any, reward: float):
    options = DistillOptions(
        teacher=TEACHER,
        loss=loss,
        normalisation=normalisation,
        teacher_coefficient=1.3,
        reward_coefficient=reward,
    )
    for seed in range(4):
        batch = some_batch(seed)
        ours, gradient, _ = of_batch(batch, options)
        assert ours == pytest.approx(plain_policy_loss(batch, options), abs=1e-7)

        def at(rows: Rows, batch: Batch = batch) -> float:
            return plain_policy_loss(structs.replace(batch, logprobs=rows), options, frozen=batch.logprobs)

        for row, expected in zip(gradient, slopes(at, batch.logprobs), strict=True):
            assert row[: len(expected)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("drift", [0.0, 0.3])
def test_the_gradient_equals_that_of_the_reverse_kl_also_in_later_passes(drift: float):
    """Over all tokens of a small vocabulary, weighed by the policy that sampled, which π may have left since:
    Σ old · r · (π − log p) ∇ π = ∇ KL(π ‖ p).
    """
    torch.manual_seed(0)
    logits = torch.randn(5, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(5, dtype=torch.float64), 0)
    old = torch.log_softmax(logits.detach() + drift * torch.randn(5, dtype=torch.float64), 0)
    policy = torch.log_softmax(logits, 0)
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits)
    options = DistillOptions(
        teacher=TEACHER, correction="none", normalisation="constant", constant_tokens=1, clip_low=1, clip_high=9
    )
    total = torch.zeros_like(exact)

    def row(value: Any) -> Any:
        return torch.stack([torch.zeros((), dtype=torch.float64), value]).unsqueeze(0)

    for token in range(5):
        policy = torch.log_softmax(logits, 0)
        loss, _ = policy_loss(
            row(policy[token]),
            row(old[token]),
            None,
            torch.zeros(1, dtype=torch.float64),
            torch.tensor([[False, True]]),
            torch.tensor([0]),
            options,
            teacher=row(teacher[token]),
        )
        (one,) = torch.autograd.grad(loss, logits)
        total += old[token].exp() * one
    assert torch.allclose(total, exact, atol=1e-9)


@pytest.mark.parametrize("poison", [7.0, math.nan, math.inf, -math.inf])
def test_unsampled_tokens_do_not_affect_loss_or_gradient(poison: float):
    options = DistillOptions(teacher=TEACHER, reward_coefficient=0.5)
    batch = some_batch(1)
    before = of_batch(batch, options)

    def poisoned(rows: Rows) -> Rows:
        pairs = zip(rows, batch.mask, strict=True)
        return [[value if one else poison for value, one in zip(row, mask, strict=True)] for row, mask in pairs]

    changed = Batch(
        logprobs=poisoned(batch.logprobs),
        old=poisoned(batch.old),
        behaviour=poisoned(batch.behaviour),
        reference=batch.reference,
        entropy=batch.entropy,
        mask=batch.mask,
        advantages=batch.advantages,
        owner=batch.owner,
        teacher=poisoned(batch.teacher or []),
    )
    assert of_batch(changed, options, fill=poison) == before


def taught(groups: list[RolloutGroup], seed: int = 0) -> list[RolloutGroup]:
    """The groups with logprobs of a teacher."""
    random = Random(seed)

    def score(group: RolloutGroup) -> RolloutGroup:
        rollouts = [
            structs.replace(
                rollout,
                sequences=tuple(
                    structs.replace(
                        each, teacher_logprobs=tuple(random.uniform(-6, -1) * one for one in each.loss_mask)
                    )
                    for each in rollout.sequences
                ),
            )
            for rollout in group.rollouts
        ]
        return structs.replace(group, rollouts=tuple(rollouts))

    return [score(group) for group in groups]


def test_the_weight_gradient_equals_that_of_a_plain_forward_pass(model: Path):
    """Our forward shares prefixes and computes few logits; a plain one, a sequence at a time, gives the same."""
    options = DistillOptions(teacher=TEACHER, learning_rate=1e-3, correction="none", reward_coefficient=0.3)
    groups = taught(make_groups(groups=2, rollouts=3))
    built = build_batch(groups, options, vocabulary=10_000, longest=10_000, skipped=Counter())
    updater = Updater(model, options)
    parameters = [value for value in updater.model.parameters() if value.requires_grad]
    current = scores(updater.model, built.sequences).logprobs
    loss, _ = policy_loss(
        current,
        current.detach(),
        behaviours(built.sequences),
        torch.tensor(built.advantages),
        masks(built.sequences),
        torch.tensor(built.rollouts),
        options,
        teacher=teacher_logprobs(built.sequences),
    )
    ours = torch.autograd.grad(loss, parameters)

    lengths = Counter[int]()
    for sequence, owner in zip(built.sequences, built.rollouts, strict=True):
        lengths[owner] += sum(sequence.loss_mask)
    plain: Any = torch.zeros(())
    for sequence, owner in zip(built.sequences, built.rollouts, strict=True):
        logits = updater.model(input_ids=torch.tensor([sequence.token_ids])).logits[0]
        for position, one in enumerate(sequence.loss_mask):
            if one:
                logprob = logits[position - 1].log_softmax(0)[sequence.token_ids[position]]
                assert sequence.teacher_logprobs is not None
                reverse_kl = float(logprob.detach()) - sequence.teacher_logprobs[position]
                gain = 0.3 * built.advantages[owner] - reverse_kl
                plain = plain - gain * logprob / (len(lengths) * lengths[owner])
    for mine, expected in zip(ours, torch.autograd.grad(plain, parameters), strict=True):
        assert torch.allclose(mine, expected, atol=1e-5, rtol=1e-4)


def test_groups_with_equal_rewards_are_used_and_those_without_teacher_scores_left_out(model: Path):
    options = DistillOptions(teacher=TEACHER, learning_rate=1e-2)
    groups = make_groups(groups=2, rollouts=2)
    equal = [
        structs.replace(group, rollouts=tuple(structs.replace(each, reward=0.0) for each in group.rollouts))
        for group in groups
    ]
    mixed = [taught(equal[:1])[0], equal[1]]
    updater = Updater(model, options)
    report = updater.update(mixed, 1)
    assert report.updated and report.groups == 1 and report.teacher_kl != 0
    assert report.skipped == {NO_TEACHER: 4}
    assert not Updater(model, GRPOOptions()).update(mixed, 1).updated


def test_an_update_moves_the_student_towards_its_teacher(model: Path):
    """The teacher finds everything sampled as likely as e^-1: what is less likely becomes likelier."""
    groups = make_groups(groups=1, rollouts=2, sequences=1)
    rollouts = tuple(
        structs.replace(
            rollout,
            sequences=tuple(
                structs.replace(each, teacher_logprobs=tuple(-1.0 * one for one in each.loss_mask))
                for each in rollout.sequences
            ),
        )
        for rollout in groups[0].rollouts
    )
    taught_groups = [structs.replace(groups[0], rollouts=rollouts)]
    updater = Updater(model, DistillOptions(teacher=TEACHER, learning_rate=1e-2))
    teacher_kls = [updater.update(taught_groups, step).teacher_kl for step in range(1, 9)]
    assert abs(teacher_kls[-1]) < abs(teacher_kls[0]) / 2


def test_options_round_trip_and_invalid_teacher_options_are_refused():
    from msgspec import to_builtins

    for options in (GRPOOptions(), DistillOptions(teacher=TEACHER, reward_coefficient=1.0)):
        assert read_options(to_builtins(options)) == options
    with pytest.raises(ConfigError, match=r"temperature is 0\.7, expected 1 with a teacher"):
        DistillOptions(teacher=TEACHER, temperature=0.7)
    with pytest.raises(ConfigError, match="teacher_coefficient is 0"):
        DistillOptions(teacher=TEACHER, teacher_coefficient=0.0)
