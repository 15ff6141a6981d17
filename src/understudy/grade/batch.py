"""Grade many predictions concurrently; each gets a report, and existing reports are reused."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy.checks.twin_run import NOT_VALIDATED
from understudy.errors import ConfigError, GraderError, SandboxError, TaskError, UnderstudyError
from understudy.grade.gate import gate
from understudy.grade.predictions import PredictedPatch, Prediction, Predictions
from understudy.grade.reports import (
    UNSURE,
    GradingOutcome,
    failed_outcome,
    instance_dir,
    outcome_of,
    read_verdict,
    write_failure,
    write_report,
)
from understudy.grade.verdict import GRADER, as_validated, grade, validate
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, prepare, sandbox_spec
from understudy.types import PytestChecks, Task, Verdict, is_solved

_AHEAD = 2

_log = logging.getLogger(__name__)


@dataclass
class GradingProgress:
    """The progress of grading. `outcomes` has finished instances by id; `reused` counts reports of
    earlier runs.
    """

    total: int
    outcomes: dict[str, GradingOutcome] = field(default_factory=dict[str, GradingOutcome])
    reused: int = 0


@dataclass(frozen=True, kw_only=True)
class GradingSetup:
    """What all patches are graded with. `tasks` are the available tasks by instance id.

    `refused` maps instances that cannot be graded to the reason. With `doubt`, if a suite or script fails, its
    task is validated then, unless it was before.
    """

    tasks: Mapping[str, Task]
    output: Path
    run_id: str
    sandboxes: Sandboxes
    environment: TaskEnvironment
    cache: Path
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    doubt: bool = True


async def grade_all(
    bench: GradingSetup,
    predictions: Predictions,
    *,
    concurrency: int,
    stop: asyncio.Event,
    progress: Callable[[GradingProgress], None] = lambda standing: None,
) -> GradingProgress:
    """Grade predictions, `concurrency` at a time, until all are done or `stop` is set; then those that are running
    are finished.

    The fault of an instance becomes its outcome; it is tried twice if that may help. `progress` is called for each
    one that ended. Raises ConfigError when reports cannot be written.
    """
    standing = GradingProgress(len(predictions.rows))
    rows = iter(predictions.rows.values())
    slots = asyncio.Semaphore(concurrency)

    async def worker() -> None:
        while not stop.is_set() and (row := next(rows, None)) is not None:
            if outcome := await _grade_prediction(bench, predictions, row, standing, slots, stop):
                standing.outcomes[row.instance_id] = outcome
                progress(standing)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency + _AHEAD):  # what waits for its turn is made ready
                group.create_task(worker())
    except* UnderstudyError as errors:
        raise errors.exceptions[0] from None
    return standing


async def _grade_prediction(
    bench: GradingSetup,
    predictions: Predictions,
    row: Prediction,
    standing: GradingProgress,
    slots: asyncio.Semaphore,
    stop: asyncio.Event,
) -> GradingOutcome | None:
    """Return the outcome of a prediction; None when grading was stopped before its turn."""
    if reason := bench.refused.get(row.instance_id):
        return failed_outcome("task", reason)
    if (task := bench.tasks.get(row.instance_id)) is None:
        return failed_outcome("task", f"{row.where}: no task has the id {row.instance_id!r}")
    if row.empty:
        return GradingOutcome("empty", "empty patch")
    directory = instance_dir(bench.output, bench.run_id, row.model, row.instance_id)
    patch = await asyncio.to_thread(predictions.patch, row)
    key = _key(bench, task, patch)
    verdict = await asyncio.to_thread(read_verdict, directory, key)
    try:
        if verdict is not None and not await _is_outdated(bench, task, verdict):
            standing.reused += 1
            return outcome_of(verdict)
        prepared = await _prepare(bench, task, patch)
        async with slots:
            if stop.is_set():
                return None
            began = time.monotonic()
            verdict = await _grade_with_doubt(bench, prepared, patch)
            took_s = time.monotonic() - began
    except ConfigError:
        raise
    except Exception as fault:  # noqa: BLE001 - what is wrong with one instance does not end the others
        if not isinstance(fault, UnderstudyError):
            _log.error("internal error while %s was graded; please report it", row.instance_id, exc_info=fault)
        boundary = fault.boundary if isinstance(fault, UnderstudyError) else "understudy"
        outcome = failed_outcome(boundary, str(fault) or type(fault).__name__)
        await asyncio.to_thread(write_failure, directory, task, patch.data, outcome.reason)
        return outcome
    await asyncio.to_thread(write_report, directory, task, patch.data, verdict, took_s=took_s, key=key)
    return outcome_of(verdict)


async def _is_outdated(bench: GradingSetup, task: Task, verdict: Verdict) -> bool:
    """Return whether a verdict was reached without twins only because its task was not validated then,
    but is now.
    """
    if not verdict.unprotected.startswith(NOT_VALIDATED):
        return False
    prepared = await asyncio.to_thread(prepare, task, bench.cache, bench.sandboxes)
    validated = as_validated(prepared, sandboxes=bench.sandboxes, environment=bench.environment, cache=bench.cache)
    return validated != prepared


async def _prepare(bench: GradingSetup, task: Task, patch: PredictedPatch) -> PreparedTask:
    """Return the task with the grading options found so far; if it will need a sandbox, that is announced.

    Only the gold patch's run shows whether a script's Python itself has to write the reward. Without that run,
    forbidding it to write could make every patch fail.
    """
    prepared = await asyncio.to_thread(prepare, task, bench.cache, bench.sandboxes)
    validated = as_validated(prepared, sandboxes=bench.sandboxes, environment=bench.environment, cache=bench.cache)
    if validated == prepared and not bench.doubt:
        validated = replace(validated, options=replace(validated.options, walled=False))
    if (await asyncio.to_thread(gate, patch.data, task, prepared.tree)).patch:
        bench.sandboxes.expect(sandbox_spec(validated, bench.environment, mounts=hidden_mounts(validated)))
    return validated


async def _grade_with_doubt(bench: GradingSetup, prepared: PreparedTask, patch: PredictedPatch) -> Verdict:
    """Return the verdict. Raises TaskError, and SandboxError or GraderError if grading failed twice.

    Validation finds out how a suite must be graded in its image, and how a script must be. So a patch that fails
    is graded again if validation, which is only done then, finds another way.
    """
    verdict = await _grade_retrying(bench, prepared, patch)
    sure = isinstance(prepared.task.checks, PytestChecks)
    if is_solved(verdict.reward) or not verdict.applied or sure or not bench.doubt:
        return verdict
    try:
        validated = await validate(
            prepared, sandboxes=bench.sandboxes, environment=bench.environment, cache=bench.cache
        )
    except TaskError as error:
        return replace(verdict, reason=f"{verdict.reason} ({UNSURE}: {str(error).splitlines()[0]})")
    return verdict if validated == prepared else await _grade_retrying(bench, validated, patch)


async def _grade_retrying(bench: GradingSetup, prepared: PreparedTask, patch: PredictedPatch) -> Verdict:
    attempt = partial(grade, prepared, patch.data, sandboxes=bench.sandboxes, environment=bench.environment)
    try:
        return await attempt()
    except (SandboxError, GraderError):
        return await attempt()


def _key(bench: GradingSetup, task: Task, patch: PredictedPatch) -> str:
    """Return a digest of what a verdict depends on: a report with another digest is made again."""
    content = msgspec.json.encode([GRADER, bench.sandboxes.name, task, patch.digest])
    return hashlib.sha256(content).hexdigest()
