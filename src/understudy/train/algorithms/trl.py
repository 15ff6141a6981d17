"""What trainings through TRL's trainers share: how they are begun, watched, gone on with and ended."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct, field, structs

from understudy.errors import ConfigError
from understudy.export.formats.trl import dpo_row
from understudy.preference.checks import PairCounts
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.train.algorithms.batch import NOTHING_SAMPLED, TOO_LONG, UNKNOWN_TOKENS
from understudy.train.groups import TokenSequence, export_format, format_counts
from understudy.train.metrics import MetricsWriter
from understudy.train.options import DPOOptions, SFTOptions, TrainOptions
from understudy.train.render import PairTokens, decoded_rows, pairs_from_rows
from understudy.train.weights import (
    CHECKPOINTS,
    FULL,
    TRAINING,
    WeightsRecord,
    explain_out_of_memory,
    install_model,
    last_checkpoint,
    load_chat_tokenizer,
    load_model,
    max_sequence_length,
    remove_checkpoints,
    require_packages,
    seed,
    uses_bf16,
    vocabulary_size,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Told = Callable[[int, int, dict[str, float]], None]
"""Told `(step, of, numbers)` after each optimizer step."""


class TrainingSummary(Struct, frozen=True, kw_only=True):
    """What a training made: a model's directory, out of how much, with the loss of the first and the last step.

    `tokens` are those learned from in one epoch; `left_out` counts by why what was not. `seconds` without imports
    and reading.
    """

    output: str
    rows: int
    tokens: int
    steps: int
    first_loss: float
    last_loss: float
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


def silent(step: int, of: int, numbers: dict[str, float]) -> None:
    """A `Told` that tells nobody."""


class TrainingContext(Struct, frozen=True, kw_only=True):
    """How a training goes on from checkpoints, and whom it tells of its steps.

    Checkpoints are written every `save_steps` optimizer steps (0: once an epoch) to `training/checkpoints` of the
    output, and removed at the end. `resume` goes on from the last of them, or from the one named. `left_out`
    counts what was not learned from.
    """

    resume: bool | Path = False
    trackers: tuple[str, ...] = ()
    on_step: Told = silent
    save_steps: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])


def run_trl_training(
    model: Path,
    output: Path,
    options: TrainOptions,
    course: TrainingContext,
    name: str,
    fit: Callable[[Any], list[T]],
    make: Callable[[Any, list[T], Callable[..., Any]], Any],
    tokens: Callable[[T], int],
) -> TrainingSummary:
    """Train the model in the directory `model` and write the new one to `output`.

    `fit` gives the rows that the loaded model can learn from, `make` the trainer over them; it is given what makes
    a callback of names of numbers, for the trainer to have. Raises ConfigError.
    """
    require_packages(*FULL)
    directory = output / TRAINING
    checkpoint = last_checkpoint(directory, course.resume)
    seed(options.seed)
    with explain_out_of_memory(options):
        loaded = load_model(model, options)
        rows = fit(loaded)
        start = 0 if checkpoint is None else _checkpoint_step(checkpoint) + 1
        with MetricsWriter(directory, course.trackers, start=start, name=f"understudy-{name}") as metrics:
            trainer = make(loaded, rows, partial(_callback, metrics=metrics, on_step=course.on_step))
            trainer._save_checkpoint = _checkpoint_saver(trainer._save_checkpoint, directory / CHECKPOINTS)
            began = time.monotonic()
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    losses: list[float] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if losses and not math.isfinite(losses[-1]):
        raise ConfigError(
            f"the loss became {losses[-1]}, and no model was written; lower --learning-rate (now "
            f"{options.learning_rate}) and start again with --overwrite"
        )
    steps = int(trainer.state.global_step)
    install_model(loaded, model, output, WeightsRecord(version="", step=steps, base=str(model)))
    remove_checkpoints(directory)
    return TrainingSummary(
        output=str(output),
        rows=len(rows),
        tokens=sum(map(tokens, rows)),
        steps=steps,
        first_loss=losses[0] if losses else 0.0,
        last_loss=losses[-1] if losses else 0.0,
        left_out={why: count for why, count in course.left_out.most_common() if count},
        seconds=round(time.monotonic() - began, 3),
    )


def trl_config(
    kind: Callable[..., Any],
    directory: Path,
    options: TrainOptions,
    course: TrainingContext,
    batch: int,
    fits: int,
    **own: Any,
) -> Any:
    """The configuration of a trainer of TRL. `batch` rows make a step, at most `fits` of them go at once."""
    import torch

    # As many passes as make equal parts: a step is over `batch` rows whatever the memory allows.
    passes = next(count for count in range(1, batch + 1) if batch % count == 0 and batch // count <= max(fits, 1))
    settings: dict[str, Any] = {
        "output_dir": str(directory / CHECKPOINTS),
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "warmup_steps": options.warmup_steps,
        "max_grad_norm": options.max_grad_norm,
        "num_train_epochs": options.epochs,
        "per_device_train_batch_size": batch // passes,
        "gradient_accumulation_steps": passes,
        "seed": options.seed,
        "bf16": uses_bf16(options),
        "gradient_checkpointing": False,  # the model does it already where it was asked for
        "max_length": None,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # which would show the mean of before in place of what is no number
        "save_strategy": "steps" if course.save_steps else "epoch",
        "save_steps": course.save_steps or 500,
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    config = kind(**settings, **own)
    # The model is on one device; transformers would split its batches over all GPUs that there are.
    config._n_gpu = min(config.n_gpu, 1)
    return config


def _checkpoint_saver(save: Callable[..., None], checkpoints: Path) -> Callable[..., None]:
    """How a trainer writes its checkpoints, with a ConfigError where it cannot."""
    import torch

    def saved(*arguments: Any, **options: Any) -> None:
        try:
            save(*arguments, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch, safetensors and tokenizers have four words for a disk that is full
            raise ConfigError(
                f"{checkpoints}: a checkpoint cannot be written: {error}; make room, then use --resume"
            ) from error

    return saved


def _checkpoint_step(checkpoint: Path) -> int:
    """How many steps were made when a checkpoint was written. Raises ConfigError when it is damaged."""
    path = checkpoint / "trainer_state.json"
    try:
        return int(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["global_step"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: is damaged ({error}); resume from another checkpoint with --checkpoint"
        ) from error


def nothing_to_learn(what: str, left_out: Counter[str], advice: str) -> ConfigError:
    """The error that there is nothing to learn from."""
    return ConfigError(f"there are no {what} to learn from; left out: {format_counts(left_out)}; {advice}")


def _callback(names: Iterable[str], metrics: MetricsWriter, on_step: Told) -> Any:
    """A callback of transformers that tells these numbers of every step, by the last part of their names."""
    from transformers import TrainerCallback

    wanted = tuple(names)

    class Numbers(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                numbers = {name.rpartition("/")[2]: float(logs[name]) for name in wanted if name in logs}
                metrics.write(state.global_step, numbers)
                on_step(state.global_step, state.max_steps, numbers)

    return Numbers()


_IGNORED = -100
_SFT_NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch")


def train_sft(
    model: Path,
    sequences: Sequence[TokenSequence],
    output: Path,
    options: SFTOptions,
    course: TrainingContext | None = None,
) -> TrainingSummary:
    """Train the model in the directory `model` on sampled tokens; write the new one to the directory `output`.

    The loss is the mean over the sampled tokens of an optimizer step. The numbers of every step go to
    `training/metrics.jsonl` in `output`. Raises ConfigError when there is nothing to learn from, when model and
    sequences do not belong together, or when memory does not suffice.
    """
    course = course or TrainingContext()
    return run_trl_training(
        model,
        output,
        options,
        course,
        "sft",
        lambda loaded: _fitting_sequences(sequences, options, loaded, course.left_out),
        lambda loaded, rows, watch: _sft_trainer(loaded, model, rows, output, options, course, watch),
        lambda row: sum(row.loss_mask[1:]),
    )


def _fitting_sequences(
    sequences: Sequence[TokenSequence], options: SFTOptions, model: Any, left_out: Counter[str]
) -> list[TokenSequence]:
    most, vocabulary = max_sequence_length(model, options), vocabulary_size(model)
    usable: list[TokenSequence] = []
    for each in sequences:
        if not any(each.loss_mask[1:]):
            left_out[NOTHING_SAMPLED] += 1
        elif len(each.token_ids) > most:
            left_out[TOO_LONG] += 1
        elif max(each.token_ids) >= vocabulary or min(each.token_ids) < 0:
            left_out[UNKNOWN_TOKENS] += 1
        else:
            usable.append(each)
    if not usable:
        raise nothing_to_learn("sequences", left_out, f"the model reads up to {most} tokens and has {vocabulary}")
    return usable


def _sft_trainer(
    model: Any,
    source: Path,
    rows: list[TokenSequence],
    output: Path,
    options: SFTOptions,
    course: TrainingContext,
    watch: Callable[..., Any],
) -> Any:
    """TRL's SFTTrainer over rows that are tokens already, with our pass through the model."""
    import datasets
    from transformers.trainer_callback import PrinterCallback
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from understudy.train.algorithms.forward import token_logprobs

    class Exact(SFTTrainer):
        """Computes what the rows begin with in common once a pass; the loss is the mean over sampled tokens."""

        def _send_telemetry(self) -> None:
            """Nobody is told what is trained here."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            batch: list[TokenSequence] = inputs["sequences"]
            total = token_logprobs(model, batch).sum()
            if num_items_in_batch is None:
                return -total / sum(sum(each.loss_mask[1:]) for each in batch)
            scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            return -total * scale / num_items_in_batch

    def collate(batch: list[dict[str, int]]) -> dict[str, Any]:
        selected = [rows[each["row"]] for each in batch]
        return {"sequences": selected, "labels": _labels(selected)}

    fits = max(1, options.micro_batch_tokens // max(len(each.token_ids) for each in rows))
    config = trl_config(
        SFTConfig,
        output / TRAINING,
        options,
        course,
        min(options.batch_rollouts, len(rows)),
        fits,
        lr_scheduler_type=options.schedule,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    dataset_type: Any = datasets.Dataset
    dataset = dataset_type.from_dict(
        {
            "row": list(range(len(rows))),
            "input_ids": [list(each.token_ids) for each in rows],
            "labels": [_learned(each) for each in rows],
        }
    )
    trainer = Exact(
        model,
        args=config,
        train_dataset=dataset,
        processing_class=load_chat_tokenizer(source),
        data_collator=collate,
        callbacks=[watch(_SFT_NUMBERS)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _learned(row: TokenSequence) -> list[int]:
    return [token if learned else _IGNORED for token, learned in zip(row.token_ids, row.loss_mask, strict=True)]


def _labels(rows: Sequence[TokenSequence]) -> torch.Tensor:
    """What the trainer counts the learned tokens of a batch by."""
    import torch

    width = max(len(each.token_ids) for each in rows)
    # Nothing stands before a first token, so it cannot be learned.
    return torch.tensor(
        [[_IGNORED, *_learned(each)[1:]] + [_IGNORED] * (width - len(each.token_ids)) for each in rows]
    )


_DPO_NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch", "rewards/accuracies", "rewards/margins")
_ADVICE = "pairs need solved and unsolved rollouts of one task: run it with --samples 4 or more"


def preferences(
    sources: Iterable[Path],
    model: Path,
    *,
    run: str | None = None,
    include_suspicious: bool = False,
    left_out: Counter[str],
) -> list[PairTokens]:
    """The pairs of the rollouts in stores, and of exports in the format trl-dpo, as tokens of the model.

    Raises ConfigError for a directory that is neither, and when a store has no such run.
    """
    return pairs_from_rows(_rows(sources, run, include_suspicious, left_out), model, left_out)


def train_dpo(
    model: Path,
    pairs: Sequence[PairTokens],
    output: Path,
    options: DPOOptions,
    course: TrainingContext | None = None,
) -> TrainingSummary:
    """Train the model in the directory `model` on preference pairs; write the new one to `output`.

    The model that training begins with is the reference. The numbers of every step go to `training/metrics.jsonl`
    in `output`. Raises ConfigError when there is nothing to learn from, or memory does not suffice.
    """
    course = course or TrainingContext()
    return run_trl_training(
        model,
        output,
        options,
        course,
        "dpo",
        lambda loaded: _fitting_pairs(pairs, options, loaded, course.left_out),
        lambda loaded, rows, watch: _dpo_trainer(loaded, model, rows, output, options, course, watch),
        lambda row: len(row.chosen) + len(row.rejected),
    )


def _rows(
    sources: Iterable[Path], run: str | None, include_suspicious: bool, left_out: Counter[str]
) -> Iterator[dict[str, Any]]:
    for source in sources:
        name = export_format(source)
        if name == "trl-dpo":
            yield from decoded_rows(source)
        elif name is not None:
            raise ConfigError(
                f"{source} is an export in the format {name}, which has no pairs; export it as trl-dpo: "
                "understudy export trl-dpo DIR --output DIR"
            )
        else:
            tally = PairCounts(left_out=left_out)
            with Store.open(source, create=False) as store:
                for pair in rollout_pairs(store, run, include_suspicious=include_suspicious, tally=tally):
                    yield dpo_row(pair)


def _fitting_pairs(
    pairs: Sequence[PairTokens], options: DPOOptions, model: Any, left_out: Counter[str]
) -> list[PairTokens]:
    most, vocabulary = max_sequence_length(model, options), vocabulary_size(model)
    usable: list[PairTokens] = []
    for pair in pairs:
        if _length(pair) > most:
            left_out["pairs that are too long"] += 1
        elif max((*pair.prompt, *pair.chosen, *pair.rejected)) >= vocabulary:
            left_out["pairs with tokens that the model does not have"] += 1
        elif not pair.chosen or not pair.rejected or pair.chosen == pair.rejected:
            left_out["pairs whose answers are the same tokens"] += 1
        else:
            usable.append(pair)
    if not usable:
        raise nothing_to_learn("pairs", left_out, _ADVICE)
    return usable


def _length(pair: PairTokens) -> int:
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def _dpo_trainer(
    model: Any,
    source: Path,
    rows: list[PairTokens],
    output: Path,
    options: DPOOptions,
    course: TrainingContext,
    watch: Callable[..., Any],
) -> Any:
    """TRL's DPOTrainer over pairs that are tokens already."""
    import datasets
    from transformers.trainer_callback import PrinterCallback
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    class Tokens(DPOTrainer):
        """Tokens need no preparing: they came through the template, and what is too long is left out."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _send_telemetry(self) -> None:
            """Nobody is told what is trained here."""

    # A pair is two sequences.
    fits = max(1, options.micro_batch_tokens // (2 * max(map(_length, rows))))
    config = trl_config(
        DPOConfig,
        output / TRAINING,
        options,
        course,
        min(options.batch_pairs, len(rows)),
        fits,
        beta=options.beta,
        # Without label smoothing it is DPO's own, whose name in TRL ignores label smoothing.
        loss_type=["robust"],
        label_smoothing=options.label_smoothing,
    )
    dataset_type: Any = datasets.Dataset
    dataset = dataset_type.from_dict(
        {
            "prompt_ids": [list(each.prompt) for each in rows],
            "chosen_ids": [list(each.chosen) for each in rows],
            "rejected_ids": [list(each.rejected) for each in rows],
        }
    )
    reference = None
    if options.lora is None:
        reference = load_model(source, structs.replace(options, gradient_checkpointing=False))
    trainer = Tokens(
        model,
        ref_model=reference,
        args=config,
        train_dataset=dataset,
        processing_class=load_chat_tokenizer(source),
        callbacks=[watch(_DPO_NUMBERS)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
