"""Logprobs and gradients of batches are those of each call alone, and only sampled tokens count."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct, structs

from understudy.train.groups import TokenSequence
from understudy.train.options import GRPOOptions

from support import example_count, lazily, optional
from support.losses import Batch, plain_policy_loss
from support.tiny_model import make_model

torch: Any = optional("torch")
behaviours, masks, micro_batches, scores, token_logprobs = lazily(
    "understudy.train.algorithms.forward",
    "behaviour_logprobs",
    "masks",
    "micro_batches",
    "scores",
    "token_logprobs",
)
policy_loss, tokens_of_rollouts = lazily("understudy.train.algorithms.losses", "policy_loss", "tokens_of_rollouts")

TEMPERATURE = 0.7
VOCABULARY = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    directory: Path = make_model(tmp_path_factory.mktemp("tiny"), seed=1)
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


class Turn(Struct):
    """A call: its prompt and what was sampled."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def some_tokens(random: Random, count: int) -> tuple[int, ...]:
    return tuple(random.randrange(VOCABULARY) for _ in range(count))


def conversation(random: Random, start: tuple[int, ...], turns: int) -> tuple[TokenSequence, list[Turn]]:
    """A sequence of merged calls, and the same calls one by one."""
    tokens, mask, calls = start, [0] * len(start), list[Turn]()
    for _ in range(turns):
        answer, observation = some_tokens(random, random.randint(1, 6)), some_tokens(random, random.randint(1, 5))
        calls.append(Turn(tokens, answer))
        tokens = tokens + answer + observation
        mask += [1] * len(answer) + [0] * len(observation)
    logprobs = tuple(random.uniform(-6, -4) if one else 0.0 for one in mask)
    return TokenSequence(token_ids=tokens, loss_mask=tuple(mask), logprobs=logprobs), calls


def some_rollouts(seed: int) -> list[tuple[int, TokenSequence, list[Turn]]]:
    """Sequences of four rollouts that begin alike; two are of the same task, one has a branch of its own."""
    random = Random(seed)
    system = some_tokens(random, 40)
    task = system + some_tokens(random, 15)
    starts = [(0, task), (0, some_tokens(random, 12)), (1, task), (1, task), (2, system), (3, system)]
    return [(owner, *conversation(random, start, random.randint(1, 4))) for owner, start in starts]


def alone(model: Any, call: Turn) -> torch.Tensor:
    """The logprobs of an answer, as transformers gives them for the call alone."""
    tokens = torch.tensor([[*call.prompt, *call.answer]])
    logits = model(input_ids=tokens).logits[0] / TEMPERATURE
    first = len(call.prompt)
    table = torch.log_softmax(logits[first - 1 : -1], dim=-1)
    return table[torch.arange(len(call.answer)), tokens[0, first:]]


def gradients(model: Any) -> torch.Tensor:
    return torch.cat([value.grad.flatten() for value in model.parameters()])


@pytest.mark.parametrize("budget", [1, 150, 400, 100_000])
@pytest.mark.parametrize("seed", [0, 1])
def test_batched_logprobs_equal_those_of_each_call_alone(model: Any, seed: int, budget: int) -> None:
    rollouts = some_rollouts(seed)
    sequences = [sequence for _, sequence, _ in rollouts]
    batches = micro_batches(sequences, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(sequences)))
    for batch in batches:
        rows = [sequences[index] for index in batch]
        with torch.no_grad():
            logprobs, mask = token_logprobs(model, rows, TEMPERATURE), masks(rows)
        assert not logprobs[~mask].any()
        for row, (index, allowed) in zip(logprobs, zip(batch, mask, strict=True), strict=True):
            with torch.no_grad():
                expected = torch.cat([alone(model, call) for call in rollouts[index][2]])
            assert torch.allclose(row[allowed], expected, atol=2e-5)


def test_logprobs_of_identical_rollouts_in_a_batch_equal_those_of_each_call_alone(model: Any) -> None:
    sequence, calls = conversation(Random(4), some_tokens(Random(5), 30), 3)
    with torch.no_grad():
        logprobs = token_logprobs(model, [sequence] * 5, TEMPERATURE)
        expected = torch.cat([alone(model, call) for call in calls])
    for row in logprobs:
        assert torch.allclose(row[masks([sequence])[0]], expected, atol=2e-5)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("normalisation", ["rollout-mean", "token-mean", "constant"])
def test_the_batched_gradient_equals_that_of_one_sample_per_call(
    model: Any, loss: Any, normalisation: Any
) -> None:
    """Merged, batched and with shared beginnings; against each call alone and the plain loss over its tokens."""
    options = GRPOOptions(loss=loss, normalisation=normalisation, temperature=TEMPERATURE, micro_batch_tokens=300)
    rollouts = some_rollouts(2)
    sequences = [sequence for _, sequence, _ in rollouts]
    owner, gains = torch.tensor([one for one, _, _ in rollouts]), torch.tensor([1.0, -1.0, 0.5, -0.2])
    whole = tokens_of_rollouts(masks(sequences), owner, len(gains))
    random = Random(9)
    spread = 1e-3 if loss == "gspo" else 0.5
    model.zero_grad()
    total, logprobs_of = 0.0, dict[int, tuple[list[float], list[float]]]()
    for batch in micro_batches(sequences, options.micro_batch_tokens):
        rows = [sequences[index] for index in batch]
        mask = masks(rows)
        now = token_logprobs(model, rows, TEMPERATURE)
        noise = torch.tensor([[random.gauss(0, spread) for _ in row] for row in now])
        old, sampled_by = now.detach() + noise, behaviours(rows)
        part, _ = policy_loss(now, old, sampled_by, gains, mask, owner[batch], options, rollout_tokens=whole)
        part.backward()
        total += float(part.detach())
        for position, index in enumerate(batch):
            logprobs_of[index] = (
                old[position][mask[position]].tolist(),
                now.detach()[position][mask[position]].tolist(),
            )
    ours = gradients(model)

    model.zero_grad()
    pieces = [torch.cat([alone(model, call) for call in calls]) for _, _, calls in rollouts]
    values = [piece.detach().tolist() for piece in pieces]
    sampled = [[one for one, of in zip(s.logprobs or (), s.loss_mask, strict=True) if of] for s in sequences]
    plain = Batch(
        logprobs=values,
        old=[logprobs_of[index][0] for index in range(len(sequences))],
        behaviour=sampled,
        reference=values,
        entropy=values,
        mask=[[1] * len(row) for row in values],
        advantages=gains.tolist(),
        owner=owner.tolist(),
    )
    assert total == pytest.approx(plain_policy_loss(plain, options), abs=1e-5)
    # The chain rule by hand: the plain loss's slope at every token, times the token's own gradient.
    for s, piece in enumerate(pieces):
        slope = [derivative(plain, options, s, t) for t in range(len(piece))]
        (piece * torch.tensor(slope)).sum().backward()
    assert float(ours.abs().max()) > 1e-3
    assert torch.allclose(ours, gradients(model), atol=1e-5)


def derivative(batch: Batch, options: GRPOOptions, row: int, column: int, step: float = 1e-6) -> float:
    losses: list[float] = []
    for sign in (1, -1):
        shifted = [list(one) for one in batch.logprobs]
        shifted[row][column] += sign * step
        losses.append(plain_policy_loss(structs.replace(batch, logprobs=shifted), options, frozen=batch.logprobs))
    return (losses[0] - losses[1]) / (2 * step)


def test_only_sampled_tokens_are_targets(model: Any) -> None:
    """Each token in its turn as the last, where it can only be a target: its loss follows its mask."""
    sequence, _ = conversation(Random(3), some_tokens(Random(1), 20), 3)
    neighbour, _ = conversation(Random(6), sequence.token_ids[:20], 2)

    def loss(one: TokenSequence) -> float:
        rows = [one, neighbour]
        with torch.no_grad():
            now = token_logprobs(model, rows)
            value, _ = policy_loss(
                now,
                now,
                now,
                torch.tensor([1.0, -0.5]),
                masks(rows),
                torch.tensor([0, 1]),
                GRPOOptions(loss="cispo"),
            )
        return float(value)

    for end in range(21, len(sequence.token_ids)):
        prefix = TokenSequence(
            token_ids=sequence.token_ids[: end + 1],
            loss_mask=sequence.loss_mask[: end + 1],
            logprobs=None,
        )
        other = (prefix.token_ids[-1] + 1) % VOCABULARY
        changed = structs.replace(prefix, token_ids=(*prefix.token_ids[:-1], other))
        assert (loss(changed) != loss(prefix)) == bool(sequence.loss_mask[end])


def test_entropy_equals_that_of_the_token_distribution(model: Any) -> None:
    sequences = [sequence for _, sequence, _ in some_rollouts(5)][2:4]
    result = scores(model, sequences, TEMPERATURE, entropy_gradient=True)
    assert result.entropy.requires_grad
    assert not scores(model, sequences, TEMPERATURE).entropy.requires_grad
    for row, sequence in zip(result.entropy.detach(), sequences, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([sequence.token_ids])).logits[0] / TEMPERATURE
        expected = torch.distributions.Categorical(logits=logits).entropy()
        for at, sampled in enumerate(sequence.loss_mask):
            assert float(row[at]) == pytest.approx(float(expected[at - 1]) if sampled else 0.0, abs=1e-5)


def test_gradient_checkpointing_gives_the_same_logprobs_and_gradients(model: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    sequences = [sequence for _, sequence, _ in some_rollouts(0)][2:]
    checkpointed = AutoModelForCausalLM.from_pretrained(make_model(tmp_path, seed=1), dtype=torch.float32)
    checkpointed.activation_checkpointing_enable()
    checkpointed.train()
    results = []
    for one in (model, checkpointed):
        one.zero_grad()
        logprobs = token_logprobs(one, sequences)
        logprobs.sum().backward()
        results.append((logprobs.detach(), gradients(one)))
    assert torch.allclose(results[0][0], results[1][0], atol=2e-5)
    assert torch.allclose(results[0][1], results[1][1], atol=2e-3, rtol=1e-4)


def test_one_sequence_without_logprobs_makes_the_batch_have_none() -> None:
    one = TokenSequence(token_ids=(1, 2, 3), loss_mask=(0, 1, 1), logprobs=(0.0, -0.5, -0.25))
    short = TokenSequence(token_ids=(1, 2), loss_mask=(0, 1), logprobs=(0.0, -1.0))
    rows = behaviours([one, short])
    assert rows is not None and rows.tolist() == [[0.0, -0.5, -0.25], [0.0, -1.0, 0.0]]
    assert behaviours([one, structs.replace(short, logprobs=None)]) is None


def test_the_first_token_of_a_sequence_is_never_a_target(model: Any) -> None:
    one = TokenSequence(token_ids=(5, 6, 7), loss_mask=(1, 1, 1), logprobs=(-1.0, -1.0, -1.0))
    assert masks([one]).tolist() == [[False, True, True]]
    with torch.no_grad():
        logprobs = token_logprobs(model, [one])
    assert float(logprobs[0, 0]) == 0.0 and all(map(math.isfinite, logprobs[0].tolist()))


lengths = st.lists(st.tuples(st.integers(2, 60), st.integers(0, 40), st.booleans()), max_size=25)


@given(lengths, st.integers(1, 400))
@settings(max_examples=example_count(150), deadline=None)
def test_micro_batches_cover_every_sequence_once_within_the_token_budget(
    rows: list[tuple[int, int, bool]], budget: int
) -> None:
    start = tuple(range(100, 140))
    sequences: list[TokenSequence] = []
    for number, (length, shared, sampled) in enumerate(rows):
        tokens = (start[:shared] + tuple(Random(number).choices(range(50), k=length)))[:length]
        mask = (0,) * (length - 1) + (int(sampled),)
        sequences.append(TokenSequence(token_ids=tokens, loss_mask=mask, logprobs=None))
    batches = micro_batches(sequences, budget)
    used = sorted(index for batch in batches for index in batch)
    assert used == [index for index, one in enumerate(sequences) if one.sampled]
    sizes = [len(batch) * max(len(sequences[index].token_ids) for index in batch) for batch in batches]
    assert all(size <= budget or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert sizes == sorted(sizes, reverse=True)
    assert batches == micro_batches(sequences, budget)


def test_sequences_with_a_common_prefix_share_a_micro_batch() -> None:
    random = Random(0)
    tasks = [some_tokens(random, 300), some_tokens(random, 300)]
    sequences = [
        TokenSequence(
            token_ids=tasks[at % 2] + some_tokens(random, 20 + at),
            loss_mask=(0,) * 300 + (1,) * (20 + at),
            logprobs=None,
        )
        for at in range(8)
    ]
    assert sorted(map(sorted, micro_batches(sequences, 4000))) == [[0, 2, 4, 6], [1, 3, 5, 7]]
