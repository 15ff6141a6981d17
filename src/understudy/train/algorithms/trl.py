"""SFT and DPO by TRL's trainers: on sampled tokens of solved rollouts, on conversations of an export, or on pairs
of a preferred and a rejected answer to the same conversation.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field, structs

from understudy.errors import ConfigError
from understudy.export.formats.trl import dpo_row
from understudy.preference.checks import PairCounts
from understudy.preference.rollouts import rollout_pairs
from understudy.store import Store
from understudy.train.algorithms.batch import sequence_defect
from understudy.train.groups import TokenSequence, export_format, format_counts, leave_out
from understudy.train.metrics import MetricsWriter
from understudy.train.options import DPOOptions, SFTOptions, TrainOptions
from understudy.train.render import PairTokens, decoded_rows, pairs_from_rows
from understudy.train.weights import (
    CHECKPOINTS,
    TRAINING,
    TRL_PACKAGES,
    WeightsRecord,
    explain_out_of_memory,
    install_model,
    last_checkpoint,
    load_chat_tokenizer,
    load_model,
    max_sequence_length,
    remove_checkpoints,
    require_packages,
    seed_torch,
    uses_bf16,
    vocabulary_size,
)

_T = TypeVar("_T")
OnStep = Callable[[int, int, dict[str, float]], None]
"""Called with `(step, of, numbers)` after each optimizer step."""

_IGNORED = -100
"""The label of a token that is not learned."""
_SFT_METRICS = ("loss", "grad_norm", "learning_rate", "epoch")
_DPO_METRICS = (*_SFT_METRICS, "rewards/accuracies", "rewards/margins")
_PAIRS_ADVICE = "pairs need solved and unsolved rollouts of one task: run it with --samples 4 or more"


class TrainingSummary(Struct, frozen=True, kw_only=True):
    """The result of a training: the directory of the new model, the amount of data, and the first and last step's
    loss.

    `rows` are the sequences or pairs trained on and `tokens` the tokens in the loss, both per epoch. `left_out`
    counts excluded rows by reason. `seconds` excludes imports and reading of data.
    """

    output: str
    rows: int
    tokens: int
    steps: int
    first_loss: float
    last_loss: float
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


class TrainingContext(Struct, frozen=True, kw_only=True):
    """Checkpointing and reporting of one training.

    Checkpoints are written every `save_steps` optimizer steps (0: once per epoch) to `training/checkpoints` in the
    output directory, and removed at the end. `resume` continues from the last checkpoint (True) or from the given
    one. `left_out` counts excluded rows by reason.
    """

    resume: bool | Path = False
    trackers: tuple[str, ...] = ()
    on_step: OnStep | None = None
    save_steps: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])


# --- SFT ------------------------------------------------------------------------------------------------


def train_sft(
    model: Path,
    sequences: Sequence[TokenSequence],
    output: Path,
    options: SFTOptions,
    context: TrainingContext | None = None,
) -> TrainingSummary:
    """Train the model in the directory `model` on sampled tokens; write the new model to the directory `output`.

    The loss of an optimizer step is the mean over its sampled tokens. The metrics of every step go to
    `training/metrics.jsonl` in `output`. Raises ConfigError when there is nothing to learn from, when the
    sequences are not from this model's vocabulary, or when the GPU runs out of memory.
    """
    context = context or TrainingContext()

    def fit(loaded: Any) -> list[TokenSequence]:
        longest, vocabulary = max_sequence_length(loaded, options), vocabulary_size(loaded)
        rows = leave_out(sequences, lambda row: sequence_defect(row, vocabulary, longest), context.left_out)
        if not rows:
            advice = (
                f"expected some of at most {longest} tokens, each of the model's {vocabulary}: raise --max-tokens "
                f"(now {options.max_tokens}), or give the model that made them"
            )
            raise _nothing_to_learn("sequences", context.left_out, advice)
        return rows

    def make(loaded: Any, rows: list[TokenSequence], callback: Any) -> Any:
        return _sft_trainer(loaded, model, rows, output, options, context, callback)

    return _train(
        model, output, options, context, "sft", _SFT_METRICS, fit, make, lambda row: sum(row.loss_mask[1:])
    )


def _sft_trainer(
    loaded: Any,
    model: Path,
    rows: list[TokenSequence],
    output: Path,
    options: SFTOptions,
    context: TrainingContext,
    callback: Any,
) -> Any:
    """Return TRL's SFTTrainer for rows of token ids, with our forward pass (see `forward`)."""
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    from understudy.train.algorithms.forward import token_logprobs

    class Exact(SFTTrainer):
        """An SFTTrainer that computes a shared prefix once per pass; the loss is the mean over sampled tokens."""

        def _send_telemetry(self) -> None:
            """Do nothing: training is private, and TRL would report it to its authors."""

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            batch: list[TokenSequence] = inputs["sequences"]
            total = token_logprobs(model, batch).sum()
            if num_items_in_batch is None:
                return -total / sum(sum(sequence.loss_mask[1:]) for sequence in batch)
            scale = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
            return -total * scale / num_items_in_batch

    def collate(batch: list[dict[str, int]]) -> dict[str, Any]:
        from torch import tensor
        from torch.nn.utils.rnn import pad_sequence

        selected = [rows[item["row"]] for item in batch]
        labels = [tensor(_labels(sequence)) for sequence in selected]
        return {"sequences": selected, "labels": pad_sequence(labels, batch_first=True, padding_value=_IGNORED)}

    config = trl_config(
        SFTConfig,
        output / TRAINING,
        options,
        context,
        min(options.batch_rollouts, len(rows)),
        max(1, options.micro_batch_tokens // max(len(row.token_ids) for row in rows)),
        lr_scheduler_type=options.schedule,
        remove_unused_columns=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    columns = {
        "row": list(range(len(rows))),
        "input_ids": [list(row.token_ids) for row in rows],
        "labels": [_labels(row) for row in rows],
    }
    return _trainer(Exact, loaded, model, config, columns, callback, data_collator=collate)


def _labels(row: TokenSequence) -> list[int]:
    """Return the labels with which the trainer counts the tokens in the loss. The first is ignored, because
    nothing predicts it.
    """
    pairs = zip(row.token_ids[1:], row.loss_mask[1:], strict=True)
    return [_IGNORED, *(token if learned else _IGNORED for token, learned in pairs)]


# --- DPO ------------------------------------------------------------------------------------------------


def load_preference_pairs(
    sources: Iterable[Path],
    model: Path,
    *,
    run: str | None = None,
    include_suspicious: bool = False,
    left_out: Counter[str],
) -> list[PairTokens]:
    """Return the preference pairs of stores of runs and of exports in the format trl-dpo, as tokens of the model.

    Raises ConfigError for a directory that is neither a store nor such an export, and when a store has no such
    run.
    """

    def rows() -> Iterator[dict[str, Any]]:
        for source in sources:
            name = export_format(source)
            if name == "trl-dpo":
                yield from decoded_rows(source)
            elif name is not None:
                raise ConfigError(
                    f"--from {source}: an export in the format {name}, which has no pairs; expected trl-dpo: "
                    "write it with understudy export trl-dpo RUN_DIR --output DIR"
                )
            else:
                tally = PairCounts(left_out=left_out)
                with Store.open(source, create=False) as store:
                    for pair in rollout_pairs(store, run, include_suspicious=include_suspicious, tally=tally):
                        yield dpo_row(pair)

    return pairs_from_rows(rows(), model, left_out)


def train_dpo(
    model: Path,
    pairs: Sequence[PairTokens],
    output: Path,
    options: DPOOptions,
    context: TrainingContext | None = None,
) -> TrainingSummary:
    """Train the model in the directory `model` on preference pairs; write the new model to `output`.

    The initial model is the reference. The metrics of every step go to `training/metrics.jsonl` in `output`.
    Raises ConfigError when there is nothing to learn from, or the GPU runs out of memory.
    """
    context = context or TrainingContext()

    def fit(loaded: Any) -> list[PairTokens]:
        longest, vocabulary = max_sequence_length(loaded, options), vocabulary_size(loaded)

        def defect(pair: PairTokens) -> str | None:
            if _pair_length(pair) > longest:
                return "pairs that are too long"
            if max((*pair.prompt, *pair.chosen, *pair.rejected)) >= vocabulary:
                return "pairs with tokens that the model does not have"
            if not pair.chosen or not pair.rejected or pair.chosen == pair.rejected:
                return "pairs whose answers are the same tokens"
            return None

        rows = leave_out(pairs, defect, context.left_out)
        if not rows:
            raise _nothing_to_learn("pairs", context.left_out, _PAIRS_ADVICE)
        return rows

    def make(loaded: Any, rows: list[PairTokens], callback: Any) -> Any:
        return _dpo_trainer(loaded, model, rows, output, options, context, callback)

    def tokens(row: PairTokens) -> int:
        return len(row.chosen) + len(row.rejected)

    return _train(model, output, options, context, "dpo", _DPO_METRICS, fit, make, tokens)


def _pair_length(pair: PairTokens) -> int:
    return len(pair.prompt) + max(len(pair.chosen), len(pair.rejected))


def _dpo_trainer(
    loaded: Any,
    model: Path,
    rows: list[PairTokens],
    output: Path,
    options: DPOOptions,
    context: TrainingContext,
    callback: Any,
) -> Any:
    """Return TRL's DPOTrainer for pairs that are token ids already."""
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    class Tokens(DPOTrainer):
        """A DPOTrainer that skips dataset preparation: pairs are tokenized and filtered by length already."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def _send_telemetry(self) -> None:
            """Do nothing: training is private, and TRL would report it to its authors."""

    config = trl_config(
        DPOConfig,
        output / TRAINING,
        options,
        context,
        min(options.batch_pairs, len(rows)),
        # A pair is two sequences, hence the factor 2.
        max(1, options.micro_batch_tokens // (2 * max(map(_pair_length, rows)))),
        beta=options.beta,
        # TRL's "robust" loss with label smoothing 0 equals plain DPO; its "sigmoid" loss would ignore
        # label_smoothing.
        loss_type=["robust"],
        label_smoothing=options.label_smoothing,
    )
    columns = {
        f"{name}_ids": [list(getattr(row, name)) for row in rows] for name in ("prompt", "chosen", "rejected")
    }
    reference = None
    if options.lora is None:
        reference = load_model(model, structs.replace(options, gradient_checkpointing=False))
    return _trainer(Tokens, loaded, model, config, columns, callback, ref_model=reference)


# --- what both share ------------------------------------------------------------------------------------


def _train(
    model: Path,
    output: Path,
    options: TrainOptions,
    context: TrainingContext,
    name: str,
    metric_names: Sequence[str],
    select_rows: Callable[[Any], list[_T]],
    make_trainer: Callable[[Any, list[_T], Any], Any],
    tokens: Callable[[_T], int],
) -> TrainingSummary:
    """Train the model in the directory `model` and write the new one to `output`.

    `select_rows` returns the rows that the loaded model can train on. `make_trainer` returns the trainer for these
    rows; its callback reports the metrics that `metric_names` lists. `tokens` returns the number of
    tokens of a row in the loss. Raises ConfigError.
    """
    require_packages(*TRL_PACKAGES)
    directory = output / TRAINING
    checkpoint = last_checkpoint(directory, context.resume)
    seed_torch(options.seed)
    with explain_out_of_memory(options):
        loaded = load_model(model, options)
        rows = select_rows(loaded)
        start = 0 if checkpoint is None else _checkpoint_step(checkpoint) + 1
        with MetricsWriter(directory, context.trackers, start=start, name=f"understudy-{name}") as metrics:
            trainer = make_trainer(loaded, rows, _callback(metric_names, metrics, context.on_step))
            trainer._save_checkpoint = _checkpoint_saver(trainer._save_checkpoint, directory / CHECKPOINTS)
            started = time.monotonic()
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    losses: list[float] = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if losses and not math.isfinite(losses[-1]):
        raise ConfigError(
            f"the loss became {losses[-1]}, expected a finite number, so no model was written; lower "
            f"--learning-rate (now {options.learning_rate}) and start again with --overwrite"
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
        left_out={why: count for why, count in context.left_out.most_common() if count},
        seconds=round(time.monotonic() - started, 3),
    )


def _trainer(
    kind: Any,
    loaded: Any,
    model: Path,
    config: Any,
    columns: dict[str, Any],
    callback: Any,
    **trainer_options: Any,
) -> Any:
    """Return a trainer of the TRL class `kind` for a dataset with these columns."""
    import datasets
    from transformers.trainer_callback import PrinterCallback

    dataset_type: Any = datasets.Dataset
    trainer = kind(
        loaded,
        args=config,
        train_dataset=dataset_type.from_dict(columns),
        processing_class=load_chat_tokenizer(model),
        callbacks=[callback],
        **trainer_options,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def trl_config(
    kind: Callable[..., Any],
    directory: Path,
    options: TrainOptions,
    context: TrainingContext,
    batch: int,
    rows_per_pass: int,
    **overrides: Any,
) -> Any:
    """Return the configuration of a TRL trainer. An optimizer step has `batch` rows, a forward pass at most
    `rows_per_pass`.
    """
    import torch

    # The smallest number of equally large passes that fit in memory: a step always covers `batch` rows.
    passes = next(
        count for count in range(1, batch + 1) if batch % count == 0 and batch // count <= max(rows_per_pass, 1)
    )
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
        "gradient_checkpointing": False,  # load_model has already enabled it where it was asked for
        # transformers writes this into the checkpoints' config.json; TRL's losses never use a cache.
        "use_cache": True,
        "max_length": None,
        "logging_steps": 1,
        "logging_nan_inf_filter": False,  # the filter would show the previous mean in place of a NaN
        "save_strategy": "steps" if context.save_steps else "epoch",
        "save_steps": context.save_steps or 500,
        "save_total_limit": 2,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "use_cpu": not torch.cuda.is_available(),
    }
    config = kind(**settings, **overrides)
    # The model is on one device; without this, transformers would split batches over all GPUs of the machine.
    config._n_gpu = min(config.n_gpu, 1)
    return config


def _checkpoint_saver(save: Callable[..., None], checkpoints: Path) -> Callable[..., None]:
    """Return a function that writes a trainer's checkpoints, and raises ConfigError when one cannot be written."""
    import torch

    def saved(*arguments: Any, **options: Any) -> None:
        try:
            save(*arguments, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch, safetensors and tokenizers raise four kinds of errors for a full disk
            raise ConfigError(
                f"{checkpoints}: a checkpoint cannot be written: {error}; check the free disk space and the "
                "permissions of this directory, then continue with --resume"
            ) from error

    return saved


def _checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps made when a checkpoint was written. Raises ConfigError when it is damaged."""
    path = checkpoint / "trainer_state.json"
    try:
        return int(msgspec.json.decode(path.read_bytes(), type=dict[str, Any])["global_step"])
    except (OSError, msgspec.MsgspecError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: invalid checkpoint ({error}); expected a number global_step in it: give an earlier "
            "--checkpoint of this training, or start it again with --overwrite"
        ) from error


def _nothing_to_learn(what: str, left_out: Counter[str], advice: str) -> ConfigError:
    return ConfigError(f"there are no {what} to learn from; left out: {format_counts(left_out)}; {advice}")


def _callback(names: Sequence[str], metrics: MetricsWriter, on_step: OnStep | None) -> Any:
    """Return a transformers callback that reports the metrics that `names` lists after every step.

    A metric is reported by the last part of its name: "rewards/margins" as "margins".
    """
    from transformers import TrainerCallback

    class Numbers(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                numbers = {name.rpartition("/")[2]: float(logs[name]) for name in names if name in logs}
                metrics.write(state.global_step, numbers)
                if on_step is not None:
                    on_step(state.global_step, state.max_steps, numbers)

    return Numbers()
