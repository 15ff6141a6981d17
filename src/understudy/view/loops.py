"""A loop's curves, and why little or nothing of what a step collected was trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from understudy.errors import StoreError
from understudy.report.read import read_steps
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.train.algorithms.batch import NO_SIGNAL
from understudy.train.loop.state import LoopConfig, LoopDirectory, LoopState, StepState, WaveLocation
from understudy.train.loop.state import read_json as read_state
from understudy.train.metrics import FILE as METRICS
from understudy.util.statistics import wilson
from understudy.view.schema.stores import FunnelStage, LoopEvaluation, LoopStep, LoopView

OpenWave = Callable[[StoreLocation], tuple[str, Store] | None]
"""Returns the id and the store of a wave, or None if it does not exist or cannot be read."""


def loop_view(store_id: str, root: Path, open_wave: OpenWave) -> LoopView:
    """Return the current state of a loop. Raises StoreError if it cannot be read."""
    directory = LoopDirectory(root)
    config = read_state(root / "loop.json", LoopConfig)
    state = directory.load() or LoopState(version="", weights="")
    training, _ = read_steps(root / METRICS)
    values = {step.step: step.values for step in training}
    evaluations: list[LoopEvaluation] = []
    for evaluation in state.evaluations:
        wave = open_wave(directory.wave(state, evaluation.run).store)
        evaluations.append(
            LoopEvaluation(
                step=evaluation.step,
                version=evaluation.version,
                store_id=None if wave is None else wave[0],
                solved=evaluation.solved,
                total=evaluation.total,
                failed=evaluation.failed,
                rate=evaluation.rate,
            )
        )
    return LoopView(
        store_id=store_id,
        version=state.version,
        planned_steps=0 if config is None else config.steps,
        asynchronous=config is not None and config.asynchronous,
        steps=tuple(
            _step(step, values.get(step.step, {}), directory.wave(state, step.run), open_wave)
            for step in state.steps
        ),
        evaluations=tuple(evaluations),
        refused=state.refused,
    )


def _step(step: StepState, values: dict[str, float], location: WaveLocation, open_wave: OpenWave) -> LoopStep:
    wave = open_wave(location.store)
    numbers = {name: float(value) for name, value in _numeric_values(step.report).items()} | values
    return LoopStep(
        step=step.step,
        phase=step.phase,
        version=step.version,
        sampled_by=step.sampled_by,
        store_id=None if wave is None else wave[0],
        collected=step.collected,
        solved=step.solved,
        solve_rate=wilson(step.solved, step.collected) if step.collected else None,
        reward=step.reward,
        groups=step.groups,
        used=_groups_used(step, numbers),
        dropped=len(step.dropped),
        held=len(step.held),
        staleness=step.staleness,
        trained=step.weights is not None,
        skipped=step.skipped,
        values=numbers if step.weights is not None else {},
        seconds=step.seconds,
        funnel=_funnel(step, numbers, None if wave is None else wave[1], location.wave),
    )


def _numeric_values(report: dict[str, Any]) -> dict[str, int | float]:
    return {
        name: value
        for name, value in report.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _groups_used(step: StepState, numbers: dict[str, float]) -> int:
    """Return how many groups the step trains on: none if the trainer reported and made no weights."""
    return 0 if numbers and step.weights is None else max(0, len(step.used) - step.skipped.get(NO_SIGNAL, 0))


def _funnel(
    step: StepState, numbers: dict[str, float], wave: Store | None, name: str | None
) -> tuple[FunnelStage, ...]:
    """Return how many rollouts, groups and tokens were left at each stage, and why the others were dropped."""
    stages: list[FunnelStage] = []
    if wave is not None:
        try:
            stages += _collection_stages(wave, name)
        except StoreError:
            stages = []  # the store is being removed or is damaged, so the loop's own counts are shown
    lost = {"too old, or nothing to learn from": len(step.dropped), "wait for the next step": len(step.held)}
    used = FunnelStage(
        stage="groups used",
        count=_groups_used(step, numbers),
        lost={reason: count for reason, count in lost.items() if count} | step.skipped,
    )
    tokens = next((int(numbers[name]) for name in ("tokens", "sampled_tokens") if name in numbers), 0)
    return (*stages, used, FunnelStage(stage="tokens", count=tokens if step.weights is not None else 0))


def _collection_stages(wave: Store, name: str | None) -> list[FunnelStage]:
    total = graded = groups = differing = 0
    ungraded: dict[str, int] = {}
    alike: dict[str, int] = {}
    runs = wave.runs.all() if name is None else filter(None, [wave.runs.of_wave(name)])
    for run in runs:
        counts = wave.outcomes.counts(run.id)
        total += sum(counts.rollouts.values())
        graded += counts.solved + counts.unsolved
        for outcome in wave.outcomes.of_run(run.id):
            if outcome.reward is None:
                reason = outcome.status if outcome.error is None else f"{outcome.error.boundary} fault"
                ungraded[reason] = ungraded.get(reason, 0) + 1
        for task in wave.outcomes.by_task(run.id).values():
            if task.graded == 0:
                continue
            groups += 1
            differing += task.differ
            if not task.differ:
                reason = (
                    "all solved" if task.solved == task.graded else "none solved" if not task.solved else "alike"
                )
                alike[reason] = alike.get(reason, 0) + 1
    return [
        FunnelStage(stage="rollouts", count=total),
        FunnelStage(stage="graded", count=graded, lost=ungraded),
        FunnelStage(stage="groups", count=groups),
        FunnelStage(stage="groups with signal", count=differing, lost=alike),
    ]
