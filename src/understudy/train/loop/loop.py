"""The training loop: collect with the current policy, grade, update, publish the weights as a new version, repeat.

Every step goes through the phases of `state.Phase`. Each phase ends by atomically replacing the saved state, so a
loop that was killed restarts at the beginning of the interrupted phase, with the inputs that it had.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from msgspec import to_builtins
from msgspec.structs import replace

from understudy.errors import TaskError
from understudy.run.collector import RolloutBatch, RolloutCollector
from understudy.store import Store
from understudy.store.outcomes import TaskCounts
from understudy.train.algorithms.updater import UpdateReport
from understudy.train.groups import RolloutGroup, read_token_values, write_groups
from understudy.train.loop.batches import derive_seed, format_refused, select_for_update, start_step, usable_tasks
from understudy.train.loop.state import (
    Evaluation,
    GroupRef,
    LoopConfig,
    LoopDirectory,
    LoopState,
    StepState,
    TaskSolveRate,
    make_durable,
    prune,
    step_number,
    version_name,
)
from understudy.train.loop.trainer_process import TrainerProcess
from understudy.train.publish.base import Publisher
from understudy.train.teacher import TeacherServer
from understudy.train.weights import ADAPTER
from understudy.types import Task


class Watcher:
    """Callbacks for the progress of a loop. The base class does nothing."""

    def began(self, loop: Loop) -> None:
        """Called when the loop begins; its `line` may be called from now on."""

    def stepped(self, step: StepState) -> None:
        """Called when a step has ended and its weights are published."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Called when the held-out tasks were evaluated."""


_T = TypeVar("_T")


class LoopStopped(Exception):
    """Raised when the loop was asked to stop, at a point where it can be resumed. Not an error."""


@asynccontextmanager
async def running_tasks(*work: Awaitable[Any]) -> AsyncGenerator[list[asyncio.Future[Any]]]:
    """Run `work` as asyncio tasks while the block runs; yields them.

    Tasks that are still running at the end of the block are cancelled and awaited.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Loop:
    """Runs one loop from its saved state to its last step."""

    def __init__(
        self,
        config: LoopConfig,
        directory: LoopDirectory,
        state: LoopState,
        *,
        tasks: Mapping[str, Task],
        eval_tasks: Sequence[Task],
        collector: RolloutCollector,
        trainer: TrainerProcess,
        publisher: Publisher,
        watcher: Watcher,
        token_values_bytes: int = 0,
        teacher: TeacherServer | None = None,
    ) -> None:
        self.config = config
        self.directory = directory
        self.state = state
        self._tasks = tasks
        self._eval_tasks = eval_tasks
        self._collector = collector
        self._trainer = trainer
        self._publisher = publisher
        self._watcher = watcher
        self._token_values_bytes = token_values_bytes
        self._teacher = teacher
        self._waves: dict[int, RolloutBatch] = {}
        self._evaluating: RolloutBatch | None = None
        self._released = False
        self._activity = "starting"

    async def run(self) -> LoopState:
        """Run all remaining steps; return the final state.

        Raises LoopStopped when the collector was told to drain, otherwise the error that the loop cannot continue
        after.
        """
        self._watcher.began(self)
        try:
            await self._prune()
            await self._evaluate(self.state.done)
            while (number := self.state.done + 1) <= self.config.steps:
                await self._step(number)
                await self._evaluate(number)
                await self._prune()
        except LoopStopped:
            # LoopStopped came from the first wave that ended; wait until the others have ended too.
            await self._collector.finish()
            raise
        return self.state

    def line(self) -> str:
        """Return a line about the progress of the loop. May be called from any thread."""
        parts = [f"step {min(self.state.done + 1, self.config.steps)}/{self.config.steps}", self._activity]
        going = [wave for wave in list(self._waves.values()) if not wave.ended]
        waves = [self._evaluating] if self._evaluating else going
        total = sum(wave.progress.total for wave in waves)
        if total:
            ended, solved = (sum(getattr(wave.progress, name) for wave in waves) for name in ("done", "solved"))
            parts.append(f"{ended}/{total} rollouts, {solved} solved")
            if failed := sum(wave.progress.failed for wave in waves):
                parts.append(f"{failed} failed")
            if waves[-1].status not in ("collecting", "ended"):
                parts.append(waves[-1].status)
            if error := next((fault for wave in waves if (fault := wave.last_error())), None):
                parts.append(f"last fault at the {error.boundary}")
        if self._collector.draining:
            parts.append("finishing what runs; Ctrl-C again stops at once")
        return " · ".join(parts)

    # --- a step ----------------------------------------------------------------------------------------

    async def _step(self, number: int) -> None:
        step = self.state.step(number)
        if step is None:
            self._stop_if_draining()
            step = start_step(self.config, self.directory, self.state, number, self._tasks)
            self._save(self.state.with_step(step))
        if step.phase == "collecting":
            step = await self._collect_groups(step)
        if step.phase == "collected":
            step = await self._update(step)
        if step.phase == "updated":
            step = await self._publish(step)
        self._watcher.stepped(step)

    async def _collect_groups(self, step: StepState) -> StepState:
        """Wait for enough groups, and write them to a file for the update."""
        self._activity = "collecting"
        began = time.monotonic()
        self._open_waves()
        ready = await self._wait_for_groups(step.step)
        runs = {number: wave.run_id for number, wave in self._waves.items()}
        selection = await asyncio.to_thread(
            select_for_update,
            *(self.config, self.directory, self.state, ready, runs),
            last=step.step >= self.config.steps,
        )
        groups = [group for members in selection.groups.values() for group in members]
        skipped = Counter(selection.skipped)
        if self._teacher is not None:
            self._activity = "requesting the teacher's logprobs"
            groups = await self._teacher.with_logprobs(groups, skipped)
        await asyncio.to_thread(self._write_groups, step.step, groups)
        step = replace(
            step,
            phase="collected",
            used=selection.used,
            dropped=selection.dropped,
            held=selection.held,
            collected=sum(ready[ref].graded for ref in selection.newly_finished),
            solved=sum(ready[ref].solved for ref in selection.newly_finished),
            reward=selection.reward,
            groups=len(groups),
            staleness=selection.staleness,
            skipped=dict(sorted(skipped.items())),
            seconds=step.seconds | {"collect": round(time.monotonic() - began, 3)},
        )
        rates = dict(self.state.rates)
        for ref in sorted((*selection.used, *selection.dropped)):
            rates[ref.task] = rates.get(ref.task, TaskSolveRate()).after(
                ready[ref].graded, ready[ref].solved, step.step
            )
        state = replace(self.state.with_step(step), rates=dict(sorted(rates.items())))
        if self._collects_during_update(step.step) and step.step < self.config.steps:
            # The next wave runs while the update does. It is saved in the state before it starts.
            state = state.with_step(start_step(self.config, self.directory, state, step.step + 1, self._tasks))
        self._save(state)
        return step

    async def _update(self, step: StepState) -> StepState:
        self._activity = "updating the policy"
        number, began = step.step, time.monotonic()
        weights, version = self.directory.weights(number), version_name(number)
        report = UpdateReport(step=number, version=version, updated=False)
        if self._collects_during_update(number):
            self._open_waves()
        if step.groups:
            if self._publisher.capabilities.releases:
                await self._publisher.release()
                self._released = True
            groups_file = self.directory.groups(number)
            values = self.directory.token_values(number) if self._token_values_bytes else None
            work = self._trainer.update(groups_file, number, version, weights, values)
            report = await self._unless_a_wave_fails(work)
        if report.updated:
            await asyncio.to_thread(make_durable, weights)
            await asyncio.to_thread(self._store_token_values, step, version)
        else:
            version = self.state.version
            await asyncio.to_thread(shutil.rmtree, weights, ignore_errors=True)
        step = replace(
            step,
            phase="updated",
            version=version,
            weights=self.directory.relative(weights) if report.updated else None,
            skipped=dict(sorted((Counter(step.skipped) + Counter(report.skipped)).items())),
            report=to_builtins(report),
            seconds=step.seconds | {"update": round(time.monotonic() - began, 3)},
        )
        self._save(self.state.with_step(step))
        return step

    async def _publish(self, step: StepState) -> StepState:
        state = replace(self.state, version=step.version, weights=step.weights or self.state.weights)
        if step.weights is not None or self._released:
            self._activity = f"publishing {step.version}"
            weights = publishable_path(self._publisher, self.directory.absolute(state.weights))
            swap = await self._collector.update_weights(
                step.version, lambda: self._publisher.publish(weights, step.version)
            )
            self._released = False
            step = replace(step, cut=swap.cut, seconds=step.seconds | {"publish": round(swap.seconds, 3)})
        step = replace(step, phase="published")
        self._save(state.with_step(step))
        return step

    # --- waves -----------------------------------------------------------------------------------------

    def _collects_during_update(self, number: int) -> bool:
        """Return whether collecting continues while a step's update runs.

        Not when the step publishes the first LoRA adapter: to the server the adapter is another model than its
        base, and a rollout must not begin with one and end with the other.
        """
        first = step_number(self.state.version) == 0
        return self.config.asynchronous and not (first and self._publisher.capabilities.kind == "lora")

    def _open_waves(self) -> None:
        """Start or resume the rollouts of every step that has groups which are not used yet."""
        for number in sorted({ref.wave for ref in self.state.pending()}):
            if number in self._waves:
                continue
            step = self.state.step(number)
            assert step is not None
            self._waves[number] = self._collector.start(
                [self._tasks[task] for task in step.tasks],
                self.directory.run(number),
                name=step.run,
                version=step.sampled_by,
                samples=self.config.samples,
                seed=derive_seed(self.config.seed, "wave", number),
                model=self._requested_model(),
            )

    def _requested_model(self) -> str | None:
        """Return the model name to request: that of the published adapter, or None for the server's own."""
        return self._publisher.capabilities.model if step_number(self.state.version) else None

    async def _wait_for_groups(self, number: int) -> dict[GroupRef, TaskCounts]:
        """Wait until enough groups for an update have finished; return them with the counts of their rollouts."""
        is_last = number >= self.config.steps or not self._collects_during_update(number)
        groups_needed = max(1, math.ceil(self.config.quorum * self.config.groups))
        while True:
            # Taken before counting: a wave that ends between the two is then counted again in the next pass.
            running = {number: wave for number, wave in self._waves.items() if not wave.ended}
            await self._record_refused()
            ready = await self._finished_groups()
            open_ = any(ref.wave in running for ref in self.state.pending() if ref not in ready)
            differing = sum(figures.differ and self._was_started_recently(ref) for ref, figures in ready.items())
            if not open_ or (not is_last and len(ready) >= groups_needed and differing >= self.config.min_groups):
                return ready
            async with running_tasks(*(wave.changed() for wave in running.values())) as changes:
                await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)

    def _was_started_recently(self, ref: GroupRef) -> bool:
        """Return whether a group's wave was started recently enough: waiting ends when there are enough of these.

        Which groups are used is decided later by the versions that their calls name (`group_age` in batches.py).
        """
        step = self.state.step(ref.wave)
        assert step is not None
        return self.state.behind(step_number(step.sampled_by) or 0) <= self.config.max_staleness

    async def _record_refused(self) -> None:
        """Record the tasks that could not be used in the waves that have ended (a wave is the rollouts of a step).

        Raises the error that a wave ended with, LoopStopped when a wave was stopped early, and TaskError when no
        task is left.
        """
        refused = dict(self.state.refused)
        for wave in self._waves.values():
            if wave.ended:
                summary = await wave.wait()
                if summary.pending:
                    raise LoopStopped
                refused |= summary.refused_tasks
        if refused != self.state.refused:
            self._save(replace(self.state, refused=refused))
        usable_tasks(self._tasks, refused)

    async def _finished_groups(self) -> dict[GroupRef, TaskCounts]:
        pending = set(self.state.pending())
        ready: dict[GroupRef, TaskCounts] = {}
        for number in {ref.wave for ref in pending}:
            for task, figures in (await self._waves[number].task_counts()).items():
                if (ref := GroupRef(number, task)) in pending:
                    ready[ref] = figures
        return dict(sorted(ready.items()))

    async def _unless_a_wave_fails(self, work: Awaitable[_T]) -> _T:
        """Return the result of `work`. If a running wave (the rollouts of a step) fails first, cancel `work` and
        raise its error.
        """
        waves = [wave.wait() for wave in self._waves.values() if not wave.ended]
        async with running_tasks(work, *waves) as (task, *wave_tasks):
            running_waves = set(wave_tasks)
            while not task.done():
                done, _ = await asyncio.wait({task, *running_waves}, return_when=asyncio.FIRST_COMPLETED)
                for ended in done & running_waves:
                    running_waves.discard(ended)
                    ended.result()
            return task.result()

    def _store_token_values(self, step: StepState, version: str) -> None:
        """Move what the trainer computed for tokens into the stores of the waves that these tokens are from.

        Done before the state says that the update is over, so that after a kill it is repeated together with the
        update.
        """
        path = self.directory.token_values(step.step)
        if not path.exists():
            return
        values = read_token_values(path)
        for wave in sorted({ref.wave for ref in step.used}):
            run = self.directory.relative(self.directory.run(wave))
            with Store.open(self.directory.wave(self.state, run).store, create=False, waits=True) as store:
                limit = self._token_values_bytes
                store.training.record(step.step, version, values, limit_bytes=limit).result()
        path.unlink()

    def _write_groups(self, number: int, groups: Sequence[RolloutGroup]) -> None:
        path = self.directory.groups(number)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_groups(path, groups)
        make_durable(path)

    # --- evaluation ------------------------------------------------------------------------------------

    async def _evaluate(self, number: int) -> None:
        """Evaluate on the held-out tasks after a step, if that is due and not done yet."""
        config = self.config
        due = number in (0, config.steps) or (config.eval_every > 0 and number % config.eval_every == 0)
        if (
            not self._eval_tasks
            or not due
            or any(evaluation.step == number for evaluation in self.state.evaluations)
        ):
            return
        self._stop_if_draining()
        self._activity = f"evaluating {self.state.version}"
        directory, began = self.directory.evaluation(number), time.monotonic()
        wave = self._evaluating = self._collector.start(
            self._eval_tasks,
            directory,
            name=self.directory.relative(directory),
            version=self.state.version,
            samples=config.eval_samples,
            seed=derive_seed(config.seed, "evaluation"),
            purpose="evaluation",
            model=self._requested_model(),
        )
        summary = await self._unless_a_wave_fails(wave.wait())
        if summary.pending:
            raise LoopStopped
        if not summary.rollouts:
            reasons = format_refused(summary.refused_tasks)
            raise TaskError(
                "none of the --eval-tasks passed validation; correct them (`understudy tasks check` validates "
                f"them again) or give others, with another --output-dir:\n{reasons}"
            )
        figures = await wave.task_counts()
        evaluation = Evaluation(
            step=number,
            version=self.state.version,
            run=self.directory.relative(directory),
            solved=sum(task_figures.solved for task_figures in figures.values()),
            total=sum(task_figures.graded for task_figures in figures.values()),
            failed=sum(task_figures.failed for task_figures in figures.values()),
            tasks={
                task: (task_figures.solved, task_figures.graded) for task, task_figures in sorted(figures.items())
            },
            seconds=round(time.monotonic() - began, 3),
        )
        self._evaluating = None
        refused = self.state.refused | summary.refused_tasks
        self._save(replace(self.state, evaluations=(*self.state.evaluations, evaluation), refused=refused))
        self._watcher.evaluated(evaluation)

    # --- helpers -----------------------------------------------------------------------------------------

    def _stop_if_draining(self) -> None:
        if self._collector.draining:
            raise LoopStopped

    def _save(self, state: LoopState) -> None:
        self.directory.save(state)
        self.state = state

    async def _prune(self) -> None:
        await asyncio.to_thread(prune, self.directory, self.state, self.config.keep)


def publishable_path(publisher: Publisher, weights: Path) -> Path:
    """Return the part of a step's weights that the publisher takes: the whole model, or the adapter in it."""
    return weights / ADAPTER if publisher.capabilities.kind == "lora" else weights
