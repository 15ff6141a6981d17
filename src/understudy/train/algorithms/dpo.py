"""Preference: of two answers to one conversation the better becomes likelier, through TRL's DPOTrainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from understudy.errors import ConfigError
from understudy.export.formats.trl import dpo_row
from understudy.preference.checks import PairCounts
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.train.algorithms.trl import (
    TrainingContext,
    TrainingSummary,
    nothing_to_learn,
    run_trl_training,
    trl_config,
)
from understudy.train.data.load import export_format
from understudy.train.data.render import PairTokens, decoded_rows, pairs_from_rows
from understudy.train.options import DPOOptions
from understudy.train.weights import (
    TRAINING,
    load_chat_tokenizer,
    load_model,
    max_sequence_length,
    vocabulary_size,
)

_NUMBERS = ("loss", "grad_norm", "learning_rate", "epoch", "rewards/accuracies", "rewards/margins")
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
        lambda loaded: _fitting(pairs, options, loaded, course.left_out),
        lambda loaded, rows, watch: _trainer(loaded, model, rows, output, options, course, watch),
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


def _fitting(
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


def _trainer(
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
        callbacks=[watch(_NUMBERS)],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer
