"""Grade many predictions concurrently; each gets a report, and existing reports are reused."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy.checks.protection import NOT_VALIDATED
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

_PREPARED_AHEAD = 2

_log = logging.getLogger(__name__)


@dataclass
class GradingProgress:
    """The progress of grading. `outcomes` has finished instances by id; `reused` counts reports of
    earlier runs.
    """

    total: int
    outcomes: dict[str, GradingOutcome] = field(default_factory=dict[str, GradingOutcome])
    reused: int = 0


Grading = Callable[[], Awaitable[Verdict]]
"""Grades a patch; returns the verdict. Raises TaskError, SandboxError or GraderError."""


@dataclass(frozen=True, kw_only=True)
class PatchGrader:
    """Grades patches in sandboxes of this machine.

    With `validate_failures`, if a suite or script fails, its task is validated then, unless it was before.
    """

    sandboxes: Sandboxes
    environment: TaskEnvironment
    cache: Path
    validate_failures: bool = True

    async def prepare(self, task: Task, patch: PredictedPatch) -> Grading:
        """Do what needs no sandbox yet; return the grading, which is tried twice. Raises TaskError."""
        return partial(self._grade_then_validate, await self._prepare(task, patch), patch)

    async def grade_validated(self, task: Task, patch: bytes) -> Verdict:
        """Validate a task unless that was done here, then grade a patch once. Raises TaskError, SandboxError and
        GraderError.
        """
        prepared = await asyncio.to_thread(prepare, task, self.cache, self.sandboxes)
        prepared = await validate(
            prepared, sandboxes=self.sandboxes, environment=self.environment, cache=self.cache
        )
        return await grade(prepared, patch, sandboxes=self.sandboxes, environment=self.environment)

    async def is_outdated(self, task: Task, verdict: Verdict) -> bool:
        """Return whether a verdict was reached without twins only because its task was not validated then,
        but is now.
        """
        if not verdict.unprotected.startswith(NOT_VALIDATED):
            return False
        prepared = await asyncio.to_thread(prepare, task, self.cache, self.sandboxes)
        return self._as_validated(prepared) != prepared

    def _as_validated(self, prepared: PreparedTask) -> PreparedTask:
        return as_validated(prepared, sandboxes=self.sandboxes, environment=self.environment, cache=self.cache)

    async def _prepare(self, task: Task, patch: PredictedPatch) -> PreparedTask:
        """Return the task with the grading options found so far; if it will need a sandbox, that is announced.

        Only the gold patch's run shows whether a script's Python itself has to write the reward. Without that run,
        forbidding it to write could make every patch fail.
        """
        prepared = await asyncio.to_thread(prepare, task, self.cache, self.sandboxes)
        validated = self._as_validated(prepared)
        if validated == prepared and not self.validate_failures:
            validated = replace(validated, options=replace(validated.options, walled=False))
        if (await asyncio.to_thread(gate, patch.data, task, prepared.tree)).patch:
            self.sandboxes.expect(sandbox_spec(validated, self.environment, mounts=hidden_mounts(validated)))
        return validated

    async def _grade_then_validate(self, prepared: PreparedTask, patch: PredictedPatch) -> Verdict:
        """Return the verdict. Validation finds out how a suite must be graded in its image, and how a script must
        be. So a patch that fails is graded again if validation, which is only done then, finds another way.
        """
        verdict = await self._grade_retrying(prepared, patch)
        is_certain = isinstance(prepared.task.checks, PytestChecks)
        if is_solved(verdict.reward) or not verdict.applied or is_certain or not self.validate_failures:
            return verdict
        try:
            validated = await validate(
                prepared, sandboxes=self.sandboxes, environment=self.environment, cache=self.cache
            )
        except TaskError as error:
            return replace(verdict, reason=f"{verdict.reason} ({UNSURE}: {str(error).splitlines()[0]})")
        return verdict if validated == prepared else await self._grade_retrying(validated, patch)

    async def _grade_retrying(self, prepared: PreparedTask, patch: PredictedPatch) -> Verdict:
        attempt = partial(grade, prepared, patch.data, sandboxes=self.sandboxes, environment=self.environment)
        try:
            return await attempt()
        except (SandboxError, GraderError):
            return await attempt()


@dataclass(frozen=True, kw_only=True)
class GradingSetup:
    """What predictions are graded with. `tasks` are the available tasks by instance id.

    `refused` maps instances that cannot be graded to the reason. `prepare_remotely` prepares gradings on other
    machines, in place of the `grader`.
    """

    tasks: Mapping[str, Task]
    output: Path
    run_id: str
    grader: PatchGrader
    refused: Mapping[str, str] = field(default_factory=dict[str, str])
    prepare_remotely: Callable[[Task, PredictedPatch], Awaitable[Grading]] | None = None


async def grade_all(
    setup: GradingSetup,
    predictions: Predictions,
    *,
    concurrency: int,
    stop: asyncio.Event,
    report_progress: Callable[[GradingProgress], None] = lambda progress: None,
) -> GradingProgress:
    """Grade predictions, `concurrency` at a time, until all are done or `stop` is set; then those that are running
    are finished.

    The fault of an instance becomes its outcome; it is tried twice if that may help. `report_progress` is called
    for each one that ended. Raises ConfigError when reports cannot be written.
    """
    progress = GradingProgress(len(predictions.rows))
    rows = iter(predictions.rows.values())
    slots = asyncio.Semaphore(concurrency)

    async def worker() -> None:
        while not stop.is_set() and (prediction := next(rows, None)) is not None:
            if outcome := await _grade_prediction(setup, predictions, prediction, progress, slots, stop):
                progress.outcomes[prediction.instance_id] = outcome
                report_progress(progress)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency + _PREPARED_AHEAD):  # what waits for its turn is made ready
                group.create_task(worker())
    except* UnderstudyError as errors:
        raise errors.exceptions[0] from None
    return progress


async def _grade_prediction(
    setup: GradingSetup,
    predictions: Predictions,
    prediction: Prediction,
    progress: GradingProgress,
    slots: asyncio.Semaphore,
    stop: asyncio.Event,
) -> GradingOutcome | None:
    """Return the outcome of a prediction; None when grading was stopped before its turn."""
    if reason := setup.refused.get(prediction.instance_id):
        return failed_outcome("task", reason)
    if (task := setup.tasks.get(prediction.instance_id)) is None:
        return failed_outcome(
            "task",
            f"{prediction.where}: no task has the id {prediction.instance_id!r}; correct the id, or give its task "
            "with --tasks",
        )
    if prediction.empty:
        return GradingOutcome("empty", "empty patch")
    directory = instance_dir(setup.output, setup.run_id, prediction.model, prediction.instance_id)
    patch = await asyncio.to_thread(predictions.patch, prediction)
    key = _report_key(setup, task, patch)
    verdict = await asyncio.to_thread(read_verdict, directory, key)
    try:
        if verdict is not None and not await setup.grader.is_outdated(task, verdict):
            progress.reused += 1
            return outcome_of(verdict)
        grading = await (setup.prepare_remotely or setup.grader.prepare)(task, patch)
        async with slots:
            if stop.is_set():
                return None
            started_at = time.monotonic()
            verdict = await grading()
            elapsed_s = time.monotonic() - started_at
    except ConfigError:
        raise
    except Exception as fault:  # noqa: BLE001 - what is wrong with one instance does not end the others
        if not isinstance(fault, UnderstudyError):
            _log.error(
                "internal error while %s was graded; please report it", prediction.instance_id, exc_info=fault
            )
        boundary = fault.boundary if isinstance(fault, UnderstudyError) else "understudy"
        outcome = failed_outcome(boundary, str(fault) or type(fault).__name__)
        await asyncio.to_thread(write_failure, directory, task, patch.data, outcome.reason)
        return outcome
    await asyncio.to_thread(write_report, directory, task, patch.data, verdict, elapsed_s=elapsed_s, key=key)
    return outcome_of(verdict)


def _report_key(setup: GradingSetup, task: Task, patch: PredictedPatch) -> str:
    """Return a digest of what a verdict depends on: a report with another digest is made again."""
    content = msgspec.json.encode([GRADER, setup.grader.sandboxes.name, task, patch.digest])
    return hashlib.sha256(content).hexdigest()
