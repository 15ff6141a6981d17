"""The losses against a plain implementation, their masks by perturbation, and what batching leaves as it is."""

from __future__ import annotations

import math
from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from understudy.train.options import GRPOOptions

from support import example_count, lazily, optional
from support.losses import Batch, Rows, plain_policy_loss, slopes

torch: Any = optional("torch")
LossSums, policy_loss, token_weights, tokens_of_rollouts = lazily(
    "understudy.train.algorithms.losses", "LossSums", "policy_loss", "token_weights", "tokens_of_rollouts"
)

NAMES = ("logprobs", "old", "behaviour", "reference", "entropy")
SETTINGS = [
    {"loss": loss, "normalisation": normalisation, "correction": correction, **more}
    for (loss, more), normalisation, correction in product(
        [
            ("ppo", {"clip_low": 0.2, "clip_high": 0.28, "kl_coefficient": 0.05, "entropy_coefficient": 0.01}),
            ("gspo", {"clip_low": 0.05, "clip_high": 0.08, "kl_coefficient": 0.05}),
            ("cispo", {"clip_low": 0.5, "clip_high": 0.2, "entropy_coefficient": 0.1}),
        ],
        ["rollout-mean", "token-mean", "constant"],
        ["truncate", "band", "none"],
    )
]


def some_batch(seed: int, *, rollouts: int = 3, sequences: int = 6, longest: int = 7) -> Batch:
    """Rollouts of one or more sequences, some without a sampled token, with ratios in and out of every range."""
    random = Random(seed)
    lengths = [random.randint(2, longest) for _ in range(sequences)]

    def around(rows: Rows, spread: float) -> Rows:
        return [[value + random.gauss(0, spread) for value in row] for row in rows]

    old = [[random.uniform(-3, -0.1) for _ in range(length)] for length in lengths]
    return Batch(
        logprobs=around(old, 0.4),
        old=old,
        behaviour=around(old, 0.7),
        reference=around(old, 0.5),
        entropy=[[random.uniform(0, 2) for _ in row] for row in old],
        mask=[[0] + [random.randint(0, 1) for _ in row[1:]] for row in old],
        advantages=[random.choice([-1, 1]) * random.uniform(0.3, 1.5) for _ in range(rollouts)],
        owner=[at if at < rollouts else random.randrange(rollouts) for at in range(sequences)],
    )


def tensor(rows: list[Any], fill: float = 0.0, dtype: Any = None) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype or torch.float64)


def number(loss: torch.Tensor) -> float:
    return float(loss.detach())


def ours(
    batch: Batch, options: GRPOOptions, rows: list[int] | None = None, fill: float = 0.0, **overrides: torch.Tensor
) -> tuple[torch.Tensor, LossSums, torch.Tensor]:
    """Our loss of some rows of a batch (all of them), its sums, and the logprobs that have its gradient."""
    rows = list(range(len(batch.owner))) if rows is None else rows
    mask = tensor(batch.mask, 0, torch.bool)
    owner = torch.tensor(batch.owner)
    whole = tokens_of_rollouts(mask, owner, len(batch.advantages))
    columns = {
        name: tensor(getattr(batch, name), fill)
        for name in ("logprobs", "old", "behaviour", "reference", "entropy")
    }
    columns = {name: values[rows] for name, values in (columns | overrides).items()}
    logprobs = columns["logprobs"].detach().requires_grad_()
    loss, sums = policy_loss(
        logprobs,
        columns["old"],
        columns["behaviour"],
        torch.tensor(batch.advantages, dtype=torch.float64),
        mask[rows],
        owner[rows],
        options,
        rollout_tokens=whole,
        reference=columns["reference"],
        entropy=columns["entropy"],
    )
    return loss, sums, logprobs


@pytest.mark.parametrize(
    "setting",
    SETTINGS,
    ids=lambda setting: f"{setting['loss']}-{setting['normalisation']}-{setting['correction']}",
)
def test_loss_and_gradient_match_the_plain_implementation(setting: dict[str, Any]) -> None:
    options = GRPOOptions(truncate_at=1.5, band_low=0.6, band_high=1.8, constant_tokens=20, **setting)
    clipped = corrected = 0
    for seed in range(5):
        batch = some_batch(seed)
        loss, sums, logprobs = ours(batch, options)
        assert number(loss) == pytest.approx(plain_policy_loss(batch, options), abs=1e-7)
        assert sums.loss == number(loss)
        loss.backward()

        def at(rows: Rows, batch: Batch = batch) -> float:
            return plain_policy_loss(structs.replace(batch, logprobs=rows), options, frozen=batch.logprobs)

        assert logprobs.grad is not None
        for row, expected in zip(logprobs.grad.tolist(), slopes(at, batch.logprobs), strict=True):
            assert row[: len(expected)] == pytest.approx(expected, abs=1e-6)
            assert not any(row[len(expected) :])
        clipped += sums.clipped_low + sums.clipped_high
        corrected += sums.corrected
    # Else the cases above would not have seen what they are about.
    assert clipped > 0
    assert (corrected > 0) == (options.correction != "none")


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("poison", [5.0, math.nan, math.inf, -math.inf])
def test_unsampled_tokens_do_not_affect_loss_or_gradient(loss: Any, poison: float) -> None:
    wide = {"clip_low": 5.0, "clip_high": 5.0, "correction": "band", "band_low": 0.0, "band_high": 100.0}
    options = GRPOOptions(loss=loss, kl_coefficient=0.1, entropy_coefficient=0.1, **wide)
    batch = some_batch(3)
    loss_of_all, sums, logprobs = ours(batch, options)
    loss_of_all.backward()
    gradient = logprobs.grad
    # All that is not sampled, padding too, changed at once: no influence, not even on the gradient.
    mask = tensor(batch.mask, 0, torch.bool)
    changed = {name: tensor(getattr(batch, name)).masked_fill(~mask, poison) for name in NAMES}
    again, sums_again, logprobs = ours(batch, options, **changed)
    again.backward()
    assert torch.equal(again, loss_of_all)
    assert sums_again == sums
    assert gradient is not None and logprobs.grad is not None and torch.equal(gradient, logprobs.grad)
    # One at a time, as each of the tensors: unsampled ones leave the loss as it is, sampled ones change it.
    for name, (row, column) in product(NAMES, torch.ones_like(mask).nonzero().tolist()):
        values = tensor(getattr(batch, name))
        values[row, column] += 0.25
        # exp(π − old) · exp(old − μ) does not depend on `old`, so without a correction for that one.
        used_options = structs.replace(options, correction="none") if name == "old" else options
        moved, unmoved = ours(batch, used_options, **{name: values})[0], ours(batch, used_options)[0]
        assert (number(moved) != number(unmoved)) == bool(mask[row, column]), (name, row, column)


@given(st.integers(0, 10_000), st.sampled_from(["rollout-mean", "token-mean", "constant"]), st.data())
@settings(max_examples=example_count(60), deadline=None)
def test_splitting_a_rollout_into_more_sequences_keeps_the_loss(
    seed: int, normalisation: Any, data: st.DataObject
) -> None:
    batch = some_batch(seed)
    loss = data.draw(st.sampled_from(["ppo", "cispo"]))
    options = GRPOOptions(loss=loss, normalisation=normalisation, kl_coefficient=0.1)
    row = data.draw(st.integers(0, len(batch.owner) - 1))
    cut = data.draw(st.integers(1, len(batch.mask[row]) - 1))
    pieces: dict[str, Any] = {}
    for name in (*NAMES, "mask"):
        rows = getattr(batch, name)
        # The second piece begins with all that came before it, as context.
        first = [*rows[row][:cut], *([0] * (len(rows[row]) - cut))] if name == "mask" else rows[row]
        second = [*([0] * cut), *rows[row][cut:]] if name == "mask" else rows[row]
        pieces[name] = [*rows[:row], first, *rows[row + 1 :], second]
    split = structs.replace(batch, owner=[*batch.owner, batch.owner[row]], **pieces)
    assert number(ours(split, options)[0]) == pytest.approx(number(ours(batch, options)[0]), abs=1e-6)


def test_every_rollout_weighs_the_same_by_default() -> None:
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 0], [0, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    owner = torch.tensor([0, 1, 1, 2])
    tokens = tokens_of_rollouts(mask, owner, 3)
    assert tokens.tolist() == [3.0, 4.0, 0.0]
    weights = (token_weights(tokens, owner, GRPOOptions()) * mask).sum(dim=1)
    # Half for each of the two that have tokens; the second's in the proportion of its sequences' tokens.
    assert weights.tolist() == pytest.approx([0.5, 0.125, 0.375, 0.0])


@given(st.integers(0, 10_000), st.sampled_from(SETTINGS), st.randoms(use_true_random=False))
@settings(max_examples=example_count(60), deadline=None)
def test_losses_and_gradients_of_micro_batches_add_up_to_the_batch(
    seed: int, setting: dict[str, Any], random: Any
) -> None:
    batch, options = some_batch(seed), GRPOOptions(**setting)
    whole, sums, logprobs = ours(batch, options)
    whole.backward()
    order = list(range(len(batch.owner)))
    random.shuffle(order)
    cut = random.randint(1, len(order) - 1)
    total, parts, gradient = LossSums(), 0.0, torch.zeros_like(logprobs)
    for rows in (order[:cut], order[cut:]):
        loss, part_sums, part = ours(batch, options, rows)
        loss.backward()
        assert part.grad is not None
        gradient[rows] = part.grad
        total, parts = total + part_sums, parts + number(loss)
    assert parts == pytest.approx(number(whole), abs=1e-7)
    assert logprobs.grad is not None and torch.allclose(gradient, logprobs.grad, atol=1e-8)
    assert total.means() == pytest.approx(sums.means(), abs=1e-7)


def test_on_policy_the_gradient_is_that_of_reinforce() -> None:
    """With r = 1 all three losses have the gradient −w A ∇π, and nothing is clipped or corrected."""
    batch = some_batch(7)
    batch = structs.replace(batch, logprobs=batch.old, behaviour=batch.old)
    mask, owner = tensor(batch.mask, 0, torch.bool), torch.tensor(batch.owner)
    for loss in ("ppo", "gspo", "cispo"):
        options = GRPOOptions(loss=loss)
        value, sums, logprobs = ours(batch, options)
        value.backward()
        weights = token_weights(tokens_of_rollouts(mask, owner, 3), owner, options)
        gain = torch.tensor(batch.advantages)[owner].unsqueeze(1)
        assert logprobs.grad is not None
        assert torch.allclose(logprobs.grad, -(weights * gain * mask).double(), atol=1e-7)
        assert sums.means()["ratio"] == pytest.approx(1.0)
        assert (sums.clipped_low, sums.clipped_high, sums.corrected, sums.mismatch_max) == (0, 0, 0, 0.0)


def test_extreme_logprob_differences_give_a_finite_loss_and_gradient() -> None:
    batch = some_batch(1)
    distant = structs.replace(batch, behaviour=[[-2000.0 for _ in row] for row in batch.old])
    loss, sums, logprobs = ours(distant, GRPOOptions(truncate_at=2.0))
    loss.backward()
    assert math.isfinite(number(loss)) and logprobs.grad is not None and bool(logprobs.grad.isfinite().all())
    assert sums.corrected == sums.tokens


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        (GRPOOptions(), "behaviour: .* because correction='\\w+' needs it"),
        (
            GRPOOptions(correction="none", kl_coefficient=0.1),
            r"reference: .* because kl_coefficient=0\.1",
        ),
        (
            GRPOOptions(correction="none", entropy_coefficient=0.1),
            r"entropy: .* because entropy_coefficient=0\.1",
        ),
    ],
)
def test_inputs_required_by_an_option_must_be_given(options: GRPOOptions, missing: str) -> None:
    values, mask = torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=missing):
        policy_loss(values, values, None, torch.ones(1), mask, torch.tensor([0]), options)


def test_the_kl_gradient_stays_finite_and_never_pushes_away_from_the_reference() -> None:
    """Where the reference is so much likelier that exp() is no number, k3 has no gradient, not a wrong one."""
    options = GRPOOptions(correction="none", kl_coefficient=1.0)
    mask, zeros = torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2)
    for distance in (60.0, 5000.0):
        logprobs = torch.tensor([[-1.0 - distance, -1.5]], requires_grad=True)
        reference = torch.full((1, 2), -1.0)
        loss, _ = policy_loss(
            logprobs, logprobs.detach(), None, torch.zeros(1), mask, torch.tensor([0]), options,
            reference=reference, entropy=zeros,
        )  # fmt: skip
        loss.backward()
        assert math.isfinite(number(loss)) and logprobs.grad is not None
        assert float(logprobs.grad[0, 0]) <= 0 and float(logprobs.grad[0, 1]) < 0
