"""What trainings through TRL's trainers share: how they are begun, watched, gone on with and ended."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.train.data.load import format_counts
from understudy.train.metrics import MetricsWriter
from understudy.train.options import TrainOptions
from understudy.train.output_dir import CHECKPOINTS, install_model, last_checkpoint, remove_checkpoints
from understudy.train.requirements import FULL, require_packages
from understudy.train.weights import TRAINING, WeightsRecord, explain_out_of_memory, load_model, seed, uses_bf16

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
