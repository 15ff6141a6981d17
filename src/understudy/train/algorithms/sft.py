"""Imitation: the sampled tokens of solved rollouts, or conversations of an export, through TRL's SFTTrainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.train.algorithms.batch import NOTHING_SAMPLED, TOO_LONG, UNKNOWN_TOKENS
from understudy.train.algorithms.trl import (
    TrainingContext,
    TrainingSummary,
    nothing_to_learn,
    run_trl_training,
    trl_config,
)
from understudy.train.data.groups import TokenSequence
from understudy.train.options import SFTOptions
from understudy.train.weights import TRAINING, load_chat_tokenizer, max_sequence_length, vocabulary_size

if TYPE_CHECKING:
    import torch

_IGNORED = -100
_NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch")


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
        lambda loaded: _fitting(sequences, options, loaded, course.left_out),
        lambda loaded, rows, watch: _trainer(loaded, model, rows, output, options, course, watch),
        lambda row: sum(row.loss_mask[1:]),
    )


def _fitting(
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


def _trainer(
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
        callbacks=[watch(_NUMBERS)],
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
