"""Policy updates: what they learn from, what they skip, and that a resume is the same to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from understudy.errors import ConfigError
from understudy.store import Store
from understudy.train.algorithms import batch
from understudy.train.algorithms.updater import NOT_FINITE, Updater
from understudy.train.groups import RolloutGroup, TokenSequence
from understudy.train.options import GRPOOptions, LoraOptions
from understudy.train.weights import (
    check_model,
    explain_out_of_memory,
    load_model,
    read_weights_record,
    trained_weights,
)

from support import optional
from support.tiny_model import make_model
from support.train import make_groups

torch: Any = optional("torch")

OPTIONS = GRPOOptions(learning_rate=1e-2)
COPIED = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def changed(group: RolloutGroup, change: dict[str, object]) -> RolloutGroup:
    """The group with its first sequence changed."""
    first, *others = group.rollouts
    sequence, *rest = first.sequences
    first = structs.replace(first, sequences=(structs.replace(sequence, **change), *rest))
    return structs.replace(group, rollouts=(first, *others))


def weights(updater: Updater) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained_weights(updater.model).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_an_update_raises_the_logprob_of_better_rollouts(model: Path):
    from understudy.train.algorithms.forward import token_logprobs

    groups = make_groups(sequences=1)
    updater = Updater(model, OPTIONS)
    sequences = [rollout.sequences[0] for group in groups for rollout in group.rollouts]
    signs = torch.tensor([1.0 if rollout.reward else -1.0 for group in groups for rollout in group.rollouts])
    with torch.no_grad():
        before = token_logprobs(updater.model, sequences).sum(1)
    report = updater.update(groups, 1)
    with torch.no_grad():
        after = token_logprobs(updater.model, sequences).sum(1)
    assert report.updated and report.version == "step-0001" and report.optimizer_steps == 1
    assert (report.groups, report.rollouts, report.sequences) == (3, 12, 12)
    assert report.tokens == sum(each.sampled for each in sequences)
    assert ((after - before) * signs).mean() > 0


def test_the_mismatch_is_between_sampled_and_recomputed_logprobs(model: Path):
    from understudy.train.algorithms.forward import token_logprobs

    (group,) = make_groups(groups=1, sequences=1)
    updater = Updater(model, OPTIONS)
    with torch.no_grad():
        for number, rollout in enumerate(group.rollouts):
            (row,) = token_logprobs(updater.model, rollout.sequences)
            exact = structs.replace(rollout.sequences[0], logprobs=tuple((row + 0.25 * (row != 0)).tolist()))
            rollouts = list(group.rollouts)
            rollouts[number] = structs.replace(rollout, sequences=(exact,))
            group = structs.replace(group, rollouts=tuple(rollouts))
    report = updater.update([group], 1)
    assert report.mismatch_mean == pytest.approx(0.25, abs=1e-4)
    assert report.mismatch_max == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize("loss", ["ppo", "gspo", "cispo"])
@pytest.mark.parametrize("normalisation", ["rollout-mean", "token-mean", "constant"])
def test_the_micro_batch_size_does_not_change_the_update(model: Path, loss: str, normalisation: str):
    options = structs.replace(OPTIONS, loss=loss, normalisation=normalisation, kl_coefficient=0.1)
    moved: list[dict[str, torch.Tensor]] = []
    for tokens in (1, 100, 100_000):
        updater = Updater(model, structs.replace(options, micro_batch_tokens=tokens))
        start = weights(updater)
        updater.update(make_groups(groups=2), 1)
        moved.append({name: value - start[name] for name, value in weights(updater).items()})
    # Adam's first step is the sign of the gradient where there is one worth the name.
    for one in moved[:2]:
        changed_shares = [((one[name] - moved[2][name]).abs() > 1e-3).float().mean() for name in one]
        assert max(changed_shares) < 0.02


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        structs.replace(OPTIONS, mini_batches=3, epochs=2, warmup_steps=4, kl_coefficient=0.05),
        structs.replace(OPTIONS, lora=LoraOptions(rank=4, dropout=0.1)),
    ],
    ids=["plain", "mini-batches", "lora"],
)
def test_a_resumed_updater_gives_bit_identical_weights(model: Path, tmp_path: Path, options: GRPOOptions):
    groups = make_groups()
    unbroken = Updater(model, options)
    unbroken.update(groups, 1)
    unbroken.save(tmp_path / "one")
    expected = unbroken.update(groups[:2], 2)
    resumed = Updater(model, options, resume=tmp_path / "one")
    assert resumed.step == 1
    report = resumed.update(groups[:2], 2)
    assert structs.replace(report, seconds=0) == structs.replace(expected, seconds=0)
    assert same(weights(unbroken), weights(resumed))
    unbroken.save(tmp_path / "two")
    resumed.save(tmp_path / "again")
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "again" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["full", "lora"])
def test_gradient_checkpointing_gives_the_same_update(model: Path, lora: LoraOptions | None):
    updates: list[tuple[float, dict[str, torch.Tensor]]] = []
    for checkpointing in (False, True):
        # Not Adam's first step, which is the sign of the gradient alone.
        options = structs.replace(OPTIONS, lora=lora, gradient_checkpointing=checkpointing, mini_batches=2)
        updater = Updater(model, options)
        updates.append((updater.update(make_groups(groups=1), 1).grad_norm, weights(updater)))
    (norm, plain), (norm_again, checkpointed) = updates
    assert norm_again == pytest.approx(norm, rel=1e-4)
    changed_shares = [((plain[name] - checkpointed[name]).abs() > 1e-3).float().mean() for name in plain]
    assert plain.keys() == checkpointed.keys() and max(changed_shares) < 0.02


def test_the_kl_reference_of_an_adapter_is_its_base_model(model: Path):
    updater = Updater(model, structs.replace(OPTIONS, lora=LoraOptions(rank=4), kl_coefficient=0.1))
    first, second = (updater.update(make_groups(groups=1), step) for step in (1, 2))
    assert first.kl == pytest.approx(0, abs=1e-6) and second.kl > 1e-5


def test_updates_are_deterministic(model: Path):
    options = structs.replace(OPTIONS, mini_batches=4, epochs=2)
    one, other = (Updater(model, options) for _ in range(2))
    assert one.update(make_groups(), 5).loss == other.update(make_groups(), 5).loss
    assert same(weights(one), weights(other))


def test_saving_writes_a_whole_model_with_the_tokenizer_files_unchanged(model: Path, tmp_path: Path):
    updater = Updater(model, OPTIONS)
    updater.update(make_groups(), 1)
    saved = updater.save(tmp_path / "deep" / "saved", "v7")
    for name in COPIED:
        assert (saved / name).read_bytes() == (model / name).read_bytes()
    check_model(saved)
    reloaded = load_model(saved, OPTIONS)
    assert same(dict(reloaded.named_parameters()), weights(updater))
    written = read_weights_record(saved)
    assert written is not None and (written.version, written.step) == ("v7", 1)
    assert {path.name for path in (tmp_path / "deep").iterdir()} == {"saved"}
    updater.update(make_groups(), 2)
    assert updater.save(saved) == saved and read_weights_record(saved).step == 2  # type: ignore[union-attr]


def test_an_adapter_is_saved_merged_and_separately(model: Path, tmp_path: Path):
    from peft import PeftModel

    from understudy.train.algorithms.forward import token_logprobs

    updater = Updater(model, structs.replace(OPTIONS, lora=LoraOptions(rank=4)))
    base = {name: value.clone() for name, value in updater.model.named_parameters() if "lora" not in name}
    groups = make_groups(sequences=1)
    updater.update(groups, 1)
    saved = updater.save(tmp_path / "saved")
    after = dict(updater.model.named_parameters())
    assert all(torch.equal(value, after[name]) for name, value in base.items())
    sequences = [rollout.sequences[0] for rollout in groups[0].rollouts]
    with torch.no_grad():
        expected = token_logprobs(updater.model.eval(), sequences)
        merged = token_logprobs(load_model(saved, OPTIONS).eval(), sequences)
        original = load_model(model, OPTIONS)
        adapter_logprobs = token_logprobs(
            PeftModel.from_pretrained(original, str(saved / "adapter")).eval(), sequences
        )
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(adapter_logprobs, expected, atol=1e-5, rtol=1e-5)


def test_saved_weights_keep_their_dtype_and_training_resumes_in_full_precision(tmp_path: Path):
    model = make_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    updater = Updater(model, OPTIONS)
    assert all(value.dtype == torch.float32 for value in weights(updater).values())
    updater.update(make_groups(), 1)
    saved = updater.save(tmp_path / "saved")
    from safetensors.torch import load_file

    assert {value.dtype for value in load_file(saved / "model.safetensors").values()} == {torch.bfloat16}
    assert same(weights(Updater(model, OPTIONS, resume=saved)), weights(updater))


# --- bad batches ---------------------------------------------------------------------------------------


def test_groups_with_equal_rewards_leave_the_weights_unchanged(model: Path):
    (group,) = make_groups(groups=1)
    equal = structs.replace(group, rollouts=tuple(structs.replace(each, reward=1.0) for each in group.rollouts))
    updater = Updater(model, OPTIONS)
    before = weights(updater)
    report = updater.update([equal], 1)
    assert not report.updated and report.skipped == {batch.NO_SIGNAL: 1} and report.reward_mean == 1.0
    assert same(before, weights(updater)) and updater.step == 1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"token_ids": (999_999, *range(31))}, batch.UNKNOWN_TOKENS),
        ({"logprobs": (float("nan"),) * 32}, "sequences whose logprobs are not numbers"),
        ({"logprobs": None}, "sequences without logprobs"),
        ({"loss_mask": (0,) * 32}, "sequences in which nothing was sampled"),
    ],
)
def test_a_bad_sequence_is_skipped_and_counted(model: Path, change: dict[str, object], reason: str):
    first, *rest = make_groups()
    assert len(first.rollouts[0].sequences[0].token_ids) == 32
    updater = Updater(model, OPTIONS)
    report = updater.update([changed(first, change), *rest], 1)
    assert report.updated and report.skipped == {reason: 1} and report.sequences == 23
    assert all(torch.isfinite(value).all() for value in weights(updater).values())


def test_a_rollout_too_long_to_train_on_still_counts_in_the_group_baseline(model: Path):
    (group,) = make_groups(groups=1, rollouts=2, sequences=1)
    longest = len(group.rollouts[1].sequences[0].token_ids)
    report = Updater(model, structs.replace(OPTIONS, max_tokens=longest - 1)).update([group], 1)
    assert report.skipped == {batch.TOO_LONG_SEQUENCES: 1}
    assert report.updated and report.rollouts == 1 and report.reward_mean == 0.5


def test_a_non_finite_gradient_does_not_change_the_weights(model: Path):
    updater = Updater(model, OPTIONS)
    with torch.no_grad():
        next(updater.model.parameters())[30] = float("nan")  # the embedding of one token
    before = weights(updater)
    report = updater.update(make_groups(), 1)
    assert not report.updated and report.skipped == {NOT_FINITE: 1}
    after = weights(updater)
    assert all(torch.equal(before[name].nan_to_num(7), after[name].nan_to_num(7)) for name in before)
    assert updater.optimizer_steps == 0


def test_rollouts_with_non_finite_rewards_are_skipped(model: Path):
    first, *rest = make_groups()
    bad = structs.replace(first.rollouts[0], reward=float("nan"))
    report = Updater(model, OPTIONS).update(
        [structs.replace(first, rollouts=(bad, *first.rollouts[1:])), *rest], 1
    )
    assert report.skipped == {batch.BAD_REWARD: 1} and report.groups == 2
    assert report.reward_mean == pytest.approx(6 / 11)  # which the worker can write as JSON


def test_sequences_of_older_weights_are_counted_as_stale(model: Path):
    first, *rest = make_groups()
    older = changed(first, {"policy_versions": ("step-0000", "step-0001")})
    rest = [changed(group, {"policy_versions": ("step-0001",)}) for group in rest]
    assert Updater(model, OPTIONS).update([older, *rest], 2).stale == 22


def test_versions_are_ordered_by_their_step_number():
    one = TokenSequence(token_ids=(1, 2), loss_mask=(0, 1), logprobs=None)
    rows = [structs.replace(one, policy_versions=(f"step-{n}",)) for n in (9999, 10000, 10000, 10000)]
    assert batch.TrainingBatch(sequences=rows).stale == 1
    assert batch.TrainingBatch(sequences=[one, structs.replace(one, policy_versions=(None,))]).stale == 0
    odd = [structs.replace(one, policy_versions=(name,)) for name in ("7", "v", "", "v2-rc1", "v10")]
    assert batch.TrainingBatch(sequences=odd).stale == 4


# --- bad models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("chat_template.jinja", "template"),
    ],
)
def test_a_model_with_a_missing_file_is_refused(tmp_path: Path, name: str, message: str):
    model = make_model(tmp_path / "model")
    (model / name).unlink()
    with pytest.raises(ConfigError, match=message):
        Updater(model, OPTIONS)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path):
    model = make_model(tmp_path / "model")
    definition = json.loads((model / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    vocabulary |= {f"x{number}": len(vocabulary) + number for number in range(50)}
    (model / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match="use the tokenizer that the model was trained with"):
        Updater(model, OPTIONS)


def test_weights_without_matching_training_state_cannot_be_resumed(model: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be resumed"):
        Updater(model, OPTIONS, resume=model)
    updater = Updater(model, OPTIONS)
    saved = updater.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="invalid training state for this model"):
        Updater(model, structs.replace(OPTIONS, lora=LoraOptions(rank=4)), resume=saved)


def test_an_out_of_memory_error_names_the_options_to_change():
    message = r"--micro-batch-tokens \(now 77\).*--gradient-checkpointing.*--lora"
    options = structs.replace(OPTIONS, micro_batch_tokens=77)
    with pytest.raises(ConfigError, match=message), explain_out_of_memory(options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def test_bf16_without_a_gpu_is_refused(model: Path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ConfigError, match="bf16"):
        Updater(model, structs.replace(OPTIONS, precision="bf16"))


def test_a_sequence_counts_its_sampled_tokens():
    assert TokenSequence(token_ids=(1, 2), loss_mask=(0, 1), logprobs=None).sampled == 1


def test_token_values_are_kept_on_request_and_match_the_store(model: Path, tmp_path: Path):
    from understudy.train.groups import load_groups

    from support.train import put_training_run

    put_training_run(tmp_path / "run", model)
    groups = list(load_groups([tmp_path / "run"]))
    updater = Updater(model, OPTIONS)
    updater.update(groups, 1)
    assert updater.token_values == []
    updater = Updater(model, OPTIONS)
    updater.keeps_token_values = True
    report = updater.update(groups, 1)
    token_values = {each.call_id: each for each in updater.token_values}
    assert sum(len(each.logprobs) for each in token_values.values()) == report.tokens
    with Store.open(tmp_path / "run", create=False) as store:
        assert store.training.record(1, "v", updater.token_values, limit_bytes=1 << 20).result() == len(
            token_values
        )
        for graded in store.outcomes.decisions():
            for call in store.calls.of_attempt(graded.attempt.id):
                (values,) = store.training.of_call(call.id)
                assert call.logprobs is not None
                assert len(values.logprobs) == len(values.ratios) == len(call.logprobs)
                assert all(value < 0 for value in values.logprobs)
                expected = [math.exp(now - then) for now, then in zip(values.logprobs, call.logprobs, strict=True)]
                assert list(values.ratios) == pytest.approx(expected, rel=1e-5)
                (advantage,) = set(values.advantages)
                assert (advantage > 0) == (graded.verdict.reward == 1.0)
