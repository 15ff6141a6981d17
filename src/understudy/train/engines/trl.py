"""Graded rollouts of coding agents as the completions of TRL's GRPOTrainer. Written for TRL 1.16.

    with TRLRollouts(model, tasks, Path("runs/trl")) as rollouts:
        trainer = GRPOTrainer(
            model=str(model), args=GRPOConfig(…), train_dataset=rollouts.dataset(),
            rollout_func=rollouts, reward_funcs=graded_reward,
        )
        trainer.train()

TRL computes the advantages and the loss; the agent, the gateway, the grading and the model server are ours.
"""

# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from msgspec.structs import asdict, replace

from understudy.errors import BackendError, ConfigError
from understudy.run.collector import RolloutCollector, RolloutSettings
from understudy.run.config import Purpose, task_digests
from understudy.sandbox.base import load_sandboxes
from understudy.store import Store
from understudy.train.engines import verl
from understudy.train.groups import TokenSequence, TrainingRollout, format_counts, groups_from_store
from understudy.train.loop.batches import derive_seed
from understudy.train.loop.loop import publishable_path
from understudy.train.loop.runtime import LoopRuntime, model_digest, serving
from understudy.train.loop.state import LoopConfig, LoopDirectory, version_name
from understudy.train.publish.base import Publisher
from understudy.train.weights import WeightsRecord, save_model
from understudy.types import Task

_log = logging.getLogger(__name__)

OTHER_SEQUENCES = "sequences beside a rollout's longest one"
_SUPPORTED_VALUES: dict[str, tuple[float | None, ...]] = {
    "top_p": (1.0, None),
    "top_k": (0, None),
    "min_p": (0.0, None),
    "repetition_penalty": (1.0, None),
}
"""The supported values of TRL's sampling options: no effect, as the gateway passes on only the temperature."""


def graded_reward(reward: list[float | None], **_: Any) -> list[float | None]:
    """Return the graded reward of each rollout, None without a verdict: a reward function for GRPOTrainer."""
    return reward


class TRLRollouts:
    """The `rollout_func` of a GRPOTrainer. A context manager, which runs the server and the sandboxes.

    A prompt is a task's `instance_id` (see `dataset`). Before collecting for a new optimizer step, the trainer's
    current weights are published to the server: the embedded one, or a server of the kind `backend` at
    `runtime.urls`. Each call writes its run to `output`/wave-NNNN. TRL takes one sequence per rollout: the one
    with the most sampled tokens is used; the others (subagents, what follows a compaction) are counted in
    `left_out`.
    """

    def __init__(
        self,
        model: Path,
        tasks: Sequence[Task],
        output: Path,
        *,
        settings: RolloutSettings = RolloutSettings(),  # noqa: B008
        runtime: LoopRuntime = LoopRuntime(),  # noqa: B008
        backend: str = "embedded",
        tool_format: str = "hermes",
        sandbox: str = "local",
        seed: int = 0,
    ) -> None:
        if not tasks:
            raise ConfigError(
                "TRLRollouts(tasks=[]): expected at least one task to collect rollouts of; give some"
            )
        self._model = model
        self._tasks = {task.instance_id: task for task in tasks}
        self._output = output
        self._settings = settings
        self._runtime = runtime
        self._config = LoopConfig(
            model=str(model),
            model_digest=model_digest(model),
            tasks=task_digests(tasks),
            backend=backend,
            tool_format=tool_format,
            seed=seed,
            sandbox=sandbox,
            rollout_settings=asdict(settings),
        )
        self._collector: RolloutCollector | None = None
        self._publisher: Publisher | None = None
        self._published = False
        self.left_out = Counter[str]()
        """Rollouts and sequences that were not passed to the trainer, counted by reason."""

    def __enter__(self) -> Self:
        # One event loop for all calls, because the server and the collector are bound to it.
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        return self

    def __exit__(self, *_: object) -> None:
        with self._runner:
            self._runner.run(self._stack.aclose())

    def dataset(self) -> Any:
        """Return the tasks as a dataset for the trainer: one row per task, whose prompt is its `instance_id`."""
        from datasets import Dataset

        return Dataset.from_dict({"prompt": list(self._tasks)})

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        """Collect and grade one rollout for each of `prompts`; a task that is listed n times gets n rollouts.

        Returns TRL's `prompt_ids`, `completion_ids`, `logprobs` and `env_mask` (1 exactly on sampled tokens), with
        `reward` and `rollout_id` for reward functions. A rollout that failed for reasons of infrastructure has the
        reward None, which makes TRL leave it out of its group. Raises ConfigError for a prompt that is not a
        task's id and for unsupported options, BackendError when no rollout at all could be collected.
        """
        return self._runner.run(self._rollouts(prompts, trainer))

    async def _rollouts(self, prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
        samples_by_task = self._samples_by_task(prompts)
        collector = await self._open(trainer)
        step = int(trainer.state.global_step)
        if collector.version != version_name(step) or not self._published:
            await self._publish(collector, trainer, step)
        collected: dict[str, list[TrainingRollout]] = {}
        purpose: Purpose = "training" if trainer.model.training else "evaluation"
        for samples in sorted(set(samples_by_task.values())):
            tasks = [self._tasks[name] for name, count in samples_by_task.items() if count == samples]
            collected |= await self._collect(collector, tasks, samples, purpose)
        if not any(collected.values()):
            newest = max(self._output.glob("wave-*"), default=self._output)
            raise BackendError(
                f"none of the {len(prompts)} rollouts of step {step} can be learned from, expected at least one; "
                f"left out since the training began: {format_counts(self.left_out)}; see their errors with "
                f"`understudy show --dir {newest}`, remove the cause, then start the training again"
            )
        blank = int(trainer.processing_class.eos_token_id)
        rows = [_row(collected[name].pop() if collected.get(name) else None, blank) for name in prompts]
        self.left_out[OTHER_SEQUENCES] += sum(row.pop("others") for row in rows)
        return {key: [row[key] for row in rows] for key in rows[0]}

    def _samples_by_task(self, prompts: list[str]) -> Counter[str]:
        unknown = sorted({str(prompt) for prompt in prompts if str(prompt) not in self._tasks})
        if unknown:
            raise ConfigError(
                f"no task has the id {unknown[0][:200]!r}; expected a task's instance_id as a row's prompt: "
                "train on TRLRollouts.dataset()"
            )
        return Counter(prompts)

    async def _open(self, trainer: Any) -> RolloutCollector:
        """Return the collector; the first call opens it with the trainer's sampling options. Raises
        ConfigError.
        """
        if self._collector is not None:
            return self._collector
        if trainer.accelerator.num_processes > 1:
            raise ConfigError(
                f"GRPOTrainer runs in {trainer.accelerator.num_processes} processes, but each would publish "
                "weights to the server; start one process, or train with verl (docs/clusters.md)"
            )
        for name, values in _SUPPORTED_VALUES.items():
            if (value := getattr(trainer.args, name, None)) not in values:
                supported = " or ".join(map(str, values))
                raise ConfigError(
                    f"GRPOConfig({name}={value}) is unsupported, because the gateway passes on the temperature "
                    f"only; give {supported}"
                )
        temperature = float(trainer.args.temperature)
        settings = replace(self._settings, temperature=temperature, evaluation_temperature=temperature)
        directory = LoopDirectory(self._output)
        version = version_name(0)
        served, self._publisher, _ = await self._stack.enter_async_context(
            serving(self._config, directory, self._runtime, self._model, version, fresh=True)
        )
        sandboxes = load_sandboxes(self._config.sandbox)
        self._stack.push_async_callback(sandboxes.aclose)
        self._collector = RolloutCollector(
            served, settings, sandboxes=sandboxes, concurrency=self._runtime.concurrency, version=version
        )
        self._stack.push_async_callback(self._collector.close)
        return self._collector

    async def _publish(self, collector: RolloutCollector, trainer: Any, step: int) -> None:
        """Publish the trainer's current weights to the server.

        Also done at step 0, because the trainer may have loaded other weights than those in the model directory.
        """
        assert self._publisher is not None
        version = version_name(step)
        weights = self._output / "weights"
        written = WeightsRecord(version=version, step=step, base=str(self._model))
        model = trainer.accelerator.unwrap_model(trainer.model)
        save_model(model, self._model, weights / version, written=written)
        path = publishable_path(self._publisher, weights / version)
        await collector.update_weights(version, partial(self._publisher.publish, path, version))
        self._published = True
        for old in weights.iterdir():
            if old.name != version:
                shutil.rmtree(old)

    async def _collect(
        self, collector: RolloutCollector, tasks: Sequence[Task], samples: int, purpose: Purpose
    ) -> dict[str, list[TrainingRollout]]:
        """Return the graded rollouts of each task, collected in a new directory; fewer than `samples` where some
        failed.
        """
        number = len(list(self._output.glob("wave-*")))
        directory = self._output / f"wave-{number:04d}"
        batch = collector.start(
            tasks,
            directory,
            samples=samples,
            seed=derive_seed(self._config.seed, "wave", number),
            purpose=purpose,
            model=None if self._publisher is None else self._publisher.capabilities.model,
        )
        await batch.wait()
        with Store.open(directory, create=False) as store:
            groups = list(groups_from_store(store, run=batch.run_id, left_out=self.left_out))
        rollouts: dict[str, list[TrainingRollout]] = {}
        for group in groups:
            rollouts.setdefault(group.task_id, []).extend(group.rollouts)
        missing = samples * len(tasks) - sum(map(len, rollouts.values()))
        if missing:
            _log.warning(
                "%s: %d rollouts cannot be learned from; left out so far: %s; see `understudy show --dir %s`",
                directory,
                missing,
                format_counts(self.left_out),
                directory,
            )
        return rollouts


def _row(rollout: TrainingRollout | None, blank: int) -> dict[str, Any]:
    """Return TRL's columns for one rollout.

    None gives one token outside the loss and the reward None, because TRL needs a row for each prompt.
    """
    if rollout is None:
        sequence = TokenSequence(token_ids=(blank, blank), loss_mask=(0, 1), logprobs=(0.0, 0.0))
        row = replace(verl.row(sequence), mask=[0])
    else:
        row = verl.row(max(rollout.sequences, key=lambda sequence: sequence.sampled))
    return {
        "prompt_ids": row.prompt,
        "completion_ids": row.response,
        "logprobs": row.logprobs,
        "env_mask": row.mask,
        "reward": None if rollout is None else rollout.reward,
        "rollout_id": "" if rollout is None else rollout.rollout_id,
        "others": 0 if rollout is None else len(rollout.sequences) - 1,
    }
