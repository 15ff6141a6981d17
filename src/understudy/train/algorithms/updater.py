"""Policy updates: a trained model with its optimizer, updated on groups of rollouts, with metrics of what
happened.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, cast

from msgspec import Struct, field, structs

from understudy.errors import ConfigError
from understudy.store.training import TokenValues
from understudy.train.algorithms.batch import TrainingBatch, build_batch, optimizer_step_indices, with_signal
from understudy.train.groups import NO_VERDICT, SUSPICIOUS, RolloutGroup, TokenSequence, format_counts
from understudy.train.metrics import MetricsWriter
from understudy.train.options import DistillOptions, GRPOOptions
from understudy.train.weights import (
    CHECKPOINTS,
    TRAINING,
    WeightsRecord,
    explain_out_of_memory,
    install_model,
    is_adapted,
    last_checkpoint,
    load_model,
    load_state,
    max_sequence_length,
    read_weights_record,
    remove_checkpoints,
    require_packages,
    save_model,
    seed_torch,
    uses_bf16,
    vocabulary_size,
)

if TYPE_CHECKING:
    import torch

    from understudy.train.algorithms.losses import LossSums

_MAX_LOG_RATIO = 20.0
NOT_FINITE = "batches whose loss or gradient is not a number"


class UpdateReport(Struct, frozen=True, kw_only=True):
    """The metrics of one update. `version` is that of the weights after it.

    `updated` is false when nothing was learned and the weights did not change. `groups`, `rollouts`, `sequences`
    and `tokens` (sampled ones) count what was trained on; `skipped` counts by reason what was not, including
    optimizer steps. `mismatch_*` compare the sampling policy's logprobs with those that the trainer computed for
    the same tokens. `teacher_kl` estimates the reverse KL to the teacher per token. `reward_mean` is over all
    given rollouts with a finite reward. `stale` is the number of sequences that were partly sampled with older
    weights than the newest.
    """

    step: int
    version: str
    updated: bool
    loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    ratio: float = 0.0
    clip_fraction: float = 0.0
    corrected_fraction: float = 0.0
    mismatch_mean: float = 0.0
    mismatch_max: float = 0.0
    mismatch_kl: float = 0.0
    teacher_kl: float = 0.0
    reward_mean: float = 0.0
    tokens: int = 0
    groups: int = 0
    rollouts: int = 0
    sequences: int = 0
    stale: int = 0
    optimizer_steps: int = 0
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


class Updater:
    """A trained model with its optimizer; `update` makes one training step of the loop.

    The weights come from `model`, or with `resume` from a directory that `save` wrote; training then continues as
    if it had not been interrupted. `reference` is the model directory for the KL penalty (default: `model`).
    Raises ConfigError when a directory does not hold what is needed.
    """

    def __init__(
        self, model: Path, options: GRPOOptions, *, resume: Path | None = None, reference: Path | None = None
    ) -> None:
        self.source = model
        self.options = options
        self.step = 0
        written = None if resume is None else read_weights_record(resume)
        if resume is not None and written is None:
            raise ConfigError(
                f"{resume}: cannot be resumed: expected a directory that training saved, with "
                f"{TRAINING}/written.json; to start a new training from it, give it as the model"
            )
        import torch

        seed_torch(options.seed)
        with explain_out_of_memory(options):
            self.model = load_model(model, options)
            parameters = [value for value in self.model.parameters() if value.requires_grad]
            self.optimizer = torch.optim.AdamW(
                parameters,
                lr=options.learning_rate,
                betas=(options.beta1, options.beta2),
                weight_decay=options.weight_decay,
            )
            self.optimizer_steps = 0
            if resume is not None and written is not None:
                state = load_state(resume, self.model)
                self.optimizer.load_state_dict(state["optimizer"])
                self.optimizer_steps = state["optimizer_steps"]
                self.step = written.step
            self._reference = self._load_reference(reference)
        self.keeps_token_values = False
        self._logprobs: dict[int, list[float]] = {}
        self.token_values: list[TokenValues] = []
        """What the last update computed for the tokens of calls, where `keeps_token_values` was set before it."""
        self._autocast = uses_bf16(options)
        self._vocabulary = vocabulary_size(self.model)
        self._longest = max_sequence_length(self.model, options)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return next(self.model.parameters()).device

    def update(self, groups: Sequence[RolloutGroup], step: int, version: str | None = None) -> UpdateReport:
        """Learn once from groups of rollouts and return the metrics; `step` is the number of this update, from 1.

        Unusable rollouts and sequences are skipped and counted. When a loss or gradient is not finite, that
        optimizer step changes no weights. Raises ConfigError when the GPU runs out of memory.
        """
        began = time.monotonic()
        version = version or f"step-{step:04d}"
        skipped = Counter[str]()
        # Seeded by the step alone, so that repeating an update after a resume gives the same result.
        seed_torch(self.options.seed * 1_000_003 + step)
        batch = build_batch(
            groups, self.options, vocabulary=self._vocabulary, longest=self._longest, skipped=skipped
        )
        all_rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        rewards = [reward for reward in all_rewards if math.isfinite(reward)]
        report = UpdateReport(
            step=step,
            version=version,
            updated=False,
            reward_mean=sum(rewards) / len(rewards) if rewards else 0.0,
            groups=batch.groups,
            rollouts=len(batch.advantages),
            sequences=len(batch.sequences),
            stale=batch.stale,
        )
        if batch.sequences:
            with explain_out_of_memory(self.options):
                report = self._learn(batch, report, skipped, Random(f"{self.options.seed} {step}"))
        self.step = step
        self.token_values = [
            values for index in sorted(self._logprobs) for values in self._token_values_of(batch, index)
        ]
        self._logprobs.clear()
        return structs.replace(
            report, skipped=dict(sorted(skipped.items())), seconds=round(time.monotonic() - began, 3)
        )

    def save(self, directory: Path, version: str | None = None) -> Path:
        """Write the weights and the state of training to a directory that can be served; return the directory.

        The directory is replaced atomically. Raises ConfigError when it cannot be written.
        """
        state = {"optimizer": self.optimizer.state_dict(), "optimizer_steps": self.optimizer_steps}
        written = WeightsRecord(version=version or f"step-{self.step:04d}", step=self.step, base=str(self.source))
        save_model(self.model, self.source, directory, written=written, state=state)
        return directory

    # --- implementation --------------------------------------------------------------------------------

    def _token_values_of(self, batch: TrainingBatch, index: int) -> Iterator[TokenValues]:
        """Yield the logprobs, ratios and advantages of the tokens of each call in one sequence of a batch."""
        sequence, advantage = batch.sequences[index], batch.advantages[batch.rollouts[index]]
        for call_id, start, end in sequence.calls:
            logprobs = self._logprobs[index][start:end]
            sampled = [math.nan] * len(logprobs) if sequence.logprobs is None else sequence.logprobs[start:end]
            # Clamped, because the ratio overflows float32 when a token is (nearly) impossible under one of the two
            # policies.
            ratios = (
                math.exp(min(logprob - sampled_logprob, _MAX_LOG_RATIO))
                for logprob, sampled_logprob in zip(logprobs, sampled, strict=True)
            )
            yield TokenValues(
                call_id=call_id,
                logprobs=tuple(logprobs),
                ratios=tuple(ratios),
                advantages=(advantage,) * len(logprobs),
            )

    def _load_reference(self, reference: Path | None) -> Any:
        """Return the reference model of the KL penalty.

        None when there is no penalty, or when the reference is the base model below the adapter.
        """
        if self.options.kl_coefficient <= 0 or (self.options.lora is not None and reference is None):
            return None
        frozen = structs.replace(self.options, lora=None, gradient_checkpointing=False)
        model = load_model(reference or self.source, frozen)
        model.requires_grad_(False)
        return model.eval()

    def _learn(
        self, batch: TrainingBatch, report: UpdateReport, skipped: Counter[str], random: Random
    ) -> UpdateReport:
        """Run the optimizer steps of an update, one per mini-batch; return the completed report."""
        from understudy.train.algorithms.losses import LossSums

        steps = list(optimizer_step_indices(batch, self.options, random))
        old = self._initial_logprobs(batch) if len(steps) > 1 else None
        total, norms, rate = LossSums(), list[float](), self._learning_rate()
        for indexes in steps:
            rate = self._learning_rate()
            sums, norm = self._optimizer_step(batch, indexes, old, rate)
            if norm is None:
                skipped[NOT_FINITE] += 1
                continue
            norms.append(norm)
            total = total + sums
        if not norms:
            return report
        means = total.means()
        named = {name: means[name] for name in ("kl", "entropy", "ratio", "clip_fraction", "corrected_fraction")}
        named |= {name: means[name] for name in ("mismatch_mean", "mismatch_max", "mismatch_kl", "teacher_kl")}
        return structs.replace(
            report,
            updated=True,
            loss=total.loss / len(norms),
            grad_norm=sum(norms) / len(norms),
            learning_rate=rate,
            tokens=batch.tokens,
            optimizer_steps=len(norms),
            **named,
        )

    def _initial_logprobs(self, batch: TrainingBatch) -> list[torch.Tensor]:
        """Return the logprobs of each sequence under the weights at the start of the update, one tensor per
        sequence.
        """
        import torch

        from understudy.train.algorithms.forward import micro_batches, token_logprobs

        logprobs: list[torch.Tensor] = [torch.empty(0)] * len(batch.sequences)
        self.model.eval()
        with torch.no_grad(), self._precision():
            for part in micro_batches(batch.sequences, self.options.micro_batch_tokens):
                rows = token_logprobs(
                    self.model, [batch.sequences[index] for index in part], self.options.temperature
                )
                for index, row in zip(part, rows, strict=True):
                    logprobs[index] = row[: len(batch.sequences[index].token_ids)].clone()
        return logprobs

    def _optimizer_step(
        self, batch: TrainingBatch, indexes: list[int], old: list[torch.Tensor] | None, rate: float
    ) -> tuple[LossSums, float | None]:
        """Make one optimizer step over `indexes`; return its sums and the gradient's norm.

        The norm is None when the loss or gradient was not finite: then no weights changed.
        """
        import torch

        from understudy.train.algorithms.forward import (
            behaviour_logprobs,
            masks,
            micro_batches,
            scores,
            teacher_logprobs,
        )
        from understudy.train.algorithms.losses import LossSums, policy_loss, tokens_of_rollouts

        options, device = self.options, self.device
        sequences = [batch.sequences[index] for index in indexes]
        gains = torch.tensor(batch.advantages, device=device)
        owners = torch.tensor([batch.rollouts[index] for index in indexes], device=device)
        sampled = torch.tensor([[sum(sequence.loss_mask[1:])] for sequence in sequences], device=device)
        of_rollouts = tokens_of_rollouts(sampled, owners, len(gains))
        total = LossSums()
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        for part in micro_batches(sequences, options.micro_batch_tokens):
            rows = [sequences[index] for index in part]
            mask = masks(rows, device)
            with self._precision():
                current = scores(
                    self.model, rows, options.temperature, entropy_gradient=options.entropy_coefficient > 0
                )
            if self.keeps_token_values:
                on_cpu = current.logprobs.detach().float().cpu()
                for index, row in zip(part, on_cpu, strict=True):
                    self._logprobs[indexes[index]] = cast(list[float], row.tolist())  # pyright: ignore[reportUnknownMemberType]
            if old is None:
                before = current.logprobs.detach()
            else:
                rows_before = [old[indexes[index]] for index in part]
                before = torch.nn.utils.rnn.pad_sequence(rows_before, batch_first=True)
            loss, sums = policy_loss(
                current.logprobs,
                before,
                behaviour_logprobs(rows, device),
                gains,
                mask,
                owners[part],
                options,
                rollout_tokens=of_rollouts,
                reference=self._reference_logprobs(rows) if options.kl_coefficient > 0 else None,
                entropy=current.entropy,
                teacher=teacher_logprobs(rows, device) if isinstance(options, DistillOptions) else None,
            )
            if not torch.isfinite(loss):
                self.optimizer.zero_grad(set_to_none=True)
                return total, None
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            total = total + sums
        parameters = [value for value in self.model.parameters() if value.requires_grad]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, options.max_grad_norm))
        if not math.isfinite(norm):
            self.optimizer.zero_grad(set_to_none=True)
            return total, None
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer_steps += 1
        return total, norm

    def _reference_logprobs(self, rows: list[TokenSequence]) -> torch.Tensor:
        import torch

        from understudy.train.algorithms.forward import token_logprobs

        model: Any = self.model if self._reference is None else self._reference
        without = model.disable_adapter() if self._reference is None and is_adapted(model) else nullcontext()
        with torch.no_grad(), without, self._precision():
            return token_logprobs(model, rows, self.options.temperature)

    def _learning_rate(self) -> float:
        """Return the learning rate of the next optimizer step: linear warmup, then constant."""
        warmup = self.options.warmup_steps
        share = min(1.0, (self.optimizer_steps + 1) / warmup) if warmup else 1.0
        return self.options.learning_rate * share

    def _precision(self) -> AbstractContextManager[Any]:
        import torch

        return torch.autocast("cuda", dtype=torch.bfloat16) if self._autocast else nullcontext()


_MAX_CHECKPOINTS = 2
"""How many checkpoints are kept: the last one may have been written incompletely."""

OnUpdate = Callable[[UpdateReport, int], None]
"""Called with `(report, total)` after each update."""


class GRPOSummary(Struct, frozen=True, kw_only=True):
    """The result of `train_grpo`. `updated` counts the updates that changed the weights; `skipped` sums theirs by
    reason.
    """

    output: str
    groups: int
    updates: int
    updated: int
    tokens: int
    mismatch_mean: float
    mismatch_max: float
    skipped: dict[str, int] = field(default_factory=dict[str, int])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


def ignore_report(report: UpdateReport, of: int) -> None:
    """An `OnUpdate` that ignores its reports."""


def train_grpo(
    model: Path,
    groups: Sequence[RolloutGroup],
    output: Path,
    options: GRPOOptions,
    *,
    groups_per_update: int = 0,
    left_out: Counter[str] | None = None,
    resume: bool | Path = False,
    trackers: Sequence[str] = (),
    on_update: OnUpdate = ignore_report,
    save_steps: int = 0,
) -> GRPOSummary:
    """Update the model in the directory `model` on `groups`, shuffled; write the new model to `output`.

    Each update covers `groups_per_update` groups (0: all). A checkpoint is written every `save_steps` updates (0:
    only the last) to `output/training/checkpoints`; `resume` continues from the last one (True) or from the given
    one, and gives the same weights as an uninterrupted training. `left_out` has what was left out of the groups
    before, for the summary and for errors. `on_update` is called after each update, `trackers` get its metrics.

    Returns the counts of what was learned and of what was left out. Raises ConfigError when nothing can be learned
    from the groups, a package is missing, `resume` is not a checkpoint, or `output` cannot be written.
    """
    require_packages()
    counts = Counter[str]() if left_out is None else left_out
    _check_groups(groups, options, counts)
    directory = output / TRAINING
    checkpoint = last_checkpoint(directory, resume, f"{TRAINING}/written.json")
    began = time.monotonic()
    updater = Updater(model, options, resume=checkpoint)
    updates = _shuffled_updates(groups, groups_per_update, options.seed)
    reports: list[UpdateReport] = []
    with MetricsWriter(directory, trackers, start=updater.step + 1, name="understudy-grpo") as metrics:
        for step, update_groups in enumerate(updates, 1):
            if step <= updater.step:
                continue
            report = updater.update(update_groups, step)
            reports.append(report)
            metrics.write(step, structs.asdict(report))
            on_update(report, len(updates))
            if save_steps and step % save_steps == 0 and step < len(updates):
                updater.save(directory / CHECKPOINTS / f"checkpoint-{step}")
                _remove_old_checkpoints(directory / CHECKPOINTS)
    skipped = Counter[str]()
    for report in reports:
        skipped.update(report.skipped)
    if updater.optimizer_steps == 0:
        raise ConfigError(
            f"nothing could be learned from the {len(groups)} groups, so no model was written; skipped: "
            f"{format_counts(skipped)}; left out: {format_counts(counts)}; {_no_update_advice(options)}"
        )
    written = WeightsRecord(version=f"step-{updater.step:04d}", step=updater.step, base=str(model))
    install_model(updater.model, model, output, written)
    remove_checkpoints(directory)
    tokens = sum(report.tokens for report in reports)
    return GRPOSummary(
        output=str(output),
        groups=len(groups),
        updates=len(reports),
        updated=sum(report.updated for report in reports),
        tokens=tokens,
        mismatch_mean=sum(report.mismatch_mean * report.tokens for report in reports) / max(tokens, 1),
        mismatch_max=max((report.mismatch_max for report in reports), default=0.0),
        skipped=dict(sorted(skipped.items())),
        left_out={why: count for why, count in counts.most_common() if count},
        seconds=round(time.monotonic() - began, 3),
    )


_NO_TOKENS_ADVICE = (
    "expected token ids and logprobs: collect with --weights, or with a vLLM or SGLang server and "
    "tokens in and out"
)
_NO_GROUPS_ADVICE = {
    SUSPICIOUS: "read them with `understudy show`, and give --include-suspicious to learn from them",
    NO_VERDICT: "wait until they are graded, or collect others",
}
"""What to do when all rollouts were left out, by the commonest reason."""


def _no_update_advice(options: GRPOOptions) -> str:
    """Return what to do when nothing could be learned. With a teacher, rewards need not differ."""
    if isinstance(options, DistillOptions):
        return "raise --max-tokens, or take a teacher with a longer context, where sequences were too long"
    return (
        "expected groups with differing rewards, with token ids and logprobs: collect with --samples 4 or more, "
        "on tasks that are solved at times, or raise --max-tokens where sequences were too long"
    )


def _check_groups(groups: Sequence[RolloutGroup], options: GRPOOptions, counts: Counter[str]) -> None:
    why = format_counts(counts)
    if not groups:
        reasons = [reason for reason, count in counts.most_common() if count]
        remedy = (
            _NO_GROUPS_ADVICE.get(reasons[0], _NO_TOKENS_ADVICE)
            if reasons
            else "the --from directories have no rollouts: collect some with `understudy run`"
        )
        raise ConfigError(f"there are no groups to learn from; left out: {why}; {remedy}")
    if isinstance(options, DistillOptions):
        return
    if options.overlong_tokens is None and not with_signal(groups):
        rollouts = sum(len(group.rollouts) for group in groups)
        raise ConfigError(
            f"in none of the {len(groups)} groups ({rollouts} rollouts) do rewards differ, so there is nothing to "
            f"learn from; left out: {why}; collect with --samples 4 or more, and tasks that are solved at times"
        )


def _shuffled_updates(groups: Sequence[RolloutGroup], size: int, seed: int) -> list[list[RolloutGroup]]:
    order = list(groups)
    Random(f"grpo {seed}").shuffle(order)
    size = size or len(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _remove_old_checkpoints(checkpoints: Path) -> None:
    paths = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in paths[:-_MAX_CHECKPOINTS]:
        shutil.rmtree(path, ignore_errors=True)
