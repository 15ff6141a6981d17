"""Graded rollouts of coding agents as SkyRL's generator. Written for SkyRL 0.3.0 (commit a956457).

Its trainer must train step-wise (`generator.step_wise_trajectories=true`): a rollout's sequences are the steps of
one trajectory, and all get the advantage of its reward. Understudy must be installed in SkyRL's environment.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false, reportUnknownParameterType=false

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl.train.generators.base import GeneratorInterface, GeneratorOutput, TrajectoryID

from understudy.errors import BackendError, ConfigError
from understudy.train.engines import verl
from understudy.train.engines.bridge import BridgeResponse, Generate
from understudy.train.engines.rollout_process import RolloutRunner, missing_instance_id
from understudy.train.groups import TrainingRollout

_log = logging.getLogger(__name__)

_TimedRollout = tuple[TrainingRollout | None, float]
"""A rollout, None if its infrastructure failed, and its duration in seconds."""


class UnderstudyGenerator(GeneratorInterface):
    """A SkyRL generator that collects one graded rollout for each prompt, sampled by SkyRL's own engines.

    A row's task is the `instance_id` in its `extra_info`, as in the dataset of `understudy export verl --form rl`,
    or in a column of its own.
    """

    def __init__(self, client: Any, runner: RolloutRunner) -> None:
        self._client = client
        self._runner = runner

    async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
        """Return a GeneratorOutput in the order of the batch, with a row for each sequence of a rollout.

        When a rollout failed for reasons of infrastructure, all rollouts of its prompt become one row outside the
        loss, because a missing reward is not a reward of 0. Raises BackendError if no prompt is left, ConfigError
        for a row without the id of a task.
        """
        ids = input_batch["trajectory_ids"]
        if ids is None:
            raise ConfigError(
                "the batch has no trajectory_ids, by which SkyRL tells the groups apart; call this generator from "
                "SkyRL's own trainer, which sets them"
            )
        extras = input_batch["env_extras"] or [{}] * len(ids)
        instances = [_instance_id(extra) for extra in extras]
        sampling = input_batch["sampling_params"] or {}
        async with asyncio.TaskGroup() as group:
            running = [
                group.create_task(self._rollout(instance, sampling, trajectory_id.repetition_id))
                for instance, trajectory_id in zip(instances, ids, strict=True)
            ]
        return generator_output(ids, [task.result() for task in running])

    async def _rollout(self, instance: str, sampling: Mapping[str, Any], seed: int) -> _TimedRollout:
        began, session = time.monotonic(), uuid.uuid4().hex
        try:
            rollout, _ = await self._runner.run(instance, self._sampler(session, sampling), sampling, seed=seed)
        except (BackendError, ConfigError) as error:
            _log.warning("%s: its group is left out: %s", instance, error)
            rollout = None
        finally:
            await self._client.finish_session(session)
        return rollout, time.monotonic() - began

    def _sampler(self, session: str, sampling: Mapping[str, Any]) -> Generate:
        """Return a function that samples through SkyRL's engines; its router keeps a session on one engine."""

        async def generate(prompt: list[int], wanted: dict[str, Any]) -> BridgeResponse:
            limit = min(wanted["max_tokens"], int(sampling.get("max_tokens") or wanted["max_tokens"]))
            output = await self._client.generate(
                {
                    "prompts": None,
                    "prompt_token_ids": [prompt],
                    "sampling_params": {**wanted, "max_tokens": limit, "logprobs": 1},
                    "session_ids": [session],
                    "mm_features": None,
                    "cache_salt": None,
                }
            )
            logprobs = output["response_logprobs"]
            return BridgeResponse(
                ids=list(output["response_ids"][0]),
                logprobs=None if logprobs is None else list(logprobs[0]),
                stopped=output["stop_reasons"][0] == "stop",
                aborted=output["stop_reasons"][0] == "abort",
            )

        return generate


def _instance_id(extra: Mapping[str, Any]) -> str:
    instance = (extra.get("extra_info") or {}).get("instance_id") or extra.get("instance_id")
    if not instance:
        raise missing_instance_id("extra_info.instance_id in the row")
    return str(instance)


def generator_output(ids: Sequence[TrajectoryID], finished: Sequence[_TimedRollout]) -> GeneratorOutput:
    """Return rollouts as SkyRL's GeneratorOutput: a row for each sequence, those of a rollout side by side.

    The last row of a rollout has its reward. Raises BackendError when each prompt has a failed rollout.
    """
    failed = {
        trajectory_id.instance_id
        for trajectory_id, (rollout, _) in zip(ids, finished, strict=True)
        if rollout is None
    }
    if failed.issuperset(trajectory_id.instance_id for trajectory_id in ids):
        raise BackendError(
            f"no prompt is left to train on: each of the {len(failed)} has a rollout that failed because of a "
            "server, a sandbox or the configuration; fix what the warnings above report (details: understudy show "
            "--dir ROLLOUT_DIRECTORY), then start the training again"
        )
    rows: list[tuple[verl.VerlRow, float, TrajectoryID, bool, float, str]] = []
    for trajectory_id, (rollout, seconds) in zip(ids, finished, strict=True):
        if rollout is None or trajectory_id.instance_id in failed:
            rows.append((_EMPTY_ROW, 0.0, trajectory_id, True, seconds, "error"))
            continue
        *earlier_rows, last_row = [verl.row(sequence) for sequence in rollout.sequences]
        rows += [(row, 0.0, trajectory_id, False, seconds, "complete") for row in earlier_rows]
        rows.append((last_row, rollout.reward, trajectory_id, True, seconds, "complete"))
    return GeneratorOutput(
        prompt_token_ids=[row.prompt for row, *_ in rows],
        response_ids=[row.response for row, *_ in rows],
        rewards=[reward for _, reward, *_ in rows],
        loss_masks=[row.mask for row, *_ in rows],
        stop_reasons=[reason for *_, reason in rows],
        rollout_metrics={"generate/num_masked_prompts": len(failed)},
        rollout_logprobs=[row.logprobs or [] for row, *_ in rows],
        trajectory_ids=[trajectory_id for _, _, trajectory_id, *_ in rows],
        trajectory_generation_times=[seconds for *_, seconds, _ in rows],
        trajectory_time_splits=None,
        rollout_expert_indices=None,
        is_last_step=[last_row for *_, last_row, _, _ in rows],
        env_metrics=None,
        pixel_values=None,
        image_grid_thw=None,
    )


_EMPTY_ROW = verl.VerlRow(prompt=[0], response=[0], mask=[0], logprobs=[0.0])
