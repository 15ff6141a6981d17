"""Reinforcement over rollouts that are there: policy updates over groups, some at a time."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

from msgspec import Struct, field, structs

from understudy.errors import ConfigError
from understudy.train.algorithms.advantages import with_signal
from understudy.train.algorithms.updater import Updater, UpdateReport
from understudy.train.data.groups import RolloutGroup
from understudy.train.data.load import format_counts
from understudy.train.metrics import MetricsWriter
from understudy.train.options import GRPOOptions
from understudy.train.output_dir import CHECKPOINTS, install_model, last_checkpoint, remove_checkpoints
from understudy.train.requirements import require_packages
from understudy.train.weights import TRAINING, WeightsRecord

_KEPT = 2
"""Checkpoints."""

OnUpdate = Callable[[UpdateReport, int], None]
"""Told `(report, of)` after each update."""


class GRPOSummary(Struct, frozen=True, kw_only=True):
    """What policy updates made. `updated` counts those that changed the weights; `skipped` sums theirs by why."""

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


def silent(report: UpdateReport, of: int) -> None:
    """A `OnUpdate` that tells nobody."""


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
    watch: OnUpdate = silent,
    save_steps: int = 0,
) -> GRPOSummary:
    """Update the model in the directory `model` over `groups`, shuffled; write the new one to `output`.

    Each update is over `groups_per_update` groups (0: all). A checkpoint is written every `save_steps` updates (0:
    none but the last) to `output/training/checkpoints`; `resume` goes on from the last of them, or from the one
    named, to the same weights. Raises ConfigError when nothing can be learned from the groups.
    """
    require_packages()
    counts = Counter[str]() if left_out is None else left_out
    _check(groups, options, counts)
    directory = output / TRAINING
    checkpoint = last_checkpoint(directory, resume, f"{TRAINING}/written.json")
    began = time.monotonic()
    updater = Updater(model, options, resume=checkpoint)
    plan = _plan(groups, groups_per_update, options.seed)
    reports: list[UpdateReport] = []
    with MetricsWriter(directory, trackers, start=updater.step + 1, name="understudy-grpo") as metrics:
        for step, update_groups in enumerate(plan, 1):
            if step <= updater.step:
                continue
            report = updater.update(update_groups, step)
            reports.append(report)
            metrics.write(step, structs.asdict(report))
            watch(report, len(plan))
            if save_steps and step % save_steps == 0 and step < len(plan):
                updater.save(directory / CHECKPOINTS / f"checkpoint-{step}")
                _forget(directory / CHECKPOINTS)
    skipped = Counter[str]()
    for report in reports:
        skipped.update(report.skipped)
    if updater.optimizer_steps == 0:
        raise ConfigError(
            f"nothing could be learned from the {len(groups)} groups, so no model was written; skipped: "
            f"{format_counts(skipped)}; left out: {format_counts(counts)}"
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


def _check(groups: Sequence[RolloutGroup], options: GRPOOptions, counts: Counter[str]) -> None:
    why = format_counts(counts)
    if not groups:
        raise ConfigError(
            f"there are no groups to learn from; left out: {why}; GRPO needs token ids and logprobs: collect with "
            "--weights, or with a vLLM or SGLang server and tokens in and out"
        )
    if options.overlong_tokens is None and not with_signal(groups):
        rollouts = sum(len(group.rollouts) for group in groups)
        raise ConfigError(
            f"in none of the {len(groups)} groups ({rollouts} rollouts) do rewards differ, so there is nothing to "
            f"learn from; left out: {why}; collect with --samples 4 or more, and tasks that are solved at times"
        )


def _plan(groups: Sequence[RolloutGroup], size: int, seed: int) -> list[list[RolloutGroup]]:
    order = list(groups)
    Random(f"grpo {seed}").shuffle(order)
    size = size or len(order)
    return [order[start : start + size] for start in range(0, len(order), size)]


def _forget(checkpoints: Path) -> None:
    paths = sorted(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    for path in paths[:-_KEPT]:
        shutil.rmtree(path, ignore_errors=True)
